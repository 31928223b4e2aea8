"""The effect ledger of plain scripts: one SQLite file that any number of processes and threads share.

Nobody watches over these processes, so each one that opens the file is an owner with an epoch of its own, known by pid,
start ticks and boot id. A claim of an owner that is no more becomes unknown when the ledger is opened or the claim is
met. Time plays no part in it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from protocol import effects
from protocol.effects import COLUMNS, FIELDS, Claim, EffectRecord, Policy, Reconciliation, Scope
from protocol.errors import CrewError, EffectLedgerUnavailable, EffectNotFound
from protocol.states import EffectState
from worker.guarding.session import Granted, Replayed

#: How long SQLite waits for another process's transaction; each takes as long as a disk needs for one sync.
BUSY_TIMEOUT_S = 60.0
#: Beside the ledger: held with flock(2) by the process that opens it, so that creation and the switch to WAL come once,
#: and by the one that writes.
LOCK_SUFFIX = "-lock"
OWNERS = """CREATE TABLE IF NOT EXISTS owners (epoch INTEGER PRIMARY KEY AUTOINCREMENT, pid INTEGER NOT NULL,
    start_ticks INTEGER NOT NULL, boot_id TEXT NOT NULL, opened_at REAL NOT NULL)"""
EFFECTS = f"CREATE TABLE IF NOT EXISTS effects ({COLUMNS})"
#: A ledger is opened by looking through its open claims.
CLAIMED = "CREATE INDEX IF NOT EXISTS claimed ON effects (epoch) WHERE state = 'claimed'"
#: PRAGMA user_version; another layout has another number, and is refused.
LAYOUT = 1
SELECT = f"SELECT {', '.join(FIELDS)} FROM effects"
PUT = f"INSERT OR REPLACE INTO effects ({', '.join(FIELDS)}) VALUES ({', '.join('?' * len(FIELDS))})"

T = TypeVar("T")


class Owner(NamedTuple):
    """A process for certain: pids are used again, one with its start ticks (proc_pid_stat(5)) and boot id is not."""

    pid: int
    start_ticks: int
    boot_id: str

    @classmethod
    def here(cls) -> Owner:
        """The calling process."""
        fields = _stat(os.getpid())
        assert fields is not None, "/proc does not show this process"
        return cls(os.getpid(), int(fields[19]), _boot_id())

    @property
    def alive(self) -> bool:
        """Whether it can still run code. A zombie can while it has threads besides its leader."""
        fields = _stat(self.pid)
        if fields is None or int(fields[19]) != self.start_ticks or self.boot_id != _boot_id():
            return False
        if fields[0] not in {"Z", "X"}:
            return True
        with contextlib.suppress(OSError):
            return len(os.listdir(f"/proc/{self.pid}/task")) > 1
        return False


def _stat(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    return text[text.rindex(b")") + 2 :].decode("ascii").split()


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


class LocalLedger:
    """A ledger file. Created with mode 0600 if there is none; its directory must exist and be local.

    May be used by all threads; a process that was forked from one that uses it becomes an owner of its own.
    Raises EffectLedgerUnavailable from every method that cannot do its work.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(path)
        #: Held for each transaction, and by the thread that forks.
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._epoch: int | None = None
        _ledgers.add(self)
        with self._using():
            pass

    @property
    def epoch(self) -> int:
        """This process's incarnation as an owner."""
        with self._using():
            assert self._epoch is not None
            return self._epoch

    @contextlib.contextmanager
    def _using(self) -> Iterator[sqlite3.Connection]:
        """The open file, for one thread at a time. Raises EffectLedgerUnavailable."""
        try:
            with self._lock:
                if self._connection is None:
                    self._connection, self._epoch = _open(self.path, self._epoch)
                yield self._connection
        except (sqlite3.Error, OSError) as error:
            raise EffectLedgerUnavailable(
                f"the effect ledger cannot be used, so nothing was done: {type(error).__name__}: {error}"
            ) from error

    def close(self) -> None:
        """Give the file back; the next use opens it again, as the same owner."""
        with self._lock:
            self._disconnect()

    def _disconnect(self) -> None:
        if self._connection is not None:
            with _exclusive(self.path):
                self._connection.close()
            self._connection = None

    def before_fork(self) -> None:
        """Leave no connection to inherit: SQLite's idea of its locks would be wrong in the child."""
        self._lock.acquire()
        self._disconnect()

    def after_fork(self, *, child: bool) -> None:
        """Go on; the child is another owner."""
        if child:
            self._epoch = None
        self._lock.release()

    def claim(self, wanted: Claim) -> Granted | Replayed:
        """May this call be made?"""

        def decide(
            connection: sqlite3.Connection, record: EffectRecord | None
        ) -> tuple[EffectRecord | None, Granted | Replayed | CrewError]:
            assert self._epoch is not None
            lost = _lost(connection, record)
            try:
                answer = effects.claim(lost or record, wanted, epoch=self._epoch, at=time.time())
            except CrewError as refusal:
                return lost, refusal
            if isinstance(answer, effects.Replayed):
                return answer.record, Replayed(answer.record.receipt, answer.record.settled_at or 0.0)
            return answer.record, Granted(answer.record.epoch, answer.record.attempt)

        answer = self._change(effects.key_id_of(wanted.preimage), decide)
        if isinstance(answer, CrewError):
            raise answer
        return answer

    def settle(self, key_id: str, *, epoch: int, args_hash: str, receipt: bytes | None) -> None:
        """It took effect."""
        self._step(
            key_id,
            lambda record: effects.settle(
                record, epoch=epoch, args_hash=args_hash, receipt=receipt, at=time.time()
            ),
        )

    def not_applied(self, key_id: str, *, epoch: int) -> None:
        """The tool says that nothing happened."""
        self._step(key_id, lambda record: effects.not_applied(record, epoch=epoch))

    def lose(self, key_id: str, *, epoch: int, reason: str) -> None:
        """Nobody knows."""
        self._step(key_id, lambda record: effects.lose(record, epoch=epoch, reason=reason))

    def deliver(self, key_id: str) -> None:
        """The caller has the receipt. Not synced: a power cut may take back this one fact."""
        with contextlib.suppress(CrewError):
            self._step(key_id, lambda record: effects.deliver(record, at=time.time()), synced=False)

    def reconcile(self, key_id: str, found: Reconciliation, *, version: int | None) -> None:
        """Record a decision about an unknown outcome. Raises EffectNotFound, EffectChanged, EffectNotOpen."""

        def decide(record: EffectRecord | None) -> EffectRecord:
            if record is None:
                raise EffectNotFound(f"the ledger has no effect {key_id}")
            return effects.reconcile(record, found, version=version, at=time.time())

        self._step(key_id, decide)

    def records(self, *, state: EffectState | None = None) -> list[EffectRecord]:
        """Every effect, oldest claim first."""
        with self._using() as connection:
            rows = connection.execute(f"{SELECT} ORDER BY claimed_at, key_id").fetchall()
        return [record for record in map(_record, rows) if state in (None, record.state)]

    def find(self, key_id: str) -> EffectRecord | None:
        """One effect."""
        with self._using() as connection:
            return _find(connection, key_id)

    def _step(
        self, key_id: str, decide: Callable[[EffectRecord | None], EffectRecord | None], *, synced: bool = True
    ) -> None:
        self._change(key_id, lambda connection, record: (decide(record), None), synced=synced)

    def _change(
        self,
        key_id: str,
        decide: Callable[[sqlite3.Connection, EffectRecord | None], tuple[EffectRecord | None, T]],
        *,
        synced: bool = True,
    ) -> T:
        # Processes queue at the lock, which wakes the next one at once; SQLite would look again after up to 100 ms.
        with self._using() as connection, _exclusive(self.path), _transaction(connection, synced=synced):
            record, answer = decide(connection, _find(connection, key_id))
            if record is not None:
                _put(connection, record)
        return answer


