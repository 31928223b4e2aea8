"""What changes the journal. Every function runs in the writer thread, inside a savepoint of a transaction.

All of them may raise UnknownAction (no such row), RowQuarantined and IllegalTransition; nothing is changed then.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

import msgspec

from protocol import canonical, points
from protocol.api import JobReconciliation, StopEvidence
from protocol.errors import (
    ActionRunning,
    EffectsOpen,
    IllegalTransition,
    JournalFull,
    OutcomeCertain,
    UnknownAction,
)
from protocol.states import Phase, Status, Step, advance
from supervisor.journal import effects, outbox, queries
from supervisor.journal.records import (
    WORKER_COLUMNS,
    WORKER_FIELDS,
    Admission,
    AuditEntry,
    Ended,
    Ending,
    Item,
    JobRecord,
    NewJob,
    WorkerIdentity,
    stop_bytes,
)
from supervisor.journal.writer import Tally

_NEW_JOB_FIELDS = NewJob.__struct_fields__
_INSERT_JOB = (
    f"INSERT INTO jobs({', '.join(_NEW_JOB_FIELDS)}, status, phase, event_count) "
    f"VALUES({', '.join('?' * len(_NEW_JOB_FIELDS))}, 'running', 'queued', 0)"
)
_INSERT_WORKER = (
    f"INSERT OR REPLACE INTO workers(job, {WORKER_COLUMNS}) VALUES(?, {', '.join('?' * len(WORKER_FIELDS))})"
)


class _Note(msgspec.Struct, frozen=True, omit_defaults=True):
    reason: str
    detail: str = ""


class _DecisionNote(msgspec.Struct, frozen=True):
    decision: str
    by: str


def admit(connection: sqlite3.Connection, job: NewJob, *, tally: Tally, retained_limit: int) -> Admission:
    """Make the job durable, or find its record. Raises ActionArchived, ActionConflict, JournalFull."""
    record = queries.fence(connection, job)
    if record is not None:
        return Admission(record, fresh=False)
    refuse_if_full(tally.working.jobs, retained_limit, action_id=job.action_id)
    values = msgspec.structs.asdict(job)
    row = connection.execute(_INSERT_JOB, [values[name] for name in _NEW_JOB_FIELDS]).lastrowid
    assert row is not None
    points.write("journal.admit")
    tally.working.jobs += 1
    audit(connection, AuditEntry(at=job.admitted_at, action_id=job.action_id, actor=job.client, act="admitted"))
    record = JobRecord(
        **values,
        row=row,
        status=Status.RUNNING,
        phase=Phase.QUEUED,
        event_count=0,
        started_at=None,
        ended_at=None,
        uncertain=None,
        stop=None,
    )
    return Admission(record, fresh=True)


def refuse_if_full(retained: int, limit: int, *, action_id: str) -> None:
    """Raise JournalFull if no more jobs are retained."""
    if retained >= limit:
        raise JournalFull(
            f"the journal retains {retained} jobs, the limit is {limit}; archive some",
            action_id=action_id,
            retry_after_s=60,
        )


def record_worker(connection: sqlite3.Connection, row: int, worker: WorkerIdentity) -> JobRecord:
    """Record a worker that waits for ``go``; a later attempt is recorded beside the earlier one."""
    record = queries.job_by_row(connection, row)
    phase = _starting(record)
    _insert_worker(connection, row, worker)
    connection.execute("UPDATE jobs SET phase = ? WHERE row = ?", (phase, row))
    return msgspec.structs.replace(record, phase=phase)


def record_start(
    connection: sqlite3.Connection, row: int, *, worker: WorkerIdentity, started: bytes, at: float
) -> JobRecord:
    """Record the worker and the ``started`` event (sequence 0) together; ``go`` may be sent after the commit."""
    record = queries.job_by_row(connection, row)
    phase = advance(_starting(record), Step.START_RECORDED)
    _insert_worker(connection, row, worker)
    points.write("journal.record_start")
    count = _append(connection, record, record.event_count, [("started", started)], at=at)
    connection.execute(
        "UPDATE jobs SET phase = ?, started_at = ?, event_count = ? WHERE row = ?", (phase, at, count, row)
    )
    return msgspec.structs.replace(record, phase=phase, started_at=at, event_count=count)


def _starting(record: JobRecord) -> Phase:
    step = Step.LAUNCH_RETRIED if record.phase is Phase.STARTING else Step.SLOT_GRANTED
    return advance(record.phase, step)


def _insert_worker(connection: sqlite3.Connection, row: int, worker: WorkerIdentity) -> None:
    connection.execute(_INSERT_WORKER, (row, *(getattr(worker, name) for name in WORKER_FIELDS)))


def append_events(connection: sqlite3.Connection, row: int, first_seq: int, *, items: Sequence[Item], at: float) -> int:
    """Append events of a job that has started and not ended. Returns the new event count."""
    record = queries.job_by_row(connection, row)
    if record.phase not in (Phase.RUNNING, Phase.STOPPING):
        raise IllegalTransition(f"Action {record.action_id} is {record.phase.value} and takes no events")
    count = _append(connection, record, first_seq, items, at=at)
    points.write("journal.append_events")
    connection.execute("UPDATE jobs SET event_count = ? WHERE row = ?", (count, row))
    return count


def _append(
    connection: sqlite3.Connection, record: JobRecord, first_seq: int, items: Sequence[Item], *, at: float
) -> int:
    if first_seq != record.event_count:
        raise IllegalTransition(
            f"Action {record.action_id} has {record.event_count} events; none can be appended at sequence {first_seq}"
        )
    connection.executemany(
        "INSERT INTO events(job, seq, name, at, data) VALUES(?, ?, ?, ?, ?)",
        [(record.row, seq, name, at, data) for seq, (name, data) in enumerate(items, first_seq)],
    )
    return first_seq + len(items)


def record_stop_request(
    connection: sqlite3.Connection, row: int, *, reason: str, actor: str, at: float, detail: str
) -> JobRecord:
    """Record that an ending is decided; a further request for the same stop is audited only."""
    record = queries.job_by_row(connection, row)
    phase = _stopping(record)
    connection.execute("UPDATE jobs SET phase = ? WHERE row = ?", (phase, row))
    points.write("journal.record_stop_request")
    note = msgspec.json.encode(_Note(reason, detail))
    audit(connection, AuditEntry(at=at, action_id=record.action_id, actor=actor, act="stop_requested", detail=note))
    return msgspec.structs.replace(record, phase=phase)


def _stopping(record: JobRecord) -> Phase:
    return record.phase if record.phase is Phase.STOPPING else advance(record.phase, Step.ENDING_DECIDED)


def finish(connection: sqlite3.Connection, row: int, *, ending: Ending, tally: Tally, told: bool = False) -> Ended:
    """Write the terminal record with its events, stop evidence, effects, task ids and audit. It never changes again.

    ``told``: put into the outbox with it.
    """
    record = queries.job_by_row(connection, row)
    phase = advance(_stopping(record), Step.ENDING_RECORDED)
    lost = effects.lose_claimed(connection, row, ending.lost, reasons=ending.lost_keys, tally=tally)
    data = _with_effects(connection, row, ending)
    items = [*ending.pending, (ending.status.value, data)]
    count = _append(connection, record, ending.first_seq, items, at=ending.ended_at)
    connection.execute(
        """UPDATE jobs SET status = ?, phase = ?, event_count = ?, ended_at = ?, uncertain = ?, stop = ?
           WHERE row = ?""",
        (ending.status, phase, count, ending.ended_at, ending.uncertain, stop_bytes(ending.stop), row),
    )
    points.write("journal.finish")
    if told:
        outbox.add(connection, row)
    connection.executemany(
        "INSERT OR IGNORE INTO tasks(task_id, job) VALUES(?, ?)", [(task_id, row) for task_id in ending.task_ids]
    )
    note = msgspec.json.encode(_Note(ending.stop.reason if ending.stop else "", ending.detail))
    act = ending.status.value
    audit(
        connection, AuditEntry(at=ending.ended_at, action_id=record.action_id, actor=ending.actor, act=act, detail=note)
    )
    ended = msgspec.structs.replace(
        record,
        status=ending.status,
        phase=phase,
        event_count=count,
        ended_at=ending.ended_at,
        uncertain=ending.uncertain,
        stop=ending.stop,
    )
    return Ended(record=ended, event_data=data, lost=lost)


def _with_effects(connection: sqlite3.Connection, row: int, ending: Ending) -> bytes:
    """The terminal event's data; a job that failed or was cancelled says what became of its effects, if it had any."""
    counts = {} if ending.status is Status.COMPLETED else effects.counts_of_jobs(connection, [row])
    return canonical.with_fields(ending.event_data, {"effects": counts[row]}) if row in counts else ending.event_data


