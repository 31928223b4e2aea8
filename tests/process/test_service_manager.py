"""A supervisor that is told how to report and where to listen, as systemd does it, without systemd."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import procs
from tests.support.crash_build import ENOSPC, PLAN, Plan, PlanFile
from tests.support.manager import Manager, listening, passing
from tests.support.server import Server, ServerFactory
from tests.systemd.service import free_port

REGISTRY = "tests.crews.stop_crews:CREWS"
WATCHDOG_S = 1.0
#: Between a client's connection and its request; well below what it is given.
SLOW_CLIENT_S = 0.4


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    with listening(tmp_path) as manager:
        yield manager


def told(manager: Manager) -> dict[str, str | None]:
    """The variables of a service that is watched."""
    return {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": str(int(WATCHDOG_S * 1e6))}


def test_the_manager_hears_every_turn_of_a_life(make_server: ServerFactory, manager: Manager) -> None:
    server = make_server(registry=REGISTRY, environment=told(manager))
    server.launch()
    assert manager.next()["STATUS"].startswith("recovering")
    assert int(manager.next()["EXTEND_TIMEOUT_USEC"]) > 0
    manager.until("STATUS", "0 running, 0 queued, 0 effects unknown")
    manager.until("READY")
    line = server.wait_log("listening")
    server.host, server.port = line["host"], line["port"]
    assert server.client().request("GET", "/readyz").status == 200, "ready means that it answers"
    for _ in range(3):
        manager.until("WATCHDOG")
    server.process.send_signal(signal.SIGHUP)
    assert int(manager.until("RELOADING")["MONOTONIC_USEC"]) > 0
    manager.until("READY")
    server.wait_log("registry_reloaded")
    server.process.send_signal(signal.SIGTERM)
    manager.until("STOPPING")
    assert server.wait_exit() == 0


def test_a_stop_does_not_wait_for_a_reload(make_server: ServerFactory, manager: Manager, tmp_path: Path) -> None:
    registry = tmp_path / "registry"
    registry.mkdir()
    module = registry / "slow_registry.py"
    module.write_text("CREWS = {'a': object}\n")
    server = make_server(registry="slow_registry:CREWS", environment=told(manager), python_path=(registry,)).start()
    started = tmp_path / "importing"
    module.write_text(f"import pathlib, time\npathlib.Path({str(started)!r}).touch()\ntime.sleep(600)\n")
    server.process.send_signal(signal.SIGHUP)
    procs.wait_until(started.exists, 30, "the reload imports")
    assert server.stop(deadline_s=20) == 0
    server.wait_log("reload_cut_short")


def test_a_full_disk_is_no_reason_to_be_restarted(make_server: ServerFactory, manager: Manager, tmp_path: Path) -> None:
    plan = PlanFile(tmp_path / "plan")
    server = make_server(registry=REGISTRY, environment={**told(manager), PLAN: str(plan.path)})
    server._program = ["tests.support.crash_build"]
    server.start()
    plan.arm(Plan("journal.begin", ENOSPC, 1, 1_000_000))
    client = server.client()
    assert client.start("a-1", "instant").status == 507
    assert client.request("GET", "/readyz").status == 503
    manager.until("STATUS", "0 running, 0 queued, 0 effects unknown; the journal cannot be written")
    for _ in range(10):
        manager.until("WATCHDOG", limit_s=WATCHDOG_S)
    assert client.request("GET", "/readyz").status == 503, "it was full all the time"
    plan.disarm()
    manager.until("STATUS", "0 running, 0 queued, 0 effects unknown")
    assert client.start("a-1", "instant").status == 200


def test_the_status_says_that_an_operator_has_drained_it(make_server: ServerFactory, manager: Manager) -> None:
    server = make_server(registry=REGISTRY, environment=told(manager)).start()
    client = server.client()
    client.request("POST", "/drain").expect(200)
    manager.until("STATUS", "0 running, 0 queued, 0 effects unknown; drained by an operator")
    assert client.start("a-1", "instant").status == 503
    client.request("DELETE", "/drain").expect(200)
    manager.until("STATUS", "0 running, 0 queued, 0 effects unknown")


def test_a_writer_that_hangs_is_told_by_silence(make_server: ServerFactory, manager: Manager, tmp_path: Path) -> None:
    order = tmp_path / "order"
    environment = {**told(manager), "BLOCK_ORDER": str(order)}
    server: Server = make_server(registry=REGISTRY, environment=environment, mutant="deaf").start()
    manager.until("WATCHDOG")
    order.touch()
    procs.wait_until(lambda: not order.exists(), 10, "the writer hangs")
    manager.forget()
    with pytest.raises(TimeoutError):
        manager.until("WATCHDOG", limit_s=2 * WATCHDOG_S)
    assert server.client().request("GET", "/livez").status == 200, "the event loop turns"


def test_a_passed_socket_takes_the_place_of_host_and_port(make_server: ServerFactory) -> None:
    port = free_port()
    server = make_server(registry=REGISTRY, settings={"host": "127.0.0.1", "port": 1}, prefix=passing(port)).start()
    line = server.wait_log("listening_on_passed_socket")
    assert (line["address"], line["ignored"]) == (f"127.0.0.1:{port}", "127.0.0.1:1")
    assert server.port == port
    assert server.client().start("a-1", "instant").status == 200


def test_a_connection_that_was_accepted_last_is_still_answered(make_server: ServerFactory) -> None:
    server = make_server(registry=REGISTRY, prefix=passing(free_port())).start()
    with socket.create_connection((server.host, server.port)) as late:
        assert server.client().request("GET", "/livez").status == 200, "it was accepted before this one"
        server.process.send_signal(signal.SIGTERM)
        server.wait_log("listener_left")
        time.sleep(SLOW_CLIENT_S)
        late.sendall(b"GET /livez HTTP/1.1\r\nHost: here\r\n\r\n")
        late.settimeout(20)
        assert late.recv(64).startswith(b"HTTP/1.1 200 ")
    assert server.wait_exit() == 0


def test_what_is_no_listener_refuses_the_start(make_server: ServerFactory) -> None:
    shell = 'exec 3</dev/null; export LISTEN_FDS=1 LISTEN_PID=$$; exec "$@"'
    server = make_server(registry=REGISTRY, prefix=("sh", "-c", shell, "sh"))
    assert server.run_refused() == 3
    assert "no listening stream socket" in server.wait_log("start_refused")["detail"]


def test_descriptors_for_another_process_are_left_alone(make_server: ServerFactory) -> None:
    server = make_server(registry=REGISTRY, environment={"LISTEN_FDS": "1", "LISTEN_PID": "1"}).start()
    assert server.client().request("GET", "/livez").status == 200
