"""The table of shared effects: its rows, what is read of them, and the one statement that changes them.

A row is replaced only in the version that the change was made from and only under the fence, so whoever decides on an
old view, or in an old epoch, changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import LiteralString

import msgspec
from psycopg import AsyncConnection
from psycopg.rows import TupleRow

from protocol.effects import FIELDS, EffectRecord, Policy, Scope
from protocol.states import EffectState
from supervisor.fleet.database import FENCE


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A shared effect. ``replica_id`` made its last claim in its epoch ``replica_epoch``; ``claim_id`` names that."""

    record: EffectRecord
    replica_id: str
    replica_epoch: int
    claim_id: str


#: Kinds of columns in PostgreSQL; any other is text.
_KINDS = {
    **dict.fromkeys(("preimage", "receipt"), "bytea"),
    **dict.fromkeys(("version", "epoch", "attempt", "job", "replays", "replica_epoch", "made_from"), "bigint"),
    **dict.fromkeys(("claimed_at", "settled_at", "delivered_at"), "double precision"),
}


def _sent(name: str) -> str:
    """How a column comes in JSON: bytes are text in base64."""
    kind = _KINDS.get(name, "text")
    return "text" if kind == "bytea" else kind


def _taken(name: str) -> str:
    return f"decode({name}, 'base64') AS {name}" if _KINDS.get(name) == "bytea" else name


_HOLDER = ("replica_id", "replica_epoch", "claim_id")
_STORED = (*FIELDS, *_HOLDER, "made_from")
_READ = ", ".join((*FIELDS, *_HOLDER))
#: One JSON document has all rows: a parameter for each column cost the replica several times the processor time.
_STORE = f"""WITH {FENCE}, wanted AS (
        SELECT {", ".join(_taken(name) for name in _STORED)}
        FROM json_to_recordset(%(rows)s::json) AS w({", ".join(f"{name} {_sent(name)}" for name in _STORED)})),
    written AS (
        INSERT INTO crew_supervisor.effects AS e({", ".join(_STORED)})
        SELECT wanted.* FROM wanted, fence ORDER BY wanted.key_id
        ON CONFLICT (key_id) DO UPDATE SET {", ".join(f"{name} = excluded.{name}" for name in _STORED[1:])}
            WHERE e.version = excluded.made_from
        RETURNING key_id)
    SELECT (SELECT count(*) FROM fence), ARRAY(SELECT key_id FROM written)""".encode()
_LOAD = f"SELECT {_READ} FROM crew_supervisor.effects WHERE key_id = ANY(%s)".encode()
_LOSE: LiteralString = """UPDATE crew_supervisor.effects SET state = 'unknown', reason = %(reason)s,
        version = version + 1, made_from = version
    WHERE replica_id = %(replica)s AND state = 'claimed'"""
_LOSE_EARLIER = f"""WITH {FENCE} {_LOSE} AND epoch < %(before)s AND EXISTS (SELECT 1 FROM fence)"""
#: The escape of U+0000 behind an even number of backslashes.
_ZERO = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")
_ENUMS = {"scope": Scope, "policy": Policy, "state": EffectState}


class Fenced(Exception):
    """The database does not take our epoch any more."""


def _row(values: TupleRow) -> Row:
    fields = dict(zip((*FIELDS, *_HOLDER), values, strict=True))
    holder = {name: fields.pop(name) for name in _HOLDER}
    for name, kind in _ENUMS.items():
        fields[name] = kind(fields[name])
    return Row(record=EffectRecord(**fields), **holder)


async def load(connection: AsyncConnection, key_ids: Sequence[str]) -> dict[str, Row]:
    """The rows of those keys that have one."""
    found = await (await connection.execute(_LOAD, (list(key_ids),))).fetchall()
    return {row.record.key_id: row for row in map(_row, found)}


async def store(
    connection: AsyncConnection, rows: Mapping[str, tuple[Row, int]], *, replica_id: str, epoch: int
) -> set[str]:
    """Replace rows by key id, each in the version given with it, 0 for a key that has no row.

    Returns the keys that were written; the others have another version by now. Raises Fenced: nothing is written.
    """
    document = msgspec.json.encode(
        [
            msgspec.structs.asdict(row.record)
            | {name: getattr(row, name) for name in _HOLDER}
            | {"made_from": made_from}
            for row, made_from in rows.values()
        ]
    ).decode()
    values = {"rows": _storable(document), "replica": replica_id, "epoch": epoch}
    asked = await connection.execute(_STORE, values)
    found = await asked.fetchone()
    assert found is not None, "an aggregate has one row"
    fence, written = found
    if not fence:
        raise Fenced
    return set(written)


def _storable(document: str) -> str:
    """JSON without U+0000, which PostgreSQL does not store as text; a key is made of the preimage and not of this."""
    if "\\u0000" not in document:
        return document
    return _ZERO.sub(r"\1\\ufffd", document)


async def lose_claimed(connection: AsyncConnection, replica_id: str, *, reason: str) -> int:
    """Make whatever a replica has claimed unknown; the caller has locked the replica's row. Returns how much it was."""
    return (await connection.execute(_LOSE, {"replica": replica_id, "reason": reason})).rowcount


async def lose_earlier(connection: AsyncConnection, *, replica_id: str, epoch: int, before: int, reason: str) -> int:
    """Make unknown what earlier processes of a replica have claimed: in journal epochs below ``before``."""
    values = {"replica": replica_id, "epoch": epoch, "before": before, "reason": reason}
    return (await connection.execute(_LOSE_EARLIER, values)).rowcount


async def page(
    connection: AsyncConnection,
    *,
    state: EffectState | None,
    crew_id: str | None,
    scope: Scope | None,
    before: int | None,
    limit: int,
    limit_bytes: int,
) -> tuple[list[Row], int | None]:
    """Rows below ``before``, newest key first, within ``limit_bytes`` but one at least, and what the next is below."""
    wanted = {"state = %s": state, "crew_id = %s": crew_id, "scope = %s": scope, "seq < %s": before}
    given = {
        clause: str(value) if isinstance(value, str) else value for clause, value in wanted.items() if value is not None
    }
    where = f"WHERE {' AND '.join(given)}" if given else ""
    # Only numbers are sorted and their sizes added up: receipts may be long.
    statement = f"""WITH picked AS (
            SELECT seq, sum(length(preimage) + coalesce(length(receipt), 0) + length(evidence) + length(reason))
                OVER (ORDER BY seq DESC) AS total, row_number() OVER (ORDER BY seq DESC) AS number
            FROM (SELECT * FROM crew_supervisor.effects {where} ORDER BY seq DESC LIMIT %s) AS newest)
        SELECT {_READ}, seq FROM crew_supervisor.effects JOIN picked USING (seq)
        WHERE number = 1 OR total <= %s ORDER BY seq DESC"""
    found = await (await connection.execute(statement.encode(), (*given.values(), limit + 1, limit_bytes))).fetchall()
    more = len(found) > limit
    rows = found[:limit]
    if not more and rows:
        rest = await connection.execute(
            f"SELECT 1 FROM crew_supervisor.effects WHERE {' AND '.join((*given, 'seq < %s'))} LIMIT 1".encode(),
            (*given.values(), rows[-1][-1]),
        )
        more = await rest.fetchone() is not None
    return [_row(values[:-1]) for values in rows], rows[-1][-1] if more else None
