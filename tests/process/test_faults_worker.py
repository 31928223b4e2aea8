"""Workers that die, lie, flood or never build their crew: their job fails and says how, nobody else notices."""

from __future__ import annotations

import hashlib
import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.crews.hostile_crews import ATTACKS
from tests.support import procs
from tests.support.client import Client
from tests.support.server import Server

MIB = 1024 * 1024
SETTINGS: dict[str, Any] = {"max_concurrency": 6, "grace_s": 0.2, "linger_s": 0.2, "log_bytes": 65_536}
#: How much a flooding worker may add to the supervisor's peak of resident memory.
FLOOD_GROWTH_KIB = 30 * 1024
#: Ends a job that nothing else has ended, so that its test fails soon.
TIMEOUT_MS = 10_000

_numbers = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all of these: it must survive every one."""
    directory = tmp_path_factory.mktemp("server")
    environment: dict[str, str | None] = {"FACTORY_BLOCK_S": "60"}
    registry = "tests.crews.hostile_crews:CREWS"
    with Server(directory, registry=registry, settings=SETTINGS, environment=environment) as running:
        pid = running.pid
        yield running
        assert (running.process.poll(), running.pid) == (None, pid), "the server did not survive"


@pytest.fixture
def client(server: Server) -> Client:
    """A client of that server."""
    return server.client()


def new_id() -> str:
    """An Action id that was not used before."""
    return f"a-{next(_numbers)}"


def run(client: Client, crew_id: str, **inputs: Any) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Run a job to its end: the status of the answer, the data of the last event, the view."""
    action_id = new_id()
    answer = client.start(action_id, crew_id, input=inputs, timeout_ms=TIMEOUT_MS)
    view = client.get(action_id).expect(200)
    last = client.events(action_id).expect(200)["events"][-1]
    assert last["event"] == view["status"]
    return answer.status, last["data"], view


def failure(client: Client, crew_id: str, **inputs: Any) -> dict[str, Any]:
    """Run a job that must fail; returns the data of its last event, whose stop must be proved."""
    status, data, view = run(client, crew_id, **inputs)
    assert (status, view["status"], data["stop"]["confirmed"]) == (502, "failed", True), data
    assert data["stop"] == view["stop"]
    assert data["uncertain_outcome"] is view["uncertain_outcome"]
    return data


# --- crews that never come to be -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("crew_id", "error_type"), [("factory_raises", "RuntimeError"), ("not_a_crew", "RegistryError")]
)
def test_a_factory_without_a_crew_fails_its_job_for_certain(client: Client, crew_id: str, error_type: str) -> None:
    data = failure(client, crew_id)
    assert (data["error_type"], data["uncertain_outcome"]) == (error_type, False)
    assert "no crew today" not in str(data)
    assert client.health().expect(200)["status"] == "ready"


@pytest.mark.case(53)
def test_a_factory_that_blocks_holds_nobody_else_up(client: Client) -> None:
    action_id = new_id()
    with client.stream(action_id, "factory_blocks") as stream:
        stream.until("started")
        assert client.health().expect(200)["status"] == "ready"
        assert run(client, "instant")[0] == 200
        view = client.cancel(action_id, "factory_blocks").expect(200)
        assert (view["status"], view["stop"]["confirmed"]) == ("cancelled", True)
        assert stream.rest()[-1].event == "cancelled"


@pytest.mark.case(47)
def test_an_exception_of_the_crew_is_uncertain_and_its_place_is_in_the_log(client: Client, server: Server) -> None:
    data = failure(client, "failing")
    assert (data["error_type"], data["uncertain_outcome"]) == ("ValueError", True)
    assert "secret" not in str(data)
    logs = [log.read_bytes() for log in (server.state_file.parent / "work" / "logs").glob("*.log")]
    assert any(b"ValueError, its text is left out" in log and b"fake_crews.py" in log for log in logs)
    assert not any(b"the secret of the crew" in log for log in logs)


# --- workers that die ----------------------------------------------------------------------------------------------


def test_a_worker_that_a_signal_kills_is_named_with_it(client: Client) -> None:
    data = failure(client, "crash", how="signal")
    assert (data["error_type"], data["uncertain_outcome"]) == ("WorkerDied", True)
    assert data["stop"]["worker"]["exit_signal"] == "SIGKILL"
    assert data["stop"]["worker"]["exit_code"] is None
    assert "SIGKILL" in data["message"]


