"""Tells the fleet how Actions ended, in order, from the journal's outbox; the same again changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from psycopg import AsyncConnection

from protocol.errors import FleetUnavailable, JournalUnavailable
from supervisor.fleet.database import FENCE, Line
from supervisor.fleet.lease import Lease
from supervisor.fleet.ownership import find
from supervisor.journal import Fact, Outbox
from supervisor.log import get_log

log = get_log(__name__)
#: Endings in one statement.
PAGE = 200
#: Pause while the database or the lease is away, seconds.
AGAIN_S = 0.5

# The row is there since before the local admission, unless this journal was not always in the fleet. The time is the
# database's: when the fleet learned of it.
_TELL = f"""WITH {FENCE}, facts AS (
        SELECT * FROM unnest(%(ids)s::text[], %(hashes)s::text[], %(crews)s::text[], %(operations)s::text[],
            %(timeouts)s::integer[], %(statuses)s::text[], %(uncertain)s::boolean[])
            AS f(action_id, request_hash, crew_id, operation, timeout_ms, status, uncertain))
    INSERT INTO crew_supervisor.actions AS a(action_id, request_hash, crew_id, operation, timeout_ms, status, uncertain,
        replica_id, epoch, said_by, ended_at)
    SELECT facts.*, fence.replica_id, fence.epoch, 'owner', clock_timestamp() FROM facts, fence ORDER BY action_id
    ON CONFLICT (action_id) DO UPDATE SET status = excluded.status, uncertain = excluded.uncertain,
        said_by = excluded.said_by, ended_at = excluded.ended_at
        WHERE a.replica_id = excluded.replica_id AND a.request_hash = excluded.request_hash AND a.status IS NULL
    RETURNING action_id"""


class Fenced(Exception):
    """The database does not take our epoch any more."""


async def tell(connection: AsyncConnection, facts: Sequence[Fact], *, replica_id: str, epoch: int) -> list[str]:
    """Record endings. Returns the ids of those whose Action the fleet knows as another's, which stay as they are.

    Raises Fenced; nothing is recorded then.
    """
    values = {
        "replica": replica_id,
        "epoch": epoch,
        "ids": [fact.action_id for fact in facts],
        "hashes": [fact.request_hash for fact in facts],
        "crews": [fact.crew_id for fact in facts],
        "operations": [fact.operation for fact in facts],
        "timeouts": [fact.timeout_ms for fact in facts],
        "statuses": [fact.status for fact in facts],
        "uncertain": [fact.uncertain for fact in facts],
    }
    told = {row[0] for row in await (await connection.execute(_TELL, values)).fetchall()}
    left = [fact for fact in facts if fact.action_id not in told]
    known = await find(connection, [fact.action_id for fact in left]) if left else {}
    others = []
    for fact in left:
        row = known.get(fact.action_id)
        if row is None or (row.replica_id == replica_id and row.status is None):
            raise Fenced
        if row.replica_id != replica_id or row.request_hash != fact.request_hash:
            others.append(fact.action_id)
    return others


class Teller:
    """Empties the outbox whenever there is something in it and the lease is valid."""

    def __init__(
        self, outbox: Outbox, lease: Lease, line: Line, *, replica_id: str, clock: Callable[[], float]
    ) -> None:
        self._outbox = outbox
        self._lease = lease
        self._line = line
        self._replica_id = replica_id
        self._clock = clock
        self._silenced = False

    async def run(self) -> None:
        """Tell until cancelled."""
        while True:
            self._outbox.bell.clear()
            more = await self._page()
            if not more:
                pause_s = AGAIN_S if self._outbox.waiting > 0 else None
                try:
                    async with asyncio.timeout(pause_s):
                        await self._outbox.bell.wait()
                except TimeoutError:
                    pass

    async def _page(self) -> bool:
        """Tell a page. Returns whether there may be another right away."""
        if not self._lease.valid(self._clock()):
            return False
        epoch = self._lease.epoch
        try:
            facts = await self._outbox.page(PAGE)
            if not facts:
                return False
            telling = partial(tell, facts=facts, replica_id=self._replica_id, epoch=epoch)
            others = await self._line.run(telling)
            await self._outbox.remove([fact.id for fact in facts])
        except (FleetUnavailable, JournalUnavailable) as error:
            if not self._silenced:
                log.warning("endings_not_told", waiting=self._outbox.waiting, why=error.detail)
            self._silenced = True
            return False
        except Fenced:
            if epoch == self._lease.epoch:
                self._lease.fenced(f"the database refused epoch {epoch}")
            return False
        self._silenced = False
        if others:
            log.error("endings_of_others", action_ids=others[:20], count=len(others))
        return len(facts) == PAGE
