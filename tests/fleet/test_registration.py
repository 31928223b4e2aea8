"""Registration, heartbeats and the fence in a real PostgreSQL: what is refused, what repeats, what cannot be said."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import Any

import msgspec
import psycopg
import pytest
from psycopg import AsyncConnection

from protocol.errors import LeaseInvalid, OwnerUnavailable
from supervisor.fleet import ownership, registration, schema
from supervisor.fleet.database import Line
from supervisor.fleet.lease import Payload, Request
from supervisor.fleet.registration import Beat, Granted, Rejected
from supervisor.ownership import OwnedElsewhere
from tests.fleet.conftest import Expire
from tests.support.journals import new_job
from tests.support.postgres import Postgres

LEASE_S = 30.0
SHORT_S = 0.2
QUIET = Beat(draining=False, running=0, queued=0)


def request(replica_id: str = "a", *, request_id: str = "r1", **changes: Any) -> Request:
    payload = Payload(
        replica_id=replica_id, url=f"http://{replica_id}", instance_id=f"journal of {replica_id}", journal_epoch=1,
        lease_s=LEASE_S, version="1",
    )  # fmt: skip
    return Request(request_id=request_id, payload=msgspec.structs.replace(payload, **changes))


async def register(line: Line, wanted: Request) -> Granted | Rejected:
    return await line.run(partial(registration.register, request=wanted))


async def renew(line: Line, epoch: int, beat: Beat = QUIET) -> None:
    await line.run(partial(registration.renew, replica_id="a", epoch=epoch, beat=beat))


async def take(line: Line, action_id: str, *, replica_id: str = "a", epoch: int = 1, **changes: Any) -> Any:
    """What stands against it: None if it was taken, else the row, or "fenced"."""
    new = new_job(action_id, **changes)
    left = await line.run(partial(ownership.take, wanted=[new], replica_id=replica_id, epoch=epoch))
    return None if action_id not in left else left[action_id] or "fenced"


# --- the schema ------------------------------------------------------------------------------------------------------


async def test_many_processes_make_the_schema_once(dsn: str, postgres: Postgres, database: str) -> None:
    lines = [Line(dsn, f"tests {number}", patience_s=20) for number in range(8)]
    verdicts = await asyncio.gather(*(register(line, request(f"r{n}")) for n, line in enumerate(lines)))
    assert verdicts == [Granted(1)] * 8
    assert postgres.ask(database, "SELECT version FROM crew_supervisor.schema") == [
        (version,) for version in range(1, schema.VERSION + 1)
    ]
    for line in lines:
        await line.close()


async def test_a_newer_schema_is_left_alone(line: Line, dsn: str, postgres: Postgres, database: str) -> None:
    await register(line, request())
    postgres.ask(database, "INSERT INTO crew_supervisor.schema(version) VALUES(99)")
    other = Line(dsn, "older", patience_s=10)
    with pytest.raises(Exception, match="schema has version 99"):
        await register(other, request("b"))
    await other.close()


# --- registration ----------------------------------------------------------------------------------------------------


async def test_an_id_whose_lease_is_valid_is_refused(line: Line) -> None:
    assert await register(line, request()) == Granted(1)
    refused = await register(line, request(request_id="r2"))
    assert isinstance(refused, Rejected)
    assert "still valid" in refused.why
    assert refused.wait_s is not None
    assert 0 < refused.wait_s <= LEASE_S


async def test_the_same_request_is_granted_once(line: Line, expire: Expire) -> None:
    first = request()
    assert await register(line, first) == Granted(1)
    assert await register(line, first) == Granted(1, repeated=True)
    expire("a")
    assert await register(line, first) == Granted(1, repeated=True)


async def test_the_same_request_id_with_other_material_is_refused(line: Line) -> None:
    await register(line, request())
    refused = await register(line, request(url="http://elsewhere"))
    assert isinstance(refused, Rejected)
    assert "another payload" in refused.why


async def test_every_registration_after_an_expiry_is_a_new_epoch(line: Line, expire: Expire) -> None:
    for epoch in (1, 2, 3):
        assert await register(line, request(request_id=f"r{epoch}")) == Granted(epoch)
        expire("a")


async def test_another_journal_cannot_take_the_id(line: Line, expire: Expire) -> None:
    await register(line, request())
    expire("a")
    refused = await register(line, request(request_id="r2", instance_id="another"))
    assert isinstance(refused, Rejected)
    assert "belongs to the journal" in refused.why


async def test_an_older_copy_of_the_journal_cannot_take_the_id(line: Line, expire: Expire) -> None:
    await register(line, request(journal_epoch=5))
    expire("a")
    refused = await register(line, request(request_id="r2", journal_epoch=4))
    assert isinstance(refused, Rejected)
    assert "newer copy" in refused.why
    assert await register(line, request(request_id="r3", journal_epoch=6)) == Granted(2)


async def test_of_many_that_register_at_once_one_is_granted(dsn: str, line: Line, expire: Expire) -> None:
    await register(line, request())
    expire("a")
    lines = [Line(dsn, f"tests {number}", patience_s=20) for number in range(6)]
    verdicts = await asyncio.gather(
        *(register(line, request(request_id=f"again {n}")) for n, line in enumerate(lines))
    )
    assert sorted(isinstance(verdict, Granted) for verdict in verdicts) == [False] * 5 + [True]
    for other in lines:
        await other.close()


# --- heartbeats ------------------------------------------------------------------------------------------------------


async def test_a_heartbeat_extends_the_lease_and_says_how_it_goes(
    line: Line, postgres: Postgres, database: str
) -> None:
    await register(line, request(lease_s=1000.0))
    before = postgres.ask(database, "SELECT expires_at FROM crew_supervisor.replicas")
    await renew(line, 1, Beat(draining=True, running=3, queued=4))
    after = postgres.ask(database, "SELECT expires_at, draining, running, queued FROM crew_supervisor.replicas")
    assert after[0][0] > before[0][0]
    assert after[0][1:] == (True, 3, 4)


async def test_a_heartbeat_revives_nothing(line: Line, expire: Expire, postgres: Postgres, database: str) -> None:
    await register(line, request())
    expire("a")
    with pytest.raises(LeaseInvalid):
        await renew(line, 1)
    alive = "SELECT expires_at > clock_timestamp() FROM crew_supervisor.replicas"
    assert postgres.ask(database, alive) == [(False,)]


async def test_a_heartbeat_of_an_older_epoch_is_refused(line: Line, expire: Expire) -> None:
    await register(line, request())
    expire("a")
    await register(line, request(request_id="r2"))
    with pytest.raises(LeaseInvalid):
        await renew(line, 1)
    await renew(line, 2)


async def test_a_lease_that_was_given_back_can_be_taken_at_once(line: Line) -> None:
    await register(line, request())
    await line.run(partial(registration.release, replica_id="a", epoch=1))
    assert await register(line, request(request_id="r2")) == Granted(2)


async def test_an_older_epoch_gives_nothing_back(line: Line, expire: Expire) -> None:
    await register(line, request())
    expire("a")
    await register(line, request(request_id="r2"))
    await line.run(partial(registration.release, replica_id="a", epoch=1))
    await renew(line, 2)


# --- the fence and the owner -----------------------------------------------------------------------------------------


async def test_an_action_is_taken_once_and_again_by_its_owner(line: Line) -> None:
    await register(line, request())
    await register(line, request("b"))
    assert await take(line, "x") is None
    assert await take(line, "x") is None
    found = await take(line, "x", replica_id="b")
    assert isinstance(ownership.refusal(found, "1" * 64, replica_id="b"), OwnedElsewhere)
    assert isinstance(ownership.refusal(found, "2" * 64, replica_id="b"), Exception)


async def test_without_a_lease_nothing_is_taken(line: Line, expire: Expire) -> None:
    await register(line, request())
    expire("a")
    assert await take(line, "x") == "fenced"


async def test_an_older_epoch_takes_nothing(line: Line, expire: Expire) -> None:
    await check_older_epoch(line, expire)


async def check_older_epoch(line: Line, expire: Expire) -> None:
    """What an epoch that is over writes is refused; the next one's is taken."""
    await register(line, request())
    expire("a")
    await register(line, request(request_id="r2"))
    assert await take(line, "x", epoch=1) == "fenced"
    assert await take(line, "x", epoch=2) is None


