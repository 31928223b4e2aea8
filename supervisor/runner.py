"""One job from its slot to its terminal record.

Every ending goes the same way: a cause is taken from the mailbox, the work is killed and proved gone, then the record
is made durable, then readers see it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time

import msgspec

from protocol import canonical, frames
from protocol.api import MAX_OUTPUT_BYTES, LateResult, StopEvidence
from protocol.errors import BadJson, JournalUnavailable, ProtocolViolation
from protocol.operations import Operation
from protocol.states import Method, Status, Step
from supervisor import stop as stops
from supervisor.capture import Capture
from supervisor.channel import Channel
from supervisor.config import Settings
from supervisor.ending import (
    CancelAsked,
    Cause,
    Decision,
    Exited,
    Finished,
    JournalLost,
    LaunchLost,
    Raised,
    TimedOut,
    Violated,
    decide,
)
from supervisor.job import Job, LiveWorker, Outcome, WorkerPipes
from supervisor.journal import Ending, JobRecord, Journal, WorkerIdentity
from supervisor.launcher import Launcher
from supervisor.log import get_log
from supervisor.mailbox import first
from supervisor.processes import Reaper, boot_id
from supervisor.recorder import Recorder
from supervisor.strays import Hunter
from supervisor.template import LaunchFailed, TemplateFailed
from supervisor.workspace import ArtifactRefused, Workspace, check_artifact_free, place_artifact

log = get_log(__name__)
#: Launches tried while ``go`` was never sent.
LAUNCH_ATTEMPTS = 2
#: Waits between attempts to record an ending that the journal does not take, seconds; the last repeats.
RECORD_DELAYS_S = (0.05, 0.2, 1.0, 2.0)
#: Wait between attempts to prove a stop whose deadline has passed, seconds.
STOP_RETRY_S = 0.5


class Means(msgspec.Struct, frozen=True, kw_only=True):
    """What a run works with."""

    settings: Settings
    journal: Journal
    launcher: Launcher
    reaper: Reaper
    hunter: Hunter
    workspace: Workspace


class Run:
    """Drives one job. ``execute`` returns once the job has its terminal record."""

    def __init__(self, job: Job, means: Means) -> None:
        self._job = job
        self._means = means
        self._hello = asyncio.Event()
        self._cancel_answer = asyncio.Event()
        self._closing = False
        self._go_sent = False
        self._listening = True
        self._directories: frames.Directories
        #: Name of the training artifact to put in place, and whether it may replace one.
        self._artifact: tuple[str, bool] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._recorder = Recorder(
            means.journal,
            job.record.row,
            job.feed,
            on_pressure=self._press,
            on_failure=lambda: job.mailbox.put(JournalLost()),
        )

    async def execute(self) -> None:
        """Run the job to its end."""
        job = self._job
        cause = await self._until_granted() or await self._work()
        if self._timer is not None:
            self._timer.cancel()
        job.advance(Step.ENDING_DECIDED)
        decision = decide(cause, operation=job.record.operation, go_sent=self._go_sent)
        evidence = await self._stop(decision, cause)
        decision, output = await self._keep(decision, cause)
        await self._record(decision, cause, evidence, output)

    # --- from the slot to a cause --------------------------------------------------------------------------------

    async def _until_granted(self) -> Cause | None:
        job = self._job
        await first(job.granted.wait(), job.mailbox.wait())
        return job.mailbox.take()

    async def _work(self) -> Cause:
        job = self._job
        job.advance(Step.SLOT_GRANTED)
        try:
            go = await self._prepare()
        except ArtifactRefused as error:
            return LaunchLost(error_type=error.error_type, detail=error.detail)
        except OSError as error:
            return LaunchLost(error_type="WorkspaceError", detail=f"job directories: {error.strerror}")
        cause = await self._launch_until_hello()
        if cause is not None:
            return cause
        cause = await self._record_start()
        if cause is not None:
            return cause
        return await self._operate(go)

    async def _prepare(self) -> frames.Go:
        job, settings, workspace = self._job, self._means.settings, self._means.workspace
        record = job.record
        self._directories = workspace.prepare(record.row, record.crew_id)
        document = msgspec.json.decode(job.input_json)
        replay_store = artifact = None
        if record.operation == Operation.REPLAY:
            owner = await self._means.journal.task_owner(record.crew_id, document["task_id"])
            if owner is not None:
                replay_store = workspace.copy_replay(owner, record.row)
        if record.operation == Operation.TRAIN and settings.training_dir is not None:
            self._artifact = (document["artifact_name"], document.get("overwrite", False))
            check_artifact_free(settings.training_dir, self._artifact[0], overwrite=self._artifact[1])
            artifact = workspace.training_file(record.row)
        return frames.Go(
            crew_id=record.crew_id,
            operation=record.operation,
            input=job.input_json,
            output_limit_bytes=MAX_OUTPUT_BYTES,
            event_limit_bytes=settings.max_event_bytes,
            event_limit=settings.max_events_per_run,
            replay_store=str(replay_store) if replay_store else None,
            artifact_path=str(artifact) if artifact else None,
            tracing=settings.tracing,
        )

    async def _launch_until_hello(self) -> Cause | None:
        job = self._job
        lost = LaunchLost(error_type="LaunchError", detail="no worker came up")
        for attempt in range(1, LAUNCH_ATTEMPTS + 1):
            if attempt > 1:
                job.advance(Step.LAUNCH_RETRIED)
            try:
                await self._launch(attempt)
            except (LaunchFailed, TemplateFailed) as error:
                log.warning("launch_failed", action_id=job.action_id, attempt=attempt, code=error.code)
                lost = LaunchLost(error_type="LaunchError", detail=f"no worker came up: {error.code}")
                continue
            cause = await self._until_hello()
            if not isinstance(cause, LaunchLost | Exited):
                return cause
            lost = LaunchLost(error_type="LaunchError", detail="the worker did not say hello")
            if attempt < LAUNCH_ATTEMPTS:
                await self._abandon_worker()
        return lost

    async def _launch(self, attempt: int) -> None:
        record = self._job.record
        crew = self._means.settings.crew(record.crew_id)
        pipes = WorkerPipes()
        launch = frames.Launch(
            launch_id=0,
            crew_id=record.crew_id,
            directories=self._directories,
            environment=crew.environment,
            limits=crew.limits,
            leaf=False,
            supervisor_pid=os.getpid(),
        )
        try:
            launched = await self._means.launcher.launch(
                launch, pipes.worker_ends(), f"job-{record.row}.{attempt}"
            )
        except BaseException:
            pipes.close()
            raise
        finally:
            pipes.close_worker_ends()
        capture = Capture(self._means.workspace.log(record.row), self._means.settings.log_bytes)
        capture.attach(pipes.stdout, "stdout")
        capture.attach(pipes.stderr, "stderr")
        channel = Channel(pipes.ours, frames.FromWorker, on_frame=self._on_frame, on_end=self._on_end)
        self._job.worker = LiveWorker(launched, channel, capture, attempt)
        self._watch = asyncio.get_running_loop().create_task(self._watch_exit(self._job.worker))

    async def _watch_exit(self, worker: LiveWorker) -> None:
        """Put the exit into the mailbox, after everything that the worker had said before it."""
        child = worker.work.child
        await child.gone.wait()
        worker.channel.drain()
        child.collect()
        found = stops.worker_exit(worker.work)
        self._job.mailbox.put(Exited(signal_name=found.exit_signal, exit_code=found.exit_code))

    async def _until_hello(self) -> Cause | None:
        try:
            async with asyncio.timeout(self._means.settings.launch_timeout_s):
                await first(self._hello.wait(), self._job.mailbox.wait())
        except TimeoutError:
            return LaunchLost(error_type="LaunchError", detail="no hello")
        return self._job.mailbox.take()

    async def _abandon_worker(self) -> None:
        """Kill a worker that never got ``go`` and prove it gone before the next attempt."""
        worker = self._job.worker
        assert worker is not None
        await self._prove(worker)
        await self._close_worker(worker)
        self._job.worker = None
        self._hello.clear()
        self._job.mailbox.find(Exited)

    async def _record_start(self) -> Cause | None:
        job, worker = self._job, self._job.worker
        assert worker is not None
        child, leaf = worker.work.child, worker.work.leaf
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
        )
        data = canonical.compact({"status": "running", "operation": job.record.operation})
        try:
            job.record = await self._means.journal.record_start(
                job.record.row, identity, started=data, at=time.time()
            )
        except JournalUnavailable:
            return JournalLost()
        job.feed.publish([("started", data)])
        job.advance(Step.START_RECORDED)
        return job.mailbox.take()

    # --- while the operation runs --------------------------------------------------------------------------------

    async def _operate(self, go: frames.Go) -> Cause:
        job, worker = self._job, self._job.worker
        assert worker is not None
        self._go_sent = True
        worker.channel.send(go)
        job.input_json = b""
        timeout_ms = job.record.timeout_ms or self._means.settings.default_timeout_ms
        self._timer = asyncio.get_running_loop().call_later(timeout_ms / 1000, job.mailbox.put, TimedOut())
        cause = await job.mailbox.get()
        match cause:
            case Finished():
                self._timer.cancel()
                await self._linger(worker)
            case CancelAsked():
                return await self._grace(worker, cause)
        return cause

    async def _linger(self, worker: LiveWorker) -> None:
        limit_s = self._means.settings.linger_s_of(self._job.record.crew_id)
        await stops.settle(worker.work, limit_s)

    async def _grace(self, worker: LiveWorker, cause: CancelAsked) -> Cause:
        """Let the worker close what it can; a result that comes meanwhile overrides the cancel."""
        mailbox = self._job.mailbox
        worker.channel.send(frames.Cancel(reason=cause.reason))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._means.settings.grace_s_of(self._job.record.crew_id)):
                await first(self._cancel_answer.wait(), mailbox.wait())
                if self._closing:
                    await mailbox.wait()
        worker.channel.drain()
        finished = mailbox.find(Finished)
        if finished is None:
            return cause
        await self._linger(worker)
        return finished

    # --- what the worker says ------------------------------------------------------------------------------------

    def _press(self, pressed: bool) -> None:
        worker = self._job.worker
        if worker is not None:
            (worker.channel.pause if pressed else worker.channel.resume)()

    def _on_end(self, why: ProtocolViolation | None) -> None:
        if why is not None:
            self._violated("ProtocolViolation", "the worker broke the pipe protocol")

    def _violated(self, error_type: str, detail: str) -> None:
        self._listening = False
        self._job.mailbox.put(Violated(error_type=error_type, detail=detail))
        self._press(True)

    def _on_frame(self, frame: frames.FromWorker) -> None:
        if not self._listening:
            return
        try:
            self._take(frame)
        except BadJson:
            self._violated("ProtocolViolation", "the worker sent something that is no JSON object")

    def _take(self, frame: frames.FromWorker) -> None:
        mailbox = self._job.mailbox
        if isinstance(frame, frames.Hello):
            if frame.version != frames.PROTOCOL_VERSION:
                self._violated("ProtocolViolation", "the worker speaks another protocol version")
            self._hello.set()
            return
        if not self._go_sent:
            self._violated("ProtocolViolation", "the worker spoke before it was told to go")
            return
        match frame:
            case frames.Chunk(data=data):
                self._take_chunk(data)
            case frames.Result(output=output, task_ids=task_ids):
                canonical.check_object(output)
                if len(output) > MAX_OUTPUT_BYTES:
                    self._violated("RegistryError", f"the output is above {MAX_OUTPUT_BYTES} bytes")
                    return
                mailbox.put(Finished(output=output, task_ids=task_ids))
            case frames.Failure(error_type=error_type, dispatched=dispatched):
                mailbox.put(Raised(error_type=error_type, dispatched=dispatched))
            case frames.CancelAnswer(closing=closing):
                self._closing = closing
                self._cancel_answer.set()

    def _take_chunk(self, data: bytes) -> None:
        settings = self._means.settings
        canonical.check_object(data)
        if len(data) > settings.max_event_bytes:
            self._violated("RegistryError", f"an event is above max_event_bytes = {settings.max_event_bytes}")
        elif self._recorder.total >= settings.max_events_per_run - 1:
            self._violated("RegistryError", f"more than max_events_per_run = {settings.max_events_per_run} events")
        else:
            self._recorder.add("chunk", data)

    # --- the end -------------------------------------------------------------------------------------------------

    async def _stop(self, decision: Decision, cause: Cause) -> StopEvidence:
        requested_at = cause.at if isinstance(cause, CancelAsked) else time.time()
        worker = self._job.worker
        if worker is None:
            now = time.time()
            return StopEvidence(
                confirmed=True,
                method=Method.NEVER_STARTED,
                reason=decision.reason,
                requested_at=requested_at,
                confirmed_at=now,
                elapsed_ms=_milliseconds(now - requested_at),
                processes_left=0,
                boot_id=boot_id(),
            )
        proof = await self._prove(worker)
        late = await self._close_worker(worker, expect_result=not isinstance(cause, Finished))
        return StopEvidence(
            confirmed=proof.confirmed,
            method=proof.method,
            reason=decision.reason if proof.missing is None else f"{decision.reason}: {proof.missing}",
            requested_at=requested_at,
            confirmed_at=proof.confirmed_at,
            elapsed_ms=None if proof.confirmed_at is None else _milliseconds(proof.confirmed_at - requested_at),
            worker=proof.worker,
            processes_killed=proof.killed,
            strays=proof.strays,
            processes_left=proof.left,
            late_result=late,
            boot_id=boot_id(),
        )

    async def _prove(self, worker: LiveWorker) -> stops.Proof:
        """Kill until it is proved; an attempt that misses its deadline is told to whoever waits, and goes on."""
        job = self._job
        stop = stops.Stop(worker.work, self._means.hunter)
        while True:
            proof = await stop.attempt(self._means.settings.stop_timeout_s)
            if proof.confirmed or worker.work.leaf is None:
                return proof
            if not job.unconfirmed.is_set():
                job.unconfirmed.set()
                log.error("stop_unconfirmed", action_id=job.action_id, left=proof.left, missing=proof.missing)
            await asyncio.sleep(STOP_RETRY_S)

    async def _close_worker(self, worker: LiveWorker, *, expect_result: bool = False) -> LateResult | None:
        """Read what the dead worker had still said, then give its descriptors and its leaf back."""
        worker.channel.drain()
        late = self._job.mailbox.find(Finished) if expect_result else None
        worker.channel.close()
        worker.capture.close()
        if self._watch is not None:
            self._watch.cancel()
        self._means.reaper.forget(worker.work.child)
        if worker.work.leaf is not None:
            with contextlib.suppress(OSError):
                worker.work.leaf.remove()
        if late is None:
            return None
        return LateResult(sha256=canonical.digest(late.output), bytes=len(late.output))

    async def _keep(self, decision: Decision, cause: Cause) -> tuple[Decision, bytes]:
        """Keep what a finished operation made. Returns the decision, which a lost artifact changes, and the output."""
        if not isinstance(cause, Finished):
            return decision, b""
        row, settings = self._job.record.row, self._means.settings
        if cause.task_ids:
            await asyncio.to_thread(self._means.workspace.keep_replay, row)
        if self._artifact is None or settings.training_dir is None:
            return decision, cause.output
        name, overwrite = self._artifact
        try:
            artifact = await asyncio.to_thread(
                place_artifact,
                self._means.workspace.training_file(row),
                settings.training_dir,
                name,
                overwrite=overwrite,
            )
        except (ArtifactRefused, OSError) as error:
            error_type = error.error_type if isinstance(error, ArtifactRefused) else "ArtifactNotStored"
            raised = Violated(error_type=error_type, detail="the training ended, but its artifact is not in place")
            return decide(raised, operation=self._job.record.operation, go_sent=True), b""
        return decision, canonical.with_fields(cause.output, {"sha256": artifact.sha256, "bytes": artifact.bytes})

    async def _record(self, decision: Decision, cause: Cause, evidence: StopEvidence, output: bytes) -> None:
        job = self._job
        data = output if decision.status is Status.COMPLETED else _terminal_data(decision, evidence)
        pending = await self._recorder.halt()
        ending = Ending(
            status=decision.status,
            first_seq=job.feed.count,
            event_data=data,
            ended_at=time.time(),
            uncertain=decision.uncertain,
            stop=evidence,
            pending=pending,
            task_ids=cause.task_ids if isinstance(cause, Finished) else (),
            detail=decision.reason,
        )
        job.record = await self._record_persistently(ending)
        job.advance(Step.ENDING_RECORDED)
        self._recorder.finished((decision.status.value, data))
        log.info(
            "job_ended",
            action_id=job.action_id,
            status=decision.status.value,
            reason=decision.reason,
            stop_confirmed=evidence.confirmed,
            stop_ms=evidence.elapsed_ms,
        )
        job.ended.set_result(Outcome(record=job.record, cause=cause))
        await asyncio.to_thread(self._means.workspace.remove_job, job.record.row)

    async def _record_persistently(self, ending: Ending) -> JobRecord:
        for attempt in itertools.count():
            try:
                return await self._means.journal.finish(self._job.record.row, ending)
            except JournalUnavailable:
                if attempt == 0:
                    log.error("ending_not_recorded", action_id=self._job.action_id)
                self._job.unrecorded.set()
                await asyncio.sleep(RECORD_DELAYS_S[min(attempt, len(RECORD_DELAYS_S) - 1)])
        raise AssertionError("unreachable")


def _milliseconds(seconds: float) -> float:
    return round(max(seconds, 0.0) * 1000, 3)


def _terminal_data(decision: Decision, evidence: StopEvidence) -> bytes:
    document: dict[str, object] = {"status": decision.status.value}
    if decision.error_type is not None:
        document |= {"error_type": decision.error_type, "message": decision.message}
    document |= {"uncertain_outcome": decision.uncertain, "stop": msgspec.to_builtins(evidence)}
    return canonical.compact(document)
