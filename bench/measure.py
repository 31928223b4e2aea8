"""What a figure is, and how its steps are run: in rounds, one of each a round, so that neighbours hit all alike."""

from __future__ import annotations

import enum
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from bench import machine

T = TypeVar("T")
#: What one run of a step measured: series name to values.
Values = Mapping[str, Sequence[float]]


class Series(NamedTuple):
    """One row of a figure's table. ``unit``: ``count`` for what is added up. ``baseline``: not ours, for comparison."""

    name: str
    unit: str
    baseline: bool = False


class Step(NamedTuple):
    """One thing to measure. Runs in every ``every``-th round, the first included."""

    name: str
    run: Callable[[], Values]
    every: int = 1


class Unmet(Exception):
    """A step's conditions are not met on this machine; the text says which, and stands in the table."""


class Size(enum.IntEnum):
    """How large the steps are: the smallest that is one at all, below two minutes, ten minutes, every cell."""

    SMOKE = 0
    QUICK = 1
    NORMAL = 2
    FULL = 3


class Scale(NamedTuple):
    """How much is measured. After ``budget_s`` no further round begins."""

    rounds: int
    size: Size
    budget_s: float = math.inf

    @property
    def quick(self) -> bool:
        """Whether it must not take long."""
        return self.size <= Size.QUICK

    def pick(self, smoke: T, quick: T, normal: T, full: T) -> T:
        """The one for this size."""
        return (smoke, quick, normal, full)[self.size]


class Figure(Protocol):
    """A figure: its rows, and its steps once it is opened. ``rounds``: unless the command line says: quick, full."""

    @property
    def name(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def notes(self) -> tuple[str, ...]: ...
    @property
    def series(self) -> tuple[Series, ...]: ...
    @property
    def rounds(self) -> tuple[int, int]: ...

    def open(self, directory: Path, scale: Scale) -> AbstractContextManager[Sequence[Step]]:
        """Start what the steps need, in ``directory``; everything is ended with the context. Raises Unmet."""
        ...


class Measured(NamedTuple):
    """A series with its values, one list a round in which it was measured."""

    series: Series
    rounds: list[list[float]]

    @property
    def values(self) -> list[float]:
        """All values."""
        return [value for values in self.rounds for value in values]

    def summary(self) -> dict[str, Any]:
        """Numbers for the table and the file. ``p99`` is by nearest rank: below 100 values it is the largest."""
        values = sorted(self.values)
        if not values:
            return {"n": 0}
        medians = [statistics.median(values) for values in self.rounds if values]
        return {
            "n": len(values),
            "median": statistics.median(values),
            "p99": values[math.ceil(0.99 * len(values)) - 1],
            "min": values[0],
            "max": values[-1],
            "round_medians": [min(medians), max(medians)],
            "sum": sum(values),
            "last": self.values[-1],
        }


class Found(NamedTuple):
    """A figure's results. ``unmet``: step to why it could not be measured. Loads are one-minute averages.

    ``rounds``: how many there were, and how many there should have been.
    """

    measured: list[Measured]
    unmet: dict[str, str]
    load: tuple[str, str]
    seconds: float
    rounds: tuple[int, int]


def measure(figure: Figure, directory: Path, scale: Scale, say: Callable[[str], None]) -> Found:
    """Run the figure's steps in interleaved rounds, every other round backwards."""
    found: dict[str, list[list[float]]] = {series.name: [] for series in figure.series}
    unmet: dict[str, str] = {}
    began, load, done = time.monotonic(), machine.load(), 0
    try:
        with figure.open(directory, scale) as steps:
            for number in range(scale.rounds):
                if number and time.monotonic() - began > scale.budget_s:
                    break
                due = [step for step in steps if number % step.every == 0 and step.name not in unmet]
                for step in due if number % 2 == 0 else reversed(due):
                    say(f"{figure.name}: round {number + 1}/{scale.rounds}, {step.name}")
                    try:
                        values = step.run()
                    except Unmet as why:
                        unmet[step.name] = str(why)
                        continue
                    for name, measured in values.items():
                        found[name].append(list(measured))
                done += 1
    except Unmet as why:
        unmet[figure.name] = str(why)
    measured_series = [Measured(series, found[series.name]) for series in figure.series]
    spent = time.monotonic() - began
    return Found(measured_series, unmet, (load, machine.load()), spent, (done, scale.rounds))
