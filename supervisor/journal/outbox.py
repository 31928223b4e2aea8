"""Endings that others are to be told: written with the terminal record, in one transaction, and kept until they are."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from protocol.states import TERMINAL

if TYPE_CHECKING:
    from supervisor.journal.journal import Journal

#: The last epoch in which endings were put here.
META_KEY = "outbox_epoch"
_ENDINGS = ", ".join(f"'{status.value}'" for status in sorted(TERMINAL))
# What is not known to be certain is uncertain; a job that completed is certain.
_ADD = f"""INSERT OR IGNORE INTO outbox(action_id, request_hash, crew_id, operation, timeout_ms, status, uncertain)
    SELECT action_id, request_hash, crew_id, operation, timeout_ms, status,
        CASE WHEN status = 'completed' THEN 0 ELSE coalesce(uncertain, 1) END
    FROM jobs WHERE status IN ({_ENDINGS})"""
_ADD_ARCHIVED = f"""INSERT OR IGNORE INTO outbox(action_id, request_hash, crew_id, operation, status, uncertain)
    SELECT action_id, request_hash, crew_id, operation, status, status <> 'completed'
    FROM tombstones WHERE status IN ({_ENDINGS})"""


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """How an Action ended, with what says which Action that was."""

    id: int
    action_id: str
    request_hash: str
    crew_id: str
    operation: str
    timeout_ms: int | None
    status: str
    uncertain: bool


_FIELDS = Fact.__struct_fields__


def add(connection: sqlite3.Connection, row: int) -> None:
    """Put in how the job of that row ended."""
    connection.execute(f"{_ADD} AND row = ?", (row,))


def enable(connection: sqlite3.Connection, epoch: int) -> int:
    """Put in whatever ended while nobody was to be told, if there was such a time. Returns how much waits in all."""
    found = connection.execute("SELECT value FROM meta WHERE key = ?", (META_KEY,)).fetchone()
    if found is None or int(found[0]) < epoch - 1:
        connection.execute(_ADD)
        connection.execute(_ADD_ARCHIVED)
    connection.execute("INSERT OR REPLACE INTO meta VALUES(?, ?)", (META_KEY, str(epoch)))
    return int(connection.execute("SELECT count(*) FROM outbox").fetchone()[0])


def page(connection: sqlite3.Connection, limit: int) -> list[Fact]:
    """The oldest that wait."""
    rows = connection.execute(f"SELECT {', '.join(_FIELDS)} FROM outbox ORDER BY id LIMIT ?", (limit,)).fetchall()
    return [Fact(**dict(zip(_FIELDS, (*row[:-1], bool(row[-1])), strict=True))) for row in rows]


def remove(connection: sqlite3.Connection, ids: Sequence[int]) -> int:
    """Take out what was told. Returns how much it was."""
    return sum(connection.execute("DELETE FROM outbox WHERE id = ?", (number,)).rowcount for number in ids)


class Outbox:
    """The outbox of one journal; nothing is put in before it is enabled."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.enabled = False
        #: How many endings wait to be told.
        self.waiting = 0
        #: Set when there is more.
        self.bell = asyncio.Event()

    async def enable(self) -> None:
        """From now on every ending is put in; so is what ended in times when that was not so."""
        epoch = self._journal.epoch
        self.waiting = await self._journal.write(lambda connection: enable(connection, epoch))
        self.enabled = True

    def added(self, count: int) -> None:
        """So many more are durable."""
        self.waiting += count
        self.bell.set()

    async def page(self, limit: int) -> list[Fact]:
        """The oldest that wait. Raises JournalUnavailable."""
        return await self._journal.read(lambda connection: page(connection, limit))

    async def remove(self, ids: Sequence[int]) -> None:
        """These were told. Raises JournalUnavailable; they are told again then, which changes nothing."""
        self.waiting -= await self._journal.write(lambda connection: remove(connection, ids), terminal=True)
