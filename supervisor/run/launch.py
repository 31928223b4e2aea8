"""From a slot to a worker that has said hello and is recorded; and the way back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time

import msgspec

from protocol import canonical, frames, points
from protocol.api import MAX_OUTPUT_BYTES, LateResult
from protocol.errors import JournalUnavailable
from protocol.operations import Operation
from protocol.states import Step
from supervisor import stop
from supervisor.capture import Capture
from supervisor.channel import Channel
from supervisor.effects import WORKER_DIED
from supervisor.job import Job, LiveWorker, WorkerPipes
from supervisor.journal import WorkerIdentity
from supervisor.log import get_log
from supervisor.run.ending import Cause, Exited, Finished, JournalLost, LaunchLost, Violated, loss
from supervisor.run.listen import Listener
from supervisor.run.mailbox import first
from supervisor.run.means import Means
from supervisor.template import LaunchFailed, TemplateFailed
from supervisor.workspace import check_artifact_free

log = get_log(__name__)
#: Launches tried while ``go`` was never sent.
LAUNCH_ATTEMPTS = 2
#: Wait between attempts to prove a stop whose deadline has passed, seconds.
STOP_RETRY_S = 0.5
#: Characters of an Action id in the name of a leaf.
NAMED_CHARS = 64
#: Between the end of a pipe and the exit of its worker, or the relay of a wait status, seconds.
STATUS_PATIENCE_S = 1.0


async def prepare(job: Job, means: Means) -> tuple[frames.Directories, frames.Go]:
    """Make the job's directories and what ``go`` will say. Raises OSError, ArtifactRefused, JournalUnavailable."""
    settings, workspace, record = means.settings, means.workspace, job.record
    directories = await asyncio.to_thread(workspace.prepare, record.row, record.crew_id)
    document = msgspec.json.decode(job.input_json)
    replay_store = artifact = None
    if record.operation == Operation.REPLAY:
        owner = await means.journal.task_owner(record.crew_id, document["task_id"])
        if owner is not None:
            replay_store = await asyncio.to_thread(workspace.copy_replay, owner, record.row)
    if record.operation == Operation.TRAIN and settings.training_dir is not None:
        job.artifact = (document["artifact_name"], document.get("overwrite", False))
        check_artifact_free(settings.training_dir, job.artifact[0], overwrite=job.artifact[1])
        artifact = workspace.training_file(record.row)
    go = frames.Go(
        action_id=job.action_id,
        crew_id=record.crew_id,
        operation=record.operation,
        input=job.input_json,
        output_limit_bytes=MAX_OUTPUT_BYTES,
        event_limit_bytes=settings.max_event_bytes,
        event_limit=settings.max_events_per_run,
        replay_store=str(replay_store) if replay_store else None,
        artifact_path=str(artifact) if artifact else None,
        tracing=settings.tracing,
        effects=settings.crew(record.crew_id).effects,
    )
    return directories, go


def leaf_name(row: int, attempt: int, action_id: str) -> str:
    """Name of a job's leaf: a restart finds it by its row, people by the Action, as far as a file name takes that."""
    return f"job-{row}.{attempt}.{re.sub(r'[^A-Za-z0-9._-]+', '_', action_id)[:NAMED_CHARS]}"