#: Every ledger of this process that is still in use, for a fork.
_ledgers: weakref.WeakSet[LocalLedger] = weakref.WeakSet()
_forking: list[LocalLedger] = []


def _before_fork() -> None:
    _forking[:] = sorted(_ledgers, key=id)
    for ledger in _forking:
        ledger.before_fork()


def _after_fork(*, child: bool) -> None:
    for ledger in _forking:
        ledger.after_fork(child=child)
    _forking.clear()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=lambda: _after_fork(child=False),
    after_in_child=lambda: _after_fork(child=True),
)


@contextlib.contextmanager
def _exclusive(path: str) -> Iterator[None]:
    descriptor = os.open(path + LOCK_SUFFIX, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        # An explicit unlock also frees the lock in a child that was forked meanwhile (flock(2)).
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection, *, synced: bool = True) -> Iterator[None]:
    """One write, on the disk when it ends. Without ``synced`` it is on the disk with the next one that is."""
    if not synced:
        connection.execute("PRAGMA synchronous=NORMAL")
    try:
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            connection.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
            raise
    finally:
        if not synced:
            connection.execute("PRAGMA synchronous=FULL")


def _open(path: str, epoch: int | None) -> tuple[sqlite3.Connection, int]:
    """Open the file, as the owner ``epoch`` or as a new one."""
    with _exclusive(path):
        # SQLite gives its two side files the mode of the ledger itself.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
            with _transaction(connection):
                connection.execute(OWNERS)
                connection.execute(EFFECTS)
                connection.execute(CLAIMED)
                _check_layout(connection)
                epoch = _register(connection, Owner.here()) if epoch is None else epoch
                _sweep(connection)
            _sync_directory(path)
        except BaseException:
            connection.close()
            raise
    return connection, epoch


