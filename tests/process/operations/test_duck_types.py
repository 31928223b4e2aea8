"""The seven operations on crews that only look like CrewAI's: what they are given, and how they fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol import frames
from tests.process.operation_child import importer
from tests.process.operations.conftest import Start, fake


@pytest.fixture(scope="module", autouse=True)
def _server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One process that imports the fakes, for all tests of this module."""
    with importer(tmp_path_factory.mktemp("home"), "tests.crews.fake_crews"):
        yield


@pytest.mark.case(36)
def test_an_asynchronous_stream_sends_its_chunks_and_nothing_else(start: Start) -> None:
    child = fake(start, "streaming")
    assert child.output()["raw"] == "streamed"
    assert child.chunks == [{"content": f"chunk {n}", "channel": "messages"} for n in range(2)]


@pytest.mark.case(38)
def test_arguments_reach_the_crew_as_the_contract_says(start: Start) -> None:
    run = fake(start, "instant", topic="bees").output()
    assert (run["calls"], run["stream"], run["tracing"]) == ([["kickoff", {"topic": "bees"}]], True, False)
    batch = fake(start, "instant", "batch_run", inputs=[{"n": 1}, {"n": 2}]).output()["results"]
    assert batch[1]["calls"] == [["kickoff_for_each_async", {"n": 1}], ["kickoff_for_each_async", {"n": 2}]]
    assert batch[1]["stream"] is False
    assert fake(start, "instant", "replay", task_id="t").output()["calls"] == [["replay", "t", None]]
    query = fake(start, "instant", "knowledge_query", query=["a"])
    assert query.output()["results"] == [{"content": ["a"], "limit": 3, "threshold": 0.35}]
    given = fake(start, "async_knowledge", "knowledge_query", query=["a"], results_limit=7, score_threshold=1)
    assert given.output()["results"] == [{"content": ["a"], "limit": 7, "threshold": 1}]


def test_a_duck_type_runs_without_importing_crewai(start: Start) -> None:
    assert fake(start, "instant", order={"start": "spawn"}).output()["crewai_loaded"] is False


@pytest.mark.case(37)
def test_the_remaining_operations_of_a_duck_type_complete(start: Start) -> None:
    train = fake(start, "instant", "train", order={"artifact": "x"}, n_iterations=1, artifact_name="x")
    assert train.output() == {"status": "completed", "artifact_name": "x", "n_iterations": 1}
    assert (train.order.job_directory / "x").read_bytes() == b"trained"
    test = fake(start, "instant", "test", n_iterations=1, eval_llm="judge")
    assert test.output()["eval_llm"] == "judge"
    reset = fake(start, "instant", "memory_reset", command_type="all")
    assert reset.output() == {"status": "completed", "command_type": "all"}


@pytest.mark.case(39)
@pytest.mark.parametrize(
    ("operation", "input"),
    [
        ("batch_run", {"inputs": [{}]}),
        ("replay", {"task_id": "t"}),
        ("train", {"n_iterations": 1, "artifact_name": "a"}),
        ("test", {"n_iterations": 1, "eval_llm": "m"}),
        ("knowledge_query", {"query": ["q"]}),
        ("memory_reset", {"command_type": "all"}),
    ],
)
def test_a_crew_without_the_method_fails_undispatched(start: Start, operation: str, input: dict[str, Any]) -> None:
    failure = fake(start, "batch_of_one", operation, **input).failure()
    assert (failure.error_type, failure.dispatched) == ("RegistryError", False)


@pytest.mark.parametrize(
    ("crew_id", "error_type", "dispatched"),
    [
        ("factory_raises", "RuntimeError", False),
        ("not_a_crew", "RegistryError", False),
        ("failing", "ValueError", True),
    ],
)
def test_failures_say_whether_the_crew_was_called(
    start: Start, crew_id: str, error_type: str, dispatched: bool
) -> None:
    failure = fake(start, crew_id).failure()
    assert (failure.error_type, failure.dispatched) == (error_type, dispatched)


def test_sys_exit_in_a_crew_is_a_failure(start: Start) -> None:
    failure = fake(start, "crash", how="raise").failure()
    assert (failure.error_type, failure.dispatched) == ("SystemExit", True)


@pytest.mark.case(52)
def test_bounds_of_events_and_output_fail_the_job(start: Start) -> None:
    too_many = fake(start, "streaming", order={"event_limit": 2})
    assert too_many.failure().error_type == "RegistryError"
    assert too_many.chunks == []
    assert fake(start, "flood", order={"event_limit": 50}).failure().error_type == "RegistryError"
    too_long = fake(start, "flood", order={"event_limit_bytes": 1024}, chunks=1, bytes=1024)
    assert too_long.failure().error_type == "RegistryError"
    assert fake(start, "big_output").failure().error_type == "RegistryError"
    fits = fake(start, "big_output", order={"event_limit_bytes": 1024}, bytes=1_000_000).output()
    assert len(fits["raw"]) == 1_000_000


def test_a_cancel_closes_asynchronous_work_and_says_so(start: Start, tmp_path: Path) -> None:
    child = fake(start, "async_sleeper", closed=str(tmp_path / "closed"))
    child.wait_for(content="sleeping")
    child.cancel()
    assert child.receive() == frames.CancelAnswer(closing=True)
    failure = child.failure()
    assert (failure.error_type, failure.dispatched) == ("CancelledError", True)
    assert (tmp_path / "closed").exists()


def test_a_cancel_has_nothing_to_close_in_a_sleeping_thread(start: Start) -> None:
    child = fake(start, "sleeper")
    child.cancel()
    assert child.receive() == frames.CancelAnswer(closing=False)
