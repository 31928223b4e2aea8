"""Which ending a job gets when several are possible, who is told what, and that nothing is left in any of them."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support import procs, world
from tests.support.client import Answer, Client
from tests.support.server import Server

LINGER_S = 0.3
#: Linger of the crew ``patient``: long enough to cancel during it.
LONG_LINGER_S = 2.0
#: Linger of the crew ``echo``, which leaves nothing to linger for.
ENDLESS_LINGER_S = 30
#: Grace of the crew ``closer``, which ends its closing when the test says so.
LONG_GRACE_S = 15
#: Off where a daemon must outlive its worker: the init of a PID namespace takes everything along.
OUTLIVING = {"pid_namespace": "off"}
SETTINGS: dict[str, Any] = {
    "max_concurrency": 8,
    "linger_s": LINGER_S,
    "drain_s": 1,
    "crews": {
        "turnstile": {"max_concurrency": 1},
        "closer": {"grace_s": LONG_GRACE_S},
        "patient": {"linger_s": LONG_LINGER_S},
        "echo": {"linger_s": ENDLESS_LINGER_S},
    },
}
#: A cancel is answered within this many seconds, times the slack of a shared machine.
STOP_S = 2.0
SLACK = 5
WAIT_S = 30.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server of crews without CrewAI."""
    directory = tmp_path_factory.mktemp("server")
    with Server(directory, registry="tests.crews.stop_crews:CREWS", settings=SETTINGS | OUTLIVING) as server:
        yield server


class Gate:
    """The files by which a ``turnstile`` or ``closer`` job and its test talk."""

    def __init__(self, directory: Path, name: str) -> None:
        self._files = {event: directory / f"{name}-{event}" for event in ("began", "closing", "release")}

    @property
    def input(self) -> dict[str, Any]:
        """What the crew needs of it."""
        return {event: str(path) for event, path in self._files.items()}

    def happened(self, event: str) -> bool:
        """Whether the crew has got there."""
        return self._files[event].exists()

    def wait(self, event: str) -> None:
        """Wait until the crew gets there."""
        procs.wait_until(lambda: self.happened(event), WAIT_S, f"{self._files[event].name}")

    def release(self) -> None:
        """Let the crew go on."""
        self._files["release"].touch()


def events_of(client: Client, action_id: str) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = client.events(action_id).expect(200)["events"]
    return events


def stop_requests(server: Server, action_id: str) -> list[str]:
    """Reasons of the requests to stop the job, as the audit has them."""
    wanted = (
        "SELECT detail FROM audit WHERE action_id = ? AND act IN ('stop_requested', 'cancel_requested') ORDER BY id"
    )
    with contextlib.closing(sqlite3.connect(f"{server.state_file.as_uri()}?mode=ro", uri=True)) as journal:
        details = [json.loads(row[0]) for row in journal.execute(wanted, (action_id,))]
    return [detail.get("detail") or detail["reason"] for detail in details]


def phase(client: Client, action_id: str) -> str | None:
    """Phase of a job; None before it is admitted."""
    answer = client.get(action_id)
    return answer.json()["phase"] if answer.status == 200 else None


# --- while it waits for a slot ---------------------------------------------------------------------------------------


