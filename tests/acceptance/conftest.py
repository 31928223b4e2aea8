"""Fixtures of the acceptance tests; and what the numbered cases of the wire contract came to, at the end of a run."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from _pytest.terminal import TerminalReporter

from tests.support.client import Client
from tests.support.server import Server

#: Numbers of the cases in the list.
CASES = range(1, 80)
_HERE = Path(__file__).parent
_PROPERTY = "case"
#: Outcomes from the one that says least to the one that decides.
_OUTCOMES = ("passed", "skipped", "xfailed", "xpassed", "failed", "error")


@pytest.fixture
def client(server: Server) -> Client:
    """A client of the module's server."""
    return server.client()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """For calls that wait."""
    with ThreadPoolExecutor(8) as pool:
        yield pool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the reports of this directory's tests carry their case numbers."""
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.user_properties += [
                (_PROPERTY, number) for mark in item.iter_markers(_PROPERTY) for number in mark.args
            ]


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    """Print which case numbers ran, and how each of them ended: a case passes when all of its tests do."""
    decided: dict[int, str] = {}
    for outcome in _OUTCOMES:
        for report in terminalreporter.getreports(outcome):
            for name, number in getattr(report, "user_properties", ()):
                # A passed test has one report that counts; one that fails or cannot be set up has its own.
                if name == _PROPERTY:
                    decided[number] = outcome
    if not decided:
        return
    terminalreporter.section(f"cases of the wire contract on Python {platform.python_version()}")
    for outcome in _OUTCOMES:
        numbers = [number for number, found in decided.items() if found == outcome]
        if numbers:
            terminalreporter.line(f"{outcome}: {len(numbers)} ({ranges(numbers)})")
    missing = [number for number in CASES if number not in decided]
    if missing:
        terminalreporter.line(f"not run: {len(missing)} ({ranges(missing)})")


def ranges(numbers: Iterable[int]) -> str:
    """``1-3, 7`` for 1, 2, 3 and 7."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
