"""Registration, heartbeat and release in the database: who holds an id, in which epoch, until when.

Every time is the database's. A registration is decided while the replica's row is locked, so that no write under an
older epoch can be committed after it (``database.FENCE``).
"""

from __future__ import annotations

import msgspec
from psycopg import AsyncConnection
from psycopg.rows import class_row

from protocol.errors import LeaseInvalid
from supervisor.fleet.database import FENCE
from supervisor.fleet.lease import Request


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's row as a registration finds it; ``left_s``: seconds until its lease ends, negative afterwards."""

    instance_id: str
    journal_epoch: int
    epoch: int
    request_id: str
    request: str
    left_s: float
    retired: bool


class Granted(msgspec.Struct, frozen=True):
    """The replica's new epoch; ``repeated``: this very request had been granted before."""

    epoch: int
    repeated: bool = False


class Rejected(msgspec.Struct, frozen=True):
    """Why not, whether that is so for ever, and after how many seconds it may be otherwise."""

    why: str
    retired: bool = False
    wait_s: float | None = None


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica says of itself with each sign of life."""

    draining: bool
    running: int
    queued: int


def document(request: Request) -> str:
    """The payload as it is compared: two requests of one id must be equal in it."""
    return msgspec.json.encode(request.payload).decode()


def judge(found: Holder, request: Request) -> Granted | Rejected:
    """Decide about a registration of an id that is there already."""
    payload = request.payload
    if found.retired:
        why = f"replica {payload.replica_id} was retired; an id is never given again, set another"
        return Rejected(why, retired=True)
    if found.request_id == request.request_id:
        if found.request != document(request):
            return Rejected("the same request id came with another payload before")
        return Granted(found.epoch, repeated=True)
    if found.instance_id != payload.instance_id:
        return Rejected(
            f"replica id {payload.replica_id} belongs to the journal {found.instance_id}, and this one is"
            f" {payload.instance_id}; set another id, and retire the old one if its machine is lost"
        )
    if payload.journal_epoch < found.journal_epoch:
        return Rejected(
            f"this journal was opened {payload.journal_epoch} times and a newer copy of it {found.journal_epoch} times:"
            " it does not know what was admitted since; use the newer copy, or another id and a new journal"
        )
    if found.left_s > 0:
        return Rejected(f"a lease of replica {payload.replica_id} is still valid", wait_s=found.left_s)
    return Granted(found.epoch + 1)


_INSERT = """INSERT INTO crew_supervisor.replicas(replica_id, url, instance_id, journal_epoch, version, epoch,
        request_id, request, lease_s, registered_at, expires_at)
    SELECT %(replica)s, %(url)s, %(instance)s, %(journal_epoch)s, %(version)s, 1, %(request_id)s, %(request)s,
        %(lease_s)s, t, t + make_interval(secs => %(lease_s)s) FROM clock_timestamp() AS t
    ON CONFLICT (replica_id) DO NOTHING RETURNING epoch"""
_LOCK = """SELECT instance_id, journal_epoch, epoch, request_id, request, retired_at IS NOT NULL AS retired,
        extract(epoch FROM expires_at - clock_timestamp())::float8 AS left_s
    FROM crew_supervisor.replicas WHERE replica_id = %(replica)s FOR UPDATE"""
_UPDATE = """UPDATE crew_supervisor.replicas SET url = %(url)s, journal_epoch = %(journal_epoch)s,
        version = %(version)s, epoch = epoch + 1, request_id = %(request_id)s, request = %(request)s,
        lease_s = %(lease_s)s, registered_at = t, expires_at = t + make_interval(secs => %(lease_s)s), draining = false
    FROM clock_timestamp() AS t WHERE replica_id = %(replica)s"""


async def register(connection: AsyncConnection, request: Request) -> Granted | Rejected:
    """Take an id, or take it again after its lease has ended. The same request again gets the same answer."""
    payload = request.payload
    values = {
        "replica": payload.replica_id,
        "url": payload.url,
        "instance": payload.instance_id,
        "journal_epoch": payload.journal_epoch,
        "version": payload.version,
        "lease_s": payload.lease_s,
        "request_id": request.request_id,
        "request": document(request),
    }
    async with connection.transaction():
        if await (await connection.execute(_INSERT, values)).fetchone() is not None:
            return Granted(1)
        async with connection.cursor(row_factory=class_row(Holder)) as cursor:
            await cursor.execute(_LOCK, values)
            found = await cursor.fetchone()
        assert found is not None, "a replica's row is never deleted"
        verdict = judge(found, request)
        if isinstance(verdict, Granted) and not verdict.repeated:
            await connection.execute(_UPDATE, values)
        return verdict


_RENEW = f"""WITH {FENCE}
    UPDATE crew_supervisor.replicas SET expires_at = clock_timestamp() + make_interval(secs => lease_s),
        draining = %(draining)s, running = %(running)s, queued = %(queued)s
    FROM fence WHERE replicas.replica_id = fence.replica_id AND replicas.epoch = fence.epoch"""


async def renew(connection: AsyncConnection, replica_id: str, epoch: int, beat: Beat) -> None:
    """Extend a lease that is still valid. Raises LeaseInvalid where it is not: an expired lease is not revived."""
    values = {"replica": replica_id, "epoch": epoch, **msgspec.structs.asdict(beat)}
    if (await connection.execute(_RENEW, values)).rowcount != 1:
        raise LeaseInvalid(f"epoch {epoch} of replica {replica_id} is over")


async def release(connection: AsyncConnection, replica_id: str, epoch: int) -> None:
    """End a lease now, so that its id can be registered at once. Does nothing where it is not ours any more."""
    await connection.execute(
        """UPDATE crew_supervisor.replicas SET expires_at = least(expires_at, clock_timestamp()), draining = true
           WHERE replica_id = %s AND epoch = %s AND retired_at IS NULL""",
        (replica_id, epoch),
    )