async def test_an_owner_without_a_lease_is_named(line: Line, expire: Expire) -> None:
    await register(line, request())
    await register(line, request("b"))
    await take(line, "x")
    expire("a")
    refused = ownership.refusal(await take(line, "x", replica_id="b"), "1" * 64, replica_id="b")
    assert isinstance(refused, OwnerUnavailable)
    assert "replica a" in refused.detail


async def test_a_registration_waits_for_what_the_older_epoch_has_begun(dsn: str, line: Line) -> None:
    """Else an insert that looked before the registration could be committed after it."""
    await register(line, request(lease_s=SHORT_S))
    async with await AsyncConnection.connect(dsn) as slow:
        new = new_job("x")
        await ownership.take(slow, [new], replica_id="a", epoch=1)
        await asyncio.sleep(SHORT_S)
        registering = asyncio.ensure_future(register(line, request(request_id="r2")))
        done, _ = await asyncio.wait({registering}, timeout=0.3)
        assert not done, "it was granted while a write of the older epoch was under way"
        await slow.commit()
        assert await registering == Granted(2)


async def test_the_cheapest_fence_lets_heartbeats_pass(dsn: str, line: Line) -> None:
    await register(line, request())
    async with await AsyncConnection.connect(dsn) as slow:
        await ownership.take(slow, [new_job("x")], replica_id="a", epoch=1)
        async with asyncio.timeout(5):
            await renew(line, 1)
        await slow.rollback()


