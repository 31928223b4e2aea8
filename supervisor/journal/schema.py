"""The journal's tables, its connections, and how an older schema moves forward."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path

from protocol.errors import StartError
from protocol.states import Phase, Status
from supervisor.journal.files import beside, sync_directory

#: "CrSu": marks the file as ours (SQLite's PRAGMA application_id).
APPLICATION_ID = 0x43725375
#: Larger files are not read through at every start.
QUICK_CHECK_BYTES = 64 * 1024 * 1024
#: The log is cut to this size after a burst.
WAL_LIMIT_BYTES = 64 * 1024 * 1024
CHECKPOINT_PAGES = 1000
#: Another program that holds SQLite's write lock is waited for this long.
BUSY_S = 2.0


def _quoted(values: Sequence[str]) -> str:
    return ", ".join(f"'{value}'" for value in values)


#: A row that no version of ours wrote. Served by the index jobs_odd whatever the number of jobs.
ODD = f"status NOT IN ({_quoted([*Status])}) OR phase NOT IN ({_quoted([*Phase])})"

#: Step N brings a journal from version N to N+1; the number of steps is the current version.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        "CREATE TABLE meta(key TEXT PRIMARY KEY NOT NULL, value TEXT NOT NULL) WITHOUT ROWID",
        # AUTOINCREMENT: leaf cgroups and directories are named after the row, so no row is used twice.
        """CREATE TABLE jobs(
            row INTEGER PRIMARY KEY AUTOINCREMENT, action_id TEXT NOT NULL UNIQUE, crew_id TEXT NOT NULL,
            operation TEXT NOT NULL, request_hash TEXT NOT NULL, timeout_ms INTEGER, status TEXT NOT NULL,
            phase TEXT NOT NULL, event_count INTEGER NOT NULL, admitted_at REAL NOT NULL, started_at REAL,
            ended_at REAL, uncertain INTEGER, stop BLOB, registry_digest TEXT NOT NULL, config_digest TEXT NOT NULL,
            client TEXT NOT NULL)""",
        "CREATE INDEX jobs_running ON jobs(row) WHERE status = 'running'",
        "CREATE INDEX jobs_failed ON jobs(row) WHERE status = 'failed'",
        "CREATE INDEX jobs_cancelled ON jobs(row) WHERE status = 'cancelled'",
        "CREATE INDEX jobs_crew ON jobs(crew_id)",
        """CREATE INDEX jobs_odd ON jobs(row) WHERE
            status NOT IN ('running', 'completed', 'failed', 'cancelled')
            OR phase NOT IN ('queued', 'starting', 'running', 'stopping', 'done')""",
        """CREATE TABLE events(
            job INTEGER NOT NULL, seq INTEGER NOT NULL, name TEXT NOT NULL, at REAL NOT NULL, data BLOB NOT NULL,
            PRIMARY KEY(job, seq)) WITHOUT ROWID""",
        """CREATE TABLE workers(
            job INTEGER NOT NULL, attempt INTEGER NOT NULL, pid INTEGER NOT NULL, start_ticks INTEGER NOT NULL,
            started_at REAL NOT NULL, boot_id TEXT NOT NULL, pid_ns INTEGER NOT NULL, leaf TEXT, method TEXT NOT NULL,
            launched_at REAL NOT NULL, keeper_pid INTEGER, keeper_ticks INTEGER,
            PRIMARY KEY(job, attempt)) WITHOUT ROWID""",
        "CREATE TABLE tasks(task_id TEXT NOT NULL, job INTEGER NOT NULL, PRIMARY KEY(task_id, job)) WITHOUT ROWID",
        "CREATE INDEX tasks_job ON tasks(job)",
        """CREATE TABLE audit(
            id INTEGER PRIMARY KEY, at REAL NOT NULL, action_id TEXT, actor TEXT NOT NULL, act TEXT NOT NULL,
            detail BLOB)""",
        "CREATE INDEX audit_action ON audit(action_id)",
        """CREATE TABLE tombstones(
            action_id TEXT PRIMARY KEY NOT NULL, request_hash TEXT NOT NULL, crew_id TEXT NOT NULL,
            operation TEXT NOT NULL, status TEXT NOT NULL, archived_at REAL NOT NULL) WITHOUT ROWID""",
    ),
    # An imported record's output where it is not the data of the last event; NULL for every job of our own.
    ("ALTER TABLE jobs ADD COLUMN output BLOB",),
    (
        # Pages are in the order of the first claim, which is that of rowid: no row is ever removed.
        """CREATE TABLE effects(
            key_id TEXT PRIMARY KEY NOT NULL, preimage BLOB NOT NULL, scope TEXT NOT NULL, scope_id TEXT NOT NULL,
            tool TEXT NOT NULL, policy TEXT NOT NULL, args_hash TEXT NOT NULL, state TEXT NOT NULL,
            version INTEGER NOT NULL, epoch INTEGER NOT NULL, attempt INTEGER NOT NULL, action_id TEXT NOT NULL,
            crew_id TEXT NOT NULL, job INTEGER, claimed_at REAL NOT NULL, settled_at REAL, delivered_at REAL,
            receipt BLOB, replays INTEGER NOT NULL, reason TEXT NOT NULL, actor TEXT NOT NULL, decision TEXT NOT NULL,
            evidence TEXT NOT NULL)""",
        # Covers the counts of a job's page and its open effects.
        "CREATE INDEX effects_job ON effects(job, state)",
        "CREATE INDEX effects_state ON effects(state)",
        "CREATE INDEX effects_crew ON effects(crew_id)",
    ),
    (
        # Decisions beside uncertain outcomes; the newest one counts, and none is changed.
        """CREATE TABLE reconciliations(
            id INTEGER PRIMARY KEY, job INTEGER NOT NULL, at REAL NOT NULL, decision TEXT NOT NULL,
            actor TEXT NOT NULL, evidence TEXT NOT NULL)""",
        "CREATE INDEX reconciliations_job ON reconciliations(job)",
    ),
    (
        # Endings that a fleet has not been told yet, in their order; empty where there is none.
        """CREATE TABLE outbox(
            id INTEGER PRIMARY KEY AUTOINCREMENT, action_id TEXT NOT NULL UNIQUE, request_hash TEXT NOT NULL,
            crew_id TEXT NOT NULL, operation TEXT NOT NULL, timeout_ms INTEGER, status TEXT NOT NULL,
            uncertain INTEGER NOT NULL)""",
    ),
    (
        # Of an effect that is shared: the version that the others know. What is later is news.
        "ALTER TABLE effects ADD COLUMN told INTEGER",
        "CREATE INDEX effects_news ON effects(key_id) WHERE told < version",
    ),
)
#: The first version whose table jobs has the column output.
OUTPUT_VERSION = 2
#: The first version with the table effects.
EFFECTS_VERSION = 3
#: The first version with the table reconciliations.
RECONCILIATIONS_VERSION = 4


def connect(path: Path) -> sqlite3.Connection:
    """Open an existing file and change nothing in it. Raises sqlite3.Error."""
    # A connection is used by one thread at a time, though not always by the same one.
    connection = sqlite3.connect(
        f"{path.as_uri()}?mode=rw", uri=True, timeout=BUSY_S, isolation_level=None, check_same_thread=False
    )
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA temp_store = MEMORY")
    return connection


def set_up_writer(connection: sqlite3.Connection) -> None:
    """Make this the connection that writes and checkpoints. Raises sqlite3.Error."""
    mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
    if mode != "wal":
        raise sqlite3.OperationalError(f"the file system cannot hold a write-ahead log (mode is {mode})")
    connection.execute("PRAGMA synchronous = FULL")
    # Kibibytes. It fills up with the journal for ever, and four times as much was measured to be no faster.
    connection.execute("PRAGMA cache_size = -2048")
    connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
    connection.execute(f"PRAGMA journal_size_limit = {WAL_LIMIT_BYTES}")


def set_up_reader(connection: sqlite3.Connection) -> None:
    """Make this a connection that can neither write nor checkpoint. Raises sqlite3.Error."""
    connection.execute("PRAGMA query_only = ON")
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    # The first read opens the log: from here on the wal-index stays alive while the writer reopens.
    connection.execute("SELECT count(*) FROM meta").fetchone()


def reopen(path: Path, set_up: Callable[[sqlite3.Connection], None]) -> sqlite3.Connection:
    """``connect`` and ``set_up``, or nothing is left open. Raises sqlite3.Error."""
    connection = connect(path)
    try:
        set_up(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def check(connection: sqlite3.Connection, path: Path, version: int) -> int:
    """Return the schema version found, 0 for a file that is still empty.

    Raises StartError for a database of another program, a newer schema or a damaged file; nothing is changed.
    """
    application = _pragma(connection, "application_id")
    found = _pragma(connection, "user_version")
    if application == 0 and found == 0 and not connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone():
        return 0
    identify(connection, path, version)
    if os.stat(path).st_size < QUICK_CHECK_BYTES:
        verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if verdict != "ok":
            raise StartError(f"journal {path} is damaged ({verdict}); it was left as it is, restore a backup")
    return found


def identify(connection: sqlite3.Connection, path: Path, version: int) -> int:
    """Return the schema version of a journal that is not empty.

    Raises StartError for a database of another program or a schema newer than ``version``.
    """
    found = _pragma(connection, "user_version")
    if _pragma(connection, "application_id") != APPLICATION_ID or found < 1:
        raise StartError(f"{path} is an SQLite database of another program; name another file")
    if found > version:
        raise StartError(
            f"journal {path} has schema version {found}, this program knows {version}; "
            f"start the newer version, or restore a copy that it kept"
        )
    return found


def migrate(connection: sqlite3.Connection, path: Path, found: int, steps: Sequence[Sequence[str]]) -> None:
    """Bring the journal from version ``found`` to ``len(steps)`` in one transaction.

    A copy of an older journal is kept as ``<name>.v<found>.bak``. Raises sqlite3.Error; the journal is then unchanged.
    """
    if found == len(steps):
        return
    if found:
        _keep_copy(connection, beside(path, f".v{found}.bak"))
    connection.execute("BEGIN IMMEDIATE")
    try:
        for step in steps[found:]:
            for statement in step:
                connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {len(steps)}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _keep_copy(connection: sqlite3.Connection, path: Path) -> None:
    unfinished = beside(path, ".tmp")
    unfinished.unlink(missing_ok=True)
    fd = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        copy = sqlite3.connect(unfinished, isolation_level=None)
        try:
            connection.backup(copy)
        finally:
            copy.close()
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(unfinished, path)
    sync_directory(path.parent)


def version_of(connection: sqlite3.Connection) -> int:
    """The schema version of an open journal."""
    return _pragma(connection, "user_version")


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])
