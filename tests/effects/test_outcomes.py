"""What a body returns or raises, and what a repeat of its call then gets."""

from __future__ import annotations

import asyncio
import math
import threading
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import (
    EffectNotOpen,
    EffectOutcomeUnknown,
)
from protocol.states import EffectState
from tests.effects.conftest import Counted, only, records
from worker.effect import NotApplied, effect
from worker.guarding.receipts import NOT_STORED
from worker.guarding.session import Session
from worker.ledger import LocalLedger

ROOT = Path(__file__).resolve().parents[2]
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")


@pytest.mark.effect_case(26)
@pytest.mark.parametrize(
    "result",
    [None, (1, 2), [(1,)], {1: "a"}, {"a": {1}}, b"bytes", math.nan, object(), "x" * 65_536, True.__class__, "\ud800"],
    ids=lambda value: repr(value)[:20],
)
def test_a_result_that_cannot_be_given_back_exactly_is_settled_and_never_run_again(
    result: Any, here: Session, acted: Counted
) -> None:
    @effect(key="invoice")
    def act(invoice: str) -> Any:
        acted()
        return result

    assert act("17") is result
    assert (only(here).state, only(here).receipt) == (EffectState.SETTLED, None)
    assert act("17") == NOT_STORED
    assert len(acted) == 1


@pytest.mark.parametrize(
    "result",
    ["", "\u00e9\U0001f600", 0, -1, 2**60, 1.5, -0.0, True, False, [], {}, [None, {"a": [1.0, 1, True]}], "x" * 65_534],
    ids=lambda value: repr(value)[:20],
)
def test_a_stored_result_comes_back_as_it_was(result: Any, here: Session) -> None:
    act = effect(key=lambda: "k", tool="act")(lambda: result)
    assert repr(act()) == repr(act()) == repr(result)
    assert only(here).receipt is not None


@pytest.mark.effect_case(27)
def test_a_call_that_was_not_applied_can_be_made_again(here: Session, acted: Counted) -> None:
    @effect(key="invoice")
    def act(invoice: str) -> str:
        acted()
        if len(acted) == 1:
            raise NotApplied("the card was refused")
        return "paid"

    with pytest.raises(NotApplied, match="the card was refused"):
        act("17")
    assert only(here).state is EffectState.NOT_APPLIED
    assert act("17") == "paid"
    assert (only(here).state, only(here).attempt) == (EffectState.SETTLED, 2)


class Odd(Exception):
    pass


RAISED = [TimeoutError, ConnectionError, Odd, KeyboardInterrupt, SystemExit, GeneratorExit]


@pytest.mark.effect_case(28)
@pytest.mark.effect_case(29)
@pytest.mark.parametrize("kind", RAISED)
@pytest.mark.parametrize("key", [None, "invoice"])
def test_whatever_a_body_raises_leaves_the_outcome_unknown_and_the_repeat_blocked(
    kind: type[BaseException], key: str | None, here: Session, acted: Counted
) -> None:
    error = kind("as it was")

    @effect(key=key)
    def act(invoice: str) -> None:
        acted()
        raise error

    with pytest.raises(kind) as raised:
        act("17")
    assert raised.value is error
    assert (only(here).state, only(here).reason) == (EffectState.UNKNOWN, kind.__name__)
    for _ in range(2):
        with pytest.raises(EffectOutcomeUnknown, match=kind.__name__):
            act("17")
    assert len(acted) == 1


@pytest.mark.effect_case(29)
async def test_a_cancelled_coroutine_leaves_the_outcome_unknown(here: Session, acted: Counted) -> None:
    begun = asyncio.Event()

    @effect(key="invoice")
    async def act(invoice: str) -> None:
        acted()
        begun.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(act("17"))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (only(here).state, only(here).reason) == (EffectState.UNKNOWN, "CancelledError")
    with pytest.raises(EffectOutcomeUnknown):
        await act("17")
    assert len(acted) == 1


async def test_a_coroutine_that_is_cancelled_while_it_claims_leaves_no_claim(
    here: Session, monkeypatch: pytest.MonkeyPatch, acted: Counted
) -> None:
    claiming, go_on = threading.Event(), threading.Event()
    claim = LocalLedger.claim

    def slow(ledger: LocalLedger, wanted: Any) -> Any:
        claiming.set()
        assert go_on.wait(30)
        return claim(ledger, wanted)

    @effect(key="invoice")
    async def act(invoice: str) -> None:
        acted()

    monkeypatch.setattr(LocalLedger, "claim", slow)
    task = asyncio.create_task(act("17"))
    assert await asyncio.to_thread(claiming.wait, 30)
    task.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert only(here).state is EffectState.NOT_APPLIED
    assert len(acted) == 0
    await act("17")
    assert len(acted) == 1


