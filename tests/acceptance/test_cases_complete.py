"""The lists of cases are whole: every number has a test that carries it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.numbered import CASES, EFFECT_CASES, Numbered

HERE = Path(__file__).parent
TESTS = HERE.parent


@pytest.mark.parametrize(
    ("cases", "directories"),
    [(CASES, [HERE]), (EFFECT_CASES, [TESTS / "effects", TESTS / "http", TESTS / "unit"])],
    ids=["wire", "effects"],
)
def test_every_case_has_a_test(cases: Numbered, directories: list[Path]) -> None:
    found = cases.carried(*directories)
    missing = [number for number in cases.numbers if number not in found]
    assert not missing, f"no test carries {cases.ranges(missing)}"
    assert not found.keys() - set(cases.numbers), "a test carries a number that the list does not have"


def test_ranges_are_short() -> None:
    assert CASES.ranges([7, 2, 1, 3, 3]) == "1-3, 7"
    assert CASES.ranges([5]) == "5"
    assert EFFECT_CASES.ranges([5, 6, 40]) == "E05-E06, E40"