def update_stop(connection: sqlite3.Connection, row: int, stop: StopEvidence) -> JobRecord:
    """Replace the stop evidence of a job that is being stopped."""
    record = queries.job_by_row(connection, row)
    if record.phase is not Phase.STOPPING:
        raise IllegalTransition(f"Action {record.action_id} is {record.phase.value}; its stop evidence is not open")
    connection.execute("UPDATE jobs SET stop = ? WHERE row = ?", (stop_bytes(stop), row))
    return msgspec.structs.replace(record, stop=stop)


def _ended(connection: sqlite3.Connection, action_id: str) -> JobRecord:
    """The record of a job that has ended. Raises UnknownAction, ActionRunning."""
    record = queries.job_by_action(connection, action_id)
    if record is None:
        raise UnknownAction(f"no retained job has Action id {action_id}", action_id=action_id)
    if record.status is Status.RUNNING:
        raise ActionRunning(f"Action {action_id} is still running; cancel it or wait", action_id=action_id)
    return record


def reconcile(connection: sqlite3.Connection, action_id: str, *, found: JobReconciliation, by: str) -> JobRecord:
    """Put a decision beside an uncertain outcome. Returns the record, which stays as it is.

    Raises UnknownAction, ActionRunning, OutcomeCertain.
    """
    record = _ended(connection, action_id)
    if not record.uncertain:
        raise OutcomeCertain(
            f"the outcome of Action {action_id} is not uncertain; there is nothing to reconcile", action_id=action_id
        )
    connection.execute(
        "INSERT INTO reconciliations(job, at, decision, actor, evidence) VALUES(?, ?, ?, ?, ?)",
        (record.row, found.at, found.decision, found.actor, found.evidence),
    )
    note = msgspec.json.encode(_DecisionNote(found.decision, by))
    audit(connection, AuditEntry(at=found.at, action_id=action_id, actor=found.actor, act="reconciled", detail=note))
    return record


