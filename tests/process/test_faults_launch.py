"""Templates that die, hang or are replaced, and kernels that refuse the better ways of making a worker."""

from __future__ import annotations

import os
import platform
import signal
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.support import procs, seccomp
from tests.support.client import Client
from tests.support.registries import GOOD, with_registry, write_registry
from tests.support.server import Server, ServerFactory

REGISTRY = "tests.crews.fake_crews:CREWS"
BROKEN = "def broken(:\n"


def template_of(server: Server, *workers: int) -> int:
    """Pid of the one child of a server that is not among ``workers``."""
    (template,) = set(procs.children(server.pid)) - set(workers)
    return template


def worker_of(client: Client, action_id: str) -> int:
    """Pid of a running job's worker."""
    return int(client.get(action_id).expect(200)["worker"]["pid"])


def launch_methods(server: Server) -> set[str]:
    """How the recorded workers were made."""
    with closing(sqlite3.connect(f"{server.state_file.as_uri()}?mode=ro", uri=True)) as connection:
        return {method for (method,) in connection.execute("SELECT method FROM workers")}


# --- the template's own life ---------------------------------------------------------------------------------------


def test_the_death_of_the_template_touches_no_running_job(start_server: ServerFactory) -> None:
    server = start_server(registry=REGISTRY)
    client = server.client()
    with client.stream("running", "sleeper", input={"seconds": 1}) as stream:
        stream.until("started")
        lost = template_of(server, worker_of(client, "running"))
        os.kill(lost, signal.SIGKILL)
        server.wait_log("template_lost", pid=lost)
        client.start("new", "instant").expect(200)
        assert stream.rest()[-1].event == "completed"
    assert client.health().expect(200)["status"] == "ready"
    assert template_of(server) != lost


def test_the_death_of_a_standby_is_made_up_for(start_server: ServerFactory) -> None:
    server = start_server(registry=REGISTRY, settings={"launch": "spawn"})
    lost = template_of(server)
    os.kill(lost, signal.SIGKILL)
    server.wait_log("standby_lost", pid=lost)
    for number in range(2):
        server.client().start(f"a-{number}", "instant").expect(200)


@pytest.mark.parametrize("launch", ["fork", "spawn"])
def test_a_launch_that_hangs_is_made_again_by_a_new_process(start_server: ServerFactory, launch: str) -> None:
    server = start_server(registry=REGISTRY, settings={"launch": launch, "launch_timeout_s": 1})
    hung = template_of(server)
    os.kill(hung, signal.SIGSTOP)
    with server.client().stream("a", "instant") as stream:
        events = stream.rest()
    assert [event.event for event in events] == ["started", "completed"]
    assert not procs.alive(hung)
    server.client().start("b", "instant").expect(200)


def test_a_worker_that_stops_before_hello_is_replaced(start_server: ServerFactory) -> None:
    settings = {"launch_timeout_s": 1, "template": {"preload": []}}
    server = start_server(registry="tests.crews.stalling_crews:CREWS", settings=settings)
    marker = server.directory / "stalled"
    server.client().start("a", "stalls_once", input={}).expect(200)
    (pid,) = marker.read_text().split()
    assert not procs.alive(int(pid))


# --- growth ---------------------------------------------------------------------------------------------------------

#: Each fork costs the template 8 MiB.
LEAK = """
    import os
    from tests.crews.fake_crews import Sleeper

    HELD = []
    os.register_at_fork(before=lambda: HELD.append(b"x" * (8 << 20)))
    CREWS["sleeper"] = Sleeper
"""


def with_leak(make_server: ServerFactory, tmp_path: Path, limit_bytes: int) -> Server:
    """A server whose template grows with each job."""
    template = {"preload": [], "recycle_growth_bytes": limit_bytes}
    return with_registry(make_server, tmp_path, GOOD, LEAK, template=template).start()


def test_a_template_that_grows_is_replaced_while_a_job_runs(make_server: ServerFactory, tmp_path: Path) -> None:
    server = with_leak(make_server, tmp_path, 20 << 20)
    client = server.client()
    with client.stream("running", "sleeper", input={"seconds": 4}) as stream:
        stream.until("started")
        worker = worker_of(client, "running")
        old = template_of(server, worker)
        for number in range(3):
            client.start(f"grows-{number}", "good").expect(200)
        assert server.wait_log("template_recycled", pid=old)["grown_bytes"] > 20 << 20
        client.start("from-the-new-one", "good").expect(200)
        procs.wait_until(lambda: not procs.alive(old), 10, "the old template is gone")
        assert template_of(server, worker) != old
        assert stream.rest()[-1].event == "completed"


def test_a_template_may_grow_where_that_is_allowed(make_server: ServerFactory, tmp_path: Path) -> None:
    server = with_leak(make_server, tmp_path, 0)
    before = template_of(server)
    for number in range(5):
        server.client().start(f"grows-{number}", "good").expect(200)
    assert template_of(server) == before
    assert not [line for line in server.log_lines() if line["event"] == "template_recycled"]


def test_a_registry_that_cannot_be_loaded_again_keeps_its_grown_template(
    make_server: ServerFactory, tmp_path: Path
) -> None:
    server = with_leak(make_server, tmp_path, 20 << 20)
    old = template_of(server)
    write_registry(tmp_path, BROKEN)
    for number in range(4):
        server.client().start(f"grows-{number}", "good").expect(200)
    server.wait_log("template_not_recycled", pid=old)
    server.client().start("from-the-old-one", "good").expect(200)
    assert template_of(server) == old


# --- reload --------------------------------------------------------------------------------------------------------


