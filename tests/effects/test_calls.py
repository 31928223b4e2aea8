"""Without a ledger nothing is done; keys and arguments decide which calls are the same."""

from __future__ import annotations

import datetime
import decimal
import math
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from demo.payments.provider import Provider
from protocol.errors import (
    EffectConflict,
    EffectLedgerUnavailable,
    EffectOutcomeUnknown,
    NotCanonical,
)
from protocol.states import EffectState
from tests.effects.conftest import Counted, only, records
from worker.effect import EffectPolicyError, effect
from worker.guarding.session import Session
from worker.ledger import LocalLedger

ROOT = Path(__file__).resolve().parents[2]
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")


@pytest.mark.effect_case(12)
def test_without_a_ledger_nothing_is_done(acted: Counted) -> None:
    act = effect(tool="act")(acted)
    with pytest.raises(EffectLedgerUnavailable, match="use_ledger"):
        act()
    assert len(acted) == 0


@pytest.mark.effect_case(12)
@pytest.mark.parametrize("damage", ["directory_gone", "no_database", "a_directory"])
def test_with_a_ledger_that_cannot_be_opened_nothing_is_done(damage: str, tmp_path: Path) -> None:
    path = tmp_path / ("gone/effects.db" if damage == "directory_gone" else "effects.db")
    if damage == "no_database":
        path.write_bytes(b"this is no database" * 1000)
    elif damage == "a_directory":
        path.mkdir()
    with pytest.raises(EffectLedgerUnavailable):
        effect.use_ledger(path, action="a")


@pytest.mark.effect_case(12)
def test_with_a_ledger_that_fails_later_nothing_is_done(here: Session, path: Path, acted: Counted) -> None:
    act = effect(tool="act")(acted)
    here.ledger.close()
    path.write_bytes(b"this is no database" * 1000)
    with pytest.raises(EffectLedgerUnavailable):
        act("17")
    assert len(acted) == 0


@pytest.mark.effect_case(13)
def test_an_outcome_that_cannot_be_recorded_is_unknown_and_the_caller_gets_no_result(
    here: Session, monkeypatch: pytest.MonkeyPatch, acted: Counted
) -> None:
    def fail(*_: Any, **__: Any) -> NoReturn:
        raise EffectLedgerUnavailable("the disk is full")

    @effect
    def act() -> str:
        acted()
        return "done"

    with monkeypatch.context() as patched:
        patched.setattr(LocalLedger, "settle", fail)
        with pytest.raises(EffectOutcomeUnknown, match="could not be recorded"):
            act()
    assert only(here).state is EffectState.UNKNOWN
    with pytest.raises(EffectOutcomeUnknown):
        act()
    assert len(acted) == 1



FIELDS: dict[str, tuple[Any, Any]] = {
    "text": ("a", "b"),
    "accent": ("\u00e9", "e\u0301"),
    "empty": ("", None),
    "whole": (1, 2),
    "share": (0.1, 0.10000000000000002),
    "yes": (True, 1),
    "nothing": (None, False),
    "day": (datetime.date(2026, 1, 1), datetime.date(2026, 1, 2)),
    "price": (decimal.Decimal("1.10"), decimal.Decimal("1.11")),
    "id": (uuid.UUID(int=1), uuid.UUID(int=2)),
    "rows": ([1, 2], [2, 1]),
    "nested": ({"a": {"b": [1]}}, {"a": {"b": [2]}}),
}


@pytest.mark.effect_case(15)
@pytest.mark.parametrize("changed", FIELDS)
def test_the_same_key_with_one_changed_argument_is_a_conflict(changed: str, here: Session, acted: Counted) -> None:
    assert len(FIELDS) == 12

    @effect(key=lambda **_: "the key")
    def act(**fields: Any) -> str:
        acted(fields)
        return "done"

    first = {name: values[0] for name, values in FIELDS.items()}
    assert act(**first) == "done"
    with pytest.raises(EffectConflict):
        act(**first | {changed: FIELDS[changed][1]})
    assert act(**first) == "done"
    assert len(acted) == 1


@pytest.mark.effect_case(16)
def test_other_keys_with_the_same_arguments_are_other_effects(here: Session, acted: Counted) -> None:
    for key in ("a", "b"):
        with effect.claim("charge", key=key, args={"amount": 1}) as call:
            acted()
            call.settle()
    assert len(acted) == 2