def archive(connection: sqlite3.Connection, action_id: str, *, actor: str, at: float, tally: Tally) -> int:
    """Leave a tombstone for the job and its effects, and remove the rest. Returns its row.

    Raises UnknownAction, ActionRunning, EffectsOpen.
    """
    record = _ended(connection, action_id)
    refuse_open_effects(action_id, *effects.open_keys(connection, record.row))
    connection.execute(
        "INSERT INTO tombstones(action_id, request_hash, crew_id, operation, status, archived_at) VALUES(?,?,?,?,?,?)",
        (action_id, record.request_hash, record.crew_id, record.operation, record.status, at),
    )
    points.write("journal.archive")
    for table in ("events", "workers", "tasks", "reconciliations"):
        connection.execute(f"DELETE FROM {table} WHERE job = ?", (record.row,))
    connection.execute("DELETE FROM jobs WHERE row = ?", (record.row,))
    tally.working.jobs -= 1
    audit(connection, AuditEntry(at=at, action_id=action_id, actor=actor, act="archived"))
    return record.row


def refuse_open_effects(action_id: str, count: int, key_ids: Sequence[str]) -> None:
    """Raise EffectsOpen, naming them, if there are any."""
    if count:
        named = ", ".join(key_ids) + (", ..." if count > len(key_ids) else "")
        raise EffectsOpen(
            f"Action {action_id} has {count} effects that are claimed or of unknown outcome ({named}); "
            "reconcile them first",
            action_id=action_id,
        )


def audit(connection: sqlite3.Connection, entry: AuditEntry) -> None:
    """Add an entry; none is ever changed or removed."""
    connection.execute(
        "INSERT INTO audit(at, action_id, actor, act, detail) VALUES(?, ?, ?, ?, ?)",
        (entry.at, entry.action_id, entry.actor, entry.act, entry.detail),
    )
