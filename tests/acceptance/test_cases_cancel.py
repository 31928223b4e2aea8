"""Cases 56 to 64: cancel."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support import procs, world
from tests.support.cases import REGISTRY, RESPOND_ASYNC, WAIT_S, events_of, names_of, strict, wait_for_phase
from tests.support.client import Client
from tests.support.gates import Gate
from tests.support.server import Server
from tests.support.strict_client import Refused

SETTINGS: dict[str, Any] = {
    "max_concurrency": 8,
    "grace_s": 0.1,
    "linger_s": 0.2,
    "crews": {"narrow": {"max_concurrency": 1}},
}
STOP_TIMEOUT_S = 0.3


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for the module."""
    directory = tmp_path_factory.mktemp("server")
    environment: dict[str, str | None] = {"HEARTBEAT_FILE": str(directory / "beats")}
    with Server(directory, registry=REGISTRY, settings=SETTINGS, environment=environment) as running:
        yield running


def cancel_and_check(
    client: Client, crew_id: str, operation: str, given: dict[str, Any], beats: Path, *, uncertain: bool
) -> list[str]:
    """Cancel an operation whose thread sleeps and whose daemon beats; returns the names of its events.

    The worker must be reaped and the daemon gone before the answer, and answer, event and record must say the same.
    """
    action_id = f"cancel-{crew_id}-{operation}"
    with client.stream(action_id, crew_id, operation=operation, input=given) as stream:
        work = world.observe(client, action_id, beats)
        view = client.cancel(action_id, crew_id, reason="enough").expect(200)
        stop = view["stop"]
        assert world.violations(work, stop) == []
        last = stream.rest()[-1]
    assert (view["status"], view["phase"], view["uncertain_outcome"]) == ("cancelled", "done", uncertain)
    assert (last.event, last.data) == (
        "cancelled",
        {"status": "cancelled", "uncertain_outcome": uncertain, "stop": stop},
    )
    assert (stop["worker"]["pid"], stop["worker"]["exit_signal"]) == (work.pid, "SIGKILL")
    assert stop["worker"]["started_at"] <= stop["requested_at"] <= stop["confirmed_at"] <= view["ended_at"]
    assert (stop["confirmed"], stop["method"], stop["processes_left"]) == (True, "cgroup", 0)
    assert stop["processes_killed"] >= 2, "the worker and its daemon"
    assert client.get(action_id).expect(200) == view
    return [event.event for event in stream.events]


@pytest.mark.case(56)
def test_a_cancelled_run_is_gone_before_the_answer(client: Client, tmp_path: Path) -> None:
    """Case 56 (≠, B2): the worker is reaped and what it left behind is dead; the reference's call goes on."""
    beats = tmp_path / "beats"
    given = {"heartbeat": str(beats)}
    names = cancel_and_check(client, "beating_stream", "run", given, beats, uncertain=True)
    assert names == ["started", "chunk", "cancelled"]


THREADED: dict[str, dict[str, Any]] = {
    "batch_run": {},
    "replay": {"task_id": "t"},
    "train": {"n_iterations": 1, "artifact_name": "cancelled.pkl"},
    "test": {"n_iterations": 1, "eval_llm": "judge"},
}


@pytest.mark.case(57)
@pytest.mark.parametrize("operation", THREADED)
def test_operations_that_sleep_in_a_thread_can_be_cancelled_too(
    server: Server, client: Client, operation: str, tmp_path: Path
) -> None:
    """Case 57 (≠, B2): the reference answers 409, its predecessor 200 while the thread goes on."""
    beats = tmp_path / "beats"
    inputs = {"heartbeat": str(beats)}
    given = THREADED[operation] | ({"inputs": [inputs]} if operation == "batch_run" else {"inputs": inputs})
    assert cancel_and_check(client, "beating", operation, given, beats, uncertain=True) == ["started", "cancelled"]
    assert not (server.directory / "training" / "cancelled.pkl").exists()


@pytest.mark.case(58)
@pytest.mark.parametrize("operation", ["knowledge_query", "memory_reset"])
def test_the_short_operations_can_be_cancelled_too(
    server: Server, client: Client, operation: str, tmp_path: Path
) -> None:
    """Case 58 (≠): as 57; the outcome of a read is never uncertain."""
    beats = tmp_path / "beats" if operation == "knowledge_query" else server.directory / "beats"
    given = {"query": [str(beats)]} if operation == "knowledge_query" else {"command_type": "all"}
    uncertain = operation == "memory_reset"
    assert cancel_and_check(client, "beating", operation, given, beats, uncertain=uncertain) == ["started", "cancelled"]


