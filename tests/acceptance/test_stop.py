"""A real crew is stopped in the middle of every long operation, and the world agrees with what is said about it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support import procs, world
from tests.support.client import Answer, Client
from tests.support.server import Server

CREW = "daemon"
LONG_OPERATIONS: dict[str, dict[str, Any]] = {
    "run": {},
    "batch_run": {},
    "replay": {},
    "train": {"n_iterations": 1, "feedback": "be brief"},
    "test": {"n_iterations": 1, "eval_llm": "scripted"},
}
#: Off where a daemon must outlive its worker: the init of a PID namespace takes everything along.
OUTLIVING = {"pid_namespace": "off"}
SETTINGS: dict[str, Any] = {
    "template": {"preload": ["crewai"]},
    "max_concurrency": 8,
    "linger_s": 0.2,
    "pid_namespace": "auto",
}
BLOCK_S = 60
#: A cancel is answered, and a job at its timeout is gone, within this many seconds ...
STOP_S = 2.0
#: ... times this, since tests share their machine.
SLACK = 5
#: Long enough for five crews at once to be in the middle of their model call.
TIMEOUT_MS = 6_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for the module: importing CrewAI takes seconds."""
    directory = tmp_path_factory.mktemp("server")
    with Server(directory, registry="tests.crews.real_crews:CREWS", settings=SETTINGS) as server:
        yield server