async def test_two_replicas_that_want_the_same_in_another_order_do_not_block_each_other(dsn: str, line: Line) -> None:
    names = [f"n{number}" for number in range(200)]
    await register(line, request())
    await register(line, request("b"))
    wanted = {"a": [new_job(name) for name in names], "b": [new_job(name) for name in reversed(names)]}
    other = Line(dsn, "b", patience_s=10)
    left_a, left_b = await asyncio.gather(
        line.run(partial(ownership.take, wanted=wanted["a"], replica_id="a", epoch=1)),
        other.run(partial(ownership.take, wanted=wanted["b"], replica_id="b", epoch=1)),
    )
    assert not left_a.keys() & left_b.keys()
    assert left_a.keys() | left_b.keys() == set(names)
    await other.close()


# --- what cannot be written ------------------------------------------------------------------------------------------

FORBIDDEN = [
    "UPDATE crew_supervisor.actions SET status = 'completed'",
    "UPDATE crew_supervisor.actions SET status = 'running', uncertain = false, said_by = 'owner', ended_at = now()",
    "UPDATE crew_supervisor.actions SET status = 'completed', uncertain = true, said_by = 'owner', ended_at = now()",
    "UPDATE crew_supervisor.actions SET replica_id = 'b'",
    "UPDATE crew_supervisor.actions SET epoch = 0",
    "UPDATE crew_supervisor.actions SET request_hash = repeat('2', 64)",
    "DELETE FROM crew_supervisor.actions",
    "INSERT INTO crew_supervisor.actions(action_id, request_hash, crew_id, operation, replica_id, epoch)"
    " VALUES('y', repeat('1', 64), 'c', 'run', 'nobody', 1)",
    "INSERT INTO crew_supervisor.actions(action_id, request_hash, crew_id, operation, replica_id, epoch)"
    " VALUES('a b', repeat('1', 64), 'c', 'run', 'a', 1)",
    "UPDATE crew_supervisor.replicas SET epoch = epoch - 1 WHERE replica_id = 'a'",
    "UPDATE crew_supervisor.replicas SET journal_epoch = 0 WHERE replica_id = 'a'",
    "UPDATE crew_supervisor.replicas SET instance_id = 'other'",
    "UPDATE crew_supervisor.replicas SET retired_at = now()",
    "DELETE FROM crew_supervisor.replicas",
    "INSERT INTO crew_supervisor.audit(replica_id, act, actor, evidence) VALUES('a', 'retired', 'me', '')",
]


@pytest.mark.parametrize("statement", FORBIDDEN)
async def test_an_impossible_state_cannot_be_written(
    line: Line, postgres: Postgres, database: str, statement: str
) -> None:
    await register(line, request())
    await register(line, request("b"))
    await take(line, "x")
    with pytest.raises((psycopg.errors.IntegrityError, psycopg.errors.RaiseException)):
        postgres.ask(database, statement)


async def test_a_terminal_record_never_changes(line: Line, postgres: Postgres, database: str) -> None:
    await register(line, request())
    await take(line, "x")
    end = "UPDATE crew_supervisor.actions SET status = %s, uncertain = true, said_by = 'owner', ended_at = now()"
    postgres.ask(database, end, "failed")
    with pytest.raises(psycopg.errors.RaiseException):
        postgres.ask(database, end, "cancelled")


# --- the line --------------------------------------------------------------------------------------------------------


async def test_a_connection_that_was_cut_is_made_anew(line: Line, postgres: Postgres, database: str) -> None:
    await register(line, request())
    cut = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'crew-supervisor%'"
    postgres.ask(database, cut)
    assert await take(line, "x") is None


async def test_a_statement_that_hangs_is_left_and_the_line_goes_on(dsn: str, postgres: Postgres, database: str) -> None:
    line = Line(dsn, "tests", patience_s=1)

    async def hang(connection: AsyncConnection) -> None:
        await connection.execute("SET statement_timeout = 0")
        await connection.execute("SELECT pg_sleep(60)")

    await register(line, request())
    with pytest.raises(Exception, match="did not answer within 1 s"):
        await line.run(hang)
    with contextlib.suppress(Exception):
        await take(line, "x")  # refused for a moment, so that callers do not queue up
    await asyncio.sleep(0.3)
    assert await take(line, "x") is None
    await line.close()
