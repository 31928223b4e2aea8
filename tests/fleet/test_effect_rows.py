"""Shared effects in a real PostgreSQL: the fence, lost answers, and a table that forbids what the states forbid."""

from __future__ import annotations

import asyncio
import itertools
from functools import partial
from typing import Any

import msgspec
import psycopg
import pytest
from psycopg import AsyncConnection

from protocol.effects import Claim, EffectRecord, Granted, Policy, key_id_of
from protocol.errors import EffectInFlight
from protocol.states import EFFECT_TRANSITIONS, EffectState, EffectStep
from supervisor.fleet import effect_rows, effect_steps
from supervisor.fleet.database import FENCE, Line
from supervisor.fleet.deciding import Request, decide
from supervisor.fleet.effect_rows import Fenced, Row
from tests.fleet.conftest import Expire
from tests.fleet.test_registration import register, request
from tests.support.effects import claim_of, in_state, key_of

CROWD = 40


def claiming(wanted: Claim, *, replica_id: str = "a", claim_id: str = "c-1") -> Request:
    """What a replica asks for a worker of its."""
    step = partial(effect_steps.claim, wanted=wanted, claim_id=claim_id, replica_id=replica_id, epoch=1, at=10.0)
    return Request(key_id_of(wanted.preimage), step, guess=None)


async def ask(line: Line, *requests: Request, replica_id: str = "a", epoch: int = 1) -> list[object]:
    return await line.run(partial(decide, requests=requests, replica_id=replica_id, epoch=epoch))


@pytest.fixture
async def table(line: Line) -> Line:
    """A database in which ``a`` and ``b`` are registered."""
    await register(line, request("a"))
    await register(line, request("b"))
    return line


async def found(line: Line, name: str = "invoice-1") -> Row | None:
    rows = await line.run(partial(effect_rows.load, key_ids=[key_of(name).key_id]))
    return rows.get(key_of(name).key_id)


async def check_fence(table: Line, expire: Expire) -> None:
    """Nothing is written in an epoch that is over, be there a new one or none."""
    expire("a")
    with pytest.raises(Fenced):
        await ask(table, claiming(claim_of()))
    assert await found(table) is None
    await register(table, request("a", request_id="r2"))
    with pytest.raises(Fenced):
        await ask(table, claiming(claim_of()), epoch=1)
    assert await found(table) is None
    (answer,) = await ask(table, claiming(claim_of()), epoch=2)
    assert isinstance(answer, Granted)


async def test_a_claim_in_an_epoch_that_is_over_is_refused_and_leaves_nothing(table: Line, expire: Expire) -> None:
    await check_fence(table, expire)


async def test_the_check_fails_without_the_fence(table: Line, expire: Expire, monkeypatch: pytest.MonkeyPatch) -> None:
    condition = " AND epoch = %(epoch)s AND retired_at IS NULL AND expires_at > clock_timestamp()"
    assert condition in " ".join(FENCE.split())
    open_fence = b"fence AS (SELECT replica_id, %(epoch)s::bigint AS epoch FROM crew_supervisor.replicas" + (
        b" WHERE replica_id = %(replica)s)"
    )
    monkeypatch.setattr(effect_rows, "_STORE", effect_rows._STORE.replace(FENCE.encode(), open_fence))
    assert open_fence in effect_rows._STORE
    with pytest.raises(pytest.fail.Exception):
        await check_fence(table, expire)


