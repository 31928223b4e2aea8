"""The supervisor killed, blocked, reloaded and restarted under systemd."""

from __future__ import annotations

import os
import select
import signal
import textwrap
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support import procs
from tests.support.booted import Booted
from tests.systemd.service import PYTHON, Service, ServiceFactory
from tests.systemd.test_service import train, wait_for_beat

#: From the kill of the main process to a fenced record, seconds.
FENCED_S = 10.0
#: Figures are asserted at five times their value: the machine of the tests is shared.
SLACK = 5
REQUESTS = 200
WATCHDOG_S = 2
REAL = {"registry": "tests.crews.real_crews:CREWS"}


def mutant(name: str, service_name: str) -> tuple[str, ...]:
    """Lines of a drop-in that start a mutant in the place of the program."""
    config = f"/etc/crew-supervisor/{service_name}.toml"
    return (
        "ExecStart=",
        f"ExecStart={PYTHON} -m tests.support.mutants {name} serve --config {config}",
        f"Environment=BLOCK_ORDER=/var/lib/crew-supervisor-{service_name}/order",
    )


def kill_main(service: Service) -> float:
    """SIGKILL the main process alone, and wait for its end; returns when it was killed, on the monotonic clock."""
    fd = os.pidfd_open(service.main_pid())
    try:
        at = time.monotonic()
        signal.pidfd_send_signal(fd, signal.SIGKILL)
        assert select.select([fd], [], [], 30)[0], "it has ended"
    finally:
        os.close(fd)
    return at


def test_a_killed_supervisor_comes_back_and_proves_what_is_gone(make_service: ServiceFactory) -> None:
    service = make_service("killed", **REAL, settings={"template": {"preload": ["crewai"]}}).start()
    client, cgroup = service.client(), service.cgroup
    work, _ = train(client, "trained", service)
    with client.stream("trained", "daemon", operation="train", input=work, complete=False):
        beat = wait_for_beat(service, "trained")
        before = service.machine.pids_in(cgroup)
        at = kill_main(service)
        took_s = service.wait_ready(FENCED_S * SLACK) - at
    view = service.client().get("trained").expect(200)
    stop = view["stop"]
    assert not procs.alive(beat.pid, beat.start_ticks)
    assert not before & service.machine.pids_in(cgroup), "nobody of the old cgroup is left"
    assert (view["status"], view["uncertain_outcome"]) == ("failed", True)
    assert (stop["confirmed"], stop["method"], stop["reason"]) == (True, "sealed_cgroup", "restart")
    # systemd's KillMode= came first: the restart had nothing to kill, and says so.
    assert (stop["processes_killed"], stop["strays"], stop["processes_left"]) == (0, [], 0)
    assert service.show("NRestarts") == "1"
    assert service.leaves("job-") == []
    assert took_s < FENCED_S * SLACK


def escape(service: Service, action_id: str, *, hidden: bool = False) -> procs.Beat:
    """Have a worker fork itself out of its leaf into the supervisor's, and block. Returns the escaped one's beat."""
    inside, ours = service.heartbeat(action_id)
    refuge = f"/sys/fs/cgroup{service.cgroup}/supervisor"
    inputs = {"heartbeat": inside, "then": "block", "cgroup": refuge, "moved": f"{inside}.moved", "hidden": hidden}
    with service.client().stream(action_id, "escapee", input=inputs, complete=False) as stream:
        stream.next()
        procs.wait_until(ours.with_name(f"{action_id}.moved").exists, 30, "the daemon has moved")
    return procs.read_beats(ours)[0]


@pytest.mark.parametrize("hides", [False, True])
def test_an_escaped_process_is_found_and_named(make_service: ServiceFactory, hides: bool) -> None:
    # ProtectProc= hides from the supervisor what makes itself undumpable, so our units do without.
    name = "hidden" if hides else "shown"
    service = make_service(name, drop_in=["ProtectProc=invisible"] if hides else []).start()
    beat = escape(service, "out", hidden=hides)
    stop = service.client().cancel("out", "escapee").expect(200)["stop"]
    assert not procs.alive(beat.pid, beat.start_ticks)
    assert (stop["confirmed"], stop["method"], len(stop["strays"])) == (True, "cgroup", 1)
    assert stop["strays"][0]["pid"] == beat.pid, "as the service counts its processes, and so does the daemon"
    assert service.client().request("GET", "/readyz").status == 200


def leave_daemon(service: Service, action_id: str) -> procs.Beat:
    """Let a worker escape, and kill the supervisor."""
    beat = escape(service, action_id)
    kill_main(service)
    return beat


@pytest.mark.parametrize("proc", ["default", "invisible"])
def test_where_systemd_kills_nothing_the_restart_does(make_service: ServiceFactory, proc: str) -> None:
    # With both PrivateUsers= and ProtectProc=, /proc shows a restart nothing of the process before it.
    service = make_service(f"spared-{proc}", drop_in=["KillMode=process", f"ProtectProc={proc}"]).start()
    beat = leave_daemon(service, "escaped")
    service.wait_ready()
    stop = service.client().get("escaped").expect(200)["stop"]
    assert not procs.alive(beat.pid, beat.start_ticks)
    assert (stop["confirmed"], stop["method"]) == (True, "sealed_cgroup")
    assert beat.pid in [stray["pid"] for stray in stop["strays"]]