async def test_waiting_for_the_ledger_does_not_hold_the_event_loop(
    here: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim, turned = LocalLedger.claim, threading.Event()

    def claim_after_a_turn(ledger: LocalLedger, wanted: Any) -> Any:
        assert turned.wait(30), "the loop stood still"
        return claim(ledger, wanted)

    @effect
    async def act() -> str:
        return "done"

    monkeypatch.setattr(LocalLedger, "claim", claim_after_a_turn)
    task = asyncio.create_task(act())
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_later(0.01, turned.set)
    assert await task == "done"




def test_a_block_claims_settles_and_replays(here: Session) -> None:
    seen = []
    for _ in range(2):
        with effect.claim("charge", key="17", args={"amount": 3}) as call:
            if not call.replayed:
                call.settle({"id": 1})
            seen.append((call.replayed, call.receipt, call.provider_key))
    key_id = only(here).key_id
    assert seen == [(False, None, key_id), (True, {"id": 1}, key_id)]


async def test_an_asynchronous_block_does_the_same(here: Session) -> None:
    seen = []
    for _ in range(2):
        async with effect.claim("charge", key="17", args={"amount": 3}) as call:
            if not call.replayed:
                await call.settle({"id": 1})
            seen.append((call.replayed, call.receipt))
    assert seen == [(False, None), (True, {"id": 1})]


@pytest.mark.parametrize(
    ("leave", "state", "reason"),
    [
        (None, EffectState.UNKNOWN, "left without an outcome"),
        (TimeoutError, EffectState.UNKNOWN, "TimeoutError"),
        (KeyboardInterrupt, EffectState.UNKNOWN, "KeyboardInterrupt"),
        (NotApplied, EffectState.NOT_APPLIED, ""),
    ],
)
async def test_leaving_a_block_without_an_outcome_makes_that_unknown(
    leave: type[BaseException] | None, state: EffectState, reason: str, here: Session
) -> None:
    def act() -> None:
        with effect.claim("charge", key="sync", args={}):
            if leave is not None:
                raise leave

    async def act_async() -> None:
        async with effect.claim("charge", key="async", args={}):
            if leave is not None:
                raise leave

    if leave is None:
        act()
        await act_async()
    else:
        with pytest.raises(leave):
            act()
        with pytest.raises(leave):
            await act_async()
    assert [(record.state, record.reason) for record in records(here)] == [(state, reason)] * 2


def test_a_block_has_one_outcome(here: Session) -> None:
    with effect.claim("charge", key="17", args={}) as call:
        call.not_applied()
        with pytest.raises(EffectNotOpen):
            call.settle()
    assert only(here).state is EffectState.NOT_APPLIED
    with effect.claim("charge", key="17", args={}) as call:
        call.settle()
    with effect.claim("charge", key="17", args={}) as call, pytest.raises(EffectNotOpen):
        call.settle()


@pytest.mark.effect_case(36)
async def test_a_block_that_was_left_without_an_outcome_may_still_be_settled_once(here: Session) -> None:
    """Late, by whoever still has the call: nothing else ends it from here."""
    with pytest.raises(TimeoutError), effect.claim("charge", key="17", args={}) as call:
        raise TimeoutError
    with pytest.raises(EffectNotOpen):
        call.not_applied()
    assert only(here).state is EffectState.UNKNOWN
    call.settle("late")
    assert (only(here).state, only(here).receipt) == (EffectState.SETTLED, b'"late"')
    with pytest.raises(EffectNotOpen):
        call.settle("later")
    with pytest.raises(NotApplied):
        async with effect.claim("charge", key="18", args={}) as refused:
            raise NotApplied
    with pytest.raises(EffectNotOpen):
        await refused.settle()
    async with effect.claim("charge", key="19", args={}) as left:
        pass
    await left.settle("late")
    assert [record.state.value for record in records(here)] == ["settled", "not_applied", "settled"]


def test_a_tool_that_calls_another_claims_both_and_its_own_repeat_meets_them_again(
    path: Path, acted: Counted
) -> None:
    @effect
    def inner(to: str) -> str:
        acted(to)
        return to

    @effect
    def outer(to: str) -> list[str]:
        acted("outer")
        return [inner(to), inner(to)]

    for _ in range(2):
        with effect.ledger(path, action="a") as session:
            assert outer("x") == ["x", "x"]
            assert outer("x") == ["x", "x"]
            assert inner("x") == "x"
    assert len(acted) == 2 + 4 + 1
    assert len(records(session)) == 7
