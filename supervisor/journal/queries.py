"""What is read from the journal. Every function takes a connection, reads one short page and leaves no cursor open."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import msgspec

from protocol.api import JobReconciliation
from protocol.errors import ActionArchived, ActionConflict, UnknownAction
from protocol.states import Status
from supervisor.journal.records import (
    JOB_COLUMNS,
    JOB_FIELDS,
    WORKER_COLUMNS,
    WORKER_FIELDS,
    AuditEntry,
    JobPage,
    JobRecord,
    NewJob,
    Quarantined,
    RowQuarantined,
    StoredEvent,
    Tombstone,
    Unfinished,
    WorkerIdentity,
    job_of,
    worker_of,
)
from supervisor.journal.schema import ODD

#: At the start the newest rows are decoded, so that its time is bounded; older ones are found by the index jobs_odd.
SCAN_ROWS = 10_000
AUDIT_PAGE = 1000


def job_by_action(connection: sqlite3.Connection, action_id: str) -> JobRecord | None:
    """The retained job of an Action. Raises RowQuarantined."""
    found = connection.execute(f"SELECT {JOB_COLUMNS} FROM jobs WHERE action_id = ?", (action_id,)).fetchone()
    return job_of(found) if found else None


def job_by_row(connection: sqlite3.Connection, row: int) -> JobRecord:
    """The retained job of a row. Raises UnknownAction, RowQuarantined."""
    found = connection.execute(f"SELECT {JOB_COLUMNS} FROM jobs WHERE row = ?", (row,)).fetchone()
    if not found:
        raise UnknownAction(f"no retained job has row {row}; it was archived or never admitted")
    return job_of(found)


def fence(connection: sqlite3.Connection, job: NewJob) -> JobRecord | None:
    """The record that an exact repeat of ``job`` gets, None if its Action id is free.

    Raises ActionArchived for the same request after its archive, ActionConflict for other material and
    for a quarantined row.
    """
    buried = tombstone(connection, job.action_id)
    if buried is not None:
        if buried.request_hash == job.request_hash:
            raise ActionArchived(
                f"Action {job.action_id} was archived and is not executed again; use another id",
                action_id=job.action_id,
            )
        raise _conflict(job, "was archived with other material")
    try:
        record = job_by_action(connection, job.action_id)
    except RowQuarantined:
        raise _conflict(job, "is quarantined: its record cannot be read") from None
    if record is not None and record.request_hash != job.request_hash:
        raise _conflict(job, "is known with other material")
    return record


def _conflict(job: NewJob, why: str) -> ActionConflict:
    return ActionConflict(f"Action {job.action_id} {why}; use another id", action_id=job.action_id)


def tombstone(connection: sqlite3.Connection, action_id: str) -> Tombstone | None:
    """What stays of an archived Action."""
    fields = Tombstone.__struct_fields__
    found = connection.execute(
        f"SELECT {', '.join(fields)} FROM tombstones WHERE action_id = ?", (action_id,)
    ).fetchone()
    return Tombstone(**dict(zip(fields, found, strict=True))) if found else None


def knows(connection: sqlite3.Connection, action_id: str) -> bool:
    """Whether the Action has a row here, or had one."""
    found = connection.execute(
        """SELECT EXISTS(SELECT 1 FROM jobs WHERE action_id = :id)
               OR EXISTS(SELECT 1 FROM tombstones WHERE action_id = :id)""",
        {"id": action_id},
    ).fetchone()
    return bool(found[0])


def output(connection: sqlite3.Connection, row: int) -> bytes | None:
    """Data of the ``completed`` event, or what an imported record has instead; None for a job that did not complete."""
    found = connection.execute(
        """SELECT coalesce(output, data) FROM jobs LEFT JOIN events ON job = row AND seq = event_count - 1
           WHERE row = ? AND status = 'completed'""",
        (row,),
    ).fetchone()
    return found[0] if found else None


def events(connection: sqlite3.Connection, row: int, start: int, *, limit: int, limit_bytes: int) -> list[StoredEvent]:
    """Events from sequence ``start``: at most ``limit``, and within ``limit_bytes`` of data but always one."""
    page: list[StoredEvent] = []
    room = limit_bytes
    with closing(
        connection.execute(
            "SELECT seq, name, data, at FROM events WHERE job = ? AND seq >= ? ORDER BY seq LIMIT ?",
            (row, start, limit),
        )
    ) as cursor:
        for values in cursor:
            room -= len(values[2])
            if page and room < 0:
                break
            page.append(StoredEvent(*values))
    return page


def unfinished(connection: sqlite3.Connection) -> list[Unfinished]:
    """Every job without a terminal record, oldest first; quarantined rows are left to ``quarantined``."""
    jobs = ", ".join(f"jobs.{name}" for name in JOB_FIELDS)
    workers = ", ".join(f"workers.{name}" for name in WORKER_FIELDS)
    found = connection.execute(
        f"""SELECT {jobs}, events.name, {workers} FROM jobs
            LEFT JOIN events ON events.job = row AND events.seq = 0
            LEFT JOIN workers ON workers.job = row
                AND attempt = (SELECT max(attempt) FROM workers WHERE workers.job = row)
            WHERE status = 'running' ORDER BY row"""
    ).fetchall()
    return [made for made in map(_unfinished, found) if made is not None]


def _unfinished(values: tuple[Any, ...]) -> Unfinished | None:
    split = len(JOB_FIELDS)
    worker = values[split + 1 :]
    try:
        return Unfinished(
            record=job_of(values[:split]),
            worker=worker_of(worker) if worker[0] is not None else None,
            dispatched=values[split] == "started",
        )
    except (RowQuarantined, msgspec.ValidationError):
        return None


def quarantined(connection: sqlite3.Connection) -> list[Quarantined]:
    """Rows that break a bound: odd ones, unfinished ones, and those among the newest SCAN_ROWS."""
    reasons: dict[int, tuple[str, str]] = {}
    for where in (f"WHERE {ODD}", "WHERE status = 'running'", f"ORDER BY row DESC LIMIT {SCAN_ROWS}"):
        for values in connection.execute(f"SELECT {JOB_COLUMNS} FROM jobs {where}"):
            try:
                job_of(values)
            except RowQuarantined as error:
                reasons[error.row] = (str(values[1]), error.why)
    for row, action_id in connection.execute("SELECT row, action_id FROM jobs WHERE status = 'running'").fetchall():
        try:
            last_worker(connection, row)
        except msgspec.ValidationError as error:
            reasons.setdefault(row, (str(action_id), f"its worker cannot be read: {error}"))
    return [Quarantined(row, *reasons[row], _readable_worker(connection, row)) for row in sorted(reasons)]


def _readable_worker(connection: sqlite3.Connection, row: int) -> WorkerIdentity | None:
    try:
        return last_worker(connection, row)
    except msgspec.ValidationError:
        return None


def last_worker(connection: sqlite3.Connection, row: int) -> WorkerIdentity | None:
    """The worker of a job's last attempt. Raises msgspec.ValidationError."""
    found = connection.execute(
        f"SELECT {WORKER_COLUMNS} FROM workers WHERE job = ? ORDER BY attempt DESC LIMIT 1", (row,)
    ).fetchone()
    return worker_of(found) if found else None


