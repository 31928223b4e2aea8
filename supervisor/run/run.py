"""One job from its slot to its terminal record.

Every ending goes the same way: a cause is taken from the mailbox, the work is killed and proved gone, then the record
is made durable, then readers see it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from functools import partial

from protocol import frames, points
from protocol.api import StopEvidence
from protocol.errors import CrewError
from protocol.states import Step
from supervisor import stop
from supervisor.effects import Desk
from supervisor.job import Job, LiveWorker, Outcome
from supervisor.journal import Ending, Owner
from supervisor.log import get_log
from supervisor.run import finish
from supervisor.run.ending import (
    CancelAsked,
    Cause,
    Decision,
    Finished,
    JournalLost,
    LaunchLost,
    TimedOut,
    decide,
    loss,
)
from supervisor.run.launch import Bringup, prepare, prove
from supervisor.run.listen import Listener
from supervisor.run.mailbox import first
from supervisor.run.means import Means
from supervisor.run.recorder import Recorder
from supervisor.workspace import ArtifactRefused

log = get_log(__name__)


class Run:
    """Drives one job. ``execute`` returns in the very step in which readers see the terminal record; then ``clean``."""

    def __init__(self, job: Job, means: Means) -> None:
        self._job = job
        self._means = means
        self._timer: asyncio.TimerHandle | None = None
        self._granted_at = 0.0
        self._recorder = Recorder(
            means.journal,
            job.record.row,
            job.feed,
            on_failure=lambda: job.mailbox.put(JournalLost()),
        )
        owner = Owner(action_id=job.action_id, crew_id=job.record.crew_id, row=job.record.row)
        self._desk = Desk(owner, means.effects, limit=means.settings.max_effects_per_run, facts=job.facts)
        self._listener = Listener(job.mailbox, self._recorder, self._desk, means.settings)
        self._desk.send = self._listener.send
        self._desk.on_pressure = partial(self._listener.press, "effects")
        self._recorder.on_pressure = partial(self._listener.press, "events")
        self._bringup = Bringup(job, means, self._listener)

    async def execute(self) -> None:
        """Run the job to its end."""
        job = self._job
        cause = await self._until_granted() or await self._work()
        self._desk.close_claims(loss(cause))
        if self._timer is not None:
            self._timer.cancel()
        job.advance(Step.ENDING_DECIDED)
        decision = decide(cause, operation=job.record.operation, go_sent=self._listener.go_sent)
        evidence = await self._stop(decision, cause)
        decision, output = await finish.keep(job, self._means, decision, cause)
        await self._record(decision, cause, evidence, output)

    async def clean(self) -> None:
        """Remove the directories of a job that has ended."""
        await asyncio.to_thread(self._means.workspace.remove_job, self._job.record.row)

    async def _until_granted(self) -> Cause | None:
        await first(self._job.granted.wait(), self._job.mailbox.wait())
        return self._job.mailbox.take()

    async def _work(self) -> Cause:
        self._granted_at = time.monotonic()
        self._job.advance(Step.SLOT_GRANTED)
        try:
            directories, go = await prepare(self._job, self._means)
        except ArtifactRefused as error:
            return LaunchLost(error_type=error.error_type, detail=error.detail)
        except (OSError, CrewError) as error:
            log.failure("job_not_prepared", error, **self._job.facts)
            return LaunchLost(error_type="WorkspaceError", detail="the job's directories could not be prepared")
        return (
            await self._bringup.until_hello(directories)
            or await self._bringup.record_start()
            or await self._operate(go)
        )

    async def _operate(self, go: frames.Go) -> Cause:
        job, worker = self._job, self._job.worker
        assert worker is not None
        self._listener.go_sent = True
        worker.channel.send(go)
        points.reach("go.sent")
        launch_s = time.monotonic() - self._granted_at
        self._means.meters.told_to_go(admitted_at=job.record.admitted_at, launch_s=launch_s)
        job.input_json = b""
        timeout_ms = self._means.settings.timeout_ms_of(job.record.crew_id, job.record.timeout_ms)
        self._timer = asyncio.get_running_loop().call_later(timeout_ms / 1000, job.mailbox.put, TimedOut())
        cause = await job.mailbox.get()
        self._desk.close_claims(loss(cause))
        match cause:
            case Finished():
                await self._linger(worker)
            case CancelAsked():
                return await self._grace(worker, cause)
        return cause

    async def _linger(self, worker: LiveWorker) -> None:
        """Give finished work time to end on its own, until somebody asks for the end. No timeout any more."""
        if self._timer is not None:
            self._timer.cancel()
        limit_s = self._means.settings.linger_s_of(self._job.record.crew_id)
        await first(stop.settle(worker.work, limit_s), self._job.hurried.wait())

    async def _grace(self, worker: LiveWorker, cause: CancelAsked) -> Cause:
        """Let the worker close what it can and report its effects; a result meanwhile overrides the cancel."""
        mailbox, listener = self._job.mailbox, self._listener
        worker.channel.send(frames.Cancel(reason=cause.reason))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._means.settings.grace_s_of(self._job.record.crew_id)):
                await first(listener.cancel_answer.wait(), mailbox.wait())
                if listener.closing:
                    await mailbox.wait()
                await first(self._desk.settled(), mailbox.wait())
        worker.channel.drain()
        finished = mailbox.find(Finished)
        if finished is None:
            return cause
        await self._linger(worker)
        return finished

    async def _stop(self, decision: Decision, cause: Cause) -> StopEvidence:
        asked_at = finish.requested_at(cause)
        worker = self._job.worker
        if worker is None:
            return finish.never_started(decision, asked_at)
        points.reach("stop.decided")
        proof = await prove(self._job, worker, self._means)
        points.reach("stop.proved")
        late = await self._bringup.close(worker, expect_result=not isinstance(cause, Finished))
        return finish.evidence_of(proof, decision, asked_at, late)

    async def _record(self, decision: Decision, cause: Cause, evidence: StopEvidence, output: bytes) -> None:
        job = self._job
        data = finish.terminal_data(decision, evidence, output)
        pending = await self._recorder.halt()
        await self._desk.finish()
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
            lost=loss(cause),
            lost_keys=dict(self._desk.lost),
        )
        ended = await finish.record(job, self._means.journal, ending)
        points.reach("ending.recorded")
        job.record = ended.record
        job.advance(Step.ENDING_RECORDED)
        self._recorder.finished((decision.status.value, ended.event_data))
        if ended.lost:
            log.warning("effect_unknown", **job.facts, count=ended.lost, reason=ending.lost)
        log.info(
            "job_ended",
            **job.facts,
            sequence=job.record.event_count - 1,
            status=decision.status.value,
            reason=decision.reason,
            stop_confirmed=evidence.confirmed,
            stop_ms=evidence.elapsed_ms,
        )
        job.ended.set_result(Outcome(record=job.record, cause=cause))
