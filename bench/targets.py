"""What is to be reached, and a verdict that is computed from what was measured in the same run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

#: Figure to series to summary (``Measured.summary``).
Results = Mapping[str, Mapping[str, Mapping[str, Any]]]
Reading = Callable[[Results], float | None]


class Target(NamedTuple):
    """One row of the table. ``baseline`` is read in the same run; ``at_most``: smaller is better."""

    what: str
    bound: float
    unit: str
    value: Reading
    baseline: Reading | None = None
    at_most: bool = True


class Judged(NamedTuple):
    """A target and what came of it."""

    target: Target
    value: float | None
    baseline: float | None

    @property
    def ratio(self) -> float | None:
        """How many times better than the baseline."""
        if not self.value or not self.baseline:
            return None
        return self.baseline / self.value if self.target.at_most else self.value / self.baseline

    @property
    def met(self) -> bool | None:
        """Whether the target was reached; None where nothing was measured."""
        if self.value is None:
            return None
        return self.value <= self.target.bound if self.target.at_most else self.value >= self.target.bound

    @property
    def verdict(self) -> str:
        """In words, with how far it is away."""
        if self.value is None:
            return "not measured"
        if self.met:
            return "reached"
        worst = self.value / self.target.bound if self.target.at_most else self.target.bound / max(self.value, 1e-9)
        return f"FALLS SHORT {worst:.2f}x"

    def document(self) -> dict[str, Any]:
        """For the file."""
        return {
            "what": self.target.what,
            "at_most": self.target.at_most,
            "bound": self.target.bound,
            "unit": self.target.unit,
            "value": self.value,
            "baseline": self.baseline,
            "ratio": self.ratio,
            "met": self.met,
        }


def judge(results: Results, targets: tuple[Target, ...]) -> list[Judged]:
    """A verdict for every target."""
    return [
        Judged(target, target.value(results), target.baseline(results) if target.baseline is not None else None)
        for target in targets
    ]


def read(figure: str, series: str, statistic: str = "median") -> Reading:
    """A number of a summary; None where it was not measured."""

    def reading(results: Results) -> float | None:
        found = results.get(figure, {}).get(series, {}).get(statistic)
        return None if found is None else float(found)

    return reading


def fewer(one: Reading, other: Reading) -> Reading:
    """By how much the one is below the other, percent; 0 where it is not."""

    def reading(results: Results) -> float | None:
        first, second = one(results), other(results)
        return None if first is None or not second else max(0.0, 1 - first / second) * 100

    return reading


def above(one: Reading, other: Reading) -> Reading:
    """By how much the one is above the other, percent; 0 where it is not."""

    def reading(results: Results) -> float | None:
        first, second = one(results), other(results)
        return None if first is None or not second else max(0.0, first / second - 1) * 100

    return reading


def sum_of(figure: str, *series: str) -> Reading:
    """Counts added up; None where none was measured."""

    def reading(results: Results) -> float | None:
        found = [results.get(figure, {}).get(name, {}).get("sum") for name in series]
        known = [float(value) for value in found if value is not None]
        return sum(known) if known else None

    return reading


def more(one: Reading, other: Reading) -> Reading:
    """By how much the one is above the other, in its unit; below 0 where it is not."""

    def reading(results: Results) -> float | None:
        first, second = one(results), other(results)
        return None if first is None or second is None else first - second

    return reading
