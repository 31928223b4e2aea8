"""The journal as the supervisor uses it: every answer is durable before it is given."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from protocol.api import JobReconciliation, StopEvidence
from protocol.errors import JournalUnavailable
from protocol.states import Status
from supervisor.journal import queries, transactions
from supervisor.journal.files import Lock
from supervisor.journal.ledger import Ledger
from supervisor.journal.mirror import Mirror
from supervisor.journal.outbox import Outbox
from supervisor.journal.readers import Readers
from supervisor.journal.records import (
    Admission,
    AuditEntry,
    Ended,
    Ending,
    Item,
    JobPage,
    JobRecord,
    NewJob,
    Quarantined,
    StoredEvent,
    Tombstone,
    Unfinished,
    WorkerIdentity,
)
from supervisor.journal.watch import Watch
from supervisor.journal.writer import Op, Tally, Writer, look, probe
from supervisor.log import get_log
from supervisor.processes import Identity

T = TypeVar("T")
EVENT_PAGE = 1000
EVENT_PAGE_BYTES = 1024 * 1024
_LOG = get_log(__name__)


class Journal:
    """One open journal; made by ``open_journal``. Belongs to the event loop that first writes to it.

    Every writing method returns after its commit and raises JournalUnavailable when nothing was recorded; it may be
    called again then. (If the fsync failed and the process dies before another commit, a restart may find the refused
    batch after all: whole, and seen by no reader until then.) Cancelling the caller does not take a write back.
    Methods marked *terminal* may use the reserve of a full disk. Times are Unix seconds.
    """

    def __init__(
        self,
        path: Path,
        lock: Lock,
        writer: Writer,
        readers: Readers,
        *,
        tally: Tally,
        instance_id: str,
        epoch: int,
        previous_owner: Identity | None,
        quarantined: list[Quarantined],
        warnings: list[str],
        watch: Watch,
    ) -> None:
        self.path = path
        #: Made once with the journal: uuid4 in hex.
        self.instance_id = instance_id
        #: Counts openings from 1.
        self.epoch = epoch
        #: Who had the journal open and did not close it; None after a clean close.
        self.previous_owner = previous_owner
        self.quarantined = quarantined
        self.warnings = warnings
        self._lock = lock
        self._writer = writer
        self._readers = readers
        self._tally = tally
        self._watch = watch
        #: What is known of effects.
        self.effects = Ledger(self, tally)
        #: What is still to be told to the others, where there are others.
        self.outbox = Outbox(self)
        #: Copies of effects that are decided with the others.
        self.mirror = Mirror(self, tally)
        self._closing = threading.Lock()

    @property
    def writable(self) -> bool:
        """Whether the last attempt to write succeeded; gets true again by itself."""
        return self._writer.writable

    @property
    def fault(self) -> str | None:
        """Why the last attempt to write failed; None if it succeeded."""
        return self._writer.fault

    @property
    def retained(self) -> int:
        """Number of jobs kept, running ones included."""
        return self._tally.committed.jobs

    async def write(self, op: Op[T], terminal: bool = False) -> T:
        """Run ``op`` in the writer's next transaction and return its value after the commit.

        Raises JournalUnavailable, and what ``op`` raises; a constraint or statement error of ``op`` fails only ``op``.
        """
        return await self.submit(op, terminal=terminal)

    def submit(self, op: Op[T], *, terminal: bool = False) -> asyncio.Future[T]:
        """``write`` without waiting: everything goes into the writer's transactions in the order of these calls."""
        try:
            return self._writer.submit(op, terminal=terminal)
        except JournalUnavailable as error:
            refused: asyncio.Future[T] = asyncio.get_running_loop().create_future()
            refused.set_exception(error)
            return refused

    async def read(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        """Run ``fn``, which leaves no cursor open, on a reading connection in a thread. Raises JournalUnavailable."""
        return await self._readers.run(fn)

    async def probe(self) -> None:
        """Write and commit something tiny. Raises JournalUnavailable."""
        await self.write(probe)

    async def answers(self) -> bool:
        """Wait until the writer thread has answered, be it with an error. False when it has died."""
        # An idle writer that is unwell tries a real write now and then; this must not keep it from that.
        op = look if self.writable else probe
        try:
            await self.write(op)
        except JournalUnavailable:
            return self._writer.alive
        return True

    async def close(self) -> None:
        """Write what waits, fold the log into the file, give the lock back."""
        await asyncio.to_thread(self.close_sync)

    def close_sync(self) -> None:
        """``close`` for a thread that may block; a second call does nothing."""
        with self._closing:
            self._readers.close()
            self._writer.stop()
            connection = self._writer.idle_connection
            if connection is not None:
                self._say_goodbye(connection)
            self._lock.release()

    def _say_goodbye(self, connection: sqlite3.Connection) -> None:
        try:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            connection.execute("DELETE FROM meta WHERE key = 'owner'")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except sqlite3.ProgrammingError:
            return  # closed before
        except sqlite3.Error as error:
            _LOG.warning("journal_close_failed", journal=str(self.path), error=str(error))
        connection.close()

    # --- a job's life ---------------------------------------------------------------------------------------------

    async def admit(self, job: NewJob, *, retained_limit: int) -> Admission:
        """Make ``job`` durable (running, queued), or return the record that an exact repeat gets.

        Repeats are answered also when the journal is full or cannot be written.
        Raises ActionArchived, ActionConflict, JournalFull, JournalUnavailable.
        """
        op = partial(transactions.admit, job=job, tally=self._tally, retained_limit=retained_limit)
        try:
            return await self.write(op)
        except JournalUnavailable:
            record = await self.read(lambda connection: queries.fence(connection, job))
            if record is None:
                raise
            return Admission(record, fresh=False)

    def refuse_new(self, action_id: str, *, retained_limit: int) -> None:
        """Raise what ``admit`` would raise for a fresh job as things stand: JournalFull, JournalUnavailable."""
        transactions.refuse_if_full(self.retained, retained_limit, action_id=action_id)
        if self.fault is not None:
            raise JournalUnavailable(
                f"the journal cannot be written ({self.fault}); nothing was admitted",
                action_id=action_id,
                retry_after_s=5,
            )

    async def knows(self, action_id: str) -> bool:
        """Whether the Action is, or was, a job of this journal; one that is quarantined too."""
        return await self.read(lambda connection: queries.knows(connection, action_id))

    async def record_worker(self, row: int, worker: WorkerIdentity) -> JobRecord:
        """Record a worker before its ``go``; the phase becomes starting. Raises IllegalTransition, UnknownAction."""
        return await self.write(lambda connection: transactions.record_worker(connection, row, worker))

    async def record_start(self, row: int, worker: WorkerIdentity, started: bytes, at: float) -> JobRecord:
        """Record the worker and event 0 ``started`` together; the phase becomes running, and ``go`` may be sent.

        Raises IllegalTransition, UnknownAction.
        """
        record = await self.write(partial(transactions.record_start, row=row, worker=worker, started=started, at=at))
        self._watch.appended(1)
        return record

    async def append_events(self, row: int, first_seq: int, items: Sequence[Item], at: float) -> int:
        """Append (name, data) pairs from sequence ``first_seq`` on. Returns the new event count.

        Raises IllegalTransition if ``first_seq`` is not the event count, or the job has not started or has ended.
        """
        op = partial(transactions.append_events, row=row, first_seq=first_seq, items=items, at=at)
        count = await self.write(op)
        self._watch.appended(len(items))
        return count

    async def record_stop_request(self, row: int, reason: str, actor: str, at: float, detail: str = "") -> JobRecord:
        """Record that an ending is decided, by whom and why; the phase becomes stopping. *Terminal.*

        ``reason`` is a word (cancel, timeout), ``detail`` text for people. A further request is only audited.
        Raises IllegalTransition for a job that has ended, UnknownAction.
        """
        op = partial(transactions.record_stop_request, row=row, reason=reason, actor=actor, at=at, detail=detail)
        return await self.write(op, terminal=True)

    async def update_stop(self, row: int, stop: StopEvidence) -> JobRecord:
        """Replace the evidence of a stop that goes on. *Terminal.* Raises IllegalTransition unless it is stopping."""
        return await self.write(lambda connection: transactions.update_stop(connection, row, stop), terminal=True)

    async def finish(self, row: int, ending: Ending) -> Ended:
        """Write the terminal record, once and for all; what is still claimed becomes unknown with it. *Terminal.*

        Raises IllegalTransition if there is one already or ``ending.first_seq`` is not the event count; UnknownAction.
        """
        told = self.outbox.enabled
        op = partial(transactions.finish, row=row, ending=ending, tally=self._tally, told=told)
        ended = await self.write(op, terminal=True)
        if told:
            self.outbox.added(1)
        self._watch.appended(len(ending.pending) + 1)
        self._watch.ended(ended.record, ending.detail)
        return ended

    async def archive(self, action_id: str, *, actor: str, at: float | None = None) -> int:
        """Replace an ended job by a tombstone. Returns the row it had. *Terminal.*

        Raises UnknownAction, ActionRunning, EffectsOpen, RowQuarantined.
        """
        when = time.time() if at is None else at
        op = partial(transactions.archive, action_id=action_id, actor=actor, at=when, tally=self._tally)
        return await self.write(op, terminal=True)

    async def reconcile(self, action_id: str, found: JobReconciliation, *, by: str) -> JobRecord:
        """Put an operator's decision beside an uncertain outcome; ``by`` is who sent it. *Terminal.*

        Returns the record, which never changes. Raises UnknownAction, ActionRunning, OutcomeCertain, RowQuarantined.
        """
        op = partial(transactions.reconcile, action_id=action_id, found=found, by=by)
        return await self.write(op, terminal=True)

    async def audit(self, entry: AuditEntry, *, terminal: bool = False) -> None:
        """Add an audit entry."""
        await self.write(lambda connection: transactions.audit(connection, entry), terminal=terminal)

    # --- reading --------------------------------------------------------------------------------------------------

    async def get(self, action_id: str) -> JobRecord | None:
        """The retained job of an Action. Raises RowQuarantined."""
        return await self.read(lambda connection: queries.job_by_action(connection, action_id))

    async def fence(self, job: NewJob) -> JobRecord | None:
        """The record that an exact repeat of ``job`` gets, None if its id is free. Raises as ``admit`` does."""
        return await self.read(lambda connection: queries.fence(connection, job))

    async def get_row(self, row: int) -> JobRecord:
        """The retained job of a row. Raises UnknownAction, RowQuarantined."""
        return await self.read(lambda connection: queries.job_by_row(connection, row))

    async def tombstone(self, action_id: str) -> Tombstone | None:
        """What stays of an archived Action."""
        return await self.read(lambda connection: queries.tombstone(connection, action_id))

    async def output(self, row: int) -> bytes | None:
        """Data of the ``completed`` event, ASCII JSON; None for a job that did not complete."""
        return await self.read(lambda connection: queries.output(connection, row))

    async def events(
        self, row: int, start: int, *, limit: int = EVENT_PAGE, limit_bytes: int = EVENT_PAGE_BYTES
    ) -> list[StoredEvent]:
        """Events from sequence ``start``, at most ``limit`` and ``limit_bytes`` of data, one at least."""
        return await self.read(partial(queries.events, row=row, start=start, limit=limit, limit_bytes=limit_bytes))

    async def unfinished(self) -> list[Unfinished]:
        """Jobs without a terminal record, oldest first, without quarantined ones."""
        return await self.read(queries.unfinished)

    async def list_jobs(
        self,
        *,
        status: Status | None = None,
        crew_id: str | None = None,
        operation: str | None = None,
        before: int | None = None,
        limit: int = 100,
    ) -> JobPage:
        """Jobs that match every filter given, newest first, with rows below ``before``; quarantined ones left out."""
        return await self.read(
            partial(queries.list_jobs, status=status, crew_id=crew_id, operation=operation, before=before, limit=limit)
        )

    async def task_owner(self, crew_id: str, task_id: str) -> int | None:
        """Row of the crew's latest retained job that ran the CrewAI task."""
        return await self.read(lambda connection: queries.task_owner(connection, crew_id, task_id))

    async def absent(self, rows: Sequence[int]) -> list[int]:
        """Those of ``rows``, a few hundred at most, that belong to no retained job."""
        return await self.read(partial(queries.absent, rows=rows))

    async def reconciliations(self, records: Sequence[JobRecord]) -> dict[int, list[JobReconciliation]]:
        """Decisions about the outcomes of those of ``records``, a page of them, that have any; by row, oldest first."""
        rows = [record.row for record in records if record.uncertain]
        return await self.read(partial(queries.reconciliations, rows=rows)) if rows else {}

    async def audit_of(self, action_id: str, *, limit: int = queries.AUDIT_PAGE) -> list[AuditEntry]:
        """The newest entries about an Action, oldest first."""
        return await self.read(lambda connection: queries.audit_of(connection, action_id, limit))
