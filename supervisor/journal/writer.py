"""The one thread that writes: everything waiting goes into one transaction and one fsync."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from protocol.errors import JournalUnavailable
from supervisor.journal.files import Reserve
from supervisor.journal.watch import Watch
from supervisor.log import get_log

T = TypeVar("T")
#: Runs in the writer thread inside a savepoint; it neither begins nor commits.
Op = Callable[[sqlite3.Connection], T]
#: Called at ``begin``, ``op`` and ``commit``; what it raises happens there. For tests.
Faults = Callable[[str], None]

#: Seconds between two attempts of an idle writer to get well.
RECHECK_S = 1.0
#: Primary result codes that blame one statement (sqlite.org/rescode.html); every other one blames the journal:
#: SQLITE_ERROR, TOOBIG, CONSTRAINT, MISMATCH, MISUSE, RANGE.
_OP_CODES = frozenset({1, 18, 19, 20, 21, 25})
_ROOM_CODES = frozenset({sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_FSYNC, sqlite3.SQLITE_IOERR_SHMSIZE})
_LOG = get_log(__name__)


def blames_journal(error: BaseException) -> bool:
    """Whether ``error`` says that the journal cannot be used, rather than that one operation is wrong."""
    if not isinstance(error, sqlite3.Error):
        return False
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:
        return type(error) in (sqlite3.OperationalError, sqlite3.DatabaseError)
    return code & 0xFF not in _OP_CODES


def is_full(error: BaseException) -> bool:
    """Whether ``error`` is SQLITE_FULL: the disk has no room."""
    code = getattr(error, "sqlite_errorcode", None)
    return "full" in str(error) if code is None else code & 0xFF == sqlite3.SQLITE_FULL


def may_need_room(error: BaseException) -> bool:
    """Whether room could cure ``error``: a full disk, or a write that a quota or a wal-index without room refused."""
    return is_full(error) or getattr(error, "sqlite_errorcode", None) in _ROOM_CODES


class Numbers:
    """How many jobs are retained, and how many effects there are by state."""

    __slots__ = ("effects", "jobs")

    def __init__(self, jobs: int = 0, effects: Mapping[str, int] | None = None) -> None:
        self.jobs = jobs
        self.effects = Counter(effects or {})

    def copy(self) -> Numbers:
        """The same numbers, apart."""
        return Numbers(self.jobs, self.effects)


class Tally:
    """What is stored, counted: ``working`` inside a transaction, ``committed`` for everybody else."""

    def __init__(self) -> None:
        self.committed = Numbers()
        self.working = Numbers()

    def load(self, connection: sqlite3.Connection) -> None:
        """Count what is stored."""
        jobs = connection.execute("SELECT count(*) FROM jobs").fetchone()[0]
        effects = connection.execute("SELECT state, count(*) FROM effects GROUP BY state").fetchall()
        self.committed = Numbers(jobs, dict(effects))


class Pending:
    """An operation that waits for the writer; nobody waits for one without a future."""

    __slots__ = ("future", "op", "terminal")

    def __init__(self, op: Op[Any], future: asyncio.Future[Any] | None, *, terminal: bool) -> None:
        self.op = op
        self.future = future
        self.terminal = terminal


#: An operation and what came of it: a value or an error.
Outcome = tuple[Pending, Any, BaseException | None]


def probe(connection: sqlite3.Connection) -> None:
    """A tiny real write."""
    connection.execute(
        "INSERT INTO meta VALUES('probe', ?) ON CONFLICT(key) DO UPDATE SET value = excluded.value", (str(time.time()),)
    )


def look(connection: sqlite3.Connection) -> None:
    """Nothing: whoever asked learns that the writer gets round to it."""


class Writer:
    """Owns the writing connection. ``submit`` belongs to one event loop's thread; everything else is the writer's.

    ``connect`` reopens the journal after a failure and raises sqlite3.Error or OSError while it cannot be had.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        connect: Callable[[], sqlite3.Connection],
        *,
        reserve: Reserve,
        tally: Tally,
        name: str,
        faults: Faults | None = None,
        watch: Watch | None = None,
    ) -> None:
        self._connection: sqlite3.Connection | None = connection
        self._connect = connect
        self._reserve = reserve
        self._tally = tally
        self._name = name
        self._faults = faults
        self._watch = watch or Watch()
        self._wake = threading.Condition()
        self._queue: list[Pending] = []
        self._batch: list[Pending] = []
        self._stopping = False
        self._death: BaseException | None = None
        self._healthy = reserve.ready
        self._error = "there is no room for the reserve"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="journal-writer", daemon=True)

    @property
    def writable(self) -> bool:
        """Whether the last attempt to write succeeded and the reserve is in place."""
        return self._healthy and self._death is None

    @property
    def fault(self) -> str | None:
        """Why nothing can be written; None while something can."""
        if self._death is not None:
            return f"the writer has died ({type(self._death).__name__}), and only a restart brings it back"
        return None if self._healthy else self._error

    @property
    def alive(self) -> bool:
        """Whether the thread can still answer; one that has died is brought back by nothing but a restart."""
        return self._death is None and self._thread.is_alive()

    @property
    def idle_connection(self) -> sqlite3.Connection | None:
        """The connection, once the thread has ended."""
        return None if self._thread.is_alive() else self._connection

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, op: Op[T], *, terminal: bool) -> asyncio.Future[T]:
        """Hand over an operation; the future resolves after its commit. Always called from the same loop.

        The future raises what ``op`` raised, or JournalUnavailable. Cancelling it does not take the operation back.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not None and self._loop is not loop:
            raise RuntimeError("a journal belongs to the event loop that first wrote to it")
        self._loop = loop
        future: asyncio.Future[T] = loop.create_future()
        with self._wake:
            if self._stopping or self._death is not None:
                raise self._unavailable(self._death or RuntimeError("closed"))
            self._queue.append(Pending(op, future, terminal=terminal))
            self._wake.notify()
        return future

    def stop(self) -> None:
        """Write everything that waits, then end the thread. Blocks."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            while (batch := self._take()) is not None:
                self._deliver(self._perform(batch or [Pending(probe, None, terminal=False)]))
                # References to results of the last batch must not live until the next one.
                self._batch = batch = []
        except BaseException as error:  # noqa: BLE001 - the thread's boundary: its death is a journal failure
            self._die(error)

    def _take(self) -> list[Pending] | None:
        """Everything that waits; an empty list when it is time for a probe; None at the end."""
        with self._wake:
            self._wake.wait_for(lambda: self._queue or self._stopping, None if self.writable else RECHECK_S)
            if not self._queue:
                return None if self._stopping else []
            self._batch, self._queue = self._queue, []
            return self._batch

    def _perform(self, batch: list[Pending]) -> list[Outcome]:
        if self._reserve.restore():
            return self._attempt(batch)
        # The room that the reserve left is for endings.
        self._healthy = False
        kept = [pending for pending in batch if pending.terminal]
        error = sqlite3.OperationalError("database or disk is full")
        self._error = str(error)
        refused = self._refuse([pending for pending in batch if not pending.terminal], error)
        return refused + (self._attempt(kept) if kept else [])

    def _attempt(self, batch: list[Pending]) -> list[Outcome]:
        """Commit ``batch``; on a full disk once more without what is not terminal, in the reserve's room."""
        try:
            return self._commit(batch)
        except sqlite3.Error as error:
            self._abandon(error)
            kept = [pending for pending in batch if pending.terminal]
            if not (kept and may_need_room(error) and self._reserve.release()):
                return self._refuse(batch, error)
            refused = self._refuse([pending for pending in batch if not pending.terminal], error)
        _LOG.warning("journal_reserve_released", journal=self._name)
        try:
            return refused + self._commit(kept)
        except sqlite3.Error as error:
            self._abandon(error)
            return refused + self._refuse(kept, error)

    def _commit(self, batch: list[Pending]) -> list[Outcome]:
        connection = self._connected()
        began = time.monotonic()
        self._reach("begin")
        connection.execute("BEGIN IMMEDIATE")
        changes = connection.total_changes
        self._tally.working = self._tally.committed.copy()
        outcomes = [self._apply(connection, pending) for pending in batch]
        self._reach("commit")
        connection.execute("COMMIT")
        self._tally.committed = self._tally.working
        self._watch.committed(len(batch), time.monotonic() - began)
        if connection.total_changes != changes:
            self._healthy = self._reserve.ready
        return outcomes

    def _apply(self, connection: sqlite3.Connection, pending: Pending) -> Outcome:
        mark = self._tally.working.copy()
        connection.execute("SAVEPOINT op")
        try:
            self._reach("op")
            outcome: Outcome = (pending, pending.op(connection), None)
        except Exception as error:
            if blames_journal(error):
                raise
            connection.execute("ROLLBACK TO op")  # fails, and with it the batch, where no transaction is left
            self._tally.working = mark
            outcome = (pending, None, error)
        connection.execute("RELEASE op")
        return outcome

    def _connected(self) -> sqlite3.Connection:
        if self._connection is None:
            try:
                self._connection = self._connect()
            except OSError as error:
                raise sqlite3.OperationalError(str(error)) from error
            self._tally.load(self._connection)
        return self._connection

    def _abandon(self, error: sqlite3.Error) -> None:
        """Take the transaction back. Whatever the error was, only a full disk leaves the connection trusted."""
        self._watch.failed()
        if self._healthy:
            _LOG.error("journal_write_failed", journal=self._name, error=str(error))
        self._healthy, self._error = False, str(error)
        connection = self._connection
        if connection is None:
            return
        trusted = is_full(error)
        try:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        except sqlite3.Error:
            trusted = False
        if not trusted:
            # The readers' connections keep the wal-index alive, so that frames whose fsync failed are overwritten by
            # the next commit and never recovered.
            self._connection = None
            with contextlib.suppress(sqlite3.Error):
                connection.close()

    def _refuse(self, batch: list[Pending], error: BaseException) -> list[Outcome]:
        awaited = sum(pending.future is not None for pending in batch)
        if awaited:
            self._watch.refused_operations(awaited)
        return [(pending, None, self._unavailable(error)) for pending in batch]

    def _unavailable(self, error: BaseException) -> JournalUnavailable:
        return JournalUnavailable(
            f"journal {self._name} cannot be written ({error}); nothing of this was recorded, try again later",
            retry_after_s=5,
        )

    def _reach(self, point: str) -> None:
        if self._faults is not None:
            self._faults(point)

    def _deliver(self, outcomes: list[Outcome]) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(_settle, outcomes)

    def _die(self, error: BaseException) -> None:
        with self._wake:
            self._death = error
            waiting, self._queue, self._batch = self._batch + self._queue, [], []
        _LOG.failure("journal_writer_died", error, journal=self._name)
        self._deliver(self._refuse(waiting, error))


def _settle(outcomes: list[Outcome]) -> None:
    for pending, value, error in outcomes:
        future = pending.future
        if future is None or future.done():
            continue
        if error is None:
            future.set_result(value)
        elif isinstance(error, StopIteration):  # a future cannot carry it
            future.set_exception(RuntimeError("the operation raised StopIteration"))
        else:
            future.set_exception(error)