@pytest.fixture(scope="module")
def blind_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The same without the kill, and with a look that finds nothing left whatever is there."""
    directory = tmp_path_factory.mktemp("blind")
    settings = SETTINGS | OUTLIVING
    with Server(directory, registry="tests.crews.real_crews:CREWS", settings=settings, mutant="blind") as server:
        yield server


def operation_input(client: Client, operation: str, action_id: str, heartbeats: Path) -> dict[str, Any]:
    """Input that makes ``operation`` leave a daemon and then block; a replay gets a completed run first."""
    inputs = {"heartbeat": str(heartbeats), "seconds": str(BLOCK_S)}
    fields = dict(LONG_OPERATIONS[operation])
    if operation == "run":
        return inputs
    if operation == "batch_run":
        return {"inputs": [inputs]}
    if operation == "train":
        fields["artifact_name"] = f"{action_id}.pkl"
    if operation == "replay":
        first = {"heartbeat": f"{heartbeats}-first", "seconds": "0"}
        output = client.start(f"{action_id}-first", CREW, input=first).expect(200)
        fields["task_id"] = output["tasks_output"][0]["task_id"]
    return fields | {"inputs": inputs}


class Stopped(msgspec.Struct, frozen=True, kw_only=True):
    """A stop as the canceller, the streaming reader and the world have seen it."""

    view: dict[str, Any]
    last_event: Any
    took_s: float
    violations: list[str]


def cancel_in_the_middle(server: Server, operation: str, heartbeats: Path) -> Stopped:
    """Start ``operation``, wait until its daemon beats, cancel, and look at what is left."""
    client, action_id = server.client(), f"cancel-{operation}"
    given = operation_input(client, operation, action_id, heartbeats)
    with client.stream(action_id, CREW, operation=operation, input=given) as stream:
        work = world.observe(client, action_id, heartbeats)
        began = time.monotonic()
        view = client.cancel(action_id, CREW, reason="enough").expect(200)
        took_s = time.monotonic() - began
        return Stopped(
            view=view,
            violations=world.violations(work, view["stop"]),
            last_event=stream.rest()[-1],
            took_s=took_s,
        )


@pytest.mark.case(56)
@pytest.mark.case(57)
@pytest.mark.parametrize("operation", LONG_OPERATIONS)
def test_a_cancel_ends_the_operation_its_model_call_and_its_daemon(
    server: Server, operation: str, tmp_path: Path
) -> None:
    stopped = cancel_in_the_middle(server, operation, tmp_path / "beats")
    assert stopped.violations == []
    assert stopped.took_s < STOP_S * SLACK
    view, stop = stopped.view, stopped.view["stop"]
    assert (view["status"], view["phase"], view["uncertain_outcome"]) == ("cancelled", "done", True)
    assert (stop["confirmed"], stop["method"], stop["processes_left"]) == (True, "cgroup", 0)
    exit_status = stop["worker"]["exit_signal"] or stop["worker"]["exit_code"]
    # A batch waits for its threads on an event loop: that much can be closed in the grace, before the kill or after.
    assert exit_status in (("SIGKILL", 0) if operation == "batch_run" else ("SIGKILL",))
    # The daemon and the worker; one that ends by itself takes its PID namespace along: nothing is left to kill.
    assert stop["processes_killed"] >= 2 or exit_status == 0
    assert stop["requested_at"] <= stop["confirmed_at"] <= view["ended_at"]
    assert stopped.last_event.event == "cancelled"
    assert stopped.last_event.data == {"status": "cancelled", "uncertain_outcome": True, "stop": stop}


@pytest.mark.parametrize("operation", LONG_OPERATIONS)
def test_without_the_kill_the_same_look_at_the_world_finds_survivors(
    blind_server: Server, operation: str, tmp_path: Path
) -> None:
    stopped = cancel_in_the_middle(blind_server, operation, tmp_path / "beats")
    assert (stopped.view["status"], stopped.view["stop"]["confirmed"]) == ("cancelled", True), "the mutant must lie"
    found = "; ".join(stopped.violations)
    assert "daemon" in found
    assert "is still alive" in found
    assert "after confirmed_at" in found
    assert "heartbeats go on" in found


class Timed(msgspec.Struct, frozen=True, kw_only=True):
    """A job under way that nobody will cancel, and the caller that waits for it."""

    work: world.Work
    answer: Future[Answer]
    input: dict[str, Any]


@pytest.fixture(scope="module")
def timed(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Timed]]:
    """Every long operation at once, each with a timeout, each observed while it ran."""
    client, directory = server.client(), tmp_path_factory.mktemp("timed")
    inputs = {
        operation: operation_input(client, operation, f"timeout-{operation}", directory / operation)
        for operation in LONG_OPERATIONS
    }
    with ThreadPoolExecutor(len(LONG_OPERATIONS)) as pool:
        answers = {
            operation: pool.submit(start_with_timeout, client, operation, inputs[operation]) for operation in inputs
        }
        yield {
            operation: Timed(
                work=world.observe(client, f"timeout-{operation}", directory / operation),
                answer=answers[operation],
                input=inputs[operation],
            )
            for operation in inputs
        }


def start_with_timeout(client: Client, operation: str, given: dict[str, Any]) -> Answer:
    return client.start(f"timeout-{operation}", CREW, operation=operation, input=given, timeout_ms=TIMEOUT_MS)


@pytest.mark.case(49)
@pytest.mark.case(50)
@pytest.mark.parametrize("operation", LONG_OPERATIONS)
def test_a_timeout_ends_the_operation_its_model_call_and_its_daemon(
    server: Server, timed: dict[str, Timed], operation: str
) -> None:
    client, action_id, job = server.client(), f"timeout-{operation}", timed[operation]
    problem = job.answer.result().expect(504)
    view = client.get(action_id).expect(200)
    stop = view["stop"]
    assert world.violations(job.work, stop) == []
    assert problem["code"] == "action_timed_out"
    assert (view["status"], view["phase"], view["uncertain_outcome"]) == ("failed", "done", True)
    assert (stop["confirmed"], stop["method"], stop["reason"]) == (True, "cgroup", "timeout")
    assert stop["worker"]["exit_signal"] == "SIGKILL"
    assert stop["processes_killed"] >= 2, "the worker and its daemon"
    overdue_s = stop["confirmed_at"] - view["started_at"] - TIMEOUT_MS / 1000
    assert -0.01 < overdue_s < STOP_S * SLACK
    with client.follow(action_id) as stream:
        last = stream.rest()[-1]
    assert last.event == "failed"
    assert (last.data["status"], last.data["error_type"]) == ("failed", "TimeoutError")
    assert (last.data["uncertain_outcome"], last.data["stop"]) == (True, stop)
    assert start_with_timeout(client, operation, job.input).expect(502)["code"] == "action_failed"
    assert client.get(action_id).expect(200) == view, "a repeat changes nothing"


def test_a_stop_that_kills_nothing_is_never_confirmed_until_somebody_else_has_killed(tmp_path: Path) -> None:
    """Case 59, with a server whose kill is switched off and whose look is honest."""
    heartbeats = tmp_path / "beats"
    registry, settings = "tests.crews.stop_crews:CREWS", {"stop_timeout_s": 0.3, "grace_s": 0} | OUTLIVING
    given = {"heartbeat": str(heartbeats), "then": "block"}
    with (
        Server(tmp_path / "server", registry=registry, settings=settings, mutant="toothless") as server,
        ThreadPoolExecutor(1) as pool,
    ):
        client = server.client()
        waiting = pool.submit(client.start, "a", "escapee", input=given)
        work = world.observe(client, "a", heartbeats)
        refusals = [client.cancel("a", "escapee"), waiting.result(), client.cancel("a", "escapee")]
        assert [(answer.status, answer.json()["code"]) for answer in refusals] == [(503, "stop_unconfirmed")] * 3
        view = client.get("a").expect(200)
        assert (view["status"], view["phase"], view["stop"]) == ("running", "stopping", None)
        assert [event["event"] for event in client.events("a").expect(200)["events"]] == ["started"]
        daemon = procs.read_beats(heartbeats)[-1]
        assert procs.alive(work.pid, work.start_ticks)
        assert procs.alive(daemon.pid, daemon.start_ticks)
        with client.follow("a") as stream:
            procs.kill(work.pid, work.start_ticks)
            procs.kill(daemon.pid, daemon.start_ticks)
            assert stream.until("cancelled").data["stop"]["confirmed"] is True
        assert world.violations(work, client.get("a").expect(200)["stop"]) == []
        assert client.cancel("a", "escapee").expect(200)["status"] == "cancelled"
