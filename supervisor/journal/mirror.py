"""Copies of effects whose state is decided elsewhere: of each that a job of this journal claimed, and what of them is
not told yet.

``told`` of a row is the version of it that the others know; NULL in a journal that shares nothing. Whatever changes an
effect gives it a later version, which makes it news, in the same transaction: nothing can forget to put it in.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from protocol.effects import FIELDS, SHARED_SCOPES, EffectRecord
from protocol.states import EffectState
from supervisor.journal import effects as table
from supervisor.journal.writer import Tally

if TYPE_CHECKING:
    from supervisor.journal.journal import Journal

_COLUMNS = ", ".join(FIELDS)
_SHARED = ", ".join(f"'{scope.value}'" for scope in sorted(SHARED_SCOPES))


class Mirror:
    """The copies in one journal. All methods raise JournalUnavailable."""

    def __init__(self, journal: Journal, tally: Tally) -> None:
        self._journal = journal
        self._tally = tally

    async def enable(self) -> None:
        """From now on effects are shared: whatever this journal decided by itself is news."""
        await self._journal.write(
            lambda connection: (
                connection.execute(f"UPDATE effects SET told = 0 WHERE told IS NULL AND scope IN ({_SHARED})").rowcount
            )
        )

    def keep(self, record: EffectRecord, *, over_news: bool = True) -> asyncio.Future[None]:
        """Have a copy of what was decided. ``over_news``: also where this journal knows something that is not told."""
        op = partial(_keep, record=record, over_news=over_news, tally=self._tally)
        return self._journal.submit(op, terminal=record.state is not EffectState.CLAIMED)

    async def untold(self, limit: int) -> list[EffectRecord]:
        """News."""
        return await self._journal.read(lambda connection: _untold(connection, limit))

    async def unknown(self, limit: int, *, after: str) -> list[EffectRecord]:
        """Copies of unknown outcomes behind the key ``after``, which somebody may have found out elsewhere."""
        return await self._journal.read(lambda connection: _unknown(connection, limit, after))

    def tell(self, versions: Mapping[str, int]) -> asyncio.Future[None]:
        """These versions are known to the others."""
        return self._journal.submit(partial(_tell, versions=dict(versions)), terminal=True)


def _keep(connection: sqlite3.Connection, *, record: EffectRecord, over_news: bool, tally: Tally) -> None:
    known = table.load(connection, record.key_id)
    if known is not None and not over_news and _is_news(connection, record.key_id):
        # What is not told yet is kept; how often it was replayed is counted elsewhere.
        connection.execute(
            "UPDATE effects SET replays = max(replays, ?) WHERE key_id = ? AND attempt = ?",
            (record.replays, record.key_id, record.attempt),
        )
        return
    table.store(connection, record, was=known, tally=tally)
    connection.execute("UPDATE effects SET told = version WHERE key_id = ?", (record.key_id,))


def _is_news(connection: sqlite3.Connection, key_id: str) -> bool:
    found = connection.execute("SELECT 1 FROM effects WHERE key_id = ? AND told < version", (key_id,)).fetchone()
    return found is not None


def _untold(connection: sqlite3.Connection, limit: int) -> list[EffectRecord]:
    rows = connection.execute(f"SELECT {_COLUMNS} FROM effects WHERE told < version LIMIT ?", (limit,)).fetchall()
    return list(table.readable(rows))


def _unknown(connection: sqlite3.Connection, limit: int, after: str) -> list[EffectRecord]:
    rows = connection.execute(
        f"""SELECT {_COLUMNS} FROM effects WHERE state = 'unknown' AND told >= version AND key_id > ?
            ORDER BY key_id LIMIT ?""",
        (after, limit),
    ).fetchall()
    return list(table.readable(rows))


def _tell(connection: sqlite3.Connection, *, versions: Mapping[str, int]) -> None:
    for key_id, version in versions.items():
        connection.execute("UPDATE effects SET told = ? WHERE key_id = ? AND told < ?", (version, key_id, version))
