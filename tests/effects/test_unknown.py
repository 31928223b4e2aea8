"""Asking the provider, the passing of time, and what a record shows."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from demo.payments.provider import Provider
from protocol import jcs
from protocol.effects import key_id_of
from protocol.errors import (
    EffectInFlight,
    EffectOutcomeUnknown,
)
from protocol.states import EffectState
from tests.effects.conftest import Counted, only
from tests.effects.dying import pay
from worker.effect import effect, not_applied, settled, unknown
from worker.guarding.session import Session
from worker.ledger import LocalLedger

ROOT = Path(__file__).resolve().parents[2]
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")


def unsettled(reconcile: Any, acted: Counted) -> Callable[[str], Any]:
    """A call whose outcome is unknown already."""

    @effect(key="invoice", reconcile=reconcile, tool="act")
    def act(invoice: str) -> str:
        acted()
        if len(acted) == 1:
            raise TimeoutError
        return "acted again"

    with pytest.raises(TimeoutError):
        act("17")
    made: Callable[[str], Any] = act
    return made


def test_a_provider_that_knows_the_effect_gives_its_receipt(here: Session, acted: Counted) -> None:
    asked = []

    def ask(key_id: str, tool: str, args: dict[str, Any]) -> Any:
        asked.append((key_id, tool, args))
        return settled({"id": 7}, evidence="charge 7")

    act = unsettled(ask, acted)
    assert act("17") == {"id": 7}
    record = only(here)
    assert asked == [(record.key_id, "act", {"invoice": "17"})]
    assert (record.state, record.evidence, record.decision) == (EffectState.SETTLED, "charge 7", "settled")
    assert record.actor == f"{__name__}:{ask.__qualname__}"
    assert len(acted) == 1


def test_a_provider_that_never_saw_the_call_lets_it_be_made(here: Session, acted: Counted) -> None:
    act = unsettled(lambda *_: not_applied(), acted)
    assert act("17") == "acted again"
    assert (only(here).state, only(here).attempt) == (EffectState.SETTLED, 2)


def broken(*_: Any) -> NoReturn:
    raise ConnectionError


@pytest.mark.effect_case(40)
@pytest.mark.parametrize(
    "ask", [lambda *_: unknown(), broken, lambda *_: "settled", lambda *_: None, f"{__name__}:missing"]
)
def test_a_provider_that_does_not_know_either_leaves_it_unknown(ask: Any, here: Session, acted: Counted) -> None:
    act = unsettled(ask, acted)
    for _ in range(2):
        with pytest.raises(EffectOutcomeUnknown):
            act("17")
    assert only(here).state is EffectState.UNKNOWN
    assert len(acted) == 1


def test_while_two_ask_one_finding_is_recorded(here: Session, acted: Counted) -> None:
    def ask(key_id: str, tool: str, args: dict[str, Any]) -> Any:
        if not acted.calls.count(("asked",)):
            acted("asked")
            assert act("17") == "found"
        return settled("found")

    act = unsettled(ask, acted)
    assert act("17") == "found"
    assert only(here).state is EffectState.SETTLED




def age(path: Path, seconds: float) -> None:
    """Make every record older."""
    ledger = LocalLedger(path)
    with ledger._using() as connection:
        connection.execute(
            "UPDATE effects SET claimed_at = claimed_at - ?, settled_at = settled_at - ?", (seconds, seconds)
        )
    ledger.close()


@pytest.mark.effect_case(41)
@pytest.mark.parametrize("seconds", [3600.0, -3600.0, 365 * 86400.0])
def test_age_never_turns_a_claim_into_permission(seconds: float, path: Path, acted: Counted) -> None:
    with effect.ledger(path, action="a"), effect.claim("charge", key="open", args={}) as opened:
        with pytest.raises(TimeoutError), effect.claim("charge", key="unknown", args={}):
            raise TimeoutError
        with effect.claim("charge", key="settled", args={}) as call:
            call.settle("receipt")
        age(path, seconds)
        with pytest.raises(EffectInFlight), effect.claim("charge", key="open", args={}):
            acted()
        with pytest.raises(EffectOutcomeUnknown), effect.claim("charge", key="unknown", args={}):
            acted()
        with effect.claim("charge", key="settled", args={}) as call:
            assert (call.replayed, call.receipt) == (True, "receipt")
        opened.settle()
    assert len(acted) == 0


@pytest.mark.effect_case(41)
@pytest.mark.parametrize("jump", ["+1h", "-1h", "+1y"])
def test_a_process_whose_clock_jumps_decides_the_same(
    jump: str, path: Path, provider: Provider, here: Session
) -> None:
    """The child's wall clock is libfaketime's where that is installed, else its time.time."""
    pay(provider.url)("17", 120.0)
    with pytest.raises(OSError):
        pay("http://127.0.0.1:1")("18", 1.0)
    environment = {**os.environ}
    if FAKETIME.exists():
        environment |= {"LD_PRELOAD": str(FAKETIME), "FAKETIME": jump, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    child = subprocess.run(
        [sys.executable, "-m", "tests.effects.clock", str(path), provider.url, jump],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert child.stdout.split() == ["charge", "1", "effect_outcome_unknown"], child.stderr
    assert len(provider.charges()) == 1




@pytest.mark.effect_case(46)
def test_a_replay_is_counted_delivery_is_noted_once_and_the_key_can_be_recomputed(here: Session) -> None:
    @effect(key=lambda invoice, **_: ["invoice", invoice], scope="global")
    def act(invoice: str, amount: float) -> str:
        return "paid"

    act("17", 1.0)
    first = only(here)
    assert first.delivered_at is not None
    act("17", 1.0)
    act("17", 1.0)
    last = only(here)
    assert (last.replays, last.delivered_at) == (2, first.delivered_at)
    assert key_id_of(last.preimage) == last.key_id
    assert last.preimage == jcs.encode(["effect/1", "global", "", "act", ["key", ["invoice", "17"]]])
    assert last.args_hash == jcs.digest({"invoice": "17", "amount": 1})


def test_threads_of_one_process_share_a_ledger(here: Session, acted: Counted) -> None:
    begin = threading.Barrier(16)
    outcomes: list[str] = []

    @effect(key="invoice")
    def act(invoice: str) -> str:
        acted()
        return "paid"

    def run() -> None:
        begin.wait(30)
        try:
            with session_of(here):
                outcomes.append(act("17"))
        except EffectInFlight:
            outcomes.append("in flight")

    threads = [threading.Thread(target=run) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(acted) == 1
    assert set(outcomes) <= {"paid", "in flight"}
    assert len(outcomes) == 16


def session_of(here: Session) -> Any:
    from worker.guarding import session

    return session.using(here)


def test_a_fork_is_an_owner_of_its_own(here: Session, path: Path) -> None:
    assert isinstance(here.ledger, LocalLedger)
    ours = here.ledger.epoch
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        status = 1
        try:
            with effect.claim("charge", key="in the child", args={}) as call:
                call.settle()
            os.write(writing, str(here.ledger.epoch).encode())
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert int(os.read(reading, 20)) > ours
    assert here.ledger.epoch == ours
    assert only(here).state is EffectState.SETTLED
