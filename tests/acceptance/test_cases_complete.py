"""The list of cases is whole: every number has a test here that carries it."""

from __future__ import annotations

import importlib
from collections import defaultdict
from pathlib import Path

from tests.acceptance.conftest import CASES, ranges


def carried() -> dict[int, set[str]]:
    """The tests of this directory by the case numbers that they are marked with."""
    found: dict[int, set[str]] = defaultdict(set)
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        module = importlib.import_module(f"tests.acceptance.{path.stem}")
        for name, function in vars(module).items():
            if name.startswith("test_"):
                for mark in getattr(function, "pytestmark", ()):
                    if mark.name == "case":
                        for number in mark.args:
                            found[number].add(f"{path.name}::{name}")
    return found


def test_every_case_has_a_test() -> None:
    found = carried()
    missing = [number for number in CASES if number not in found]
    assert not missing, f"no test carries {ranges(missing)}"
    assert not found.keys() - set(CASES), "a test carries a number that the list does not have"


def test_ranges_are_short() -> None:
    assert ranges([7, 2, 1, 3, 3]) == "1-3, 7"
    assert ranges([5]) == "5"
