"""What the numbered cases of a list came to, printed at the end of a run."""

from __future__ import annotations

import importlib
import platform
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from _pytest.terminal import TerminalReporter

ROOT = Path(__file__).resolve().parents[2]
#: Outcomes from the one that says least to the one that decides.
OUTCOMES = ("passed", "skipped", "xfailed", "xpassed", "failed", "error")


class Numbered(NamedTuple):
    """The list behind a marker: tests with ``@pytest.mark.MARKER(number)`` prove its cases. ``prefix``: of a number."""

    marker: str
    numbers: range
    title: str
    prefix: str = ""

    def tag(self, items: Iterable[pytest.Item]) -> None:
        """Let the reports of ``items`` carry their case numbers."""
        for item in items:
            item.user_properties += [
                (self.marker, number) for mark in item.iter_markers(self.marker) for number in mark.args
            ]

    def carried(self, *directories: Path) -> dict[int, set[str]]:
        """The tests of the modules in ``directories``, subdirectories of ROOT, by the numbers that they carry."""
        found: dict[int, set[str]] = defaultdict(set)
        for directory in directories:
            for path in sorted(directory.rglob("test_*.py")):
                module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
                for name, function in vars(module).items():
                    if name.startswith("test_"):
                        for number in self._numbers_of(getattr(function, "pytestmark", ())):
                            found[number].add(f"{path.name}::{name}")
        return found

    def _numbers_of(self, marks: Iterable[Any]) -> Iterator[int]:
        """Those of the marks themselves and of the parameters that they bring."""
        for mark in marks:
            if mark.name == self.marker:
                yield from mark.args
            elif mark.name == "parametrize":
                for value in mark.args[1]:
                    yield from self._numbers_of(getattr(value, "marks", ()))

    def outcomes(self, reporter: TerminalReporter) -> dict[int, str]:
        """How each case that ran ended: a case passes when all of its tests do."""
        decided: dict[int, str] = {}
        for outcome in OUTCOMES:
            for report in reporter.getreports(outcome):
                for name, number in getattr(report, "user_properties", ()):
                    # A passed test has one report that counts; one that fails or cannot be set up has its own.
                    if name == self.marker:
                        decided[number] = outcome
        return decided

    def summarize(self, reporter: TerminalReporter) -> None:
        """Print it, if any case ran."""
        decided = self.outcomes(reporter)
        if not decided:
            return
        reporter.section(f"{self.title} on Python {platform.python_version()}")
        for outcome in OUTCOMES:
            numbers = [number for number, found in decided.items() if found == outcome]
            if numbers:
                reporter.line(f"{outcome}: {len(numbers)} ({self.ranges(numbers)})")
        missing = [number for number in self.numbers if number not in decided]
        if missing:
            reporter.line(f"not run: {len(missing)} ({self.ranges(missing)})")

    def ranges(self, numbers: Iterable[int]) -> str:
        """``1-3, 7`` for 1, 2, 3 and 7."""
        runs: list[list[int]] = []
        for number in sorted(set(numbers)):
            if runs and number == runs[-1][-1] + 1:
                runs[-1].append(number)
            else:
                runs.append([number])
        name = f"{self.prefix}{{:0{2 if self.prefix else 1}}}".format
        return ", ".join(name(run[0]) if len(run) == 1 else f"{name(run[0])}-{name(run[-1])}" for run in runs)


#: The wire contract's test list.
CASES = Numbered("case", range(1, 80), "cases of the wire contract")
#: The effect ledger's matrix.
EFFECT_CASES = Numbered("effect_case", range(1, 47), "cases of the effect ledger", prefix="E")