def test_a_worker_killed_from_outside_is_the_same(client: Client) -> None:
    action_id = new_id()
    with client.stream(action_id, "sleeper") as stream:
        stream.until("started")
        os.kill(client.get(action_id).expect(200)["worker"]["pid"], signal.SIGSEGV)
        data = stream.rest()[-1].data
    assert (data["status"], data["error_type"], data["uncertain_outcome"]) == ("failed", "WorkerDied", True)
    assert data["stop"]["worker"]["exit_signal"] == "SIGSEGV"
    assert "SIGSEGV" in data["message"]


def test_a_worker_that_exits_is_named_with_its_code(client: Client) -> None:
    data = failure(client, "crash", how="exit")
    assert (data["error_type"], data["uncertain_outcome"]) == ("WorkerDied", True)
    assert (data["stop"]["worker"]["exit_code"], data["stop"]["worker"]["exit_signal"]) == (3, None)


def test_a_crew_that_asks_python_to_exit_fails(client: Client) -> None:
    data = failure(client, "crash", how="raise")
    assert (data["error_type"], data["uncertain_outcome"]) == ("SystemExit", True)


# --- workers that break the protocol -------------------------------------------------------------------------------


@pytest.mark.parametrize("attack", sorted(ATTACKS))
def test_what_is_no_frame_stops_its_job_and_no_other(client: Client, attack: str) -> None:
    other = new_id()
    with client.stream(other, "sleeper", input={"seconds": 0.3}) as stream:
        stream.until("started")
        data = failure(client, "attacker", attack=attack)
        assert stream.rest()[-1].event == "completed"
    assert (data["error_type"], data["uncertain_outcome"]) == ("ProtocolViolation", True)
    assert data["stop"]["worker"]["exit_signal"] == "SIGKILL"


def test_a_frame_cut_off_by_the_exit_is_a_death(client: Client) -> None:
    data = failure(client, "truncating", then="exit")
    assert (data["error_type"], data["uncertain_outcome"]) == ("WorkerDied", True)
    assert data["stop"]["worker"]["exit_code"] == 0


def test_a_frame_cut_off_by_a_worker_that_lives_on_is_a_violation(client: Client) -> None:
    data = failure(client, "truncating", then="close")
    assert (data["error_type"], data["uncertain_outcome"]) == ("ProtocolViolation", True)
    assert data["stop"]["worker"]["exit_signal"] == "SIGKILL"


def test_a_worker_that_speaks_before_go_is_stopped_for_certain(client: Client) -> None:
    action_id = new_id()
    assert client.start(action_id, "early").status == 502
    events = client.events(action_id).expect(200)["events"]
    assert [event["event"] for event in events] == ["failed"]
    assert (events[0]["data"]["error_type"], events[0]["data"]["uncertain_outcome"]) == ("ProtocolViolation", False)


# --- bounds --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("crew_id", "inputs"),
    [
        ("big_output", {"bytes": 5 * MIB}),
        ("large_frames", {"what": "output", "bytes": 5 * MIB}),
        ("large_frames", {"what": "event", "bytes": 300_000}),
    ],
)
def test_an_output_above_4_mib_or_an_event_above_its_bound_fails(
    client: Client, crew_id: str, inputs: dict[str, Any]
) -> None:
    data = failure(client, crew_id, **inputs)
    assert (data["error_type"], data["uncertain_outcome"]) == ("RegistryError", True)


@pytest.mark.case(42, 52)
def test_an_output_above_the_event_bound_completes_and_is_left_out_of_the_stream_only(client: Client) -> None:
    action_id = new_id()
    with client.stream(action_id, "big_output", input={"bytes": MIB}) as stream:
        last = stream.rest()[-1]
    assert last.event == "completed"
    whole = client.start(action_id, "big_output", input={"bytes": MIB})
    output = whole.expect(200)
    assert len(output["raw"]) == MIB
    assert client.get(action_id).expect(200)["output"] == output
    slice_ = client.request("GET", last.data["location"]).expect(200)
    assert [event["data"] for event in slice_["events"]] == [output]
    digest = hashlib.sha256(whole.body).hexdigest()
    omitted = {"status": "completed", "output_omitted": True, "bytes": len(whole.body), "sha256": digest}
    assert {name: value for name, value in last.data.items() if name != "location"} == omitted


