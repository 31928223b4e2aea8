"""As PID 1 of a container: a PID namespace and a mount namespace of its own, made by unshare(1)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.process.hostile import outside
from tests.process.hostile.field import Field
from tests.support import procs
from tests.support.server import Server, ServerFactory

CONTAINER = ("unshare", "--pid", "--fork", "--mount", "--mount-proc", "--propagation", "private")
REGISTRY = "tests.crews.confined_crews:CREWS"
WAIT_S = 20.0
METHODS = {
    "cgroup": {"stop_method": "cgroup", "pid_namespace": "off"},
    "namespace": {"stop_method": "cgroup", "pid_namespace": "auto"},
    "keeper": {"stop_method": "keeper"},
}

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a PID namespace")


class Inside(NamedTuple):
    """Pids, as the machine counts them, of PID 1 and of the child that serves."""

    server: Server
    init: int
    serving: int
    method: str

    def everybody(self) -> list[int]:
        """Every process of the container, zombies included, and those of namespaces in it."""
        return [self.init, *_all_below(self.init)]

    def zombies(self) -> list[int]:
        """Those that nobody has reaped."""
        return [pid for pid in self.everybody() if not procs.alive(pid)]


def _all_below(pid: int) -> list[int]:
    found = procs.children(pid)
    return found + [further for child in found for further in _all_below(child)]


def numbers_of(pid: int) -> list[int]:
    """The pids of a process, from our namespace down to its own (NSpid in proc_pid_status(5))."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return [int(word) for word in line.split()[1:]]
    return []


@pytest.fixture(params=METHODS)
def inside(request: pytest.FixtureRequest, make_server: ServerFactory) -> Inside:
    """A container that serves."""
    settings = {"drain_s": 0, "linger_s": 0.1, "grace_s": 0.05, **METHODS[request.param]}
    server = make_server(registry=REGISTRY, settings=settings, prefix=CONTAINER).start()
    (init,) = procs.children(server.pid)
    assert numbers_of(init) == [init, 1]
    (serving,) = procs.children(init)
    return Inside(server, init, serving, request.param)


@contextlib.contextmanager
def operators_process(inside: Inside) -> Iterator[int]:
    """What an operator's shell in the container has left behind: a daemon whose parent is PID 1."""
    enter = ["nsenter", "--target", str(inside.init), "--pid", "--mount", "--"]
    command = "setsid sleep 600 </dev/null >/dev/null 2>&1 &"
    before = set(procs.children(inside.init))
    subprocess.run([*enter, "sh", "-c", command], check=True, timeout=60)
    (left,) = procs.wait_until(lambda: set(procs.children(inside.init)) - before, WAIT_S, "PID 1 has adopted it")
    try:
        yield left
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(left, signal.SIGKILL)


def test_the_child_of_pid_1_serves_and_stops_with_proof(inside: Inside) -> None:
    client = inside.server.client()
    assert client.health().expect(200)["status"] == "ready"
    assert inside.server.wait_log("listening")["pid"] == numbers_of(inside.serving)[-1] != 1
    client.start("quick", "instant").expect(200)
    with client.stream("long", "sleeper", complete=False) as stream:
        stream.until("started")
        stop = client.cancel("long", "sleeper").expect(200)["stop"]
        assert (stop["confirmed"], stop["processes_left"], stop["worker"]["exit_signal"]) == (True, 0, "SIGKILL")
    run = Field(inside.server, "cgroup", None).run("double_fork", "cancel")
    assert run.faults() == []


def test_what_jobs_leave_behind_is_reaped(inside: Inside, tmp_path: Path) -> None:
    client = inside.server.client()
    idle = set(inside.everybody())
    for number in range(5):
        heartbeat = tmp_path / f"heartbeat-{number}"
        client.start(f"leaves-{number}", "daemon", input={"heartbeat": str(heartbeat)}).expect(200)
        (writer,) = {beat.pid for beat in procs.read_beats(heartbeat)}
        assert writer > 1
    procs.wait_until(lambda: set(inside.everybody()) == idle, WAIT_S, "only those are there who were before any job")
    assert inside.zombies() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: signal.Signals(number).name)
def test_a_signal_to_pid_1_drains_and_ends_in_order(inside: Inside, number: signal.Signals) -> None:
    client = inside.server.client()
    with client.stream("drained", "sleeper", complete=False) as stream:
        stream.until("started")
        everybody = inside.everybody()
        os.kill(inside.init, number)
        last = stream.rest()[-1]
    assert inside.server.wait_exit() == 0
    assert (last.event, last.data["error_type"]) == ("failed", "SupervisorShutdown")
    assert last.data["stop"]["confirmed"] is True
    assert inside.server.wait_log("draining")["running"] == 1
    assert inside.server.wait_log("stopped")["proved"] is True
    assert not [pid for pid in everybody if procs.alive(pid)]


def test_the_end_of_the_serving_process_is_that_of_the_container(inside: Inside) -> None:
    with inside.server.client().stream("lost", "sleeper", complete=False) as stream:
        stream.until("started")
        everybody = inside.everybody()
        os.kill(inside.serving, signal.SIGKILL)
        # unshare(1) passes on what PID 1 said of its child.
        assert inside.server.wait_exit() == 128 + signal.SIGKILL
    procs.wait_until(lambda: not [pid for pid in everybody if procs.alive(pid)], WAIT_S, "everything has gone with it")


def test_what_an_operator_left_is_never_hunted_and_is_reaped_when_it_ends(inside: Inside) -> None:
    with operators_process(inside) as left, outside.refuge() as refuge:
        ticks = procs.start_ticks(left)
        field = Field(inside.server, "cgroup", refuge)
        for attack in ("double_fork", "other_cgroup"):
            run = field.run(attack, "cancel")
            assert run.faults() == []
            assert run.stop is not None
            strays = [stray["pid"] for stray in run.stop["strays"]]
            assert numbers_of(left)[-1] not in strays
        assert len(strays) == (inside.method == "cgroup"), "there was a hunt for what had left its leaf"
        assert procs.alive(left, ticks)
        assert procs.children(inside.init) == sorted([inside.serving, left])
        os.kill(left, signal.SIGTERM)
        procs.wait_until(lambda: procs.start_ticks(left) != ticks, WAIT_S, "PID 1 has reaped it")
        inside.server.client().start("afterwards", "instant").expect(200)
