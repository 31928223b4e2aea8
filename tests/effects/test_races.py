"""Many real processes want the same effect at the same moment."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from demo.payments.provider import Provider
from protocol.states import EffectState
from worker.ledger import LocalLedger

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = 20
IN_FLIGHT = "effect_in_flight"


class Herd:
    """The processes of tests.effects.herd."""

    def __init__(
        self, size: int, ledger: Path, url: str, *, program: tuple[str, ...] = ("tests.effects.herd",)
    ) -> None:
        self.size = size
        self._process = subprocess.Popen(
            [sys.executable, "-m", *program, str(size), str(ledger), url],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def order(self, **order: str) -> None:
        """Let every process begin ``order``."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def outcomes(self, count: int | None = None) -> list[str]:
        """The next ``count`` answers, of all processes if it is not given."""
        assert self._process.stdout is not None
        lines = [self._process.stdout.readline() for _ in range(self.size if count is None else count)]
        return [json.loads(line)[1] for line in lines]

    def close(self) -> None:
        """Let them end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(60) == 0
        assert self._process.stdout is not None
        self._process.stdout.close()


MakeHerd = Callable[[int], Herd]


@pytest.fixture
def make_herd(path: Path, provider: Provider) -> Iterator[MakeHerd]:
    """Start herds at the one ledger and the one provider."""
    made: list[Herd] = []

    def make(size: int) -> Herd:
        made.append(Herd(size, path, provider.url))
        return made[-1]

    yield make
    for herd in made:
        herd.close()


@pytest.mark.parametrize(
    "size", [pytest.param(8, marks=pytest.mark.effect_case(1)), pytest.param(50, marks=pytest.mark.effect_case(2))]
)
def test_one_of_many_processes_acts_and_the_others_get_its_receipt_or_wait(
    size: int, make_herd: MakeHerd, provider: Provider
) -> None:
    herd = make_herd(size)
    for at in range(ROUNDS if size == 50 else 3):
        herd.order(do="pay", invoice=f"i{at}")
        outcomes = set(herd.outcomes())
        (charge,) = [charge for charge in provider.charges() if charge["invoice"] == f"i{at}"]
        assert f"charge {charge['id']}" in outcomes
        assert outcomes <= {f"charge {charge['id']}", IN_FLIGHT}
        herd.order(do="pay", invoice=f"i{at}")
        assert set(herd.outcomes()) == {f"charge {charge['id']}"}
    assert len(provider.charges()) == (ROUNDS if size == 50 else 3)


@pytest.mark.effect_case(3)
def test_while_one_process_acts_slowly_49_others_are_told_that_it_is_in_flight(
    make_herd: MakeHerd, provider: Provider
) -> None:
    herd = make_herd(50)
    provider.fault("hold")
    herd.order(do="pay", invoice="slow")
    assert Counter(herd.outcomes(49)) == {IN_FLIGHT: 49}
    provider.release()
    assert herd.outcomes(1) == ["charge 1"]
    assert len(provider.charges()) == 1


@pytest.mark.effect_case(4)
def test_50_processes_open_a_ledger_that_does_not_exist_yet_and_none_sees_an_error(
    make_herd: MakeHerd, tmp_path: Path
) -> None:
    herd = make_herd(50)
    for at in range(3):
        ledger = tmp_path / f"cold{at}.db"
        herd.order(do="open", ledger=str(ledger))
        assert Counter(herd.outcomes()) == {"settled": 50}
        opened = LocalLedger(ledger)
        assert len(opened.records(state=EffectState.SETTLED)) == 50
        assert opened.epoch == 51, "every process is an owner of its own"
        opened.close()
        assert stat.S_IMODE(os.stat(ledger).st_mode) == 0o600