def test_a_restart_that_trusted_systemd_would_be_found_out(make_service: ServiceFactory) -> None:
    service = make_service("trusting", drop_in=["KillMode=process", *mutant("trusting", "trusting")]).start()
    beat = leave_daemon(service, "escaped")
    service.wait_ready()
    assert service.client().get("escaped").expect(200)["stop"]["confirmed"] is True
    assert procs.alive(beat.pid, beat.start_ticks), "the mutant claimed what is not so"


@pytest.mark.parametrize("kind", ["blocked", "deaf"])
def test_the_watchdog_ends_a_supervisor_that_stands_still(make_service: ServiceFactory, kind: str) -> None:
    service = make_service(kind, drop_in=[f"WatchdogSec={WATCHDOG_S}", *mutant(kind, kind)]).start()
    first = service.show("MainPID")

    def last_sign_s() -> float:
        return int(service.show("WatchdogTimestampMonotonic")) / 1e6

    ready_s = last_sign_s()
    alive_for_s = 2.5 * WATCHDOG_S
    procs.wait_until(lambda: last_sign_s() - ready_s > alive_for_s, alive_for_s * SLACK, "it lives through two limits")
    assert (service.show("MainPID"), service.show("NRestarts")) == (first, "0")
    service.path("order").touch()
    service.wait_property("NRestarts", "1", 60)
    service.wait_ready()
    log = service.log()
    assert "Watchdog timeout" in log
    assert "Fatal Python error: Aborted" in log
    assert ("in block" if kind == "blocked" else "in hang") in log, "where it stood"


def write_registry(machine: Booted, *names: str) -> None:
    """A registry of crews that answer with their names, and one that waits for a file."""
    source = """
        import time
        from pathlib import Path

        class Named:
            def __init__(self, name):
                self.name = name

            def kickoff(self, inputs):
                return {"raw": self.name}

        class Waiting:
            def kickoff(self, inputs):
                while not Path(inputs["release"]).exists():
                    time.sleep(0.01)
                return {"raw": "waited"}

        CREWS = {"waiting": Waiting, **{name: (lambda name=name: Named(name)) for name in NAMES}}
    """
    machine.write("/opt/crew/checkout/rotating.py", f"NAMES = {names!r}\n" + textwrap.dedent(source))


def test_a_reload_rotates_token_and_registry_under_a_running_job(machine: Booted, make_service: ServiceFactory) -> None:
    write_registry(machine, "old")
    service = make_service("reloaded", registry="rotating:CREWS").start()
    old = service.token
    release, ours = service.heartbeat("release")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(service.client().start, "running", "waiting", input={"release": release})
        service.wait_event("job_admitted")
        for turn in (1, 2):
            write_registry(machine, "old", f"new{turn}")
            previous = service.token
            service.set_token(f"token-of-turn-{turn}")
            machine.run("systemctl", "reload", service.unit)
            service.wait_event("registry_reloaded", count=turn)
            assert service.client(token=previous).health().status == 401
            assert service.client().start(f"a-{turn}", f"new{turn}").expect(200)["raw"] == f"new{turn}"
        service.wait_property("ActiveState", "active")
        assert service.show("NRestarts") == "0"
        ours.touch()
        assert running.result(30).expect(200)["raw"] == "waited"
    assert service.client(token=old).health().status == 401

    # A start begins anew with the credential; nothing of a reload is left over.
    service.set_token("token-of-a-restart")
    machine.run("systemctl", "restart", service.unit)
    assert service.client().health().status == 200
    assert service.client(token="token-of-turn-2").health().status == 401


def test_a_token_that_may_only_read_is_a_credential_too(machine: Booted, make_service: ServiceFactory) -> None:
    machine.write("/etc/crew-supervisor/read.read_token", "a-reader", 0o600)
    service = make_service("read").start()
    reader = service.client(token="a-reader")
    assert reader.health().status == 200
    assert reader.start("a-1", "instant").status == 403


def test_no_connection_is_refused_during_a_restart(make_service: ServiceFactory) -> None:
    service = make_service("activated", socket=True).start()
    outcomes: Counter[str] = Counter()
    begun, done = threading.Event(), threading.Event()

    def ask() -> None:
        begun.set()
        count = 0
        while count < REQUESTS or not done.is_set():
            count += 1
            try:
                outcomes[str(service.client().request("GET", "/livez").status)] += 1
            except OSError as error:
                outcomes[type(error).__name__] += 1

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        begun.wait()
        first = service.show("MainPID")
        service.machine.run("systemctl", "restart", service.unit)
        done.set()
        asking.result(60)
    assert service.show("MainPID") != first
    assert outcomes == {"200": outcomes["200"]}
    assert outcomes["200"] >= REQUESTS
    assert service.events("listening_on_passed_socket")[-1]["ADDRESS"] == f"127.0.0.1:{service.port}"


def test_the_socket_starts_the_service(make_service: ServiceFactory) -> None:
    service = make_service("asleep", socket=True)
    service.machine.run("systemctl", "start", service.socket_unit)
    assert service.show("ActiveState") == "inactive"
    assert service.client().start("a-1", "instant").status == 200
    assert service.show("ActiveState") == "active"


def test_a_refused_configuration_is_not_tried_again(make_service: ServiceFactory) -> None:
    service = make_service("refused", settings={"max_concurrency": 0})
    assert service.machine.run("systemctl", "start", service.unit, check=False).returncode != 0
    service.wait_property("ActiveState", "failed")
    assert (service.show("NRestarts"), service.show("ExecMainStatus")) == ("0", "2")
    (refused,) = service.events("config_refused")
    assert refused["PRIORITY"] == "3"
