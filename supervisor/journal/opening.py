"""Opening a journal: one owner, checked files, the right schema."""

from __future__ import annotations

import os
import sqlite3
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from protocol import points
from protocol.errors import StartError
from supervisor.journal import effects, queries, schema
from supervisor.journal.files import (
    RESERVE_BYTES,
    JournalOwned,
    Lock,
    Reserve,
    beside,
    prepare_directory,
    prepare_journal,
)
from supervisor.journal.importing import ImportReport, import_in_place
from supervisor.journal.journal import Journal
from supervisor.journal.readers import Readers
from supervisor.journal.reference import LIMIT_BYTES
from supervisor.journal.watch import Watch
from supervisor.journal.writer import Faults, Tally, Writer
from supervisor.log import get_log
from supervisor.processes import Identity, identify, is_alive, is_zombie

_LOG = get_log(__name__)
#: Action ids of one kind that a log line names.
NAMED = 20


def open_journal(
    path: Path,
    *,
    reserve_bytes: int = RESERVE_BYTES,
    faults: Faults | None = None,
    migrations: Sequence[Sequence[str]] = schema.MIGRATIONS,
    import_limit_bytes: int = LIMIT_BYTES,
    watch: Watch | None = None,
) -> Journal:
    """Take the journal at ``path``, creating it and its directory where missing.

    A runs.json of the reference server there, of at most ``import_limit_bytes``, is imported first. ``watch`` is told
    what is written from then on.
    Raises StartError, saying which path and what to do; a file that is refused is left as it is.
    """
    path = Path(os.path.abspath(path))
    lock = None
    try:
        warnings = prepare_directory(path.parent)
        lock = Lock.acquire(path)
        imported = import_in_place(path, limit_bytes=import_limit_bytes, migrations=migrations, faults=faults)
        if imported is not None:
            _say_imported(imported)
        prepare_journal(path)
        reserve = Reserve(beside(path, ".reserve"), reserve_bytes)
        return _open(path, lock, reserve, warnings=warnings, faults=faults, migrations=migrations, watch=watch)
    except BaseException as error:
        if lock is not None:
            lock.release()
        if isinstance(error, sqlite3.Error | OSError):
            raise StartError(f"journal {path} cannot be opened ({error}); nothing in it was replaced") from error
        raise


def _say_imported(report: ImportReport) -> None:
    _LOG.info(
        "reference_imported",
        journal=report.source,
        kept_as=report.kept_as,
        jobs=report.jobs,
        events=report.events,
        interrupted=len(report.interrupted),
        interrupted_actions=report.interrupted[:NAMED],
        changed=len(report.changes),
        changes=[f"{change.action_id}: {change.what}" for change in report.changes[:NAMED]],
    )


def _open(
    path: Path,
    lock: Lock,
    reserve: Reserve,
    *,
    warnings: list[str],
    faults: Faults | None,
    migrations: Sequence[Sequence[str]],
    watch: Watch | None,
) -> Journal:
    connection = schema.connect(path)
    readers = None
    try:
        found = schema.check(connection, path, len(migrations))
        previous = read_owner(connection) if found else None
        _refuse_living_owner(previous, path)
        schema.set_up_writer(connection)
        schema.migrate(connection, path, found, migrations)
        instance_id, epoch = _take_over(connection)
        if not reserve.create():
            warnings.append(
                f"no room for the reserve {reserve.path} of {reserve.size_bytes} bytes; nothing is admitted"
            )
        tally = Tally()
        tally.load(connection)
        quarantined = queries.quarantined(connection)
        readers = Readers(path)
        writer = Writer(
            connection, _reopener(path), reserve=reserve, tally=tally, name=str(path), faults=faults, watch=watch
        )
        writer.start()
    except BaseException:
        if readers is not None:
            readers.close()
        connection.close()
        raise
    return Journal(
        path,
        lock,
        writer,
        readers,
        tally=tally,
        instance_id=instance_id,
        epoch=epoch,
        previous_owner=previous,
        quarantined=quarantined,
        warnings=warnings,
        watch=watch or Watch(),
    )


def read_owner(connection: sqlite3.Connection) -> Identity | None:
    """Who has the journal open, or had it open and did not close it; None after a clean close."""
    text = _meta(connection, "owner")
    try:
        return msgspec.json.decode(text, type=Identity) if text else None
    except msgspec.MsgspecError:
        return None


def _refuse_living_owner(owner: Identity | None, path: Path) -> None:
    # We hold the lock of this path, so a living owner has another file open: what we see is a copy of it.
    if owner is None or owner == identify(os.getpid()):
        return
    if is_alive(owner) and not is_zombie(owner.pid):
        raise JournalOwned(
            f"{path} is a copy of a running journal: its owner, pid {owner.pid}, is alive; stop that one first, "
            "or only read the copy (`crew-supervisor journal export`, `check`)"
        )


def _take_over(connection: sqlite3.Connection) -> tuple[str, int]:
    """Record us as the owner of a new epoch, and what earlier ones left claimed as unknown.

    Returns instance id and epoch.
    """
    connection.execute("BEGIN IMMEDIATE")
    instance_id = _meta(connection, "instance_id") or uuid.uuid4().hex
    epoch = int(_meta(connection, "epoch") or 0) + 1
    owner = msgspec.json.encode(identify(os.getpid())).decode()
    for key, value in (("instance_id", instance_id), ("epoch", str(epoch)), ("owner", owner)):
        connection.execute("INSERT OR REPLACE INTO meta VALUES(?, ?)", (key, value))
    points.write("journal.take_over")
    lost = effects.lose_claimed(connection, None, effects.RESTARTED, tally=Tally())
    connection.execute("COMMIT")
    if lost:
        _LOG.warning("effect_unknown", count=lost, reason=effects.RESTARTED)
    return instance_id, epoch


def _meta(connection: sqlite3.Connection, key: str) -> str | None:
    found = connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return found[0] if found else None


def _reopener(path: Path) -> Callable[[], sqlite3.Connection]:
    """Opens the same file again, never another one at its name."""
    first = os.stat(path)

    def connect() -> sqlite3.Connection:
        now = os.stat(path)
        if (now.st_dev, now.st_ino) != (first.st_dev, first.st_ino):
            raise sqlite3.OperationalError(f"{path} is another file than at the start; restart")
        return schema.reopen(path, schema.set_up_writer)

    return connect
