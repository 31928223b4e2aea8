"""The benchmarks still run: every figure at its smallest, each value a number, each baseline from the same run.

What the numbers are is not looked at: this is no place to measure.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench import targets
from bench.figures import FIGURES
from bench.goals import TARGETS
from bench.measure import Measured, Scale, Series, Size, Step, Unmet, measure

#: All of it takes half a minute on two idle processors.
pytestmark = pytest.mark.timeout(400)

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 350
#: Targets that need CrewAI, a large journal or many jobs: the smallest size has none of them.
NOT_MEASURED = {
    "admission to factory, p50",
    "admission to factory, p99",
    "admission to factory, 16 at once, p99",
    "cancel to proof, blocked in a thread, p50",
    "cancel to proof, blocked in a thread, p99",
    "admissions, fewer with 1,000,000 retained than with none",
    "processor time of an admission, more with 1,000,000 retained",
    "supervisor, more with 100,000 retained",
    "supervisor, growth from 1,000 to 10,000 jobs",
    "effects, 50 clients",
}


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What ``bench/main.py --smoke`` wrote."""
    path = tmp_path_factory.mktemp("bench") / "results.json"
    run = subprocess.run(
        [sys.executable, "bench/main.py", "--smoke", "--output", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    # The table is printed from the same document.
    assert "Targets" in run.stdout
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def test_every_figure_was_measured_and_says_on_what(document: dict[str, Any]) -> None:
    assert set(document) == {"at", "machine", "figures", "targets"}
    assert list(document["figures"]) == [figure.name for figure in FIGURES]
    assert document["machine"]["size"] == "smoke"
    assert {"cpu", "memory", "kernel", "python", "sqlite", "commit", "load"} <= set(document["machine"])


def test_every_value_is_a_finite_number(document: dict[str, Any]) -> None:
    for name, figure in document["figures"].items():
        assert figure["series"], f"{name} measured nothing"
        for series, found in figure["series"].items():
            values = [value for values in found["rounds"] for value in values]
            assert values, f"{name}: {series}"
            assert all(map(_is_number, values)), f"{name}: {series}: {values}"
            numbers = [found[key] for key in ("median", "p99", "min", "max", "sum", "last")]
            assert all(map(_is_number, numbers)), f"{name}: {series}: {found}"


def test_each_figure_has_its_baseline_in_the_same_run(document: dict[str, Any]) -> None:
    for name, figure in document["figures"].items():
        kinds = {found["baseline"] for found in figure["series"].values()}
        assert kinds == {True, False}, f"{name} has only {kinds}"


def test_nothing_survived_a_stop_and_something_survived_a_kill(document: dict[str, Any]) -> None:
    stops = document["figures"]["stop"]["series"]
    ours = {name: found for name, found in stops.items() if name.endswith(": survivors")}
    assert ours
    assert all(found["sum"] == 0 for found in ours.values())
    assert stops["kill the pid, survivors"]["sum"] > 0


def test_the_table_of_targets_reads_what_the_figures_say(document: dict[str, Any]) -> None:
    assert [row["what"] for row in document["targets"]] == [target.what for target in TARGETS]
    results = {name: figure["series"] for name, figure in document["figures"].items()}
    assert [row["value"] for row in document["targets"]] == [target.value(results) for target in TARGETS]
    assert {row["what"] for row in document["targets"] if row["value"] is None} == NOT_MEASURED


def test_every_target_reads_a_series_that_its_figure_has() -> None:
    everything = {
        figure.name: {series.name: {"median": 1.0, "p99": 1.0, "sum": 1.0, "last": 1.0} for series in figure.series}
        for figure in FIGURES
    }
    for target in TARGETS:
        assert target.value(everything) is not None, target.what
        assert target.baseline is None or target.baseline(everything) is not None, target.what


# --- the verdicts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "at_most", "verdict"),
    [
        (9.0, True, "reached"),
        (10.0, True, "reached"),
        (20.0, True, "FALLS SHORT 2.00x"),
        (11.0, False, "reached"),
        (5.0, False, "FALLS SHORT 2.00x"),
        (0.0, False, "FALLS SHORT 10000000000.00x"),
        (None, True, "not measured"),
    ],
)
def test_a_verdict_is_computed(value: float | None, at_most: bool, verdict: str) -> None:
    target = targets.Target("it", 10.0, "ms", lambda _: value, lambda _: 100.0, at_most=at_most)
    (judged,) = targets.judge({}, (target,))
    assert judged.verdict == verdict
    assert judged.met is (None if value is None else verdict == "reached")


def test_a_ratio_says_how_much_better_than_the_baseline() -> None:
    slower = targets.Target("ms", 10.0, "ms", lambda _: 5.0, lambda _: 50.0)
    faster = targets.Target("1/s", 10.0, "1/s", lambda _: 50.0, lambda _: 5.0, at_most=False)
    assert [judged.ratio for judged in targets.judge({}, (slower, faster))] == [10.0, 10.0]


# --- rounds -----------------------------------------------------------------------------------------------------------


class _Counted:
    """A figure whose steps note that they ran."""

    name = "counted"
    title = "Counted"
    notes = ()
    series = (Series("a", "ms"), Series("b", "ms"), Series("c", "ms", baseline=True))
    rounds = (1, 1)

    def __init__(self) -> None:
        self.ran: list[str] = []

    def open(self, directory: Path, scale: Scale) -> Any:
        @contextmanager
        def opened() -> Iterator[list[Step]]:
            yield [
                Step("a", lambda: self._note("a")),
                Step("b", lambda: self._note("b")),
                Step("c", lambda: self._note("c"), every=2),
                Step("not here", self._unmet),
            ]

        return opened()

    def _note(self, name: str) -> dict[str, list[float]]:
        self.ran.append(name)
        return {name: [float(len(self.ran))]}

    def _unmet(self) -> dict[str, list[float]]:
        self.ran.append("unmet")
        raise Unmet("no such kernel")


def test_rounds_are_interleaved_and_every_other_one_goes_backwards(tmp_path: Path) -> None:
    figure = _Counted()
    found = measure(figure, tmp_path, Scale(rounds=3, size=Size.SMOKE), lambda _: None)
    assert figure.ran == ["a", "b", "c", "unmet", "b", "a", "a", "b", "c"]
    assert found.unmet == {"not here": "no such kernel"}
    assert found.rounds == (3, 3)
    assert [len(measured.rounds) for measured in found.measured] == [3, 3, 2]


def test_no_round_begins_once_the_time_is_over(tmp_path: Path) -> None:
    figure = _Counted()
    found = measure(figure, tmp_path, Scale(rounds=3, size=Size.SMOKE, budget_s=0.0), lambda _: None)
    assert found.rounds == (1, 3)
    assert figure.ran == ["a", "b", "c", "unmet"]


def test_p99_is_by_nearest_rank() -> None:
    values = [float(number) for number in range(1, 201)]
    assert Measured(Series("a", "ms"), [values]).summary()["p99"] == 198.0
    assert Measured(Series("a", "ms"), [values[:99]]).summary()["p99"] == 99.0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
