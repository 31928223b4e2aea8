"""Who is in the fleet, and how a replica whose machine is gone is written off: by an operator, never by itself."""

from __future__ import annotations

from psycopg import AsyncConnection
from psycopg.rows import class_row

from protocol.errors import ReplicaLive, ReplicaUnknown
from protocol.fleet import ReplicaView, Retirement
from protocol.operations import READ_OPERATIONS
from supervisor.fleet.effect_rows import lose_claimed

_REPLICAS = """SELECT r.replica_id, r.url, r.epoch, r.retired_at IS NULL AND r.expires_at > t AS lease_valid,
        extract(epoch FROM r.expires_at - t)::float8 AS lease_left_s, r.draining, r.running, r.queued,
        (SELECT count(*) FROM crew_supervisor.actions a WHERE a.replica_id = r.replica_id AND a.status IS NULL)
            AS unfinished,
        r.version, r.instance_id, extract(epoch FROM r.registered_at)::float8 AS registered_at,
        extract(epoch FROM r.retired_at)::float8 AS retired_at
    FROM crew_supervisor.replicas r, clock_timestamp() AS t ORDER BY r.replica_id"""

#: Why an outcome is unknown.
RETIRED = "replica_retired"


async def replicas(connection: AsyncConnection) -> list[ReplicaView]:
    """Every replica that there ever was, by id."""
    async with connection.cursor(row_factory=class_row(ReplicaView)) as cursor:
        await cursor.execute(_REPLICAS)
        return await cursor.fetchall()


async def retire(connection: AsyncConnection, replica_id: str, *, actor: str, evidence: str) -> Retirement:
    """Fail what a replica left unfinished and give its id to nobody again. Done twice, the first time counts.

    Raises ReplicaUnknown, and ReplicaLive while its lease is valid.
    """
    async with connection.transaction():
        # FOR UPDATE: what the replica has begun under its lease is committed before we look, and nothing comes after.
        locked = await connection.execute(
            """SELECT retired_at IS NOT NULL, extract(epoch FROM expires_at - clock_timestamp())::float8
               FROM crew_supervisor.replicas WHERE replica_id = %s FOR UPDATE""",
            (replica_id,),
        )
        found = await locked.fetchone()
        if found is None:
            raise ReplicaUnknown(f"the fleet has no replica {replica_id}; see `crew-supervisor fleet status`")
        retired, left_s = found
        if not retired:
            if left_s > 0:
                raise ReplicaLive(
                    f"the lease of replica {replica_id} is valid for {left_s:.1f} s yet; it is alive, or was a moment"
                    " ago: only one that is off for good is retired"
                )
            await _write_off(connection, replica_id, actor=actor, evidence=evidence)
        return await _retirement(connection, replica_id)


async def _write_off(connection: AsyncConnection, replica_id: str, *, actor: str, evidence: str) -> None:
    """What the replica has claimed becomes unknown with its Actions: nobody is left to say what became of it."""
    await lose_claimed(connection, replica_id, reason=RETIRED)
    await connection.execute(
        """UPDATE crew_supervisor.actions SET status = 'failed', uncertain = operation <> ALL(%s),
               said_by = 'retirement', ended_at = clock_timestamp() WHERE replica_id = %s AND status IS NULL""",
        ([operation.value for operation in READ_OPERATIONS], replica_id),
    )
    await connection.execute(
        """UPDATE crew_supervisor.replicas SET retired_at = clock_timestamp(), running = 0, queued = 0
           WHERE replica_id = %s""",
        (replica_id,),
    )
    await connection.execute(
        "INSERT INTO crew_supervisor.audit(replica_id, act, actor, evidence) VALUES(%s, 'retired', %s, %s)",
        (replica_id, actor, evidence),
    )


async def _retirement(connection: AsyncConnection, replica_id: str) -> Retirement:
    async with connection.cursor(row_factory=class_row(Retirement)) as cursor:
        await cursor.execute(
            """SELECT r.replica_id, extract(epoch FROM r.retired_at)::float8 AS retired_at, a.actor, a.evidence,
                   (SELECT count(*) FROM crew_supervisor.actions
                    WHERE replica_id = r.replica_id AND said_by = 'retirement') AS actions
               FROM crew_supervisor.replicas r JOIN crew_supervisor.audit a USING (replica_id)
               WHERE r.replica_id = %s AND a.act = 'retired'""",
            (replica_id,),
        )
        made = await cursor.fetchone()
    assert made is not None, "a retirement is audited in its transaction"
    return made
