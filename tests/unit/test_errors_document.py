"""The table of errors: complete, without doubles, and the same in the document as in the code."""

from __future__ import annotations

from collections import Counter

from docs import generate
from protocol.errors import CrewError
from supervisor.http.declare import UNROUTED
from supervisor.http.routes import Routes


def test_the_document_is_what_the_table_says() -> None:
    written = generate.ERRORS.read_text(encoding="utf-8")
    assert written == generate.errors_document(), "out of date; run python -m docs.generate"


def test_every_code_belongs_to_one_class() -> None:
    counts = Counter(error.code for error in generate.error_classes())
    assert {code for code, count in counts.items() if count > 1} == set()


def test_every_class_is_met_by_a_route_or_marked_as_met_elsewhere() -> None:
    for error in generate.error_classes():
        by_route = bool(generate.routes_of(error)) or error in UNROUTED or error is CrewError
        assert by_route != (error.code in generate.ELSEWHERE), f"{error.code} must be one of the two"


def test_nothing_is_marked_that_does_not_exist() -> None:
    assert generate.ELSEWHERE.keys() <= {error.code for error in generate.error_classes()}


def test_every_class_says_what_it_means() -> None:
    for error in generate.error_classes():
        assert vars(error)["__doc__"], f"{error.__name__} has no docstring"
        assert "title" in vars(error), f"{error.__name__} has the title of another class"


def test_a_refusal_before_any_effect_is_of_the_class_that_callers_take_for_certain() -> None:
    """Wire contract, 16.7: a status from 500 up tells the caller that something may have happened."""
    uncertain = {error.code for route in Routes.table() for error in route.all_errors if error.status >= 500}
    assert uncertain == {
        "action_failed", "action_timed_out", "fleet_unavailable", "journal_full", "journal_unavailable",
        "lease_invalid", "not_accepting", "owner_unavailable", "stop_unconfirmed",
    }  # fmt: skip
