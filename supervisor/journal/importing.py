"""A runs.json becomes a journal: built beside it, made durable, and put in place in one step.

In place the file at the journal's path is the whole original until a rename makes it the whole journal. The original
gets its second name before that, so a crash at any instant leaves either nothing done, and the next start begins anew,
or everything. Whoever calls holds the journal's lock, which is the reference's lock too.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from protocol import canonical
from protocol.api import StopEvidence
from protocol.errors import StartError
from protocol.operations import READ_OPERATIONS
from protocol.states import Method, Phase, Status
from supervisor.journal import schema, transactions
from supervisor.journal.files import Lock, beside, prepare_directory, sync_directory
from supervisor.journal.records import AuditEntry, Item, stop_bytes
from supervisor.journal.reference import LIMIT_BYTES, Change, ReferenceRecord, Source, is_reference, read, records
from supervisor.journal.writer import Faults
from supervisor.processes import boot_id

#: ``client`` of an imported job, and the actor in its audit.
IMPORTER = "import"
INTERRUPTED = "this job was running in the reference's journal when that was imported; nothing is known of its end"

_INSERT_JOB = """INSERT INTO jobs(
        action_id, crew_id, operation, request_hash, timeout_ms, status, phase, event_count, admitted_at, started_at,
        ended_at, uncertain, stop, registry_digest, config_digest, client, output)
    VALUES(?, ?, ?, ?, NULL, ?, ?, ?, ?, NULL, ?, ?, ?, '', '', ?, ?)"""


class ImportReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was imported. ``kept_as``: where the original is. ``interrupted``: Action ids that were running.

    ``changes``: what could not be kept as it was, by Action.
    """

    source: Path
    kept_as: Path
    jobs: int
    events: int
    interrupted: tuple[str, ...]
    changes: tuple[Change, ...]


def import_in_place(
    path: Path,
    *,
    limit_bytes: int = LIMIT_BYTES,
    migrations: Sequence[Sequence[str]] = schema.MIGRATIONS,
    faults: Faults | None = None,
) -> ImportReport | None:
    """Turn a runs.json at the journal's path into a journal and keep it as ``<name>.reference``; None for other files.

    Raises StartError, sqlite3.Error, OSError; the file is then as it was.
    """
    _remove_unfinished(path)
    if not is_reference(path):
        return None
    reach = faults or _nothing
    kept = beside(path, ".reference")
    source = read(path, limit_bytes=limit_bytes)
    if source.owner != os.geteuid():
        raise StartError(f"{path} belongs to uid {source.owner}, we are uid {os.geteuid()}; import it as that user")
    _refuse_foreign_log(path)
    _release_name(kept, path)
    built = _build(source, path, kept_as=kept, migrations=migrations, reach=reach)
    try:
        try:
            os.link(path, kept, follow_symlinks=False)
        except OSError as error:
            raise StartError(
                f"{path} cannot be kept as {kept} ({error.strerror}); it was left as it is, import it with "
                "`crew-supervisor journal import` into another file"
            ) from None
        sync_directory(path.parent)
        reach("import_kept")
        os.replace(_unfinished(path), path)
    except BaseException:
        _remove_unfinished(path)
        raise
    reach("import_placed")
    sync_directory(path.parent)
    reach("import_done")
    return built


def import_file(source: Path, target: Path, *, limit_bytes: int = LIMIT_BYTES) -> ImportReport:
    """Import ``source`` as the new journal ``target``; both may be the same path. For the command line.

    Takes the locks of both. Raises JournalOwned when one is taken, StartError.
    """
    source, target = Path(os.path.abspath(source)), Path(os.path.abspath(target))
    with contextlib.ExitStack() as stack:
        try:
            prepare_directory(target.parent)
            stack.callback(Lock.acquire(target).release)
            if source == target:
                return _here(target, limit_bytes)
            _lock_source(source, stack)
            return _elsewhere(source, target, limit_bytes)
        except (OSError, sqlite3.Error) as error:
            raise StartError(f"{source} cannot be imported into {target} ({error}); it was left as it is") from error


def _here(path: Path, limit_bytes: int) -> ImportReport:
    report = import_in_place(path, limit_bytes=limit_bytes)
    if report is None:
        raise StartError(f"{path} is no runs.json of the reference server; there is nothing to import")
    return report


def _lock_source(source: Path, stack: contextlib.ExitStack) -> None:
    """Make sure that no reference server runs on ``source``; where it could make no lock, none can."""
    if beside(source, ".lock").exists() or os.access(source.parent, os.W_OK):
        stack.callback(Lock.acquire(source).release)


def _elsewhere(path: Path, target: Path, limit_bytes: int) -> ImportReport:
    if os.path.lexists(target):
        raise StartError(f"{target} exists already; an import makes a new journal, name another file")
    _refuse_foreign_log(target)
    _remove_unfinished(target)
    source = read(path, limit_bytes=limit_bytes)
    report = _build(source, target, kept_as=path, migrations=schema.MIGRATIONS, reach=_nothing)
    os.replace(_unfinished(target), target)
    sync_directory(target.parent)
    return report


def _nothing(point: str) -> None:
    pass


def _unfinished(path: Path) -> Path:
    return beside(path, ".importing")


def _remove_unfinished(path: Path) -> None:
    for suffix in ("", "-journal", "-wal", "-shm"):
        beside(_unfinished(path), suffix).unlink(missing_ok=True)


