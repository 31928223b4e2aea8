"""A crew's limits in force, by rlimits: who breaks one is told so, and nobody else is concerned.

Controllers are not delegated on the machines of these tests; what is written for them is in ``unit/test_limits.py``.
Limits of processes are in ``test_exhaustion.py``.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.client import Answer, Client
from tests.support.server import Server

MIB = 1 << 20
REGISTRY = "tests.crews.confined_crews:CREWS"
LOG_BYTES = 64 * 1024
CREWS: dict[str, Any] = {
    "glutton": {"memory_bytes": 512 * MIB},
    "squeezed": {"memory_bytes": 16 * MIB},
    "opener": {"open_files": 100},
    "writer": {"file_bytes": MIB},
    "chatty": {"log_bytes": 8192},
    "hurried": {"timeout_ms": 300},
}
IDS = (f"limited-{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all of them."""
    directory = tmp_path_factory.mktemp("limits")
    settings = {"crews": CREWS, "log_bytes": LOG_BYTES, "max_concurrency": 8}
    with Server(directory, registry=REGISTRY, settings=settings) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Client:
    """A client of that server."""
    return server.client()


def run(client: Client, crew_id: str, *, timeout_ms: int | None = None, **inputs: Any) -> tuple[Answer, dict[str, Any]]:
    """Run a job; returns the answer and its record, whose stop is proved."""
    action_id = next(IDS)
    answer = client.start(action_id, crew_id, input=inputs, timeout_ms=timeout_ms)
    view: dict[str, Any] = client.get(action_id).expect(200)
    assert (view["phase"], view["stop"]["confirmed"], view["stop"]["processes_left"]) == ("done", True, 0)
    return answer, view


def ending(client: Client, view: dict[str, Any]) -> tuple[str, str]:
    """Error type and message of a job that has failed."""
    assert view["status"] == "failed"
    data = client.events(view["action_id"]).expect(200)["events"][-1]["data"]
    return data["error_type"], data["message"]


def logs(server: Server) -> list[Path]:
    """Captured outputs, oldest first."""
    return sorted((server.state_file.parent / "work" / "logs").iterdir(), key=lambda path: int(path.stem))


def test_who_takes_too_much_memory_fails_by_name_while_others_may(server: Server, client: Client) -> None:
    with client.stream(next(IDS), "sleeper", input={"seconds": 1}) as bystander:
        bystander.until("started")
        answer, view = run(client, "glutton", bytes=600 * MIB)
        assert (answer.status, ending(client, view)[0]) == (502, "MemoryError")
        # The error itself says that nobody was killed for it; the stop that follows a failure may still kill.
        assert view["stop"]["worker"]["oom"] is not True
        assert "MemoryError" in logs(server)[-1].read_text()
        assert bystander.rest()[-1].event == "completed"
    assert run(client, "feaster", bytes=600 * MIB)[0].expect(200)["taken"] == 600 * MIB
    assert run(client, "glutton", bytes=100 * MIB)[0].expect(200)["taken"] == 100 * MIB


def test_a_crew_may_mind_its_memory_itself(client: Client) -> None:
    assert run(client, "glutton", bytes=600 * MIB, mind=True)[0].expect(200)["memory"] == "MemoryError"


def test_less_memory_than_a_worker_needs_is_a_failed_launch(client: Client) -> None:
    answer, view = run(client, "squeezed", bytes=1)
    assert (answer.status, view["uncertain_outcome"]) == (502, False)
    assert ending(client, view)[0] == "LaunchError"


def test_open_files_are_bounded(client: Client) -> None:
    said = run(client, "opener")[0].expect(200)
    assert said["stopped"] == "EMFILE"
    # Its standard streams, the pipe of the protocol and little else are open already.
    assert 85 <= said["opened"] <= 96


def test_a_file_that_grows_too_large_ends_its_writer_with_the_kernels_signal(client: Client) -> None:
    said = run(client, "writer", bytes=2 * MIB)[0].expect(200)
    assert said["child"] == -signal.SIGXFSZ
    assert said["size"] == MIB
    answer, view = run(client, "writer", bytes=2 * MIB, itself=True)
    assert answer.status == 502
    assert ending(client, view) == ("WorkerDied", "the worker was killed by SIGXFSZ before it had a result")
    assert view["stop"]["worker"]["exit_signal"] == "SIGXFSZ"
    assert run(client, "writer", bytes=MIB, itself=True)[0].expect(200)["written"] == MIB
    assert run(client, "free_writer", bytes=2 * MIB)[0].expect(200)["size"] == 2 * MIB


def test_a_crew_has_its_own_bound_of_captured_output(server: Server, client: Client) -> None:
    for crew_id, bound in (("chatty", 8192), ("free_chatty", LOG_BYTES)):
        run(client, crew_id, bytes=MIB)[0].expect(200)
        kept, _, note = logs(server)[-1].read_bytes().removesuffix(b"\n").rpartition(b"\n")
        assert note.endswith(b" bytes above the bound were dropped")
        # A quarter is kept free for the other stream, and a line is cut where the room ends.
        assert bound * 3 // 4 - 1 <= len(kept) <= bound


@pytest.mark.parametrize("timeout_ms", [None, 60_000])
def test_a_crew_has_its_own_bound_of_time_whatever_is_asked_for(client: Client, timeout_ms: int | None) -> None:
    answer, view = run(client, "hurried", timeout_ms=timeout_ms, seconds=50)
    assert answer.status == 504
    assert ending(client, view)[0] == "TimeoutError"
    assert (view["stop"]["reason"], view["stop"]["worker"]["exit_signal"]) == ("timeout", "SIGKILL")
    assert 0.25 <= view["ended_at"] - view["started_at"] < 10
    assert run(client, "hurried", timeout_ms=timeout_ms, seconds=0)[0].status == 200
    assert run(client, "sleeper", timeout_ms=timeout_ms, seconds=0.5)[0].status == 200
