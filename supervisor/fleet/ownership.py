"""Whose an Action is: one row each, inserted and committed before the local admission, and never taken away.

Admissions that wait share one statement. An answer that was lost is never guessed: the statement is sent again, and
what it finds says who owns the Action. As long as nothing was found out, nothing is admitted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
from psycopg import AsyncConnection
from psycopg.rows import class_row

from protocol.errors import (
    ActionArchived,
    ActionConflict,
    ActionFailed,
    CrewError,
    FleetUnavailable,
    LeaseInvalid,
    OwnerUnavailable,
)
from supervisor.fleet.database import FENCE, RETRY_AFTER_S, Line
from supervisor.fleet.lease import Lease
from supervisor.journal import NewJob
from supervisor.log import get_log
from supervisor.ownership import OwnedElsewhere, Place

log = get_log(__name__)
#: Admissions that share a statement.
BATCH = 256
#: Pause before a statement is sent again whose answer was lost, seconds.
AGAIN_S = 0.3


class Owned(msgspec.Struct, frozen=True, kw_only=True):
    """An Action's row with what is known of its owner; times in Unix seconds of the database's clock.

    ``alive``: the owner's lease is valid. ``status`` is None until the owner, or a retirement, has said how it ended.
    """

    action_id: str
    request_hash: str
    crew_id: str
    operation: str
    timeout_ms: int | None
    admitted_at: float
    status: str | None
    uncertain: bool | None
    ended_at: float | None
    replica_id: str
    url: str
    alive: bool
    retired: bool

    @property
    def place(self) -> Place:
        """Where a request about it goes."""
        return Place(action_id=self.action_id, replica_id=self.replica_id, url=self.url)


_TAKE = f"""WITH {FENCE}, wanted AS (
        SELECT * FROM unnest(%(ids)s::text[], %(hashes)s::text[], %(crews)s::text[], %(operations)s::text[],
            %(timeouts)s::integer[]) AS w(action_id, request_hash, crew_id, operation, timeout_ms))
    INSERT INTO crew_supervisor.actions AS a(action_id, request_hash, crew_id, operation, timeout_ms, replica_id, epoch)
    SELECT wanted.*, fence.replica_id, fence.epoch FROM wanted, fence ORDER BY action_id
    ON CONFLICT (action_id) DO UPDATE SET epoch = excluded.epoch
        WHERE a.replica_id = excluded.replica_id AND a.request_hash = excluded.request_hash AND a.status IS NULL
    RETURNING action_id"""
_FIND = """SELECT a.action_id, a.request_hash, a.crew_id, a.operation, a.timeout_ms,
        extract(epoch FROM a.admitted_at)::float8 AS admitted_at, a.status, a.uncertain,
        extract(epoch FROM a.ended_at)::float8 AS ended_at, r.replica_id, r.url,
        r.retired_at IS NULL AND r.expires_at > clock_timestamp() AS alive, r.retired_at IS NOT NULL AS retired
    FROM crew_supervisor.actions a JOIN crew_supervisor.replicas r USING (replica_id) WHERE a.action_id = ANY(%s)"""


async def take(
    connection: AsyncConnection, wanted: Sequence[NewJob], *, replica_id: str, epoch: int
) -> dict[str, Owned | None]:
    """Take those of ``wanted`` that nobody has. Returns the rows of all others, None for what was refused by the fence.

    What is ours without a terminal record counts as taken again: its local admission has not come about yet. Twice
    is once, so this also finds out what became of a statement whose answer was lost.
    """
    values = {
        "replica": replica_id,
        "epoch": epoch,
        "ids": [new.action_id for new in wanted],
        "hashes": [new.request_hash for new in wanted],
        "crews": [new.crew_id for new in wanted],
        "operations": [new.operation for new in wanted],
        "timeouts": [new.timeout_ms for new in wanted],
    }
    taken = {row[0] for row in await (await connection.execute(_TAKE, values)).fetchall()}
    left = [new.action_id for new in wanted if new.action_id not in taken]
    if not left:
        return {}
    found = await find(connection, left)
    return {action_id: found.get(action_id) for action_id in left}


async def find(connection: AsyncConnection, action_ids: Sequence[str]) -> dict[str, Owned]:
    """The rows of those Actions that have one."""
    async with connection.cursor(row_factory=class_row(Owned)) as cursor:
        await cursor.execute(_FIND, (list(action_ids),))
        return {row.action_id: row for row in await cursor.fetchall()}


def refusal(found: Owned, request_hash: str, *, replica_id: str) -> Exception:
    """Why an Action that has a row is not admitted here now. ``replica_id``: who asks."""
    action_id = found.action_id
    if found.request_hash != request_hash:
        return ActionConflict(
            f"Action {action_id} is known to the fleet with other material; use the original request or another id",
            action_id=action_id,
        )
    if found.retired:
        return ActionFailed(
            f"Action {action_id} failed: its replica {found.replica_id} was retired, and its outcome is uncertain",
            action_id=action_id,
        )
    if found.replica_id == replica_id:
        if found.status is None:
            return _no_lease(replica_id)
        return ActionArchived(
            f"Action {action_id} was executed by this replica, which has no record of it any more; it is not executed"
            " again, use another id",
            action_id=action_id,
        )
    return OwnedElsewhere(found.place) if found.alive else unavailable(found.place, "has no valid lease")


def unavailable(place: Place, why: str) -> OwnerUnavailable:
    """The owner cannot be asked."""
    return OwnerUnavailable(
        f"Action {place.action_id} belongs to replica {place.replica_id}, which {why}; it is executed nowhere else,"
        " ask again",
        action_id=place.action_id,
        retry_after_s=RETRY_AFTER_S,
    )


def _no_lease(replica_id: str, why: str | None = None) -> LeaseInvalid:
    said = f" ({why})" if why else ""
    return LeaseInvalid(
        f"replica {replica_id} has no valid lease{said} and admits nothing; ask another one",
        retry_after_s=RETRY_AFTER_S,
    )


class FleetOwnership:
    """``supervisor.ownership.Ownership`` by way of the database. ``patience_s``: how long an admission waits for it."""

    def __init__(
        self, lease: Lease, *, replica_id: str, claims: Line, reads: Line, clock: Callable[[], float], patience_s: float
    ) -> None:
        self._lease = lease
        self._replica_id = replica_id
        self._claims = claims
        self._reads = reads
        self._clock = clock
        self._patience_s = patience_s
        self._waiting: list[tuple[NewJob, asyncio.Future[None], float]] = []
        self._wake = asyncio.Event()

    async def take(self, new: NewJob) -> None:
        """As the protocol says."""
        if not self._lease.valid(self._clock()):
            await self.seek(new)
            raise _no_lease(self._replica_id, self._lease.why)
        loop = asyncio.get_running_loop()
        settled: asyncio.Future[None] = loop.create_future()
        self._waiting.append((new, settled, loop.time() + self._patience_s))
        self._wake.set()
        await settled

    async def seek(self, new: NewJob) -> None:
        """As the protocol says."""
        found = await self.locate(new.action_id)
        if found is not None:
            raise refusal(found, new.request_hash, replica_id=self._replica_id)

    async def locate(self, action_id: str) -> Owned | None:
        """The row of an Action. Raises FleetUnavailable."""
        return (await self._reads.run(partial(find, action_ids=[action_id]))).get(action_id)

    async def run(self) -> None:
        """Take what waits, everything at once, until cancelled."""
        while True:
            await self._wake.wait()
            batch, self._waiting = self._waiting[:BATCH], self._waiting[BATCH:]
            if not self._waiting:
                self._wake.clear()
            if batch:
                await self._take_all(batch)

    async def _take_all(self, batch: list[tuple[NewJob, asyncio.Future[None], float]]) -> None:
        wanted = [new for new, _, _ in batch]
        epoch = self._lease.epoch
        try:
            left = await self._claims.run(partial(take, wanted=wanted, replica_id=self._replica_id, epoch=epoch))
        except FleetUnavailable as error:
            await self._put_back(batch, error)
            return
        except Exception as error:  # noqa: BLE001 - a fault of ours must not leave the others waiting for ever
            log.failure("ownership_broke", error)
            left = dict.fromkeys((new.action_id for new in wanted), None)
        for new, settled, _ in batch:
            if settled.done():
                continue
            if new.action_id not in left:
                settled.set_result(None)
            else:
                settled.set_exception(self._why_not(new, left[new.action_id], epoch))

    def _why_not(self, new: NewJob, found: Owned | None, epoch: int) -> Exception:
        refused = refusal(found, new.request_hash, replica_id=self._replica_id) if found is not None else None
        if (refused is None or isinstance(refused, LeaseInvalid)) and epoch == self._lease.epoch:
            self._lease.fenced(f"the database refused epoch {epoch}")
        return refused or _no_lease(self._replica_id, self._lease.why)

    async def _put_back(
        self, batch: list[tuple[NewJob, asyncio.Future[None], float]], error: CrewError
    ) -> None:
        """Ask again for those that can still wait. The others are told that nobody knows; their Action is not begun."""
        await asyncio.sleep(AGAIN_S)
        now = asyncio.get_running_loop().time()
        for item in batch:
            if item[2] > now:
                self._waiting.append(item)
                self._wake.set()
            elif not item[1].done():
                item[1].set_exception(error)
