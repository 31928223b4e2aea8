"""After a restart: what the process before us left is killed, proved as far as it can be, and recorded.

A job without a terminal record is never run again. What cannot be proved gone in time stays running and stopping.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TypeGuard

import msgspec

from protocol import canonical, points
from protocol.api import StopEvidence, WorkerExit
from protocol.errors import JournalUnavailable
from protocol.operations import READ_OPERATIONS
from protocol.states import Method, Phase, Status
from supervisor.cgroup import Leaf, Tree
from supervisor.job import Job, Outcome
from supervisor.journal import Ending, Journal, Unfinished, WorkerIdentity
from supervisor.loader import is_namespaced
from supervisor.log import get_log
from supervisor.predecessor import Predecessor
from supervisor.processes import boot_id, is_alive, is_zombie, kill_identity, pid_namespace
from supervisor.stop import Pause, exit_of
from supervisor.workspace import Workspace

log = get_log(__name__)
INTERRUPTED = "the supervisor ended while this job was unfinished"
RECORD_RETRY_S = 0.5
#: Files looked at in one go when what archived jobs left is removed.
FORGET_ROWS = 500
#: Written by a keeper that outlived its supervisor into the job's directory: its pid and the worker's wait status.
KEEPER_WORD = "empty"


class Recovery:
    """Fences every unfinished job of the journal. Call ``run`` before the listener opens."""

    def __init__(
        self, journal: Journal, tree: Tree | None, workspace: Workspace, *, stop_timeout_s: float, confined: bool
    ) -> None:
        self._confined = confined
        self._predecessor = Predecessor(tree)
        self._journal = journal
        self._tree = tree
        self._workspace = workspace
        self._stop_timeout_s = stop_timeout_s

    async def run(self) -> list[tuple[Job, asyncio.Task[None]]]:
        """Kill, prove and record, at most ``stop_timeout_s`` seconds in all. Returns the jobs not proved yet."""
        unfinished = await self._journal.unfinished()
        self._vacated = asyncio.get_running_loop().create_task(self._predecessor.vacate())
        fenced = [(Job(item.record, b""), item) for item in unfinished]
        tasks = {job: asyncio.get_running_loop().create_task(self._fence(job, item)) for job, item in fenced}
        leftovers = asyncio.get_running_loop().create_task(self._clear_leaves({item.record.row for item in unfinished}))
        await asyncio.wait({leftovers, self._vacated, *tasks.values()}, timeout=self._stop_timeout_s)
        self._predecessor.closed = True
        if not leftovers.done():
            log.error("leftover_leaves_alive")
        if self._predecessor.strays:
            log.warning("leftovers_killed", pids=[stray.pid for stray in self._predecessor.strays])
        late = [(job, task) for job, task in tasks.items() if not task.done()]
        for job, _ in late:
            job.unconfirmed.set()
            log.error("stop_unconfirmed", **job.facts)
        for task in tasks.values():
            if task.done():
                task.result()
        kept = {job.record.row for job, _ in late}
        for row in self._workspace.leftovers():
            if row not in kept:
                await asyncio.to_thread(self._workspace.remove_job, row)
        self._background = (leftovers, asyncio.get_running_loop().create_task(self._forget_archived()))
        return late

    async def _forget_archived(self) -> None:
        """Remove logs and replay stores whose archive was cut off after its commit. No start waits for it."""
        kept = self._workspace.kept()
        with contextlib.suppress(JournalUnavailable, OSError):
            while rows := await asyncio.to_thread(lambda: list(itertools.islice(kept, FORGET_ROWS))):
                for row in await self._journal.absent(rows):
                    await asyncio.to_thread(self._workspace.forget, row)

    async def _fence(self, job: Job, item: Unfinished) -> None:
        job.phase = Phase.STOPPING
        requested_at = time.time()
        worker = item.worker
        killed: set[int] = set()
        if worker is None or (worker.boot_id == boot_id() and worker.pid_ns == pid_namespace()):
            killed = await self._kill(item.record.row, worker)
        points.reach("recovery.killed")
        word = self._word_of_keeper(item) if worker is not None and worker.keeper is not None else None
        evidence = _evidence(item, requested_at, len(killed), confined=self._confined, word=word)
        if worker is not None and not evidence.confirmed and self._predecessor.covers(worker):
            evidence = await self._await_vacancy(evidence)
        ending = _ending(item, evidence)
        await self._record(job, ending)

    async def _await_vacancy(self, evidence: StopEvidence) -> StopEvidence:
        """Evidence of one that could leave its leaf and not our cgroup: nobody but us is left in all of that."""
        await asyncio.shield(self._vacated)
        now = time.time()
        return msgspec.structs.replace(
            evidence,
            confirmed=True,
            method=Method.SEALED_CGROUP,
            reason="restart",
            confirmed_at=now,
            elapsed_ms=round((now - evidence.requested_at) * 1000, 3),
            strays=self._predecessor.strays,
            processes_left=0,
        )

    async def _kill(self, row: int, worker: WorkerIdentity | None) -> set[int]:
        """Kill what is in the job's leaves and the recorded worker until nothing of it can be seen."""
        leaves = self._leaves_of(row, worker)
        killed: set[int] = set()
        pause = Pause()
        while True:
            for leaf in leaves:
                if leaf.populated():
                    killed.update(leaf.pids())
                    with contextlib.suppress(OSError):
                        leaf.kill()
                    leaf.sweep()
            if _runs(worker):
                killed.add(worker.pid)
                kill_identity(worker.identity)
            if not any(leaf.populated() for leaf in leaves) and not _runs(worker) and not _keeps(worker):
                break
            await pause.wait()
        for leaf in leaves:
            with contextlib.suppress(OSError):
                leaf.remove()
        return killed

    def _word_of_keeper(self, item: Unfinished) -> WorkerExit | None:
        """What the job's keeper left when it had swept everything: the worker's end. None: it was lost before."""
        worker = item.worker
        assert worker is not None
        try:
            pid, status = map(int, (self._workspace.job(item.record.row) / KEEPER_WORD).read_text("ascii").split())
        except (OSError, ValueError):
            return None
        if pid != worker.keeper_pid:
            return None
        code, name = exit_of(status) if status >= 0 else (None, None)
        return WorkerExit(pid=worker.pid, started_at=worker.started_at, exit_code=code, exit_signal=name)

    def _leaves_of(self, row: int, worker: WorkerIdentity | None) -> list[Leaf]:
        found = {}
        if worker is not None and worker.leaf is not None:
            found[Path(worker.leaf)] = Leaf(Path(worker.leaf), "")
        if self._tree is not None:
            for name in self._tree.names():
                if name.startswith(f"job-{row}."):
                    leaf = self._tree.leaf(name)
                    found[leaf.path] = leaf
        return list(found.values())

    async def _clear_leaves(self, unfinished: Iterable[int]) -> None:
        """Empty and remove leaves that belong to no unfinished job: templates, standbys, jobs that had ended."""
        if self._tree is None:
            return
        ours = tuple(f"job-{row}." for row in unfinished)
        leaves = [self._tree.leaf(name) for name in self._tree.names() if not ours or not name.startswith(ours)]
        pause = Pause()
        while any(leaf.populated() for leaf in leaves):
            for leaf in leaves:
                with contextlib.suppress(OSError):
                    leaf.kill()
                leaf.sweep()
            await pause.wait()
        for leaf in leaves:
            with contextlib.suppress(OSError):
                leaf.remove()

    async def _record(self, job: Job, ending: Ending) -> None:
        while True:
            try:
                ended = await self._journal.finish(job.record.row, ending)
                break
            except JournalUnavailable:
                job.unrecorded.set()
                await asyncio.sleep(RECORD_RETRY_S)
        points.reach("recovery.recorded")
        job.record = ended.record
        job.phase = Phase.DONE
        job.feed.publish([(Status.FAILED.value, ended.event_data)])
        job.feed.end()
        job.ended.set_result(Outcome(record=job.record, cause=None))
        log.warning("job_fenced", **job.facts, sequence=job.record.event_count - 1, uncertain=ending.uncertain)