def reload(server: Server, said: str) -> None:
    """SIGHUP, and wait for what the server says to it."""
    seen = len(server.log_lines())
    server.process.send_signal(signal.SIGHUP)
    server.wait_log(said, skip=seen)


def test_a_reload_takes_an_edited_registry_while_a_job_runs(make_server: ServerFactory, tmp_path: Path) -> None:
    sleeper = "\nfrom tests.crews.fake_crews import Sleeper\nCREWS['sleeper'] = Sleeper\n"
    server = with_registry(make_server, tmp_path, GOOD, sleeper).start()
    client = server.client()
    before = client.health().expect(200)
    with client.stream("old", "sleeper", input={"seconds": 1}) as stream:
        stream.until("started")
        old = template_of(server, worker_of(client, "old"))
        write_registry(tmp_path, GOOD.replace("fine", "better"), "\nCREWS['another'] = Crew\n")
        reload(server, "registry_reloaded")
        assert client.start("new", "good").expect(200)["raw"] == "better"
        assert client.start("newer", "another").expect(200)["raw"] == "better"
        assert client.start("gone", "sleeper").status == 404
        assert stream.rest()[-1].event == "completed"
    after = client.health().expect(200)
    assert (before["crews"], after["crews"]) == (["good", "sleeper"], ["another", "good"])
    assert before["registry_digest"] != after["registry_digest"]
    procs.wait_until(lambda: not procs.alive(old), 10, "the old template is gone")


def test_a_reload_that_fails_keeps_the_old_registry(make_server: ServerFactory, tmp_path: Path) -> None:
    server = with_registry(make_server, tmp_path, GOOD).start()
    client = server.client()
    before = client.health().expect(200)
    template = template_of(server)
    write_registry(tmp_path, BROKEN)
    reload(server, "reload_failed")
    assert "SyntaxError" in server.wait_log("reload_failed")["detail"]
    assert client.start("a", "good").expect(200)["raw"] == "fine"
    after = client.health().expect(200)
    assert [after[name] == before[name] for name in ("status", "crews", "registry_digest")] == [True] * 3
    assert template_of(server) == template
    write_registry(tmp_path, GOOD.replace("fine", "mended"))
    reload(server, "registry_reloaded")
    assert client.start("b", "good").expect(200)["raw"] == "mended"


# --- kernels that refuse -------------------------------------------------------------------------------------------


needs_filter = pytest.mark.skipif(
    platform.machine() not in seccomp.MACHINES, reason="no seccomp filter is written for this machine"
)


def filtered(*refusals: str) -> tuple[str, ...]:
    """The prefix of a server that may not do these things."""
    return (sys.executable, "-m", "tests.support.seccomp", *refusals, "--") if refusals else ()


@needs_filter
@pytest.mark.parametrize(
    ("refusals", "method"), [((), "clone3"), (("clone3",), "clone"), (("clone3", "siblings"), "fork")]
)
def test_workers_are_made_and_stopped_whatever_the_kernel_refuses(
    start_server: ServerFactory, tmp_path: Path, refusals: tuple[str, ...], method: str
) -> None:
    server = start_server(
        registry="tests.crews.counted_crews:CREWS",
        environment={"EXECUTIONS_FILE": str(tmp_path / "executions")},
        prefix=filtered(*refusals),
    )
    client, beats = server.client(), tmp_path / "beats"
    client.start("done", "instant", input={"action": "done"}).expect(200)
    crashed = client.start("crashed", "crash", input={"action": "crashed", "how": "exit"})
    assert crashed.status == 502
    with client.stream("a", "beating_sleeper", input={"action": "a", "heartbeat": str(beats)}) as stream:
        stream.until("started")
        procs.wait_until(lambda: procs.read_beats(beats), 20, "a heartbeat")
        worker = worker_of(client, "a")
        view = client.cancel("a", "beating_sleeper").expect(200)
        assert stream.rest()[-1].event == "cancelled"
    assert (view["status"], view["stop"]["confirmed"], view["stop"]["method"]) == ("cancelled", True, "cgroup")
    assert (view["stop"]["worker"]["pid"], view["stop"]["worker"]["exit_signal"]) == (worker, "SIGKILL")
    assert not any(procs.alive(beat.pid, beat.start_ticks) for beat in procs.read_beats(beats))
    assert client.get("crashed").expect(200)["stop"]["worker"]["exit_code"] == 3
    assert launch_methods(server) == {method}


@needs_filter
def test_workers_of_a_template_that_died_are_still_stopped_with_proof(start_server: ServerFactory) -> None:
    """Where the template is the workers' parent, its death makes them orphans, and orphans are the supervisor's."""
    server = start_server(registry=REGISTRY, settings={"linger_s": 0.1}, prefix=filtered("clone3", "siblings"))
    client = server.client()
    with client.stream("a", "sleeper", input={"seconds": 60}) as cancelled:
        cancelled.until("started")
        with client.stream("b", "sleeper", input={"seconds": 1.5}) as completed:
            completed.until("started")
            lost = template_of(server)
            os.kill(lost, signal.SIGKILL)
            server.wait_log("template_lost", pid=lost)
            view = client.cancel("a", "sleeper").expect(200)
            assert (view["status"], view["stop"]["confirmed"]) == ("cancelled", True)
            assert view["stop"]["worker"]["exit_signal"] == "SIGKILL"
            assert completed.rest()[-1].event == "completed"
    view = client.get("b").expect(200)
    assert (view["stop"]["confirmed"], view["stop"]["worker"]["exit_code"]) == (True, 0)
    client.start("c", "instant").expect(200)
