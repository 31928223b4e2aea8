"""A process is killed at each moment of a call. Whoever comes next may rely on what the ledger says."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from demo.payments.provider import Provider
from protocol.errors import EffectInFlight, EffectOutcomeUnknown
from protocol.states import EffectState
from tests.effects.dying import pay
from worker.effect import effect
from worker.guarding.session import Session
from worker.ledger import LocalLedger

ROOT = Path(__file__).resolve().parents[2]


def kill_at(moment: str, path: Path, provider: Provider) -> None:
    """Let a process pay invoice 17 and be killed at ``moment``."""
    command = [sys.executable, "-m", "tests.effects.dying", moment, str(path), provider.url]
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr


def only_state(path: Path) -> EffectState:
    """The state of the one effect, as the next owner sees it."""
    ledger = LocalLedger(path)
    (record,) = ledger.records()
    ledger.close()
    return record.state


@pytest.mark.effect_case(5)
def test_killed_before_the_claim_is_durable_leaves_nothing_and_the_next_call_acts(
    path: Path, provider: Provider
) -> None:
    kill_at("before_claim_commits", path, provider)
    ledger = LocalLedger(path)
    assert ledger.records() == []
    ledger.close()
    with effect.ledger(path, action="next"):
        assert pay(provider.url)("17", 120.0) == "charge 1"
    assert len(provider.charges()) == 1


@pytest.mark.effect_case(6)
def test_killed_before_the_effect_is_unknown_and_nobody_claims_that_it_happened(path: Path, provider: Provider) -> None:
    kill_at("before_effect", path, provider)
    with effect.ledger(path, action="next"), pytest.raises(EffectOutcomeUnknown, match="nobody knows") as refused:
        pay(provider.url)("17", 120.0)
    assert "its process is gone" in refused.value.detail
    assert provider.charges() == []
    assert only_state(path) is EffectState.UNKNOWN


@pytest.mark.effect_case(7)
def test_killed_after_the_effect_is_unknown_and_a_retry_is_blocked(path: Path, provider: Provider) -> None:
    kill_at("after_effect", path, provider)
    with effect.ledger(path, action="next"), pytest.raises(EffectOutcomeUnknown):
        pay(provider.url)("17", 120.0)
    assert len(provider.charges()) == 1
    assert only_state(path) is EffectState.UNKNOWN


@pytest.mark.effect_case(8)
def test_killed_before_the_caller_heard_is_settled_undelivered_and_a_retry_gets_the_receipt(
    path: Path, provider: Provider
) -> None:
    kill_at("before_delivery", path, provider)
    ledger = LocalLedger(path)
    (record,) = ledger.records()
    assert (record.state, record.delivered_at) == (EffectState.SETTLED, None)
    with effect.ledger(path, action="next"):
        assert pay(provider.url)("17", 120.0) == "charge 1"
    (record,) = ledger.records()
    assert record.delivered_at is not None
    assert len(provider.charges()) == 1
    ledger.close()


@pytest.mark.effect_case(9)
def test_killed_after_the_delivery_is_settled_and_a_retry_gets_the_receipt(path: Path, provider: Provider) -> None:
    kill_at("after_delivery", path, provider)
    with effect.ledger(path, action="next"):
        assert pay(provider.url)("17", 120.0) == "charge 1"
    assert len(provider.charges()) == 1
    assert only_state(path) is EffectState.SETTLED


def test_a_claim_of_a_dead_owner_becomes_unknown_when_it_is_met_by_one_who_had_opened_before(
    here: Session, path: Path, provider: Provider
) -> None:
    kill_at("before_effect", path, provider)
    with pytest.raises(EffectOutcomeUnknown):
        pay(provider.url)("17", 120.0)


def test_a_claim_of_a_living_owner_is_in_flight_however_often_the_ledger_is_opened(
    here: Session, path: Path, provider: Provider
) -> None:
    with effect.claim("pay", key="17", args={"invoice": "17", "amount": 120}, scope="global") as call:
        child = subprocess.run(
            [sys.executable, "-m", "tests.effects.dying", "never", str(path), provider.url],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert "EffectInFlight" in child.stderr, child.stderr
        call.settle()
    assert provider.charges() == []


def test_a_claim_in_one_process_is_in_flight_in_another(here: Session, path: Path, provider: Provider) -> None:
    provider.fault("hold")
    command = [sys.executable, "-m", "tests.effects.dying", "never", str(path), provider.url]
    with subprocess.Popen(command, cwd=ROOT) as child:
        while not provider.charges():
            assert child.poll() is None
        with pytest.raises(EffectInFlight):
            pay(provider.url)("17", 120.0)
        provider.release()
        assert child.wait(60) == 0
    assert pay(provider.url)("17", 120.0) == "charge 1"
