"""The seven operations on real CrewAI crews, each in a process forked from an importer of CrewAI."""

from __future__ import annotations

import os
import pickle
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol import frames
from tests.process.operation_child import Child, importer
from tests.process.operations.conftest import Start, fake


@pytest.fixture(scope="module", autouse=True)
def _server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One process that imports CrewAI, for all tests of this module."""
    with importer(tmp_path_factory.mktemp("home"), "tests.crews.real_crews"):
        yield


def _message_texts(child: Child) -> list[str]:
    return [chunk["content"] for chunk in child.chunks if chunk["channel"] == "messages"]


# --- run -------------------------------------------------------------------------------------------------------------


@pytest.mark.case(78)
def test_a_real_crew_runs_streams_and_returns_its_output(start: Start) -> None:
    child = start("support")
    output = child.output()
    assert output["raw"] == "case triaged"
    assert output["token_usage"]["total_tokens"] == 5
    assert [task["task_id"] for task in output["tasks_output"]] == list(child.task_ids)
    text = "".join(chunk["content"] for chunk in child.chunks if chunk["channel"] == "messages")
    assert text.endswith("Final Answer: case triaged")


def test_chunks_of_a_real_crew_carry_their_task_and_agent(start: Start) -> None:
    child = start("support")
    child.output()
    messages = [chunk for chunk in child.chunks if chunk["channel"] == "messages"]
    seen = {(chunk["task_index"], chunk["task_name"], chunk["agent_role"], chunk["task_id"]) for chunk in messages}
    assert seen == {(0, "read", "Reader", child.task_ids[0]), (1, "triage", "Triager", child.task_ids[1])}
    assert all(chunk["chunk_type"] == "text" and chunk["agent_id"] for chunk in messages)


def test_tool_calls_are_streamed_and_reported_without_their_results(start: Start) -> None:
    child = start("calculator")
    assert child.output()["raw"] == "the sum is 5"
    tools = [chunk for chunk in child.chunks if chunk["channel"] == "tools"]
    assert tools[0]["tool_call"]["tool_name"] == "add_numbers"
    notes = [chunk for chunk in tools if "type" in chunk]
    assert {note["type"] for note in notes} == {"tool_usage_started", "tool_usage_finished"}
    assert all(note["tool_name"] == "add_numbers" for note in notes)
    assert not any({"output", "tool_args", "arguments"} & note.keys() for note in notes)


def test_progress_names_tasks_agents_and_calls_but_no_text(start: Start) -> None:
    child = start("support")
    child.output()
    kinds = child.kinds("progress")
    for kind in ("task_started", "task_completed", "agent_execution_started", "llm_call_started", "llm_call_completed"):
        assert kinds.count(kind) == 2, kind
    progress = [raw for raw, chunk in zip(child.raw, child.chunks, strict=True) if chunk["channel"] == "progress"]
    assert not any(b"case triaged" in raw or b"broken lamp" in raw for raw in progress)
    completed = next(chunk for chunk in child.chunks if chunk.get("type") == "llm_call_completed")
    assert completed["usage"]["total_tokens"] in (2, 3)
    assert completed["model"] == "scripted/offline"


def test_knowledge_is_in_the_prompt_of_a_run(start: Start) -> None:
    assert start("knowledge").output()["raw"] == "told"


def test_a_pydantic_output_is_serialised(start: Start) -> None:
    output = start("structured").output()
    expected = {"verdict": "guilty", "score": 0.5}
    assert output["pydantic"] == expected
    assert output["tasks_output"][0]["pydantic"] == expected


def test_a_crew_base_class_runs(start: Start) -> None:
    assert start("project", case="seven").output()["raw"] == "filed"


@pytest.mark.parametrize("crew_id", ["object", "cached"])
def test_a_crew_built_before_the_job_keeps_its_tasks_in_the_jobs_store(start: Start, crew_id: str) -> None:
    child = start(crew_id, spec="tests.crews.real_crews:with_objects")
    assert child.output()["raw"] == "case triaged"
    assert len(child.task_ids) == 2
    order = {"replay_store": str(child.order.job_directory / "replay.db")}
    assert start("support", "replay", order=order, task_id=child.task_ids[1]).output()["raw"] == "case triaged"


def test_a_factory_may_import_crewai_only_when_it_is_called(start: Start, tmp_path: Path) -> None:
    child = fake(start, "lazily_real", order={"start": "spawn"})
    assert child.output()["raw"] == "case triaged"
    assert len(child.task_ids) == 2
    assert (tmp_path / "crew" / "locks").is_dir()
    assert (child.order.job_directory / "replay.db").exists()


def test_a_duck_type_around_a_crew_streams_every_chunk_once(start: Start) -> None:
    plain, wrapped = start("support"), start("wrapper")
    assert plain.output()["raw"] == wrapped.output()["raw"] == "case triaged"
    assert _message_texts(wrapped) == _message_texts(plain) != []
    assert start("wrapper", order={"event_limit": 12}).failure().error_type == "RegistryError"


def test_a_task_that_asks_a_human_fails_instead_of_reading_standard_input(start: Start) -> None:
    failure = start("human").failure()
    assert (failure.error_type, failure.dispatched) == ("FeedbackRequired", True)


@pytest.mark.case(47)
def test_a_failing_model_fails_the_job_and_its_text_stays_in_the_log(start: Start) -> None:
    child = start("failing")
    failure = child.failure()
    assert (failure.error_type, failure.dispatched) == ("RuntimeError", True)
    assert "the secret of the model" in failure.detail
    assert not any(b"secret" in raw for raw in child.raw)
    assert "task_failed" in child.kinds("progress")


def test_without_texts_a_failure_is_its_types_and_places(start: Start) -> None:
    child = start("failing", order={"texts": False})
    failure = child.failure()
    assert failure.error_type == "RuntimeError"
    assert failure.detail.startswith("RuntimeError, its text is left out")
    assert re.search(r"^  at real_crews\.py:\d+ ", failure.detail, re.MULTILINE)
    assert "secret" not in failure.detail + (child.order.root / f"{child.order.job}.log").read_text()


def test_a_real_crew_that_streams_too_much_fails_while_it_still_runs(start: Start) -> None:
    child = start("talkative", order={"event_limit": 12}, seconds=60)
    began = time.monotonic()
    failure = child.failure()
    assert (failure.error_type, failure.dispatched) == ("RegistryError", True)
    assert time.monotonic() - began < 30
    assert len(child.chunks) <= 10


def test_progress_never_takes_the_room_of_messages(start: Start) -> None:
    free = start("talkative", seconds=0)
    free.output()
    messages = sum(chunk["channel"] == "messages" for chunk in free.chunks)
    text = "".join(chunk["content"] for chunk in free.chunks if chunk["channel"] == "messages")
    tight = start("talkative", order={"event_limit": messages + 2}, seconds=0)
    tight.output()
    assert len(tight.chunks) <= messages
    assert any(chunk["channel"] == "progress" for chunk in tight.chunks)
    assert "".join(chunk["content"] for chunk in tight.chunks if chunk["channel"] == "messages") == text


# --- batch_run -------------------------------------------------------------------------------------------------------


@pytest.mark.case(39)
def test_a_batch_of_a_real_crew_returns_results_in_order(start: Start) -> None:
    child = start("topical", "batch_run", inputs=[{"topic": f"bees{n}"} for n in range(3)])
    output = child.output()
    assert output["count"] == 3
    assert [result["raw"] for result in output["results"]] == ["about bees0", "about bees1", "about bees2"]
    assert not child.kinds("messages")
    assert child.task_ids == ()


@pytest.mark.case(78)
def test_a_batch_of_the_support_crew_counts_tokens_per_result(start: Start) -> None:
    output = start("support", "batch_run", inputs=[{}]).output()
    assert [result["token_usage"]["total_tokens"] for result in output["results"]] == [5]


def test_a_batch_keeps_the_crews_knowledge(start: Start) -> None:
    output = start("knowledge", "batch_run", inputs=[{}, {}]).output()
    assert [result["raw"] for result in output["results"]] == ["told", "told"]


# --- replay ----------------------------------------------------------------------------------------------------------


def test_a_task_of_an_earlier_job_replays_again_and_again_from_copies_of_its_store(start: Start) -> None:
    first = start("topical", topic="bees")
    first.output()
    store = str(first.order.job_directory / "replay.db")
    before = Path(store).read_bytes()
    start("support").output()
    for topic in ("ants", None, "wasps"):
        inputs = {} if topic is None else {"inputs": {"topic": topic}}
        again = start("topical", "replay", order={"replay_store": store}, task_id=first.task_ids[0], **inputs)
        assert again.output()["raw"] == f"about {topic or 'bees'}"
        assert len(again.task_ids) == 1
        assert "task_completed" in again.kinds("progress")
    assert Path(store).read_bytes() == before


def test_a_replay_can_be_replayed(start: Start) -> None:
    first = start("support")
    first.output()
    second_task = first.task_ids[1]
    store = str(first.order.job_directory / "replay.db")
    second = start("support", "replay", order={"replay_store": store}, task_id=second_task)
    assert [task["agent"].strip() for task in second.output()["tasks_output"]] == ["Reader", "Triager"]
    store = str(second.order.job_directory / "replay.db")
    third = start("support", "replay", order={"replay_store": store}, task_id=second.task_ids[0])
    assert third.output()["raw"] == "case triaged"


def test_a_replay_without_a_retained_store_is_refused_before_anything_runs(start: Start) -> None:
    failure = start("support", "replay", task_id="00000000-0000-0000-0000-000000000000").failure()
    assert not failure.dispatched
    assert "00000000" in failure.detail


def test_a_replay_of_a_task_that_the_store_lacks_is_refused_before_anything_runs(start: Start) -> None:
    first = start("support")
    first.output()
    order = {"replay_store": str(first.order.job_directory / "replay.db")}
    assert not start("support", "replay", order=order, task_id="another").failure().dispatched


# --- train and test --------------------------------------------------------------------------------------------------


def test_train_without_feedback_fails_before_anything_runs(start: Start) -> None:
    child = start("support", "train", order={"artifact": "a.bin"}, n_iterations=1, artifact_name="a.bin")
    failure = child.failure()
    assert (failure.error_type, failure.dispatched) == ("FeedbackRequired", False)
    assert child.chunks == []
    assert not (child.order.job_directory / "a.bin").exists()


@pytest.mark.parametrize("name", ["plain", "with.pkl"])
def test_train_uses_its_feedback_in_order_and_writes_exactly_the_artifact(start: Start, name: str) -> None:
    child = start(
        "support",
        "train",
        order={"artifact": name},
        n_iterations=2,
        artifact_name=name,
        feedback=["say less", "say more"],
    )
    assert child.output() == {"status": "completed", "artifact_name": name, "n_iterations": 2}
    with (child.order.job_directory / name).open("rb") as artifact:
        assert set(pickle.load(artifact)) == {"Reader", "Triager"}
    assert [path.name for path in child.order.job_directory.glob("*.pkl")] == [name] * name.endswith(".pkl")
    with (child.order.job_directory / "cwd" / "training_data.pkl").open("rb") as data:
        asked = [one["human_feedback"] for agent in pickle.load(data).values() for one in agent.values()]
    assert sorted(asked) == ["say less", "say more", "say more", "say more"]
    assert {"crew_train_started", "crew_train_completed", "task_completed"} <= set(child.kinds("progress"))


def test_train_replaces_a_link_at_the_artifacts_place_and_does_not_follow_it(start: Start, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.write_text("untouched")
    (tmp_path / "linked").mkdir()
    for name in ("model", "model.pkl"):
        os.symlink(target, tmp_path / "linked" / name)
    order = {"job": "linked", "artifact": "model"}
    start("support", "train", order=order, n_iterations=1, artifact_name="model", feedback="fine").output()
    assert target.read_text() == "untouched"
    assert not (tmp_path / "linked" / "model").is_symlink()


def test_test_takes_an_evaluator_object_from_the_registry_and_returns_its_scores(start: Start) -> None:
    child = start("support", "test", n_iterations=2, eval_llm="scripted")
    output = child.output()
    scores = output.pop("scores")
    assert output == {"status": "completed", "n_iterations": 2, "eval_llm": "scripted"}
    assert [score["quality"] for score in scores] == [9.0] * 4
    assert child.kinds("progress").count("crew_test_result") == 4
    assert "crew_test_completed" in child.kinds("progress")


def test_test_passes_any_other_evaluator_as_the_name_of_a_model(start: Start) -> None:
    child = start("support", "test", n_iterations=1, eval_llm="gpt-4o-mini")
    failure = child.failure()
    assert failure.dispatched
    assert "OPENAI_API_KEY" in failure.detail


# --- knowledge and memory --------------------------------------------------------------------------------------------


def test_knowledge_is_found_and_kept_apart_by_the_crews_storage(start: Start) -> None:
    query = {"query": ["queen of hive seven"], "score_threshold": 0.0}
    bees = start("knowledge", "knowledge_query", order={"store": "bees"}, **query).output()["results"]
    assert [hit["content"] for hit in bees] == ["The queen of hive seven is called Melissa."]
    ants = start("other_knowledge", "knowledge_query", order={"store": "ants"}, **query).output()["results"]
    assert [hit["content"] for hit in ants] == ["The ants of hill nine march at dawn."]


def test_jobs_of_one_crew_meet_in_the_crews_lock_directory(start: Start, tmp_path: Path) -> None:
    query = {"query": ["queen"], "score_threshold": 0.0}
    children = [start("knowledge", "knowledge_query", **query) for _ in range(4)]
    assert [len(child.output()["results"]) for child in children] == [1] * 4
    locks = {path.suffix for path in (tmp_path / "crew" / "locks").iterdir()}
    assert locks == {".lock"}
    assert not list(tmp_path.glob("job*/tmp/crewai:*"))


def test_knowledge_of_a_crew_without_any_is_empty(start: Start) -> None:
    assert start("support", "knowledge_query", query=["bees"]).output() == {"results": []}


def test_memory_is_kept_per_crew_and_reset(start: Start) -> None:
    assert start("memory").output()["raw"] == "the sea is salty"
    assert start("memory").output()["raw"] == "I remember"
    assert start("memory", order={"store": "another"}).output()["raw"] == "the sea is salty"
    output = start("memory", "memory_reset", command_type="memory").output()
    assert output == {"status": "completed", "command_type": "memory"}
    assert start("memory").output()["raw"] == "the sea is salty"


def test_memory_reset_of_a_bare_crew_is_a_failure_of_the_crew(start: Start) -> None:
    failure = start("support", "memory_reset", command_type="memory").failure()
    assert (failure.error_type, failure.dispatched) == ("RuntimeError", True)


# --- hostile work ----------------------------------------------------------------------------------------------------

DAEMON_INPUTS: dict[str, dict[str, Any]] = {
    "run": {},
    "batch_run": {},
    "replay": {},
    "train": {"n_iterations": 1, "artifact_name": "a", "feedback": "fine"},
    "test": {"n_iterations": 1, "eval_llm": "scripted"},
}


@pytest.mark.parametrize("operation", DAEMON_INPUTS)
def test_the_daemon_crew_leaves_a_heartbeat_and_blocks_in_every_long_operation(
    start: Start, tmp_path: Path, operation: str
) -> None:
    inputs = {"heartbeat": str(tmp_path / "beats"), "seconds": "60"}
    order: dict[str, Any] = {"artifact": "a"}
    fields = dict(DAEMON_INPUTS[operation])
    if operation == "replay":
        first = start("daemon", heartbeat=str(tmp_path / "first"), seconds="0")
        first.output()
        _kill_daemon(tmp_path / "first")
        order["replay_store"] = str(first.order.job_directory / "replay.db")
        fields["task_id"] = first.task_ids[0]
    fields |= {"inputs": [inputs]} if operation == "batch_run" else inputs if operation == "run" else {"inputs": inputs}
    child = start("daemon", operation, order=order, **fields)
    child.wait_for(channel="tools", type="tool_usage_finished", tool_name="leave_heartbeat")
    child.wait_for(channel="progress", type="llm_call_started")
    child.cancel()
    answer = child.receive()
    while isinstance(answer, frames.Chunk):
        answer = child.receive()
    assert answer == frames.CancelAnswer(closing=operation == "batch_run")
    child.kill()
    _kill_daemon(tmp_path / "beats")


def _kill_daemon(path: Path) -> None:
    pid, ticks, _ = path.read_text().splitlines()[0].split()
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    assert stat[19] == ticks
    os.kill(int(pid), 9)
