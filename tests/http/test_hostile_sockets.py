"""Bytes that nobody should send: each is answered or closed, nothing grows, and health does not notice."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.http.hostile import JSON, START, hostile_requests
from tests.support.raw import RawConnection, head
from tests.support.server import TOKEN, Server, ServerFactory

REGISTRY = "tests.crews.fake_crews:CREWS"
GROWTH_KIB = 10 * 1024
#: No answer of /health may take longer meanwhile, on a machine that others use too, seconds.
HEALTH_S = 2.0


class Watch:
    """Asks /health all the time and keeps how long each answer took."""

    def __init__(self, server: Server) -> None:
        self._client = server.client()
        self._over = threading.Event()
        self.took_s: list[float] = []
        self.wrong: list[int] = []

    @contextmanager
    def running(self) -> Iterator[Watch]:
        thread = threading.Thread(target=self._ask)
        thread.start()
        try:
            yield self
        finally:
            self._over.set()
            thread.join()

    def _ask(self) -> None:
        while not self._over.wait(0.02):
            began = time.monotonic()
            answer = self._client.health()
            self.took_s.append(time.monotonic() - began)
            if answer.status != 200 or answer.json()["status"] != "ready":
                self.wrong.append(answer.status)


def memory_kib(pid: int, name: str) -> int:
    """``VmRSS`` or ``VmHWM`` of a process (proc_pid_status(5)), KiB."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise AssertionError(f"no {name} of {pid}")


@pytest.mark.parametrize("rounds", [1, pytest.param(10, marks=pytest.mark.stress)])
def test_200_hostile_requests(start_server: ServerFactory, rounds: int) -> None:
    server = start_server(registry=REGISTRY)
    client = server.client()
    for number in range(5):
        client.start(f"warm-{number}", "instant", input={"x": "y" * 100_000}).expect(200)
    requests = [request for seed in range(rounds) for request in hostile_requests(seed)]
    assert len(requests) >= 200 * rounds
    before = memory_kib(server.pid, "VmRSS")
    with Watch(server).running() as watch, ThreadPoolExecutor(4) as pool:
        wrong = [text for found in pool.map(lambda one: one.play(server.host, server.port), requests) for text in found]
    growth = memory_kib(server.pid, "VmRSS") - before
    peak = memory_kib(server.pid, "VmHWM") - before
    sys.stdout.write(f"{len(requests)} requests, {len(watch.took_s)} healths, RSS +{growth} KiB, at most +{peak} KiB\n")
    assert wrong == []
    assert growth <= GROWTH_KIB
    assert watch.wrong == []
    assert len(watch.took_s) >= 5
    assert max(watch.took_s) < HEALTH_S
    client.start("afterwards", "instant").expect(200)
    assert server.stop() == 0
    _assert_log_is_clean(server)


def _assert_log_is_clean(server: Server) -> None:
    assert "Traceback" not in server.log_file.read_text(encoding="utf-8")
    broken = [line for line in server.log_lines() if line["level"] in {"error", "critical"} or "places" in line]
    assert broken == []


@pytest.mark.case(6)
@pytest.mark.parametrize("path", [b"/jobs", b"/jobs/stream", b"/jobs/a/cancel", b"/health", b"/nowhere"])
def test_nobody_without_a_token_is_asked_for_a_body(server: Server, path: bytes) -> None:
    asked = {**JSON, "Content-Length": "5", "Expect": "100-continue"}
    for token in (None, "wrong"):
        with RawConnection(server.host, server.port) as connection:
            connection.send(head("POST", path, token=token, headers=asked))
            line = connection.socket.recv(13, socket.MSG_PEEK | socket.MSG_WAITALL)
            answer = connection.answer("POST")
        assert line == b"HTTP/1.1 401 "
        assert answer is not None
        assert answer.headers["connection"] == "close"


def test_with_a_token_the_body_is_asked_for(server: Server) -> None:
    asked = {**JSON, "Content-Length": str(len(START)), "Expect": "100-continue", "Connection": "close"}
    with RawConnection(server.host, server.port) as connection:
        connection.send(head("POST", b"/jobs", token=TOKEN, headers=asked))
        assert connection.socket.recv(25, socket.MSG_WAITALL) == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert connection.send(START).rest().startswith(b"HTTP/1.1 404 ")


def test_a_slash_too_many_leads_to_no_other_server(server: Server) -> None:
    for target, status, location in (
        (b"/jobs/?limit=1", 307, "/jobs?limit=1"),
        (b"/jobs/a/", 307, "/jobs/a"),
        (b"//evil.example/", 404, None),
        (b"//evil.example/jobs/", 404, None),
        (b"/nowhere/", 404, None),
    ):
        with RawConnection(server.host, server.port) as connection:
            answer = connection.send(head(target=target, token=TOKEN)).answer()
        assert answer is not None
        assert (answer.status, answer.headers.get("location")) == (status, location)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("server"), registry=REGISTRY) as server:
        yield server
