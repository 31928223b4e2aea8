"""Reading a journal from another process, whether it is owned or not: nothing in it is changed, ever."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from protocol.errors import CrewError
from supervisor.journal import schema
from supervisor.journal.files import SQLITE_MAGIC
from supervisor.journal.reference import is_reference


class CommandRefused(CrewError):
    """A command about a journal could not be carried out; the journal is as it was."""

    code = "command_refused"
    title = "Command refused"


@contextlib.contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection that can neither write nor checkpoint, inside a read transaction: one state of the journal.

    While it is open the log of a live journal cannot be cut, so that it grows. (On a journal that nobody owns SQLite
    may leave an empty -wal and a -shm behind; the next owner removes them.)
    Raises CommandRefused, and StartError for a database of another program or a newer schema.
    """
    try:
        with contextlib.closing(_connect(path.absolute())) as connection:
            connection.execute("BEGIN")
            yield connection
    except sqlite3.Error as error:
        after = "; a crash cut its last change, which the next start completes" if _is_cut(error) else ""
        raise CommandRefused(f"journal {path} cannot be read: {error}{after}") from error


def _is_cut(error: sqlite3.Error) -> bool:
    # A rollback journal is left only where a crash met the very first opening, before the log was switched on.
    return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_READONLY_ROLLBACK


def _connect(path: Path) -> sqlite3.Connection:
    try:
        with path.open("rb") as file:
            start = file.read(len(SQLITE_MAGIC))
    except OSError as error:
        raise CommandRefused(f"journal {path} cannot be read: {error.strerror}") from None
    if start != SQLITE_MAGIC:
        if is_reference(path):
            raise CommandRefused(
                f"{path} is a runs.json; make it a journal with `crew-supervisor journal import` first"
            )
        raise CommandRefused(f"{path} is not a journal (no SQLite header)")
    connection = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=schema.BUSY_S, isolation_level=None)
    try:
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA temp_store = MEMORY")
        connection.execute("PRAGMA query_only = ON")
        schema.identify(connection, path, len(schema.MIGRATIONS))
    except BaseException:
        connection.close()
        raise
    return connection
