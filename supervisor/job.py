"""A live job: what the supervisor keeps in memory of an Action that has no terminal record yet."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Mapping

import msgspec

from protocol import frames
from protocol.api import EffectCounts, JobReconciliation, JobView, WorkerView
from protocol.states import Phase, Step, advance
from supervisor.capture import Bell, Capture
from supervisor.channel import Channel
from supervisor.events import Feed
from supervisor.journal import JobRecord
from supervisor.loader import Launched
from supervisor.log import Field
from supervisor.processes import resident_bytes
from supervisor.run.ending import Cause
from supervisor.run.mailbox import Mailbox
from supervisor.stop import Work

NULL = msgspec.Raw(b"null")


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The durable end of a job and what caused it (None when it ended before this process began)."""

    record: JobRecord
    cause: Cause | None


class LiveWorker:
    """A launched worker with its pipes."""

    def __init__(
        self, launched: Launched, channel: Channel[frames.FromWorker], capture: Capture, attempt: int
    ) -> None:
        self.work = Work(child=launched.child, leaf=launched.leaf, keeper=launched.keeper)
        self.method = launched.method
        self.channel = channel
        self.capture = capture
        self.attempt = attempt
        self.launched_at = time.time()

    def view(self) -> WorkerView:
        """For the job view; memory is read from the kernel now."""
        leaf = self.work.leaf
        return WorkerView(
            pid=self.work.child.pid,
            started_at=self.work.child.identity.started_at,
            cgroup=leaf.proc_path if leaf else None,
            memory_bytes=self.memory_bytes(),
        )

    def memory_bytes(self) -> int | None:
        """Memory of all of the job by its cgroup, else what is resident of the worker alone; None when it is gone."""
        leaf = self.work.leaf
        return (leaf.memory_bytes() if leaf else None) or resident_bytes(self.work.child.pid)


class Job:
    """State of one live job. ``ended`` is set after the terminal record is durable."""

    def __init__(self, record: JobRecord, input_json: bytes, *, key_digest: str | None = None) -> None:
        """``key_digest``: of the key that the job was admitted with; None where an earlier process did that."""
        self.record = record
        #: Which job it is, for every line of the log about it.
        self.facts: dict[str, Field] = {
            "action_id": record.action_id,
            "crew_id": record.crew_id,
            "operation": record.operation,
            "request_digest": record.request_hash,
            "key_digest": key_digest,
        }
        self.input_json = input_json
        self.phase = Phase.QUEUED
        self.feed = Feed(record.event_count)
        self.mailbox = Mailbox()
        self.granted = asyncio.Event()
        self.cancel_asked = False
        #: Somebody waits for the end: what may still take its time is cut short.
        self.hurried = asyncio.Event()
        #: Name of the training artifact to put in place, and whether it may replace one.
        self.artifact: tuple[str, bool] | None = None
        self.worker: LiveWorker | None = None
        self.task: asyncio.Task[None] | None = None
        self.ended: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        #: Set once the stop's deadline passed without a proof; the attempt goes on.
        self.unconfirmed = asyncio.Event()
        #: Set while the work is gone but the journal does not take the terminal record.
        self.unrecorded = asyncio.Event()
        #: Rung when its captured output grows.
        self.log_bell = Bell()

    @property
    def action_id(self) -> str:
        """The Action's id."""
        return self.record.action_id

    def advance(self, step: Step) -> None:
        """Move along the job's state table. Raises IllegalTransition."""
        self.phase = advance(self.phase, step)

    def view(self, effects: Mapping[str, int] | None) -> JobView:
        """The record as it stands, with the live worker. ``effects``: numbers by state, None without any."""
        worker = self.worker.view() if self.worker and self.phase is not Phase.DONE else None
        return view_of(self.record, effects, event_count=self.feed.count, phase=self.phase, worker=worker)


def view_of(
    record: JobRecord,
    effects: Mapping[str, int] | None,
    *,
    output: bytes | None = None,
    event_count: int | None = None,
    phase: Phase | None = None,
    worker: WorkerView | None = None,
    reconciliation: JobReconciliation | None = None,
) -> JobView:
    """The public view of a record. ``effects``: numbers of its effects by state, None without any."""
    return JobView(
        action_id=record.action_id,
        crew_id=record.crew_id,
        operation=record.operation,
        status=record.status,
        event_count=record.event_count if event_count is None else event_count,
        output=NULL if output is None else msgspec.Raw(output),
        phase=phase or record.phase,
        uncertain_outcome=record.uncertain,
        timeout_ms=record.timeout_ms,
        admitted_at=record.admitted_at,
        started_at=record.started_at,
        ended_at=record.ended_at,
        worker=worker,
        stop=record.stop,
        effects=EffectCounts(**(effects or {})),
        reconciliation=reconciliation,
    )


class WorkerPipes:
    """The ends that a worker gets; close them once it has them."""

    def __init__(self) -> None:
        self.ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.stdout, self._stdout = os.pipe()
        self.stderr, self._stderr = os.pipe()

    def worker_ends(self) -> list[int]:
        """Descriptors in the order of the Launch frame."""
        return [self._theirs.fileno(), self._stdout, self._stderr]

    def close_worker_ends(self) -> None:
        """The worker has its copies."""
        self._theirs.close()
        os.close(self._stdout)
        os.close(self._stderr)

    def close(self) -> None:
        """Nothing was launched: close our ends too."""
        self.ours.close()
        os.close(self.stdout)
        os.close(self.stderr)