def _refuse_foreign_log(path: Path) -> None:
    # SQLite would replay it into the journal that is about to get this name.
    for suffix in ("-wal", "-journal"):
        log = beside(path, suffix)
        if log.exists() and log.stat().st_size:
            raise StartError(f"{log} holds records of another journal; restore that one, or move {log} away")


def _release_name(kept: Path, original: Path) -> None:
    """Free the second name: an import that a crash has cut may have given it; another file there is never touched."""
    try:
        found = os.lstat(kept)
    except FileNotFoundError:
        return
    here = os.lstat(original)
    if (found.st_dev, found.st_ino) != (here.st_dev, here.st_ino):
        raise StartError(f"{kept} is the original of an earlier import; move it away to import {original}")
    kept.unlink()
    sync_directory(kept.parent)


def _build(
    source: Source, path: Path, *, kept_as: Path, migrations: Sequence[Sequence[str]], reach: Faults
) -> ImportReport:
    """Make the journal under its unfinished name, durable and closed."""
    unfinished = _unfinished(path)
    try:
        fd = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            report = _fill(unfinished, source, kept_as=kept_as, migrations=migrations, reach=reach)
            reach("import_built")
            os.fsync(fd)
        finally:
            os.close(fd)
    except BaseException:
        _remove_unfinished(path)
        raise
    sync_directory(path.parent)
    reach("import_synced")
    return report


def _fill(
    path: Path, source: Source, *, kept_as: Path, migrations: Sequence[Sequence[str]], reach: Faults
) -> ImportReport:
    events, interrupted, changes = 0, [], []
    jobs = 0
    now = time.time()
    with contextlib.closing(schema.connect(path)) as connection:
        # Nobody reads the file before it is whole and synced, so a crash may leave it in any state.
        connection.execute("PRAGMA journal_mode = MEMORY").fetchall()
        connection.execute("PRAGMA synchronous = OFF")
        schema.migrate(connection, path, 0, migrations)
        connection.execute("BEGIN IMMEDIATE")
        for record in records(source):
            reach("import_record")
            events += _insert(connection, record, written_at=source.written_at, now=now, name=source.path.name)
            jobs += 1
            changes += [Change(record.action_id, what) for what in record.changes]
            if record.status is Status.RUNNING:
                interrupted.append(record.action_id)
        connection.execute("COMMIT")
    return ImportReport(
        source=source.path,
        kept_as=kept_as,
        jobs=jobs,
        events=events,
        interrupted=tuple(interrupted),
        changes=tuple(changes),
    )


def _insert(
    connection: sqlite3.Connection, record: ReferenceRecord, *, written_at: float, now: float, name: str
) -> int:
    """Insert one record; the reference keeps no times, so its own are those of the file. Returns its event count."""
    interrupted = record.status is Status.RUNNING
    status = Status.FAILED if interrupted else record.status
    uncertain = _uncertain(record)
    stop = _no_proof(now) if interrupted else None
    items: list[Item] = [*record.events, *([("failed", _fence(uncertain, stop))] if stop else [])]
    values = (record.action_id, record.crew_id, record.operation, record.request_hash)
    ended_at = now if interrupted else None
    row = connection.execute(
        _INSERT_JOB,
        (*values, status, Phase.DONE, len(items), written_at, ended_at, uncertain, stop_bytes(stop), IMPORTER,
         _other_output(record)),
    ).lastrowid  # fmt: skip
    times = [written_at] * len(record.events) + [now] * (len(items) - len(record.events))
    connection.executemany(
        "INSERT INTO events(job, seq, name, at, data) VALUES(?, ?, ?, ?, ?)",
        [(row, seq, item[0], at, item[1]) for seq, (item, at) in enumerate(zip(items, times, strict=True))],
    )
    detail = canonical.compact({"source": name, "status": record.status.value, "changes": list(record.changes)})
    entry = AuditEntry(at=now, action_id=record.action_id, actor=IMPORTER, act="imported", detail=detail)
    transactions.audit(connection, entry)
    return len(items)


def _uncertain(record: ReferenceRecord) -> bool:
    """Whether effects may be unknown: what the record says, else what its kind and its events allow."""
    if record.status is Status.COMPLETED or record.operation in READ_OPERATIONS:
        return False
    names = [name for name, _ in record.events]
    if record.status is Status.CANCELLED:
        # The reference stops a waiter, not the work; without ``started`` there was none.
        return "started" in names
    if record.status is Status.FAILED and names and names[-1] == Status.FAILED:
        last = json.loads(record.events[-1][1])
        said = last.get("uncertain_outcome") if isinstance(last, dict) else None
        return said if isinstance(said, bool) else True
    return True


def _no_proof(now: float) -> StopEvidence:
    return StopEvidence(confirmed=False, method=Method.NONE, reason="imported", requested_at=now, boot_id=boot_id())


def _fence(uncertain: bool, stop: StopEvidence | None) -> bytes:
    return canonical.compact(
        {
            "status": Status.FAILED.value,
            "error_type": "SupervisorRestart",
            "message": INTERRUPTED,
            "uncertain_outcome": uncertain,
            "stop": msgspec.to_builtins(stop),
        }
    )


def _other_output(record: ReferenceRecord) -> bytes | None:
    """The record's output where it is not what a job of our own with these events would have."""
    expected = b"null"
    if record.status is Status.COMPLETED and record.events:
        expected = record.events[-1][1]
    return None if _canonical(record.output) == _canonical(expected) else record.output


def _canonical(data: bytes) -> bytes:
    return canonical.canonical_bytes(json.loads(data))