async def test_of_many_claims_at_once_on_many_connections_one_is_granted(dsn: str, table: Line) -> None:
    lines = [Line(dsn, f"tests {number}", patience_s=30) for number in range(4)]
    for round_number in range(5):
        wanted = claim_of(f"race-{round_number}")
        asked = [
            ask(
                lines[number % 4],
                *(claiming(wanted, replica_id="ab"[number % 2], claim_id=f"c-{number}-{at}") for at in range(5)),
                replica_id="ab"[number % 2],
            )
            for number in range(CROWD // 5)
        ]
        answers = list(itertools.chain.from_iterable(await asyncio.gather(*asked)))
        assert sum(isinstance(answer, Granted) for answer in answers) == 1
        assert all(isinstance(answer, Granted | EffectInFlight) for answer in answers)
    for one in lines:
        await one.close()


async def test_a_claim_whose_answer_was_lost_is_found_again_and_granted_once(table: Line) -> None:
    asked = claiming(claim_of()), claiming(claim_of(), claim_id="c-2")
    first = await ask(table, *asked)
    again = await ask(table, *asked)
    for granted, refused in (first, again):
        assert isinstance(granted, Granted)
        assert isinstance(refused, EffectInFlight)
    assert first[0] == again[0]
    row = await found(table)
    assert row is not None
    assert (row.record.attempt, row.record.version, row.claim_id) == (1, 1, "c-1")


async def test_a_claim_that_was_given_up_is_taken_back_and_no_other(table: Line) -> None:
    await ask(table, claiming(claim_of()))
    key_id = key_of().key_id
    (missed,) = await ask(table, Request(key_id, partial(effect_steps.withdraw, claim_id="c-2")))
    assert missed is False
    (taken,) = await ask(table, Request(key_id, partial(effect_steps.withdraw, claim_id="c-1")))
    assert taken is True
    row = await found(table)
    assert row is not None
    assert row.record.state is EffectState.NOT_APPLIED
    (answer,) = await ask(table, claiming(claim_of(), replica_id="b", claim_id="c-3"), replica_id="b")
    assert isinstance(answer, Granted)
    assert answer.record.attempt == 2


async def test_what_one_turn_decides_of_a_key_is_what_one_after_the_other_would(table: Line) -> None:
    """A claim is told lost and its key claimed again in one go; the table sees both moves."""
    wanted = claim_of(policy=Policy.PROVIDER)
    (granted,) = await ask(table, claiming(wanted))
    assert isinstance(granted, Granted)
    lost = msgspec.structs.replace(granted.record, state=EffectState.UNKNOWN, reason="worker_died", version=2)
    telling = Request(key_of().key_id, partial(effect_steps.adopt, local=lost, replica_id="a"))
    answers = await ask(
        table, telling, claiming(wanted, claim_id="c-2"), claiming(wanted, claim_id="c-3"), replica_id="a"
    )
    assert isinstance(answers[1], Granted)
    assert (answers[1].record.attempt, answers[1].record.version) == (2, 3)
    assert isinstance(answers[2], EffectInFlight)


async def test_a_report_of_another_replica_does_not_count(table: Line) -> None:
    (granted,) = await ask(table, claiming(claim_of()))
    assert isinstance(granted, Granted)
    settled = msgspec.structs.replace(granted.record, state=EffectState.SETTLED, settled_at=11.0, version=2)
    telling = Request(key_of().key_id, partial(effect_steps.adopt, local=settled, replica_id="b"))
    (answer,) = await ask(table, telling, replica_id="b")
    assert isinstance(answer, effect_steps.Overruled)
    assert (await found(table)).record == granted.record  # type: ignore[union-attr]


async def test_text_that_the_database_cannot_store_blocks_nothing(table: Line) -> None:
    wanted = claim_of(action_id="a-1", preimage=key_of(tool="p\0y").preimage)
    (answer,) = await ask(table, claiming(wanted))
    assert isinstance(answer, Granted)
    (again,) = await ask(table, claiming(wanted, claim_id="c-2"))
    assert isinstance(again, EffectInFlight)


#: What may become of a state without a new claim, from the table of states.
LEGAL = {
    (was, now)
    for (was, step), now in EFFECT_TRANSITIONS.items()
    if was is not None and step not in (EffectStep.CLAIM, EffectStep.REPEAT)
}


def _stored(record: EffectRecord, *, attempt: int) -> Row:
    named = msgspec.structs.replace(record, attempt=attempt)
    return Row(record=named, replica_id="a", replica_epoch=1, claim_id="c")


async def _write(connection: AsyncConnection, *, row: Row, made_from: int) -> bool:
    """Whether the table takes it."""
    try:
        rows = {row.record.key_id: (row, made_from)}
        return bool(await effect_rows.store(connection, rows, replica_id="a", epoch=1))
    except psycopg.errors.RaiseException:
        return False


@pytest.mark.parametrize("was", EffectState)
async def test_the_table_takes_the_moves_of_the_states_and_no_other(table: Line, was: EffectState) -> None:
    """Written by hand past every step: the trigger alone decides."""
    for now, again in itertools.product(EffectState, (False, True)):
        name = f"{was}-{now}-{again}"
        record = msgspec.structs.replace(
            in_state(was), key_id=key_of(name).key_id, preimage=key_of(name).preimage, version=1
        )
        target = msgspec.structs.replace(in_state(now), key_id=record.key_id, preimage=record.preimage, version=2)
        assert await table.run(partial(_write, row=_stored(record, attempt=1), made_from=0))
        legal = (was in (EffectState.NOT_APPLIED, EffectState.UNKNOWN)) if again else was is now or (was, now) in LEGAL
        moving = partial(_write, row=_stored(target, attempt=1 + again), made_from=1)
        assert await table.run(moving) is legal, name


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM crew_supervisor.effects",
        "UPDATE crew_supervisor.effects SET args_hash = 'x', version = version + 1",
        "UPDATE crew_supervisor.effects SET reason = 'x'",
        "UPDATE crew_supervisor.effects SET replica_id = 'b', version = version + 1",
        "UPDATE crew_supervisor.effects SET receipt = 'x', version = version + 1",
        "UPDATE crew_supervisor.effects SET state = 'free', version = version + 1",
        "UPDATE crew_supervisor.effects SET state = 'settled', version = version + 1",
    ],
)
async def test_no_hand_makes_a_claim_vanish_or_another(table: Line, statement: str) -> None:
    await ask(table, claiming(claim_of()))

    async def tamper(connection: AsyncConnection) -> Any:
        with pytest.raises((psycopg.errors.RaiseException, psycopg.errors.CheckViolation)):
            await connection.execute(statement.encode())

    await table.run(tamper)
    assert not isinstance((await ask(table, claiming(claim_of(), claim_id="c-2")))[0], Granted)


async def test_a_start_makes_unknown_what_earlier_processes_left_and_nothing_of_its_own(table: Line) -> None:
    await ask(table, claiming(claim_of("early")))
    await ask(table, claiming(claim_of("others"), replica_id="b"), replica_id="b")
    losing = partial(effect_rows.lose_earlier, replica_id="a", epoch=1, reason="supervisor_restarted")
    assert await table.run(partial(losing, before=1)) == 0
    assert await table.run(partial(losing, before=2, epoch=7)) == 0, "the fence"
    assert await table.run(partial(losing, before=2)) == 1
    assert await table.run(partial(losing, before=2)) == 0
    row, other = await found(table, "early"), await found(table, "others")
    assert row is not None
    assert other is not None
    assert (row.record.state, other.record.state) == (EffectState.UNKNOWN, EffectState.CLAIMED)
