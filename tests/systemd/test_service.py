"""A real crew in a real unit: started, watched, cancelled, reloaded, drained, as a user that exists only for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support import procs
from tests.support.booted import Booted
from tests.support.client import Client
from tests.systemd.service import Service, ServiceFactory

#: The drain of these services, seconds.
DRAIN_S = 1.0


@pytest.fixture(scope="module")
def real(machine: Booted) -> Iterator[Service]:
    """The unit without an instance, with real crews on scripted models."""
    service = Service(
        machine,
        "",
        registry="tests.crews.real_crews:CREWS",
        settings={"template": {"preload": ["crewai"]}, "drain_s": DRAIN_S},
    )
    yield service.start()
    service.close()


def train(client: Client, action_id: str, service: Service) -> tuple[dict[str, object], str]:
    """Input of a train whose tool leaves a daemon behind and whose model then blocks, and its heartbeat file."""
    inside, _ = service.heartbeat(action_id)
    inputs = {"heartbeat": inside, "seconds": 60}
    return {"n_iterations": 1, "artifact_name": f"{action_id}.pkl", "feedback": "good", "inputs": inputs}, inside


def wait_for_beat(service: Service, name: str) -> procs.Beat:
    """The first sign of life of a daemon."""
    path = service.heartbeat(name)[1]
    return procs.wait_until(lambda: procs.read_beats(path), 60, f"{name} beats")[0]


def test_it_is_ready_and_says_how_it_is(real: Service) -> None:
    assert real.show("ActiveState") == "active"
    assert real.show("StatusText") == "0 running, 0 queued, 0 effects unknown"
    with real.client().stream("shown", "blocking", input={"seconds": 60}, complete=False) as stream:
        stream.next()
        real.wait_property("StatusText", "1 running, 0 queued, 0 effects unknown")
        assert 'Status: "1 running, 0 queued, 0 effects unknown"' in real.status()
        (leaf,) = real.leaves("job-")
        assert leaf.endswith(".shown")
        tree = real.machine.run("systemd-cgls", "--no-pager", real.cgroup).stdout
        assert leaf in tree
        assert real.client().cancel("shown", "blocking").expect(200)["stop"]["method"] == "cgroup"
    real.wait_property("StatusText", "0 running, 0 queued, 0 effects unknown")


def test_every_kind_of_work_runs_with_the_hardening(real: Service) -> None:
    client = real.client()
    assert client.start("crew", "support").expect(200)["raw"] == "case triaged"
    assert client.start("knows", "knowledge").expect(200)["raw"] == "told"
    query = client.start("asks", "knowledge", operation="knowledge_query", input={"query": ["queen"]}).expect(200)
    assert "Melissa" in query["results"][0]["content"]
    assert client.start("learns", "memory").expect(200)["raw"] == "the sea is salty"
    assert client.start("remembers", "memory").expect(200)["raw"] == "I remember"
    assert client.start("adds", "calculator").expect(200)["raw"] == "the sum is 5"
    trained = client.start(
        "trains", "support", operation="train", input={"n_iterations": 1, "artifact_name": "a.pkl", "feedback": "ok"}
    ).expect(200)
    assert real.path("training/a.pkl").stat().st_size == trained["bytes"]
    with client.stream("talks", "topical", input={"topic": "bees"}) as stream:
        chunks = [event.data for event in stream.rest() if event.event == "chunk"]
    assert [chunk["content"] for chunk in chunks if chunk["channel"] == "messages"]


def test_it_runs_as_nobody_in_particular(real: Service) -> None:
    pid = real.main_pid()
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text("utf-8").splitlines())
    uids = {int(uid) for uid in status["Uid"].split()}
    assert 61184 <= min(uids) == max(uids) <= 65519, "of systemd's range for dynamic users"
    assert (status["NoNewPrivs"].strip(), int(status["CapEff"], 16), int(status["CapBnd"], 16)) == ("1", 0, 0)
    assert status["Seccomp"].strip() == "2"
    assert oct(real.machine.inside("/var/lib/private/crew-supervisor").stat().st_mode & 0o777) == "0o700"


def test_its_log_has_fields_and_priorities(real: Service) -> None:
    (listening,) = real.events("listening")
    assert (listening["PRIORITY"], listening["SYSLOG_IDENTIFIER"]) == ("6", "crew-supervisor")
    assert listening["PORT"] == str(real.port)
    assert listening["MESSAGE"].startswith("listening host=127.0.0.1")
    real.client().start("logged", "support").expect(200)
    assert [record["STATUS"] for record in real.events("job_ended", ACTION_ID="logged")] == ["completed"]
    assert real.client().start("fails", "failing").status == 502
    records = real.machine.records(real.unit)
    assert "secret" not in str([record.get("MESSAGE") for record in records])


def test_a_cancel_kills_the_leaf_and_nothing_else(real: Service) -> None:
    client, before = real.client(), real.main_pid()
    work, _ = train(client, "cancelled", real)
    with client.stream("cancelled", "daemon", operation="train", input=work) as stream:
        beat = wait_for_beat(real, "cancelled")
        assert procs.alive(beat.pid, beat.start_ticks)
        assert len(real.leaves("job-")) == 1
        stop = client.cancel("cancelled", "daemon").expect(200)["stop"]
        assert not procs.alive(beat.pid, beat.start_ticks)
        assert (stop["confirmed"], stop["method"], stop["processes_left"]) == (True, "cgroup", 0)
        assert stop["processes_killed"] >= 2
        assert stop["worker"]["exit_signal"] == "SIGKILL"
        assert stream.rest()[-1].event == "cancelled"
    assert real.main_pid() == before
    assert real.leaves("job-") == []
    assert real.client().request("GET", "/readyz").status == 200


def test_a_stop_drains_proves_records_and_is_a_success(real: Service) -> None:
    client = real.client()
    work, _ = train(client, "drained", real)
    with client.stream("drained", "daemon", operation="train", input=work) as stream, ThreadPoolExecutor(1) as pool:
        beat = wait_for_beat(real, "drained")
        rest = pool.submit(stream.rest)
        began = time.monotonic()
        real.machine.run("systemctl", "stop", real.unit)
        took_s = time.monotonic() - began
        last = rest.result(10)[-1]
    assert not procs.alive(beat.pid, beat.start_ticks)
    assert (last.event, last.data["error_type"]) == ("failed", "SupervisorShutdown")
    assert last.data["stop"]["confirmed"] is True
    assert (real.show("Result"), real.show("ExecMainStatus"), real.show("ActiveState")) == ("success", "0", "inactive")
    assert DRAIN_S <= took_s < 45, "within TimeoutStopSec="
    assert not real.machine.inside("/sys/fs/cgroup/system.slice/crew-supervisor.service").exists()

    real.start()
    view = real.client().get("drained").expect(200)
    assert (view["status"], view["stop"]["confirmed"], view["uncertain_outcome"]) == ("failed", True, True)


def test_workers_see_nothing_of_the_service_manager(make_service: ServiceFactory) -> None:
    service = make_service("seen", registry="tests.crews.hostile_crews:CREWS", socket=True).start()
    report = service.client().start("report", "report").expect(200)
    theirs = (
        "CREDENTIALS_DIRECTORY", "NOTIFY_SOCKET", "LISTEN_", "WATCHDOG_", "JOURNAL_STREAM", "INVOCATION_ID",
        "SYSTEMD_EXEC_PID", "STATE_DIRECTORY", "CREW_SUPERVISOR_",
    )  # fmt: skip
    assert not [name for name in report["environ"] if name.startswith(theirs)]
    assert service.token not in str(report)
    first_environment = report["first_environ"]
    assert not [name for name in theirs if name in str(first_environment)]
    open_sockets = [target for target in report["descriptors"].values() if target.startswith("socket:")]
    assert len(open_sockets) == 1, "the protocol's, and not systemd's listener"