def _runs(worker: WorkerIdentity | None) -> TypeGuard[WorkerIdentity]:
    """Whether that worker can still run code: one that has exited may wait long for its new parent to reap it."""
    return worker is not None and is_alive(worker.identity) and not is_zombie(worker.pid)


def _keeps(worker: WorkerIdentity | None) -> bool:
    """Whether the worker's keeper is still sweeping."""
    keeper = worker.keeper if worker is not None else None
    return keeper is not None and is_alive(keeper) and not is_zombie(keeper.pid)


def _evidence(
    item: Unfinished, requested_at: float, killed: int, *, confined: bool, word: WorkerExit | None
) -> StopEvidence:
    """What a restart can say. Its own look came after the kill, but it never held the worker's wait status.

    ``confined``: workers ran as a user who may not move a process out of its leaf. ``word``: the keeper's, if any.
    """
    worker = item.worker
    now = time.time()
    if worker is None:
        # The worker waited for ``go``, which is sent only after its identity is durable: no crew code ran.
        confirmed, method, reason = True, Method.NEVER_STARTED, "restart"
    elif worker.boot_id != boot_id():
        confirmed, method, reason = True, Method.BOOT_CHANGED, "restart"
    elif worker.pid_ns != pid_namespace():
        confirmed, method, reason = False, Method.CGROUP, "pid_namespace_changed"
    elif worker.keeper is not None:
        # Its keeper swept until the kernel said ECHILD, or it was killed before: then nobody looked.
        confirmed, method = word is not None, Method.KEEPER
        reason = "restart" if word is not None else "keeper_lost"
    elif is_namespaced(worker.method):
        # The worker was the init of its PID namespace: the kernel lets it go only after all that lived in it.
        confirmed, method, reason = True, Method.PID_NAMESPACE, "restart"
    elif worker.leaf is not None and confined:
        confirmed, method, reason = True, Method.CGROUP, "restart"
    elif worker.leaf is None:
        confirmed, method, reason = False, Method.GROUP, "no_cgroup"
    else:
        # A worker of our own user may have moved a process out of its leaf, where nobody sees it any more.
        confirmed, method, reason = False, Method.CGROUP, "escape_possible"
    return StopEvidence(
        confirmed=confirmed,
        method=method,
        reason=reason,
        requested_at=requested_at,
        confirmed_at=now if confirmed else None,
        elapsed_ms=round((now - requested_at) * 1000, 3) if confirmed else None,
        worker=word or (WorkerExit(pid=worker.pid, started_at=worker.started_at) if worker else None),
        processes_killed=killed,
        processes_left=0 if confirmed or (worker and worker.leaf) else None,
        boot_id=boot_id(),
    )


def _ending(item: Unfinished, evidence: StopEvidence) -> Ending:
    uncertain = item.dispatched and item.record.operation not in READ_OPERATIONS
    data = {
        "status": Status.FAILED.value,
        "error_type": "SupervisorRestart",
        "message": INTERRUPTED,
        "uncertain_outcome": uncertain,
        "stop": msgspec.to_builtins(evidence),
    }
    return Ending(
        status=Status.FAILED,
        first_seq=item.record.event_count,
        event_data=canonical.compact(data),
        ended_at=time.time(),
        uncertain=uncertain,
        stop=evidence,
        detail="restart",
        lost="supervisor_restarted",
    )