@pytest.mark.case(61)
def test_a_cancelled_job_that_waited_for_a_slot_never_runs(
    client: Client, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    holder, waiter = Gate(tmp_path, "holder"), Gate(tmp_path, "waiter")
    held = pool.submit(client.start, "holder", "turnstile", input=holder.input)
    holder.wait("began")
    waiting = pool.submit(client.start, "waiter", "turnstile", input=waiter.input)
    procs.wait_until(lambda: phase(client, "waiter") == "queued", WAIT_S, "the second job waits")
    view = client.cancel("waiter", "turnstile").expect(200)
    stop = view["stop"]
    assert (view["status"], view["phase"], view["uncertain_outcome"]) == ("cancelled", "done", False)
    assert (view["started_at"], view["worker"], stop["worker"]) == (None, None, None)
    assert (stop["confirmed"], stop["method"], stop["processes_left"]) == (True, "never_started", 0)
    data = {"status": "cancelled", "uncertain_outcome": False, "stop": stop}
    assert events_of(client, "waiter") == [{"event": "cancelled", "sequence": 0, "data": data}]
    assert waiting.result().expect(409)["code"] == "action_cancelled"
    holder.release()
    held.result().expect(200)
    # The slot goes round after that: the next of the same crew runs, the cancelled one still has not.
    after = Gate(tmp_path, "after")
    after.release()
    client.start("after", "turnstile", input=after.input).expect(200)
    assert after.happened("began")
    assert not waiter.happened("began")
    assert client.get("waiter").expect(200) == view


@pytest.mark.case(51)
def test_time_in_the_queue_is_not_charged_to_the_timeout(
    client: Client, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    timeout_ms = 1_000
    holder, waiter = Gate(tmp_path, "holder"), Gate(tmp_path, "waiter")
    waiter.release()
    held = pool.submit(client.start, "clock-holder", "turnstile", input=holder.input)
    holder.wait("began")
    waiting = pool.submit(client.start, "clock-waiter", "turnstile", input=waiter.input, timeout_ms=timeout_ms)
    procs.wait_until(lambda: phase(client, "clock-waiter") == "queued", WAIT_S, "the second job waits")
    over = client.get("clock-waiter").expect(200)["admitted_at"] + 1.5 * timeout_ms / 1000
    procs.wait_until(lambda: time.time() > over, WAIT_S, "its timeout would be over")
    assert phase(client, "clock-waiter") == "queued"
    holder.release()
    held.result().expect(200)
    waiting.result().expect(200)
    view = client.get("clock-waiter").expect(200)
    assert view["status"] == "completed"
    assert view["started_at"] - view["admitted_at"] > timeout_ms / 1000


# --- several endings at once -----------------------------------------------------------------------------------------


@pytest.mark.case(63)
def test_two_cancels_join_one_stop_and_both_are_audited(
    server: Server, client: Client, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    gate = Gate(tmp_path, "twice")
    with client.stream("twice", "closer", input=gate.input) as stream:
        gate.wait("began")
        first = pool.submit(client.cancel, "twice", "closer", reason="the first")
        gate.wait("closing")
        second = pool.submit(client.cancel, "twice", "closer", reason="the second")
        procs.wait_until(lambda: len(stop_requests(server, "twice")) == 2, WAIT_S, "both are audited")
        assert not first.done()
        assert not second.done()
        gate.release()
        view = first.result().expect(200)
        assert second.result().expect(200) == view
        assert client.cancel("twice", "closer", reason="the third").expect(200) == view
        assert client.get("twice").expect(200) == view
        assert [event.event for event in stream.rest()] == ["started", "cancelled"]
    assert (view["status"], view["stop"]["confirmed"]) == ("cancelled", True)
    assert stop_requests(server, "twice")[:2] == ["the first", "the second"]


def test_cancels_at_the_same_moment_get_the_same_view(client: Client, pool: ThreadPoolExecutor, tmp_path: Path) -> None:
    heartbeats = tmp_path / "beats"
    given = {"heartbeat": str(heartbeats), "then": "block"}
    with client.stream("crowd", "escapee", input=given) as stream:
        work = world.observe(client, "crowd", heartbeats)
        cancels = [pool.submit(client.cancel, "crowd", "escapee", reason=f"number {n}") for n in range(8)]
        views = [cancel.result().expect(200) for cancel in cancels]
        assert all(view == views[0] for view in views)
        assert views[0]["status"] == "cancelled"
        assert world.violations(work, views[0]["stop"]) == []
        assert [event.event for event in stream.rest()] == ["started", "cancelled"]


def test_a_result_that_comes_within_the_grace_overrides_the_cancel(
    client: Client, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    gate = Gate(tmp_path, "answers")
    started = pool.submit(client.start, "answers", "closer", input=gate.input | {"answers": True})
    gate.wait("began")
    cancel = pool.submit(client.cancel, "answers", "closer")
    gate.wait("closing")
    gate.release()
    view = cancel.result().expect(200)
    output = started.result().expect(200)
    assert (view["status"], view["uncertain_outcome"], view["output"]) == ("completed", False, output)
    assert (view["stop"]["confirmed"], view["stop"]["reason"]) == (True, "completed")
    assert [event["event"] for event in events_of(client, "answers")] == ["started", "completed"]


@pytest.mark.case(62)
def test_the_cancel_of_a_completed_job_returns_it_unchanged(client: Client) -> None:
    output = client.start("complete", "echo", input={"n": 1}).expect(200)
    before, events = client.get("complete").expect(200), events_of(client, "complete")
    assert client.cancel("complete", "echo", reason="too late").expect(200) == before
    assert (before["status"], before["output"]) == ("completed", output)
    assert client.get("complete").expect(200) == before
    assert events_of(client, "complete") == events
    assert client.start("complete", "echo", input={"n": 1}).expect(200) == output


@pytest.mark.case(60)
def test_the_caller_of_a_job_that_somebody_else_cancels_is_told_so(
    client: Client, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    gate = Gate(tmp_path, "waiting")
    waiting: Future[Answer] = pool.submit(client.start, "waiting", "turnstile", input=gate.input)
    gate.wait("began")
    assert client.cancel("waiting", "turnstile").expect(200)["status"] == "cancelled"
    for answer in (waiting.result(), client.start("waiting", "turnstile", input=gate.input)):
        problem = answer.expect(409)
        assert (problem["code"], problem["action_id"]) == ("action_cancelled", "waiting")
        assert "json" in answer.headers["content-type"]
        assert isinstance(problem["detail"], str)


@pytest.mark.case(58)
@pytest.mark.parametrize(
    ("operation", "given", "uncertain"),
    [("knowledge_query", {"query": ["bees"]}, False), ("memory_reset", {"command_type": "all"}, True)],
)
def test_the_short_operations_can_be_cancelled_too(
    client: Client, operation: str, given: dict[str, Any], uncertain: bool
) -> None:
    with client.stream(operation, "sleeper", operation=operation, input=given) as stream:
        stream.until("started")
        began = time.monotonic()
        view = client.cancel(operation, "sleeper").expect(200)
        assert time.monotonic() - began < STOP_S * SLACK
        assert (view["status"], view["uncertain_outcome"]) == ("cancelled", uncertain)
        assert (view["stop"]["confirmed"], view["stop"]["worker"]["exit_signal"]) == (True, "SIGKILL")
        assert stream.rest()[-1].data["stop"] == view["stop"]


# --- what is left behind ---------------------------------------------------------------------------------------------


def test_what_outlives_a_completed_job_is_killed_after_the_linger(client: Client, tmp_path: Path) -> None:
    heartbeats = tmp_path / "beats"
    output = client.start("leaves", "daemon", input={"heartbeat": str(heartbeats)}).expect(200)
    view = client.get("leaves").expect(200)
    stop = view["stop"]
    assert world.still_alive(procs.read_beats(heartbeats)) == []
    assert (view["status"], view["uncertain_outcome"], view["output"]) == ("completed", False, output)
    assert (stop["confirmed"], stop["method"], stop["processes_left"]) == (True, "cgroup", 0)
    assert stop["processes_killed"] >= 1
    assert (stop["worker"]["exit_code"], stop["worker"]["exit_signal"]) == (0, None), "it had ended by itself"
    assert LINGER_S <= stop["requested_at"] - view["started_at"] < LINGER_S + STOP_S * SLACK


def test_a_job_that_leaves_nothing_does_not_linger(client: Client) -> None:
    client.start("tidy", "echo").expect(200)
    view = client.get("tidy").expect(200)
    assert (view["stop"]["confirmed"], view["stop"]["processes_killed"]) == (True, 0)
    assert view["ended_at"] - view["started_at"] < ENDLESS_LINGER_S / 2


def test_a_cancel_during_the_linger_returns_the_completed_job(
    server: Server, client: Client, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    heartbeats = tmp_path / "beats"
    started = pool.submit(client.start, "lingers", "patient", input={"heartbeat": str(heartbeats)})
    work = world.observe(client, "lingers", heartbeats, may_have_ended=True)
    procs.wait_until(lambda: not procs.alive(work.pid, work.start_ticks), WAIT_S, "the worker has ended")
    assert phase(client, "lingers") == "running"
    asked = time.monotonic()
    view = client.cancel("lingers", "patient", reason="during the linger").expect(200)
    assert time.monotonic() - asked < LONG_LINGER_S / 2, "a cancel ends the linger"
    assert world.violations(work, view["stop"]) == []
    assert (view["status"], view["uncertain_outcome"]) == ("completed", False)
    assert view["output"] == started.result().expect(200)
    assert view["stop"]["processes_killed"] >= 1
    assert [event["event"] for event in events_of(client, "lingers")] == ["started", "completed"]
    assert stop_requests(server, "lingers") == ["during the linger"]


@pytest.mark.parametrize(
    ("then", "status", "reason", "uncertain"),
    [("exit", "failed", "crashed", True), ("return", "completed", "completed", False)],
)
def test_a_worker_that_left_for_another_session_is_killed_all_the_same(
    client: Client, tmp_path: Path, then: str, status: str, reason: str, uncertain: bool
) -> None:
    action_id, heartbeats = f"escapes-{then}", tmp_path / "beats"
    given = {"heartbeat": str(heartbeats), "then": then}
    with client.stream(action_id, "escapee", input=given) as stream:
        last = stream.rest()[-1]
    assert world.after(heartbeats, last.received_ns) == []
    view = client.get(action_id).expect(200)
    stop = view["stop"]
    assert (view["status"], last.event, view["uncertain_outcome"]) == (status, status, uncertain)
    assert (stop["confirmed"], stop["method"], stop["reason"]) == (True, "cgroup", reason)
    assert (stop["worker"]["exit_code"], stop["processes_left"], stop["strays"]) == (0, 0, [])
    assert stop["processes_killed"] >= 1


def test_a_job_whose_escaped_worker_holds_its_pipe_can_be_cancelled(client: Client, tmp_path: Path) -> None:
    heartbeats = tmp_path / "beats"
    with client.stream("escapes-block", "escapee", input={"heartbeat": str(heartbeats), "then": "block"}) as stream:
        work = world.observe(client, "escapes-block", heartbeats)
        began = time.monotonic()
        view = client.cancel("escapes-block", "escapee").expect(200)
        assert time.monotonic() - began < STOP_S * SLACK
        last = stream.rest()[-1]
    assert world.violations(work, view["stop"]) == []
    assert world.after(heartbeats, last.received_ns) == []
    assert (view["status"], view["stop"]["processes_killed"]) == ("cancelled", 2)


def test_a_process_that_left_the_cgroup_of_its_job_is_hunted_and_named(
    server: Server, client: Client, tmp_path: Path
) -> None:
    heartbeats, moved = tmp_path / "beats", tmp_path / "moved"
    outside = Path(server.wait_log("stop_method")["cgroup"]).parent
    given = {"heartbeat": str(heartbeats), "then": "block", "cgroup": str(outside), "moved": str(moved)}
    with client.stream("strays", "escapee", input=given) as stream:
        work = world.observe(client, "strays", heartbeats)
        procs.wait_until(moved.exists, WAIT_S, "it has left the leaf")
        escaped = procs.read_beats(heartbeats)[0].pid
        assert escaped not in world.in_cgroup(work.cgroup)
        view = client.cancel("strays", "escapee").expect(200)
        last = stream.rest()[-1]
    stop = view["stop"]
    assert world.violations(work, stop) == []
    assert world.after(heartbeats, last.received_ns) == []
    assert (view["status"], stop["confirmed"], stop["processes_killed"]) == ("cancelled", True, 1)
    assert [stray["pid"] for stray in stop["strays"]] == [escaped]