class Bringup:
    """Launches a job's worker, again if it does not come up, and takes it down."""

    def __init__(self, job: Job, means: Means, listener: Listener) -> None:
        self._job = job
        self._means = means
        self._listener = listener
        self._watches: list[asyncio.Task[None]] = []

    async def until_hello(self, directories: frames.Directories) -> Cause | None:
        """Launch until a worker waits for ``go``. Returns what ended the job instead, if anything did."""
        job = self._job
        lost = LaunchLost(error_type="LaunchError", detail="no worker came up")
        for attempt in range(1, LAUNCH_ATTEMPTS + 1):
            if attempt > 1:
                job.advance(Step.LAUNCH_RETRIED)
            try:
                await self._launch(directories, attempt)
            except (LaunchFailed, TemplateFailed, OSError) as error:
                log.warning("launch_failed", **job.facts, attempt=attempt, detail=str(error)[:500])
                continue
            cause = await self._wait_for_hello()
            if not isinstance(cause, LaunchLost | Exited):
                return cause
            log.warning("worker_without_hello", **job.facts, attempt=attempt)
            lost = LaunchLost(error_type="LaunchError", detail="the worker did not say hello")
            if attempt < LAUNCH_ATTEMPTS:
                await self._abandon()
        return lost

    async def _launch(self, directories: frames.Directories, attempt: int) -> None:
        record, settings = self._job.record, self._means.settings
        crew = settings.crew(record.crew_id)
        pipes = WorkerPipes()
        launch = frames.Launch(
            launch_id=0,
            crew_id=record.crew_id,
            directories=directories,
            environment=crew.environment,
            limits=crew.limits,
            leaf=False,
            log_exceptions=settings.log_exceptions,
            supervisor_pid=os.getpid(),
        )
        try:
            name = leaf_name(record.row, attempt, record.action_id)
            launched = await self._means.launcher.launch(launch, pipes.worker_ends(), name)
        except BaseException:
            pipes.close()
            raise
        finally:
            pipes.close_worker_ends()
        log_bytes = settings.log_bytes_of(record.crew_id)
        capture = Capture(
            self._means.workspace.log(record.row),
            log_bytes,
            kept_bytes={"stderr": log_bytes // 4},
            bell=self._job.log_bell,
        )
        capture.attach(pipes.stdout, "stdout")
        capture.attach(pipes.stderr, "stderr")
        listener = self._listener
        channel = Channel(pipes.ours, frames.FromWorker, on_frame=listener.on_frame, on_end=listener.on_end)
        listener.channel = channel
        worker = self._job.worker = LiveWorker(launched, channel, capture, attempt)
        loop = asyncio.get_running_loop()
        self._watches = [loop.create_task(self._watch_exit(worker)), loop.create_task(self._watch_end(worker))]

    async def _watch_exit(self, worker: LiveWorker) -> None:
        """Put the exit into the mailbox, after everything that the worker had said before it."""
        child, desk = worker.work.child, self._listener.desk
        await child.gone.wait()
        if self._listener.go_sent:
            # A claim that is still in the pipe was made by nobody who could act on it.
            desk.close_claims(WORKER_DIED)
        worker.channel.drain()
        # Its last words may have come with the exit: then it ended, and did not die.
        cause = self._job.mailbox.peek()
        desk.lose_open(WORKER_DIED if cause is None else loss(cause))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STATUS_PATIENCE_S):
                await asyncio.shield(child.exited)
        found = stop.worker_exit(worker.work)
        self._job.mailbox.put(Exited(signal_name=found.exit_signal, exit_code=found.exit_code))

    async def _watch_end(self, worker: LiveWorker) -> None:
        """A worker that closed its pipe and lives on can never report: that is a violation, an exit is not."""
        await self._listener.ended.wait()
        try:
            async with asyncio.timeout(STATUS_PATIENCE_S):
                await worker.work.child.gone.wait()
        except TimeoutError:
            detail = "the worker closed its pipe and went on"
            self._job.mailbox.put(Violated(error_type="ProtocolViolation", detail=detail))

    async def _wait_for_hello(self) -> Cause | None:
        try:
            async with asyncio.timeout(self._means.settings.launch_timeout_s):
                await first(self._listener.hello.wait(), self._job.mailbox.wait())
        except TimeoutError:
            return LaunchLost(error_type="LaunchError", detail="no hello")
        return self._job.mailbox.take()

    async def _abandon(self) -> None:
        """Kill a worker that never got ``go`` and prove it gone before the next attempt."""
        worker = self._job.worker
        assert worker is not None
        await prove(self._job, worker, self._means)
        await self.close(worker)
        self._job.worker = None
        self._listener.hello.clear()
        self._listener.ended.clear()
        self._job.mailbox.find(Exited)

    async def record_start(self) -> Cause | None:
        """Make the worker's identity and ``started`` durable. Returns what ended the job meanwhile, if anything did."""
        job, worker = self._job, self._job.worker
        assert worker is not None
        child, leaf, keeper = worker.work.child, worker.work.leaf, worker.work.keeper
        identity = WorkerIdentity(
            attempt=worker.attempt,
            pid=child.pid,
            start_ticks=child.identity.start_ticks,
            started_at=child.identity.started_at,
            boot_id=child.identity.boot_id,
            pid_ns=child.identity.pid_ns,
            leaf=str(leaf.path) if leaf else None,
            method=worker.method,
            launched_at=worker.launched_at,
            keeper_pid=keeper.child.pid if keeper else None,
            keeper_ticks=keeper.child.identity.start_ticks if keeper else None,
        )
        data = canonical.compact({"status": "running", "operation": job.record.operation})
        try:
            job.record = await self._means.journal.record_start(job.record.row, identity, started=data, at=time.time())
        except JournalUnavailable:
            return JournalLost()
        points.reach("start.recorded")
        log.info("job_started", **job.facts, sequence=job.feed.count, attempt=worker.attempt, pid=child.pid)
        job.feed.publish([("started", data)])
        job.advance(Step.START_RECORDED)
        return job.mailbox.take()

    async def close(self, worker: LiveWorker, *, expect_result: bool = False) -> LateResult | None:
        """Read what the dead worker had still said, then give its descriptors and its leaf back."""
        worker.channel.drain()
        late = self._job.mailbox.find(Finished) if expect_result else None
        worker.channel.close()
        worker.capture.close()
        for watch in self._watches:
            watch.cancel()
        if worker.work.keeper is not None:
            await worker.work.keeper.dismiss()
        self._means.reaper.forget(worker.work.child)
        if worker.work.leaf is not None:
            with contextlib.suppress(OSError):
                worker.work.leaf.remove()
        if late is None:
            return None
        return LateResult(sha256=canonical.digest(late.output), bytes=len(late.output))


async def prove(job: Job, worker: LiveWorker, means: Means) -> stop.Proof:
    """Kill until it is proved; an attempt that misses its deadline is told to whoever waits, and goes on."""
    stopping = stop.Stop(worker.work, means.hunter)
    while True:
        proof = await stopping.attempt(means.settings.stop_timeout_s)
        if proof.confirmed or not worker.work.provable:
            return proof
        if not job.unconfirmed.is_set():
            job.unconfirmed.set()
            log.error("stop_unconfirmed", **job.facts, left=proof.left, missing=proof.missing)
        await asyncio.sleep(STOP_RETRY_S)
