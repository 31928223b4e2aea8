"""What a journal holds, as text: JSON lines with everything, or the runs.json that the reference server reads."""

from __future__ import annotations

import json
import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from protocol import canonical
from protocol.api import EffectView, JobReconciliation, effect_view
from protocol.effects import FIELDS
from protocol.states import TERMINAL, Status
from supervisor.journal import effects, queries, schema
from supervisor.journal.files import beside, sync_directory
from supervisor.journal.reading import CommandRefused, reading
from supervisor.journal.records import (
    JOB_COLUMNS,
    JOB_FIELDS,
    WORKER_COLUMNS,
    WORKER_FIELDS,
    AuditEntry,
    JobRecord,
    RowQuarantined,
    StoredEvent,
    job_of,
)

Write = Callable[[bytes], object]
UNREADABLE = "the record could not be read when the journal was exported; nothing is known of its end"

#: Settings of the reference that bound what it reads at its start: the default and the largest value.
_BOUNDS = {
    "AIP_CREWAI_MAX_RETAINED_RUNS": (2000, 100_000),
    "AIP_CREWAI_MAX_EVENTS_PER_RUN": (1000, 100_000),
    "AIP_CREWAI_MAX_EVENT_BYTES": (262_144, 4_194_304),
    "AIP_CREWAI_MAX_STATE_BYTES": (268_435_456, 4_294_967_296),
}


class Format(StrEnum):
    """``json``: one object a line and job. ``reference``: one array, as the reference writes it."""

    JSON = "json"
    REFERENCE = "reference"


class ExportReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was exported.

    ``running``, ``quarantined``: Action ids. ``archived``: tombstones, which no export holds. ``settings``: what the
    reference must be given, above its defaults, to read the file.
    """

    jobs: int
    events: int
    running: tuple[str, ...]
    quarantined: tuple[str, ...]
    archived: int
    settings: dict[str, int]


class _Stored(msgspec.Struct, frozen=True):
    """One job with all that belongs to it; ``record`` is None, and ``why`` says why, for a row that is quarantined."""

    values: dict[str, Any]
    record: JobRecord | None
    why: str
    output: bytes
    events: list[StoredEvent]


class _Tally:
    """Counts while an export runs."""

    def __init__(self) -> None:
        self.jobs = 0
        self.events = 0
        self.running: list[str] = []
        self.quarantined: list[str] = []
        self.needs = dict.fromkeys(_BOUNDS, 0)

    def count(self, job: _Stored) -> None:
        self.jobs += 1
        self.events += len(job.events)
        if job.record is None:
            self.quarantined.append(str(job.values["action_id"]))
        elif job.record.status not in TERMINAL:
            self.running.append(job.record.action_id)

    def need(self, setting: str, value: int, action_id: str) -> None:
        self.needs[setting] = max(self.needs[setting], value)
        highest = _BOUNDS[setting][1]
        if value > highest:
            raise CommandRefused(
                f"with Action {action_id} the reference would need {setting}={value} to read the file, "
                f"and takes {highest} at most; archive what is too much",
                action_id=action_id,
            )


def export(path: Path, kind: Format, write: Write) -> ExportReport:
    """Write every job of the journal at ``path``, in the order of admission, as it is at one instant.

    ``write`` gets pieces of ASCII or UTF-8. Raises CommandRefused, perhaps after some pieces were written.
    """
    tally = _Tally()
    with reading(path) as connection:
        encode = _to_lines if kind is Format.JSON else _to_array
        for piece in encode(connection, tally):
            write(piece)
        archived = connection.execute("SELECT count(*) FROM tombstones").fetchone()[0]
    above = {name: value for name, value in tally.needs.items() if value > _BOUNDS[name][0]}
    return ExportReport(
        jobs=tally.jobs,
        events=tally.events,
        running=tuple(tally.running),
        quarantined=tuple(tally.quarantined),
        archived=archived,
        settings=above if kind is Format.REFERENCE else {},
    )


def export_to(path: Path, kind: Format, target: Path) -> ExportReport:
    """``export`` into a file (0600) that appears whole and durable or not at all; one that is there is replaced.

    Raises CommandRefused.
    """
    target = target.absolute()
    _refuse_own_files(path, target)
    try:
        fd, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    except OSError as error:
        raise CommandRefused(f"{target} cannot be written: {error.strerror}") from None
    try:
        with open(fd, "wb") as file:
            report = export(path, kind, file.write)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, target)
        sync_directory(target.parent)
    except OSError as error:
        Path(name).unlink(missing_ok=True)
        raise CommandRefused(f"{target} cannot be written: {error.strerror}") from None
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return report


def _refuse_own_files(path: Path, target: Path) -> None:
    own = [path, *(beside(path, suffix) for suffix in ("-wal", "-shm", ".lock", ".reserve", ".reference"))]
    if any(target == item.absolute() or (target.exists() and item.exists() and target.samefile(item)) for item in own):
        raise CommandRefused(f"{target} belongs to the journal itself; name another file")


def _stored(connection: sqlite3.Connection) -> Iterator[_Stored]:
    column = "output" if schema.version_of(connection) >= schema.OUTPUT_VERSION else "NULL"
    rows = connection.execute(f"SELECT {JOB_COLUMNS}, {column} FROM jobs ORDER BY row")
    for *values, imported in rows:
        row, why = values[0], ""
        try:
            record: JobRecord | None = job_of(values)
        except RowQuarantined as error:
            record, why = None, error.why
        events = [
            StoredEvent(*event)
            for event in connection.execute("SELECT seq, name, data, at FROM events WHERE job = ? ORDER BY seq", (row,))
        ]
        completed = record is not None and record.status is Status.COMPLETED
        output = imported or (events[-1].data if completed and events else b"null")
        yield _Stored(dict(zip(JOB_FIELDS, values, strict=True)), record, why, output, events)


# --- JSON lines ---------------------------------------------------------------------------------------------------


def _to_lines(connection: sqlite3.Connection, tally: _Tally) -> Iterator[bytes]:
    for job in _stored(connection):
        tally.count(job)
        yield msgspec.json.encode(_line(connection, job)) + b"\n"


def _line(connection: sqlite3.Connection, job: _Stored) -> dict[str, Any]:
    fields = msgspec.to_builtins(job.record) if job.record is not None else _odd_fields(job)
    row = job.values["row"]
    workers = connection.execute(f"SELECT {WORKER_COLUMNS} FROM workers WHERE job = ? ORDER BY attempt", (row,))
    tasks = connection.execute("SELECT task_id FROM tasks WHERE job = ? ORDER BY task_id", (row,))
    audit = queries.audit_of(connection, str(job.values["action_id"]), -1)
    return {
        **fields,
        "output": msgspec.Raw(job.output),
        "events": [
            {"event": event.name, "sequence": event.seq, "at": event.at, "data": msgspec.Raw(event.data)}
            for event in job.events
        ],
        "workers": [dict(zip(WORKER_FIELDS, values, strict=True)) for values in workers],
        "tasks": [task_id for (task_id,) in tasks],
        "audit": [_entry(entry) for entry in audit],
        "reconciliations": _reconciliations(connection, row),
        "effects": list(_effects(connection, row)),
    }


def _reconciliations(connection: sqlite3.Connection, row: int) -> list[JobReconciliation]:
    if schema.version_of(connection) < schema.RECONCILIATIONS_VERSION:
        return []
    return queries.reconciliations(connection, [row]).get(row, [])


def _effects(connection: sqlite3.Connection, row: int) -> Iterator[dict[str, Any] | EffectView]:
    """What the job claimed last; one that cannot be read by its key alone."""
    if schema.version_of(connection) < schema.EFFECTS_VERSION:
        return
    for values in connection.execute(f"SELECT {', '.join(FIELDS)} FROM effects WHERE job = ? ORDER BY rowid", (row,)):
        try:
            yield effect_view(effects.record_of(values))
        except effects.EffectQuarantined as error:
            yield {"key_id": str(values[0]), "quarantined": error.detail}


def _odd_fields(job: _Stored) -> dict[str, Any]:
    """A row that cannot be read, as it is; bytes as text."""
    raw = {
        name: value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value
        for name, value in job.values.items()
    }
    return {**raw, "quarantined": job.why}


def _entry(entry: AuditEntry) -> dict[str, Any]:
    return {"at": entry.at, "actor": entry.actor, "act": entry.act, "detail": msgspec.Raw(entry.detail or b"null")}


# --- the reference's runs.json ------------------------------------------------------------------------------------


def _to_array(connection: sqlite3.Connection, tally: _Tally) -> Iterator[bytes]:
    size = 2
    yield b"["
    for job in _stored(connection):
        tally.count(job)
        piece = (b"," if tally.jobs > 1 else b"") + canonical.canonical_bytes(_reference_record(job, tally))
        size += len(piece)
        action_id = str(job.values["action_id"])
        tally.need("AIP_CREWAI_MAX_STATE_BYTES", size, action_id)
        tally.need("AIP_CREWAI_MAX_RETAINED_RUNS", tally.jobs, action_id)
        yield piece
    yield b"]"


def _reference_record(job: _Stored, tally: _Tally) -> dict[str, Any]:
    """What the reference stores of a job; one that cannot be read is failed and uncertain, so its id stays fenced."""
    action_id = str(job.values["action_id"])
    events = [
        {"event": event.name, "sequence": event.seq, "data": _parsed(event.data, action_id)} for event in job.events
    ]
    status = Status.FAILED if job.record is None else job.record.status
    if job.record is None:
        fence = {"status": status.value, "uncertain_outcome": True, "message": UNREADABLE}
        events.append({"event": status.value, "sequence": len(events), "data": fence})
    for event in events:
        tally.need("AIP_CREWAI_MAX_EVENT_BYTES", len(canonical.canonical_bytes(event)), action_id)
    # The reference adds the end of a job that it finds running.
    tally.need("AIP_CREWAI_MAX_EVENTS_PER_RUN", len(events) + (status not in TERMINAL), action_id)
    return {
        "action_id": action_id,
        "crew_id": str(job.values["crew_id"]),
        "operation": str(job.values["operation"]),
        "input_hash": str(job.values["request_hash"]),
        "status": status.value,
        "events": events,
        "output": _parsed(job.output, action_id),
    }


def _parsed(data: bytes, action_id: str) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        raise CommandRefused(f"Action {action_id} has stored data that is no JSON; see `journal check`") from None