@pytest.mark.case(59)
def test_a_stop_without_proof_is_not_called_one(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    """Case 59 (≠), on a server that has lost its teeth: nothing is killed, and it can see that."""
    beats, settings = tmp_path / "beats", SETTINGS | {"stop_timeout_s": STOP_TIMEOUT_S, "pid_namespace": "off"}
    with Server(tmp_path / "server", registry=REGISTRY, settings=settings, mutant="toothless") as server:
        client = server.client()
        waiting = pool.submit(client.start, "stuck", "beating", input={"heartbeat": str(beats)})
        work = world.observe(client, "stuck", beats)
        early = client.cancel("stuck", "beating", headers={"Prefer": "wait=0"})
        assert (early.expect(202)["status"], early.headers["location"]) == ("running", "/jobs/stuck")
        for answer in (client.cancel("stuck", "beating"), waiting.result()):
            assert answer.expect(503)["code"] == "stop_unconfirmed"
            assert int(answer.headers["retry-after"]) > 0
        late = client.cancel("stuck", "beating", headers={"Prefer": "wait=1"})
        assert (late.status, late.json()["status"], late.json()["phase"]) == (202, "running", "stopping")
        assert names_of(client, "stuck") == ["started"]
        assert client.get("stuck").expect(200)["stop"] is None
        with client.follow("stuck") as stream:
            beating = procs.read_beats(beats)[-1]
            procs.kill(work.pid, work.start_ticks)
            procs.kill(beating.pid, beating.start_ticks)
            assert stream.until("cancelled").data["stop"]["confirmed"] is True
        view = client.cancel("stuck", "beating").expect(200)
        assert (view["status"], world.violations(work, view["stop"])) == ("cancelled", [])


@pytest.mark.case(60)
def test_the_caller_of_a_job_that_another_cancels_gets_409(
    client: Client, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    """Case 60 (≠, B1): 409 as JSON, where the reference breaks with 500; a repeat is the same."""
    gate = Gate(tmp_path, "gate")
    waiting = pool.submit(client.start, "another", "turnstile", input=gate.input)
    gate.wait("began")
    client.cancel("another", "turnstile").expect(200)
    for answer in (waiting.result(), client.start("another", "turnstile", input=gate.input)):
        problem = answer.expect(409)
        assert (problem["code"], problem["action_id"], type(problem["detail"])) == ("action_cancelled", "another", str)
        assert answer.headers["content-type"].endswith("json")


@pytest.mark.case(61)
def test_a_cancelled_job_that_waits_for_a_slot_is_never_executed(
    client: Client, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    """Case 61 (=); and B20: nothing was dispatched, so nothing is uncertain."""
    holder, waiter, after = (Gate(tmp_path, name) for name in ("holder", "waiter", "after"))
    held = pool.submit(client.start, "queue-holder", "narrow", input=holder.input)
    holder.wait("began")
    client.start("queue-waiter", "narrow", input=waiter.input, headers=RESPOND_ASYNC).expect(202)
    wait_for_phase(client, "queue-waiter", "queued")
    view = client.cancel("queue-waiter", "narrow").expect(200)
    assert (view["status"], view["stop"]["confirmed"], view["stop"]["method"]) == ("cancelled", True, "never_started")
    data = {"status": "cancelled", "uncertain_outcome": False, "stop": view["stop"]}
    assert events_of(client, "queue-waiter") == [{"event": "cancelled", "sequence": 0, "data": data}]
    holder.release()
    held.result().expect(200)
    after.release()
    client.start("queue-after", "narrow", input=after.input).expect(200)
    assert (after.happened("began"), waiter.happened("began")) == (True, False)


@pytest.mark.case(62)
def test_what_a_cancel_is_refused_for(client: Client, tmp_path: Path) -> None:
    gate = Gate(tmp_path, "gate")
    client.start("refusals", "turnstile", input=gate.input, headers=RESPOND_ASYNC).expect(202)
    gate.wait("began")
    assert client.cancel("nobody", "turnstile").status == 404
    assert client.cancel("refusals", "narrow").status == 404
    body = {"crew_id": "turnstile", "action_id": "refusals"}
    assert client.request("POST", "/jobs/other/cancel", body=body).status == 400
    for wrong in ({"reason": "x" * 2049}, {"reason": 1}, {"extra": None}, {"crew_id": ""}, {"action_id": None}):
        assert client.request("POST", "/jobs/refusals/cancel", body=body | wrong).status == 422
    assert client.get("refusals").expect(200)["phase"] == "running", "a refused cancel stops nothing"
    gate.release()
    wait_for_phase(client, "refusals", "done")
    before, events = client.get("refusals").expect(200), events_of(client, "refusals")
    assert client.cancel("refusals", "turnstile", reason="x" * 2048).expect(200) == before
    assert client.request("POST", "/runs/refusals/cancel", body=body).expect(200) == before
    assert (before["status"], client.get("refusals").expect(200), events_of(client, "refusals")) == (
        "completed", before, events,
    )  # fmt: skip


@pytest.mark.case(62)
def test_the_reason_of_a_cancel_is_in_the_audit(server: Server, client: Client, tmp_path: Path) -> None:
    """Case 62 (+, B24): the reference drops it."""
    gate = Gate(tmp_path, "gate")
    client.start("audited", "turnstile", input=gate.input, headers=RESPOND_ASYNC).expect(202)
    gate.wait("began")
    client.cancel("audited", "turnstile", reason="the reason given: é").expect(200)
    details = [json.dumps(detail, ensure_ascii=False) for detail in audit(server, "audited")]
    assert any("the reason given: é" in detail for detail in details)


def audit(server: Server, action_id: str) -> list[Any]:
    """Details of the audit's entries about an Action."""
    with contextlib.closing(sqlite3.connect(f"{server.state_file.as_uri()}?mode=ro", uri=True)) as journal:
        rows = journal.execute("SELECT detail FROM audit WHERE action_id = ? ORDER BY id", (action_id,)).fetchall()
    return [json.loads(row[0]) for row in rows if row[0]]


@pytest.mark.case(63)
def test_cancels_at_once_and_afterwards_get_the_same_view(
    client: Client, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    gate = Gate(tmp_path, "gate")
    client.start("twice", "turnstile", input=gate.input, headers=RESPOND_ASYNC).expect(202)
    gate.wait("began")
    cancels = [pool.submit(client.cancel, "twice", "turnstile", reason=str(number)) for number in range(4)]
    views = [cancel.result().expect(200) for cancel in cancels]
    views.append(client.cancel("twice", "turnstile").expect(200))
    assert views[0]["status"] == "cancelled"
    assert all(view == views[0] for view in views)
    assert names_of(client, "twice") == ["started", "cancelled"]


@pytest.mark.case(64)
def test_the_connectors_own_cancels_are_confirmed(server: Server, client: Client, tmp_path: Path) -> None:
    """Both ways of section 16.6: the explicit capability, and the host that gives an open stream up."""
    connector = strict(server)
    for action_id, explicit in (("act_1", True), ("act_2", False)):
        gate = Gate(tmp_path, action_id)
        with connector.open("run", "turnstile", action_id, gate.input) as stream:
            stream.until("started")
            if explicit:
                with pytest.raises(Refused):
                    connector.cancel("turnstile", action_id, action_id="act_3", key="k", reason="x\n")
                result = connector.cancel("turnstile", action_id, action_id="act_3", key="k", reason="enough")
                assert (result.kind, result.output["status"], result.output["action_id"]) == (
                    "completed", "cancelled", action_id,
                )  # fmt: skip
            else:
                result = connector.runtime_cancel("run", "turnstile", action_id)
                assert (result.kind, result.output) == ("cancelled", {"remote_stop_confirmed": True})
            ended = stream.result()
        assert (ended.kind, ended.output["stop"]["confirmed"]) == ("cancelled", True)
        assert client.get("act_3").status == 404, "a cancel is no job"


def test_a_cancel_at_any_moment_ends_its_job(client: Client, pool: ThreadPoolExecutor) -> None:
    """B21: a job that is cancelled before it has begun anything cannot stay running for ever."""
    numbers = range(24)
    for number in numbers:
        client.start(f"moment-{number}", "instant", headers=RESPOND_ASYNC).expect(202)
        pool.submit(client.cancel, f"moment-{number}", "instant")
    for number in numbers:
        view = client.cancel(f"moment-{number}", "instant").expect(200)
        assert (view["phase"], view["stop"]["confirmed"]) == ("done", True)
        assert names_of(client, f"moment-{number}")[-1] == view["status"]
    procs.wait_until(lambda: client.health().json()["active_runs"] == 0, WAIT_S, "nothing is left running")