def _check_layout(connection: sqlite3.Connection) -> None:
    (layout,) = connection.execute("PRAGMA user_version").fetchone()
    if layout not in (0, LAYOUT):
        raise sqlite3.NotSupportedError(f"its layout is {layout}, this program's is {LAYOUT}")
    connection.execute(f"PRAGMA user_version = {LAYOUT}")


def _register(connection: sqlite3.Connection, owner: Owner) -> int:
    values = (*owner, time.time())
    row = connection.execute(
        "INSERT INTO owners (pid, start_ticks, boot_id, opened_at) VALUES (?, ?, ?, ?)", values
    ).lastrowid
    assert row is not None
    return row


def _sweep(connection: sqlite3.Connection) -> None:
    """Give up every claim whose owner is gone."""
    rows = connection.execute(f"{SELECT} WHERE state = 'claimed'").fetchall()
    for row in rows:
        if (lost := _lost(connection, _record(row))) is not None:
            _put(connection, lost)


def _lost(connection: sqlite3.Connection, record: EffectRecord | None) -> EffectRecord | None:
    """``record`` as unknown if it is claimed by an owner that is gone, else None."""
    if record is None or record.state is not EffectState.CLAIMED:
        return None
    row = connection.execute("SELECT pid, start_ticks, boot_id FROM owners WHERE epoch = ?", (record.epoch,)).fetchone()
    if row is not None and Owner(*row).alive:
        return None
    return effects.lose(record, epoch=record.epoch, reason="its process is gone")


def _find(connection: sqlite3.Connection, key_id: str) -> EffectRecord | None:
    row = connection.execute(f"{SELECT} WHERE key_id = ?", (key_id,)).fetchone()
    return None if row is None else _record(row)


def _record(row: tuple[Any, ...]) -> EffectRecord:
    fields = dict(zip(FIELDS, row, strict=True))
    kinds = {"scope": Scope, "policy": Policy, "state": EffectState}
    return EffectRecord(**fields | {name: kind(fields[name]) for name, kind in kinds.items()})


def _put(connection: sqlite3.Connection, record: EffectRecord) -> None:
    connection.execute(PUT, [_value(value) for value in msgspec.structs.astuple(record)])


def _value(value: Any) -> Any:
    return str(value) if isinstance(value, str) else value


def _sync_directory(path: str) -> None:
    descriptor = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
