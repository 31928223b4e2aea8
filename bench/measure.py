"""What a figure is, and how its steps are run: in rounds, one of each a round, so that neighbours hit all alike."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

#: What one run of a step measured: series name to values.
Values = Mapping[str, Sequence[float]]


class Series(NamedTuple):
    """One row of a figure's table; ``unit`` ms, MB, or ``count`` for what is added up."""

    name: str
    unit: str


class Step(NamedTuple):
    """One thing to measure. Runs in every ``every``-th round, the first included."""

    name: str
    run: Callable[[], Values]
    every: int = 1


class Scale(NamedTuple):
    """How much is measured."""

    rounds: int
    quick: bool


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
        """Start what the steps need, in ``directory``; everything is ended with the context."""
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
        }


def measure(figure: Figure, directory: Path, scale: Scale, say: Callable[[str], None]) -> list[Measured]:
    """Run the figure's steps in interleaved rounds, every other round backwards."""
    found: dict[str, list[list[float]]] = {series.name: [] for series in figure.series}
    with figure.open(directory, scale) as steps:
        for number in range(scale.rounds):
            due = [step for step in steps if number % step.every == 0]
            for step in due if number % 2 == 0 else reversed(due):
                say(f"{figure.name}: round {number + 1}/{scale.rounds}, {step.name}")
                for name, values in step.run().items():
                    found[name].append(list(values))
    return [Measured(series, found[series.name]) for series in figure.series]