@pytest.mark.effect_case(23)
def test_a_new_action_acts_again_unless_a_business_key_reaches_farther(path: Path, acted: Counted) -> None:
    @effect
    def per_action(invoice: str) -> None:
        acted("action")

    @effect(key="invoice", scope="crew")
    def per_crew(invoice: str) -> None:
        acted("crew")

    @effect(key="invoice", scope="global")
    def anywhere(invoice: str) -> None:
        acted("global")

    for action, crew in (("a", "x"), ("b", "x"), ("c", "y")):
        with effect.ledger(path, action=action, crew=crew):
            for act in (per_action, per_crew, anywhere):
                act("17")
    assert [what for (what,) in acted.calls].count("action") == 3
    assert [what for (what,) in acted.calls].count("crew") == 2
    assert [what for (what,) in acted.calls].count("global") == 1


@pytest.mark.effect_case(24)
def test_reworded_arguments_under_a_business_key_are_a_conflict_unless_they_are_volatile(
    here: Session, acted: Counted
) -> None:
    @effect(key="invoice", volatile=("memo",))
    def act(invoice: str, amount: float, memo: str) -> str:
        acted()
        return "paid"

    assert act("17", 10.0, "as agreed") == "paid"
    assert act("17", 10, "As we agreed.") == "paid"
    with pytest.raises(EffectConflict):
        act("17", 10.5, "as agreed")
    assert len(acted) == 1


def test_without_a_key_equal_calls_are_told_apart_by_their_order(path: Path, acted: Counted) -> None:
    @effect
    def act(to: str) -> int:
        acted(to)
        return len(acted)

    for _ in range(2):
        with effect.ledger(path, action="a"):
            assert [act("x"), act("y"), act("x")] == [1, 2, 3]
    assert len(acted) == 3


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, b"bytes", {1}, frozenset(), "\ud800", 2**53, {1: 2}, object(), iter(()), [{"deep": b""}]],
    ids=repr,
)
@pytest.mark.effect_case(45)
def test_arguments_without_a_canonical_form_are_refused_before_the_claim(
    value: Any, here: Session, acted: Counted
) -> None:
    act = effect(tool="act")(acted)
    with pytest.raises(NotCanonical):
        act(value)
    assert len(acted) == 0
    assert records(here) == []


def test_a_key_that_is_none_or_that_raises_is_refused(here: Session, acted: Counted) -> None:
    for key in (lambda **_: None, lambda **args: args["missing"]):
        with pytest.raises(NotCanonical):
            effect(key=key, tool="act")(acted)(1)
    assert len(acted) == 0


def test_a_wrong_policy_is_found_when_it_is_written() -> None:
    def act(invoice: str) -> None: ...

    def rows() -> Any:
        yield 1

    for wrong in (
        lambda: effect(key="number")(act),
        lambda: effect(volatile="memo")(act),
        lambda: effect(pass_key_as="key")(act),
        lambda: effect(scope="global")(act),
        lambda: effect(scope="galaxy", key="invoice")(act),
        lambda: effect(policy="twice")(act),
        lambda: effect(rows),
    ):
        with pytest.raises(EffectPolicyError):
            wrong()


def test_the_provider_key_is_the_key_id_and_can_be_passed_as_an_argument(here: Session, acted: Counted) -> None:
    @effect(key="invoice", policy="provider", pass_key_as="idempotency_key")
    def act(invoice: str, idempotency_key: str = "") -> None:
        acted(idempotency_key, effect.provider_key())

    act("17")
    key_id = only(here).key_id
    assert acted.calls == [(key_id, key_id)]
    assert effect.provider_key() is None


def test_with_the_policy_provider_an_unknown_outcome_is_tried_again_under_the_same_key(
    here: Session, make_provider: Callable[..., Provider]
) -> None:
    provider = make_provider(idempotent=True)
    provider.fault("lose_ack")

    @effect(key="invoice", policy="provider")
    def act(invoice: str) -> Any:
        from demo.payments import provider as payments

        return payments.charge(provider.url, invoice, 1.0, key=effect.provider_key())["id"]

    with pytest.raises(OSError):
        act("17")
    assert only(here).state is EffectState.UNKNOWN
    assert act("17") == 1
    assert (only(here).state, only(here).attempt) == (EffectState.SETTLED, 2)
    assert len(provider.charges()) == 1
