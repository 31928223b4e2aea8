"""Many jobs want the same effect at the same moment: one charge at the provider."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest

from tests.effects.supervised.conftest import MakePayers
from tests.support.payers import IN_FLIGHT, INVOICE, Payers
from tests.support.scripts import at_once

CROWD = 50


def race(payers: Payers, size: int, invoice: str) -> list[dict[str, Any]]:
    """Let ``size`` jobs stand before their call, then go all at once; returns what each of the calls gave."""
    names = [f"{invoice}-{number}" for number in range(size)]

    def let_go() -> None:
        for name in names:
            payers.wait(name, "start")
        for name in names:
            payers.release(name, "start")

    outcomes = at_once(*(partial(payers.pay, name, invoice, holds=("start",)) for name in names), let_go)
    return [outcome for found in outcomes[:-1] for outcome in found]


def check_one_charge(payers: Payers, size: int, invoice: str = INVOICE) -> None:
    """One of them acts; the others get its receipt or hear that it is under way, and later ones get the receipt."""
    outcomes = race(payers, size, invoice)
    assert payers.charges(invoice) == 1, Counter(str(outcome) for outcome in outcomes)
    (charge,) = [charge for charge in payers.provider.charges() if charge["invoice"] == invoice]
    receipt = {"result": f"charge {charge['id']}"}
    assert len(outcomes) == size
    assert receipt in outcomes
    assert all(outcome in (receipt, {"code": IN_FLIGHT}) for outcome in outcomes), outcomes
    assert payers.pay(f"{invoice}-after", invoice) == [receipt]
    assert payers.charges(invoice) == 1


@pytest.mark.effect_case(1)
def test_of_8_jobs_on_one_key_one_acts(payers: Payers) -> None:
    for number in range(3):
        check_one_charge(payers, 8, f"eight{number}")


@pytest.mark.effect_case(2)
def test_of_50_jobs_on_one_key_one_acts(payers: Payers) -> None:
    check_one_charge(payers, CROWD, "fifty")


@pytest.mark.effect_case(3)
def test_while_one_job_acts_slowly_49_others_are_told_that_it_is_in_flight(payers: Payers) -> None:
    payers.begin("slow", "slow", until="charged")
    outcomes = race(payers, CROWD - 1, "slow")
    assert outcomes == [{"code": IN_FLIGHT}] * (CROWD - 1)
    view = payers.effect("slow")
    assert view is not None
    assert (view["state"], view["action_id"], view["replays"]) == ("claimed", "slow", 0)
    payers.release("slow", "charged")
    payers.ended("slow")
    assert payers.pay_one("slow-after", "slow").startswith("charge ")
    assert payers.charges("slow") == 1


def test_jobs_whose_tools_claim_nothing_all_act(make_payers: MakePayers) -> None:
    """The mutants of these checks: a worker without its guard, and a ledger that grants every claim."""
    for mutant in ({"registry": "tests.crews.unguarded_payers:CREWS"}, {"mutant": "granting"}):
        payers = make_payers(**mutant)
        with pytest.raises(AssertionError):
            check_one_charge(payers, 8)
        assert payers.charges() > 1