def test_an_output_between_the_event_bound_and_one_frame_goes_over_the_stream(client: Client) -> None:
    with client.stream(new_id(), "big_output", input={"bytes": MIB // 2}) as stream:
        assert len(stream.rest()[-1].data["raw"]) == MIB // 2


def new_log(client: Client, server: Server, **inputs: Any) -> Path:
    """The log of a noisy job."""
    directory = server.state_file.parent / "work" / "logs"
    before = set(directory.glob("*.log"))
    assert run(client, "noisy", **inputs)[0] == 200
    (log,) = set(directory.glob("*.log")) - before
    return log


def test_what_a_crew_prints_is_kept_by_line(client: Client, server: Server) -> None:
    log = new_log(client, server, bytes=200)
    lines = [b"stderr first error of the crew", b"stdout first line of the crew", b"stdout " + b"y" * 99]
    assert sorted(log.read_bytes().splitlines()) == sorted([*lines, b"stdout " + b"z" * 100])
    assert log.stat().st_mode & 0o777 == 0o600


def test_a_noisy_crew_fills_its_log_up_to_the_bound(client: Client, server: Server) -> None:
    log = new_log(client, server, bytes=4 * MIB)
    kept, _, note = log.read_bytes().removesuffix(b"\n").rpartition(b"\n")
    assert len(kept) <= SETTINGS["log_bytes"]
    assert note.startswith(b"supervisor ")
    assert note.endswith(b" bytes above the bound were dropped")


# --- floods --------------------------------------------------------------------------------------------------------


@pytest.fixture
def flooded(tmp_path: Path) -> Iterator[Server]:
    """A server that lets a job have very many events."""
    settings = SETTINGS | {"max_events_per_run": 100_000}
    with Server(tmp_path / "server", registry="tests.crews.hostile_crews:CREWS", settings=settings) as running:
        yield running


def memory_kib(pid: int, name: str) -> int:
    """A line of /proc/PID/status, KiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def test_a_flood_that_nobody_reads_does_not_grow_the_supervisor(flooded: Server) -> None:
    client = flooded.client()
    assert run(client, "instant")[0] == 200
    before = memory_kib(flooded.pid, "VmRSS")
    action_id, chunks, size = new_id(), 25_000, 3_000
    with client.stream(action_id, "flood", input={"chunks": chunks, "bytes": size}):
        # The stream is open and never read from; a second client waits for the end.
        client.start(action_id, "flood", input={"chunks": chunks, "bytes": size}).expect(200)
    grown = memory_kib(flooded.pid, "VmHWM") - before
    assert client.get(action_id).expect(200)["event_count"] == chunks + 2
    assert grown < FLOOD_GROWTH_KIB, f"{grown} KiB for {chunks * size // 1024} KiB of events"


def test_a_flood_past_the_workers_own_bounds_ends_at_the_supervisors(client: Client) -> None:
    other = new_id()
    with client.stream(other, "sleeper", input={"seconds": 0.3}) as stream:
        data = failure(client, "raw_flood")
        assert stream.rest()[-1].event == "completed"
    assert (data["error_type"], data["uncertain_outcome"]) == ("RegistryError", True)
    assert "max_events_per_run" in data["message"]


def test_a_flooding_worker_can_be_cancelled(flooded: Server) -> None:
    client = flooded.client(timeout_s=20)
    before, action_id = memory_kib(flooded.pid, "VmRSS"), new_id()
    with client.stream(action_id, "raw_flood") as stream:
        for _ in range(10):
            stream.next()
        view = client.cancel(action_id, "raw_flood").expect(200)
    assert view["stop"]["confirmed"] is True
    assert view["status"] in {"cancelled", "failed"}
    assert memory_kib(flooded.pid, "VmHWM") - before < FLOOD_GROWTH_KIB
    assert not procs.alive(view["stop"]["worker"]["pid"])


@pytest.mark.case(52)
def test_more_events_than_allowed_fail_the_job(tmp_path: Path) -> None:
    settings = SETTINGS | {"max_events_per_run": 2}
    with Server(tmp_path, registry="tests.crews.hostile_crews:CREWS", settings=settings) as server:
        with server.client().stream("two", "streaming") as stream:
            events = stream.rest()
        assert run(server.client(), "instant")[0] == 200
    assert [event.event for event in events] == ["started", "failed"]
    assert events[-1].data["error_type"] == "RegistryError"
