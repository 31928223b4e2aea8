"""Whether a journal says one thing only: the file's structure, and what the tables claim about each other."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from protocol import canonical, effects
from protocol.errors import BadJson, CrewError
from protocol.states import TERMINAL, EffectState, Status
from supervisor.journal import effects as effects_table
from supervisor.journal import queries, schema
from supervisor.journal.importing import IMPORTER
from supervisor.journal.reading import reading
from supervisor.journal.records import JOB_COLUMNS, RowQuarantined, job_of

MAX_STRUCTURE_FINDINGS = 100
_ENDINGS = ", ".join(f"'{status.value}'" for status in sorted(TERMINAL))
_RAW = msgspec.json.Decoder(msgspec.Raw)


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One contradiction. ``code`` is stable; ``row`` is the job's, where there is one."""

    code: str
    detail: str
    row: int | None = None
    action_id: str | None = None


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was looked at and what was found; no findings: the journal is sound."""

    jobs: int
    events: int
    tombstones: int
    effects: int
    findings: tuple[Finding, ...]


Check = Callable[[sqlite3.Connection], Iterator[Finding]]


def check_journal(path: Path) -> CheckReport:
    """Examine the journal as it is at one instant, also while its owner writes. Raises StartError: not readable."""
    with reading(path) as connection:
        findings = list(_structure(connection))
        if not findings:
            findings = [finding for check in _CHECKS for finding in check(connection)]
        return CheckReport(
            jobs=_count(connection, "jobs"),
            events=_count(connection, "events"),
            tombstones=_count(connection, "tombstones"),
            effects=_count(connection, "effects") if _has_effects(connection) else 0,
            findings=tuple(findings),
        )


def _count(connection: sqlite3.Connection, table: str) -> int:
    return int(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


def _structure(connection: sqlite3.Connection) -> Iterator[Finding]:
    for (verdict,) in connection.execute(f"PRAGMA integrity_check({MAX_STRUCTURE_FINDINGS})"):
        if verdict != "ok":
            yield Finding(code="file_damaged", detail=str(verdict))


def _quarantined(connection: sqlite3.Connection) -> Iterator[Finding]:
    for values in connection.execute(f"SELECT {JOB_COLUMNS} FROM jobs ORDER BY row"):
        try:
            record = job_of(values)
            if record.status not in TERMINAL:
                queries.last_worker(connection, record.row)
        except RowQuarantined as error:
            yield Finding(code="row_quarantined", detail=error.why, row=values[0], action_id=str(values[1]))
        except msgspec.ValidationError as error:
            detail = f"its worker cannot be read: {error}"
            yield Finding(code="row_quarantined", detail=detail, row=values[0], action_id=str(values[1]))


def _event_counts(connection: sqlite3.Connection) -> Iterator[Finding]:
    """``event_count`` is the number of events, and their sequences are 0 to that."""
    found = connection.execute(
        """SELECT row, action_id, event_count, count(seq), min(seq), max(seq) FROM jobs LEFT JOIN events ON job = row
           GROUP BY row ORDER BY row"""
    )
    for row, action_id, claimed, there, first, last in found:
        if claimed != there:
            detail = f"event_count is {claimed}, there are {there} events"
            yield Finding(code="event_count_wrong", detail=detail, row=row, action_id=action_id)
        if there and (first != 0 or last != there - 1):
            detail = f"{there} events have sequences from {first} to {last}"
            yield Finding(code="sequence_gap", detail=detail, row=row, action_id=action_id)


def _endings(connection: sqlite3.Connection) -> Iterator[Finding]:
    """A terminal job's last event is named after its status. Imported jobs keep what their file said."""
    found = connection.execute(
        f"""SELECT row, action_id, status, name FROM jobs
            LEFT JOIN events ON job = row AND seq = (SELECT max(seq) FROM events WHERE job = row)
            WHERE status IN ({_ENDINGS}) AND name IS NOT status AND client != ? ORDER BY row""",
        (IMPORTER,),
    )
    for row, action_id, status, name in found:
        detail = f"status is {status}, the last event is {name or 'missing'}"
        yield Finding(code="ending_missing", detail=detail, row=row, action_id=action_id)
    early = connection.execute(
        f"""SELECT row, action_id, name, seq FROM events JOIN jobs ON row = job
            WHERE name IN ({_ENDINGS}) AND client != ?
            AND (seq < event_count - 1 OR status = '{Status.RUNNING.value}') ORDER BY job, seq""",
        (IMPORTER,),
    )
    for row, action_id, name, seq in early:
        detail = f"event {seq} is {name}, but the job goes on after it"
        yield Finding(code="ending_early", detail=detail, row=row, action_id=action_id)


def _data(connection: sqlite3.Connection) -> Iterator[Finding]:
    for job, seq, data in connection.execute("SELECT job, seq, data FROM events"):
        try:
            _RAW.decode(data)
        except (msgspec.MsgspecError, TypeError) as error:
            yield Finding(code="event_unreadable", detail=f"event {seq} is no JSON: {error}", row=job)


def _orphans(connection: sqlite3.Connection) -> Iterator[Finding]:
    tables = ["events", "workers", "tasks"]
    if schema.version_of(connection) >= schema.RECONCILIATIONS_VERSION:
        tables.append("reconciliations")
    for table in tables:
        found = connection.execute(
            f"SELECT job, count(*) FROM {table} WHERE job NOT IN (SELECT row FROM jobs) GROUP BY job ORDER BY job"
        )
        for job, count in found:
            yield Finding(code=f"{table}_orphaned", detail=f"{count} {table} of a job that is not there", row=job)


def _tombstones(connection: sqlite3.Connection) -> Iterator[Finding]:
    found = connection.execute("SELECT row, action_id FROM jobs JOIN tombstones USING (action_id) ORDER BY row")
    for row, action_id in found:
        yield Finding(code="archived_and_retained", detail="it has a tombstone too", row=row, action_id=action_id)


def _has_effects(connection: sqlite3.Connection) -> bool:
    return schema.version_of(connection) >= schema.EFFECTS_VERSION


def _effects(connection: sqlite3.Connection) -> Iterator[Finding]:
    """Every effect can be read, is what its preimage says, and is not claimed by a job that has ended."""
    if not _has_effects(connection):
        return
    columns = ", ".join(effects.FIELDS)
    for values in connection.execute(f"SELECT {columns} FROM effects ORDER BY rowid"):
        try:
            _check_effect(effects_table.record_of(values))
        except CrewError as error:
            job = values[effects.FIELDS.index("job")]
            yield Finding(code="effect_unreadable", detail=error.detail, row=job if isinstance(job, int) else None)
    stale = connection.execute(
        f"""SELECT key_id, row, jobs.action_id FROM effects JOIN jobs ON row = job
            WHERE state = '{EffectState.CLAIMED.value}' AND status IN ({_ENDINGS}) ORDER BY row"""
    )
    for key_id, row, action_id in stale:
        detail = f"effect {key_id} is claimed, but the job has ended"
        yield Finding(code="effect_left_claimed", detail=detail, row=row, action_id=action_id)


def _check_effect(record: effects.EffectRecord) -> None:
    """Raises CrewError."""
    key = effects.parse_preimage(record.preimage)
    if (key.scope, key.scope_id, key.tool) != (record.scope, record.scope_id, record.tool):
        raise BadJson(f"effect {record.key_id} has a scope or tool that its preimage does not have")
    if record.receipt is not None:
        canonical.parse(record.receipt)


_CHECKS: tuple[Check, ...] = (_quarantined, _event_counts, _endings, _data, _orphans, _tombstones, _effects)
