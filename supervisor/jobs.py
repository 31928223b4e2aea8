"""The live jobs: admission, cancel, waiting, shutdown. One table, one queue, one task a job."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec

from protocol import canonical, points
from protocol.api import Stray
from protocol.errors import ActionConflict, IllegalTransition, JournalUnavailable, NotAccepting, StopUnconfirmed
from protocol.states import Phase
from supervisor.admission import FairQueue
from supervisor.job import Job, Outcome
from supervisor.job_logs import JobLogs
from supervisor.journal import Admission, AuditEntry, JobRecord, NewJob
from supervisor.log import get_log
from supervisor.ownership import Ownership
from supervisor.run.ending import CancelAsked, ShutDown
from supervisor.run.mailbox import first
from supervisor.run.means import Means
from supervisor.run.run import Run

log = get_log(__name__)
#: What a caller is told to wait when nothing was admitted, seconds.
RETRY_AFTER_S = 5
#: How long a stop waits for the journal to take its request, seconds; then it goes on.
RECORD_PATIENCE_S = 0.25
#: How long the end of the supervisor waits for directories to go, seconds; the next start removes what is left.
CLEANING_S = 1.0


class Jobs:
    """Every job that has no terminal record yet."""

    def __init__(self, means: Means, ownership: Ownership | None = None) -> None:
        """``ownership``: who decides whose an Action is; None: every one is ours."""
        self._means = means
        self._ownership = ownership
        self._live: dict[str, Job] = {}
        self._admitting: dict[str, asyncio.Future[None]] = {}
        settings = means.settings
        self._queue: FairQueue[Job] = FairQueue(
            settings.max_concurrency, lambda crew_id: settings.crew(crew_id).max_concurrency
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._logs = JobLogs(means.workspace, settings.log_total_bytes, self._rows)
        #: Somebody asked for a drain, which can be undone.
        self.drain_asked = False
        self._shutting_down = False

    @property
    def draining(self) -> bool:
        """Whether nothing is admitted; what was admitted goes on, unless the supervisor shuts down."""
        return self.drain_asked or self._shutting_down

    @property
    def why_draining(self) -> str | None:
        """Why nothing is admitted; None while work is."""
        if self._shutting_down:
            return "the supervisor is shutting down"
        return "the supervisor is drained" if self.drain_asked else None

    def _rows(self) -> set[int]:
        return {job.record.row for job in self._live.values()}

    def trim_logs(self) -> None:
        """Have logs removed that are above the bound; a start does not wait for it."""
        self._own(self._logs.trim())

    @property
    def running(self) -> int:
        """Jobs that have a slot, those whose stop is unproved included."""
        return self._queue.running

    @property
    def queued(self) -> int:
        """Jobs that wait for a slot."""
        return self._queue.waiting

    def first_in_line(self) -> list[Job]:
        """Of each crew with jobs that wait for a slot, the one that waits longest."""
        return self._queue.first_in_line()

    @property
    def active(self) -> int:
        """Jobs without a terminal record."""
        return len(self._live)

    @property
    def unproved(self) -> list[str]:
        """Actions whose work could not be shown to be gone in time; each holds its slot."""
        return [job.action_id for job in self._live.values() if job.unconfirmed.is_set()]

    @property
    def unrecorded(self) -> list[str]:
        """Actions whose work is gone and whose ending the journal has not taken yet."""
        return [job.action_id for job in self._live.values() if job.unrecorded.is_set() and not job.ended.done()]

    @property
    def usable_slots(self) -> int:
        """Slots that are not held by a job whose stop cannot be proved."""
        return self._means.settings.max_concurrency - len(self.unproved)

    def get(self, action_id: str) -> Job | None:
        """The live job of that id."""
        return self._live.get(action_id)

    def live(self) -> list[Job]:
        """All of them, in the order of admission."""
        return list(self._live.values())

    # --- admission -----------------------------------------------------------------------------------------------

    async def admit(self, new: NewJob, input_json: bytes, *, key_digest: str) -> tuple[Admission, Job | None]:
        """Make the job durable and queue it, or find the one that is there. The job is None when it has ended.

        Raises ActionConflict, ActionArchived, JournalFull, JournalUnavailable, NotAccepting, and what
        ``Ownership.take`` raises; nothing runs then.
        """
        while (pending := self._admitting.get(new.action_id)) is not None:
            await asyncio.wait({pending})
        known = self._live.get(new.action_id)
        # One that has ended may be archived by now, though its directory is still being removed: the journal knows.
        if known is not None and not known.ended.done():
            return Admission(_same(known.record, new), fresh=False), known
        refusal = self._refusal(new.action_id)
        if refusal is not None:
            record = await self._means.journal.fence(new)
            if record is None:
                if self._ownership is not None:
                    await self._ownership.seek(new)
                raise refusal
            return Admission(record, fresh=False), None
        # Set without a pause since the look above: of several equal starts one admits and the others find its job.
        done = self._admitting[new.action_id] = asyncio.get_running_loop().create_future()
        # The caller may be cancelled while the commit is under way; the job must start all the same.
        return await asyncio.shield(asyncio.ensure_future(self._admit(new, input_json, key_digest, done)))

    def _refusal(self, action_id: str) -> NotAccepting | None:
        why = self.why_draining
        if why is None and self.queued >= self._means.settings.max_queue:
            why = f"{self.queued} jobs wait for a slot already"
        return NotAccepting(why, action_id=action_id, retry_after_s=RETRY_AFTER_S) if why else None

    async def _admit(
        self, new: NewJob, input_json: bytes, key_digest: str, done: asyncio.Future[None]
    ) -> tuple[Admission, Job | None]:
        try:
            if self._ownership is not None:
                await self._own_action(new, self._ownership)
            admission = await self._means.journal.admit(new, retained_limit=self._means.settings.max_retained_runs)
            points.reach("admission.recorded")
            return admission, self._begin(admission.record, input_json, key_digest) if admission.fresh else None
        finally:
            del self._admitting[new.action_id]
            done.set_result(None)

    async def _own_action(self, new: NewJob, ownership: Ownership) -> None:
        """Make sure that the Action is ours before it is admitted here, and that nothing here forbids that."""
        journal = self._means.journal
        if await journal.fence(new) is None:
            journal.refuse_new(new.action_id, retained_limit=self._means.settings.max_retained_runs)
            await ownership.take(new)

    def _begin(self, record: JobRecord, input_json: bytes, key_digest: str) -> Job:
        job = Job(record, input_json, key_digest=key_digest)
        self._live[record.action_id] = job
        log.info("job_admitted", **job.facts)
        self._queue.add(record.crew_id, job)
        if self._shutting_down:
            job.mailbox.put(ShutDown())  # its commit ended after the drain had begun
        job.task = asyncio.get_running_loop().create_task(self._run(job))
        self._grant()
        return job

    def _grant(self) -> None:
        while (job := self._queue.grant()) is not None:
            job.granted.set()

    async def _run(self, job: Job) -> None:
        run = Run(job, self._means)
        try:
            await run.execute()
        except Exception as error:  # noqa: BLE001 - one job's fault must not take the table down
            # Its slot stays out of service and its record unfinished: the next start fences it.
            log.failure("run_broke", error, **job.facts)
            job.unconfirmed.set()
            return
        del self._live[job.action_id]
        # No await since the end could be seen: whoever has seen it finds the slot and the queue's place free.
        if not self._queue.withdraw(job.record.crew_id, job):
            self._queue.release(job.record.crew_id)
        self._grant()
        self._own(self._clean(run, job.record.row))

    async def _clean(self, run: Run, row: int) -> None:
        await run.clean()
        await self._logs.ended(row)

    def _own(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def adopt(self, job: Job, task: asyncio.Task[None]) -> None:
        """Keep a job of the process before us, whose work is not proved gone yet; its slot is out of service."""
        self._live[job.action_id] = job
        self._queue.occupy(job.record.crew_id)
        job.task = asyncio.get_running_loop().create_task(self._follow(job, task))

    async def _follow(self, job: Job, task: asyncio.Task[None]) -> None:
        await task
        del self._live[job.action_id]
        self._queue.release(job.record.crew_id)
        self._grant()
        self._own(self._logs.ended(job.record.row))

    def note_strays(self, strays: Sequence[Stray]) -> None:
        """Audit what was killed outside of every leaf with each live job: whose it was, nobody can tell."""
        detail = canonical.compact({"strays": msgspec.to_builtins(strays)})
        for job in [job for job in self.live() if job.worker is not None]:
            log.warning("strays_killed", **job.facts, count=len(strays))
            entry = AuditEntry(
                at=time.time(), action_id=job.action_id, actor="supervisor", act="strays_killed", detail=detail
            )
            self._own(self._audit(entry))

    async def _audit(self, entry: AuditEntry) -> None:
        try:
            await self._means.journal.audit(entry, terminal=True)
        except JournalUnavailable as error:
            log.warning("audit_not_recorded", action_id=entry.action_id, act=entry.act, code=error.code)

    # --- endings asked for ---------------------------------------------------------------------------------------

    async def cancel(self, job: Job, *, reason: str | None, actor: str) -> JobRecord:
        """Stop a live job and return its terminal record once that is durable.

        Raises StopUnconfirmed when the stop could not be proved in time, JournalUnavailable when the work is gone but
        the record is not durable; the attempts go on in both cases. A stop never waits for the journal.
        """
        at = time.time()
        await self._record_request(job, reason=reason, actor=actor, at=at)
        if not job.cancel_asked:
            job.cancel_asked = True
            job.hurried.set()
            job.mailbox.put(CancelAsked(reason=reason, at=at))
        return (await self.wait(job)).record

    async def _record_request(self, job: Job, *, reason: str | None, actor: str, at: float) -> None:
        recording = self._own(self._write_request(job, reason=reason, actor=actor, at=at))
        await asyncio.wait({recording}, timeout=RECORD_PATIENCE_S)

    async def _write_request(self, job: Job, *, reason: str | None, actor: str, at: float) -> None:
        journal = self._means.journal
        try:
            if job.phase is Phase.RUNNING:
                await journal.record_stop_request(
                    job.record.row, reason="cancelled", actor=actor, at=at, detail=reason or ""
                )
                points.reach("cancel.recorded")
                return
            await journal.audit(_cancel_entry(job.action_id, reason=reason, actor=actor, at=at), terminal=True)
        except (JournalUnavailable, IllegalTransition) as error:
            log.warning("cancel_not_recorded", **job.facts, code=error.code)

    async def note_late_cancel(self, record: JobRecord, *, reason: str | None, actor: str) -> None:
        """Audit a cancel of a job that had ended; it changes nothing."""
        await self._audit(_cancel_entry(record.action_id, reason=reason, actor=actor, at=time.time()))

    async def wait(self, job: Job) -> Outcome:
        """Wait for a job's durable end. Raises StopUnconfirmed or JournalUnavailable as ``cancel`` does."""
        await first(settled(job), job.unconfirmed.wait(), job.unrecorded.wait())
        if job.ended.done():
            return job.ended.result()
        if job.unrecorded.is_set():
            raise JournalUnavailable(
                f"the work of Action {job.action_id} is gone, but the journal does not take its record yet; ask again",
                action_id=job.action_id,
                retry_after_s=RETRY_AFTER_S,
            )
        raise StopUnconfirmed(
            f"the work of Action {job.action_id} could not be shown to be gone yet; the attempt goes on, ask again",
            action_id=job.action_id,
            retry_after_s=RETRY_AFTER_S,
        )

    async def shut_down(self, hurry: asyncio.Event) -> bool:
        """End every job: queued ones at once, running ones after ``drain_s`` or when ``hurry`` is set.

        Returns whether all ended with proof.
        """
        self._shutting_down = True
        settings = self._means.settings
        for job in self.live():
            if job.phase is Phase.QUEUED:
                job.mailbox.put(ShutDown())
        await first(self._wait_all(settings.drain_s), hurry.wait())
        for job in self.live():
            job.hurried.set()
            job.mailbox.put(ShutDown())
        await self._wait_all(settings.grace_s + settings.stop_timeout_s)
        for job in self.live():
            log.error("left_running", **job.facts, phase=job.phase.value)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLEANING_S)
        return not self._live

    async def _wait_all(self, limit_s: float) -> None:
        tasks = [job.task for job in self.live() if job.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=limit_s)


def _cancel_entry(action_id: str, *, reason: str | None, actor: str, at: float) -> AuditEntry:
    detail = canonical.compact({"reason": reason})
    return AuditEntry(at=at, action_id=action_id, actor=actor, act="cancel_requested", detail=detail)


async def settled(job: Job) -> None:
    """Wait until a job has ended."""
    await asyncio.wait({job.ended})


def _same(record: JobRecord, new: NewJob) -> JobRecord:
    if record.request_hash != new.request_hash:
        raise ActionConflict(
            f"Action {new.action_id} exists with other material; use the original request or another id",
            action_id=new.action_id,
        )
    return record