def list_jobs(
    connection: sqlite3.Connection,
    *,
    status: Status | None,
    crew_id: str | None,
    operation: str | None,
    before: int | None,
    limit: int,
) -> JobPage:
    """A page of jobs with rows below ``before``, newest first; quarantined rows are left out."""
    clauses, values = [], []
    for column, value in (("crew_id = ?", crew_id), ("operation = ?", operation), ("row < ?", before)):
        if value is not None:
            clauses.append(column)
            values.append(value)
    if status is not None:
        clauses.append(f"status = '{status.value}'")  # a literal, or the partial indexes would not be used
    where = f"WHERE {' AND '.join(clauses)}" if clauses else ""
    found = connection.execute(
        f"SELECT {JOB_COLUMNS} FROM jobs {where} ORDER BY row DESC LIMIT ?", (*values, limit + 1)
    ).fetchall()
    page = found[:limit]
    return JobPage(records=list(_readable(page)), before=page[-1][0] if len(found) > limit else None)


def _readable(rows: list[tuple[Any, ...]]) -> Iterator[JobRecord]:
    for values in rows:
        try:
            yield job_of(values)
        except RowQuarantined:
            continue


def task_owner(connection: sqlite3.Connection, crew_id: str, task_id: str) -> int | None:
    """Row of the latest job of the crew that ran the task."""
    found = connection.execute(
        """SELECT row FROM tasks JOIN jobs ON row = job WHERE task_id = ? AND crew_id = ?
           ORDER BY job DESC LIMIT 1""",
        (task_id, crew_id),
    ).fetchone()
    return found[0] if found else None


def absent(connection: sqlite3.Connection, rows: Sequence[int]) -> list[int]:
    """Those of ``rows`` that belong to no retained job; a quarantined one is retained."""
    marks = ", ".join("?" * len(rows))
    found = {row for (row,) in connection.execute(f"SELECT row FROM jobs WHERE row IN ({marks})", rows)}
    return [row for row in rows if row not in found]


def reconciliations(connection: sqlite3.Connection, rows: Sequence[int]) -> dict[int, list[JobReconciliation]]:
    """The decisions about the outcomes of those of ``rows``, a page of them, that have any; oldest first."""
    made: dict[int, list[JobReconciliation]] = {}
    columns, marks = ", ".join(JobReconciliation.__struct_fields__), ", ".join("?" * len(rows))
    found = connection.execute(f"SELECT job, {columns} FROM reconciliations WHERE job IN ({marks}) ORDER BY id", rows)
    for row, *values in found.fetchall():
        fields = dict(zip(JobReconciliation.__struct_fields__, values, strict=True))
        made.setdefault(row, []).append(msgspec.convert(fields, JobReconciliation))
    return made


def audit_of(connection: sqlite3.Connection, action_id: str, limit: int) -> list[AuditEntry]:
    """The newest ``limit`` entries about an Action, oldest first."""
    found = connection.execute(
        "SELECT at, action_id, actor, act, detail FROM audit WHERE action_id = ? ORDER BY id DESC LIMIT ?",
        (action_id, limit),
    ).fetchall()
    return [AuditEntry(**dict(zip(AuditEntry.__struct_fields__, values, strict=True))) for values in reversed(found)]
