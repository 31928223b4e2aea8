"""The checks of this folder fail where the mechanism that they are about is broken."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.payments.provider import Provider
from protocol import effects
from protocol.effects import EffectRecord
from tests.effects.conftest import Counted
from tests.effects.dying import pay
from tests.effects.test_deaths import kill_at
from tests.effects.test_races import Herd
from worker import ledger
from worker.effect import effect
from worker.guarding.places import Ordinals
from worker.guarding.session import Session


@pytest.fixture
def hasty(path: Path, provider: Provider) -> Iterator[Herd]:
    """Sixteen processes whose ledger takes no lock."""
    herd = Herd(16, path, provider.url, program=("tests.effects.broken", "hasty"))
    yield herd
    herd.close()


def test_a_ledger_that_takes_no_lock_loses_the_race(hasty: Herd, provider: Provider) -> None:
    for at in range(5):
        hasty.order(do="pay", invoice=f"i{at}")
        hasty.outcomes()
    assert len(provider.charges()) > 5


def test_a_ledger_that_takes_a_dead_owners_claim_for_free_pays_twice(
    path: Path, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = ledger._lost

    def freed(connection: sqlite3.Connection, record: EffectRecord | None) -> EffectRecord | None:
        if record is None or lost(connection, record) is None:
            return None
        return effects.not_applied(record, epoch=record.epoch)

    monkeypatch.setattr(ledger, "_lost", freed)
    kill_at("after_effect", path, provider)
    with effect.ledger(path, action="next"):
        pay(provider.url)("17", 120.0)
    assert len(provider.charges()) == 2


def test_counting_calls_that_raised_lets_their_repeat_act(
    here: Session, acted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    @effect
    def act() -> None:
        acted()
        raise TimeoutError

    monkeypatch.setattr(Ordinals, "raised", lambda *_: None)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            act()
    assert len(acted) == 3
