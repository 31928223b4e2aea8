"""A worker's operation whose tools take effect: claims over its pipe, policies, and the refusal of wrong ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.effects import Policy, Scope, ToolPolicy
from protocol.states import EffectState
from tests.process.operation_child import Child, Order, importer
from tests.support.memory_ledger import MemoryLedger

SPEC = "tests.crews.paying_crews:CREWS"
Run = Callable[..., Child]


@pytest.fixture(scope="module", autouse=True)
def _server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One process that imports CrewAI, for all tests of this module."""
    with importer(tmp_path_factory.mktemp("home"), "tests.crews.paying_crews"):
        yield


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Start operations; each is a process, and gone after the test."""
    made: list[Child] = []

    def start(crew_id: str, *, ledger: MemoryLedger | None = None, **options: Any) -> Child:
        order = Order(
            root=tmp_path,
            spec=SPEC,
            crew_id=crew_id,
            operation="run",
            input={},
            job=f"job{len(made)}",
            **options,
        )
        made.append(Child(order))
        if ledger is not None:
            made[-1].ledger = ledger
        return made[-1]

    yield start
    for child in made:
        child.kill()


def lines(path: Path) -> list[str]:
    """What was done."""
    file = path / "crew" / "home" / "effects"
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []


def test_an_effect_is_claimed_settled_and_delivered_over_the_pipe(run: Run, tmp_path: Path) -> None:
    child = run("decorated")
    assert child.output()["raw"] == "17 1"
    (record,) = child.ledger.records.values()
    assert (record.state, record.receipt, record.tool) == (EffectState.SETTLED, b'"17 1"', "pay")
    assert record.delivered_at is not None
    assert (record.scope, record.scope_id) == (Scope.ACTION, "operation")
    assert lines(tmp_path) == ["17"]


def test_the_same_action_on_the_same_ledger_gets_the_receipt(run: Run, tmp_path: Path) -> None:
    first = run("decorated")
    assert first.output()["raw"] == "17 1"
    assert run("decorated", ledger=first.ledger).output()["raw"] == "17 1"
    assert lines(tmp_path) == ["17"]


def test_a_tool_that_cannot_be_decorated_is_guarded_by_the_registry(run: Run, tmp_path: Path) -> None:
    child = run("third_party")
    assert child.output()["raw"] == "17 1"
    (record,) = child.ledger.records.values()
    assert record.replays == 1
    assert lines(tmp_path) == ["17"]


def test_the_configuration_goes_before_the_registry_and_the_decorator(run: Run, tmp_path: Path) -> None:
    by_decorator = run("twice")
    assert by_decorator.output()["raw"] == "17 2"
    configured = {"pay": ToolPolicy(key=("invoice",), volatile=("memo",), scope=Scope.CREW)}
    by_configuration = run("twice", effects=configured)
    assert by_configuration.output()["raw"] == "17 3"
    (record,) = by_configuration.ledger.records.values()
    assert (record.scope, record.scope_id, record.replays) == (Scope.CREW, "twice", 1)
    unclaimed = run("third_party", effects={"Third Party": ToolPolicy(policy=Policy.READ)})
    assert unclaimed.output()["raw"] == "17 5"
    assert unclaimed.ledger.records == {}


@pytest.mark.parametrize(
    ("crew_id", "effects", "named"),
    [
        ("unknown_tool", {}, ["'fourth_party'", "Third Party"]),
        ("decorated", {"charge": ToolPolicy()}, ["'charge'", "pay"]),
        ("unknown_argument", {}, ["'number'", "invoice, memo"]),
        ("decorated", {"pay": ToolPolicy(volatile=("note",))}, ["'note'", "invoice, memo"]),
        ("decorated", {"pay": ToolPolicy(pass_key_as="key")}, ["'key'", "invoice, memo"]),
        ("decorated", {"pay": ToolPolicy(scope=Scope.GLOBAL)}, ["needs a key"]),
        ("decorated", {"pay": ToolPolicy(reconcile="tests.nowhere:ask")}, ["tests.nowhere:ask"]),
    ],
)
def test_a_policy_that_names_what_there_is_not_stops_the_job_before_the_crew_is_called(
    crew_id: str, effects: dict[str, ToolPolicy], named: list[str], run: Run, tmp_path: Path
) -> None:
    failure = run(crew_id, effects=effects).failure()
    assert (failure.error_type, failure.dispatched) == ("EffectPolicyError", False)
    assert all(name in failure.detail for name in named), failure.detail
    assert lines(tmp_path) == []
