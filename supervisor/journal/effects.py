"""The table of effects: rows and records, what is read of them, and the one way in which a record is stored.

What a request makes of a record is decided by ``protocol.effects``. A row that cannot be read refuses its key.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import msgspec

from protocol import effects, points
from protocol.effects import FIELDS, EffectRecord, Scope
from protocol.errors import CrewError
from protocol.states import OPEN_EFFECTS, EffectState
from supervisor.journal.writer import Tally

_COLUMNS = ", ".join(FIELDS)
_STORE = (
    f"INSERT INTO effects({_COLUMNS}) VALUES({', '.join('?' * len(FIELDS))}) ON CONFLICT(key_id) DO UPDATE SET "
    + ", ".join(f"{name} = excluded.{name}" for name in FIELDS if name != "key_id")
)
#: States that end an effect. Any other, one that nobody knows included, keeps its job from being archived.
_CLOSED = ", ".join(f"'{state.value}'" for state in EffectState if state not in OPEN_EFFECTS)
_DECISIONS = frozenset({"", *effects.Decision})
#: Key ids that a refusal names.
NAMED = 3
#: An owner died before it could say what became of its claims.
RESTARTED = "supervisor_restarted"


class EffectQuarantined(CrewError):
    """A stored effect breaks a bound, so nothing is claimed about it and its key stays blocked."""

    code = "effect_quarantined"
    status = 409
    title = "Effect row quarantined"


class EffectPage(msgspec.Struct, frozen=True):
    """Effects, the newest key first. ``before`` is the argument for the next page, None after the last.

    ``shared``: they come from what several journals share.
    """

    records: list[EffectRecord]
    before: int | None
    shared: bool = False


def record_of(values: Sequence[Any]) -> EffectRecord:
    """Decode a row of FIELDS. Raises EffectQuarantined."""
    key_id = str(values[0])
    try:
        record = msgspec.convert(dict(zip(FIELDS, values, strict=True)), EffectRecord)
    except msgspec.ValidationError as error:
        raise _quarantined(key_id, str(error)) from None
    if effects.key_id_of(record.preimage) != record.key_id:
        raise _quarantined(key_id, "its preimage gives another key")
    if record.decision not in _DECISIONS:
        raise _quarantined(key_id, f"nobody decides {record.decision[:64]!r}")
    return record


def _quarantined(key_id: str, why: str) -> EffectQuarantined:
    return EffectQuarantined(
        f"the effect {key_id[:64]!r} cannot be read: {why}; its key stays blocked, and an operator must look at it"
    )


def load(connection: sqlite3.Connection, key_id: str) -> EffectRecord | None:
    """The record of a key. Raises EffectQuarantined."""
    found = connection.execute(f"SELECT {_COLUMNS} FROM effects WHERE key_id = ?", (key_id,)).fetchone()
    return record_of(found) if found else None


def store(
    connection: sqlite3.Connection, record: EffectRecord, *, was: EffectRecord | None, tally: Tally
) -> EffectRecord:
    """Replace what the ledger has of the key, ``was``, by ``record``, and return that."""
    points.write("journal.effect")
    connection.execute(_STORE, [getattr(record, name) for name in FIELDS])
    tally.working.effects[record.state] += 1
    if was is not None:
        tally.working.effects[was.state] -= 1
    return record


def change(
    connection: sqlite3.Connection,
    key_id: str,
    step: Callable[[EffectRecord | None], EffectRecord | None],
    *,
    tally: Tally,
) -> EffectRecord | None:
    """Store what ``step`` makes of the record; returns None, and changes nothing, where it makes None of it."""
    known = load(connection, key_id)
    made = step(known)
    return made and store(connection, made, was=known, tally=tally)


def lose_claimed(
    connection: sqlite3.Connection,
    job: int | None,
    reason: str,
    *,
    reasons: Mapping[str, str] | None = None,
    tally: Tally,
) -> int:
    """Make every claimed effect of a job (None: of all jobs) unknown; ``reasons`` has what differs by key id.

    Returns how many there were. One that cannot be read stays as it is; it blocks its key in any case.
    """
    where, values = ("", ()) if job is None else ("AND job = ?", (job,))
    found = connection.execute(f"SELECT {_COLUMNS} FROM effects WHERE state = 'claimed' {where}", values).fetchall()
    records = list(readable(found))
    for record in records:
        why = (reasons or {}).get(record.key_id, reason)
        store(connection, effects.lose(record, epoch=record.epoch, reason=why), was=record, tally=tally)
    return len(records)


def counts_of_jobs(connection: sqlite3.Connection, jobs: Sequence[int]) -> dict[int, dict[str, int]]:
    """Numbers of effects by state, for those of ``jobs``, a page of them, that have any."""
    marks = ", ".join("?" * len(jobs))
    found = connection.execute(
        f"SELECT job, state, count(*) FROM effects WHERE job IN ({marks}) GROUP BY job, state", list(jobs)
    )
    by_job: dict[int, dict[str, int]] = {}
    for job, state, count in found:
        by_job.setdefault(job, {})[state] = count
    return {job: effects.counts(states) for job, states in by_job.items()}


def open_keys(connection: sqlite3.Connection, job: int) -> tuple[int, list[str]]:
    """How many effects of a job are not ended, and the first few key ids."""
    where = f"WHERE job = ? AND state NOT IN ({_CLOSED})"
    count = connection.execute(f"SELECT count(*) FROM effects {where}", (job,)).fetchone()[0]
    keys = connection.execute(f"SELECT key_id FROM effects {where} ORDER BY rowid LIMIT {NAMED}", (job,)).fetchall()
    return count, [str(key_id) for (key_id,) in keys]


def page(
    connection: sqlite3.Connection,
    *,
    job: int | None,
    state: EffectState | None,
    crew_id: str | None,
    scope: Scope | None,
    before: int | None,
    limit: int,
    limit_bytes: int,
) -> EffectPage:
    """A page of effects below ``before``, within ``limit_bytes`` of receipts but one at least, newest key first.

    Rows that cannot be read are left out.
    """
    wanted = {"job = ?": job, "state = ?": state, "crew_id = ?": crew_id, "scope = ?": scope, "rowid < ?": before}
    given = {clause: value for clause, value in wanted.items() if value is not None}
    where = f"WHERE {' AND '.join(given)}" if given else ""
    # Only row numbers are sorted: receipts may be long.
    rows = f"SELECT rowid FROM effects {where} ORDER BY rowid DESC LIMIT ?"
    records: list[EffectRecord] = []
    room, last = limit_bytes, before
    with closing(
        connection.execute(
            f"SELECT rowid, {_COLUMNS} FROM effects WHERE rowid IN ({rows}) ORDER BY rowid DESC",
            (*given.values(), limit + 1),
        )
    ) as cursor:
        for number, (row, *values) in enumerate(cursor):
            room -= _size(values)
            if number == limit or (number and room < 0):
                return EffectPage(records, last)
            last = row
            records += readable([values])
    return EffectPage(records, None)


def _size(values: Sequence[Any]) -> int:
    return sum(len(value) for value in values if isinstance(value, bytes | str))


def readable(rows: Sequence[Sequence[Any]]) -> Iterator[EffectRecord]:
    """The records of rows of FIELDS, without those that cannot be read."""
    for values in rows:
        try:
            yield record_of(values)
        except EffectQuarantined:
            continue
