"""Fifty readers that stop reading cost the job no time and the supervisor little memory, and miss nothing later on."""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from tests.support.cases import REGISTRY
from tests.support.gates import Gate
from tests.support.server import Server
from tests.support.strict_stream import StreamReader

READERS = 50
#: The most that a job may have, ``started`` and ``completed`` included.
EVENTS = 100_000
GROWTH_KIB = 30 * 1024
#: What the kernel may hold for one reader that stalls, bytes; no resident memory of anybody, but memory all the same.
UNSENT_BYTES = 1 << 19
#: The job may be slower by this share of its speed.
SLOWER = 0.2
#: Pairs of jobs that are timed, at least and at most: the quickest of each kind is what a busy machine let through.
ROUNDS, MAX_ROUNDS = 2, 8
#: Receive buffer of a reader that stalls, bytes: the kernel's least, so that it stalls soon.
STALLED_BUFFER, RESUMED_BUFFER = 2_048, 1 << 20
KEEPALIVE = b": alive\n\n"
READ_BYTES = 1 << 20
#: Readers that are resumed at once.
AT_ONCE = 4
SETTINGS: dict[str, Any] = {"max_events_per_run": EVENTS, "linger_s": 0.2, "max_concurrency": 2}


class Reader:
    """Follows a job from the first event, and stops reading after the head of the answer and the first lines."""

    def __init__(self, server: Server, action_id: str) -> None:
        self._socket = socket.socket()
        # Before the connection: the window that is offered cannot shrink later.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, STALLED_BUFFER)
        self._socket.settimeout(120)
        self._socket.connect((server.host, server.port))
        self._connection = http.client.HTTPConnection(server.host, server.port)
        self._connection.sock = self._socket
        headers = {"Authorization": f"Bearer {server.token}", "Accept": "text/event-stream"}
        self._connection.request("GET", f"/jobs/{action_id}/events", headers=headers)
        self._response = self._connection.getresponse()
        assert self._response.status == 200
        self._read: list[bytes] = []
        while not self._read or not self._read[-1].startswith(b"data: "):
            self._read.append(self._response.readline())
            assert self._read[-1], "the stream ended at once"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._response.close()
        self._connection.close()

    def resume(self) -> bytes:
        """Read to the end; the whole body without comments."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RESUMED_BUFFER)
        while data := self._response.read1(READ_BYTES):
            self._read.append(data)
        return b"".join(self._read).replace(KEEPALIVE, b"")


class Flood:
    """A job that waits for ``release`` before it emits, and the caller that waits for its end."""

    def __init__(self, server: Server, pool: ThreadPoolExecutor, directory: Path, action_id: str) -> None:
        self._gate = Gate(directory, action_id)
        given = self._gate.input | {"chunks": EVENTS - 2}
        self._answer = pool.submit(server.client(timeout_s=120).start, action_id, "gated_flood", input=given)
        self._gate.wait("began")

    def run(self) -> float:
        """Let it emit; seconds until its caller has the result."""
        began = time.monotonic()
        self._gate.release()
        self._answer.result().expect(200)
        return time.monotonic() - began


def status_kib(pid: int, name: str) -> int:
    """A line of proc_pid_status(5), KiB."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def unsent_bytes(port: int) -> int:
    """Bytes in the send queues of all connections to an IPv4 port, proc_net(5)."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]]
    return sum(int(row[4].partition(":")[0], 16) for row in rows if row[1].endswith(f":{port:04X}"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for the module."""
    with Server(tmp_path_factory.mktemp("server"), registry=REGISTRY, settings=SETTINGS) as running:
        yield running


def resumed(readers: list[Reader]) -> Iterator[bytes]:
    """The bodies of all readers; not all in memory at once."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for first in range(0, len(readers), AT_ONCE):
            yield from pool.map(Reader.resume, readers[first : first + AT_ONCE])


@pytest.mark.timeout(600)
def test_stalled_readers_cost_neither_time_nor_memory_and_miss_nothing(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone_s: list[float] = []
    stalled_s: list[float] = []
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(2))
        Flood(server, pool, tmp_path, "warm").run()
        before_kib = status_kib(server.pid, "VmRSS")
        for number in range(MAX_ROUNDS):
            alone_s.append(Flood(server, pool, tmp_path, f"alone-{number}").run())
            flood = Flood(server, pool, tmp_path, f"stalled-{number}")
            with ExitStack() as round_stack:
                readers = [round_stack.enter_context(Reader(server, f"stalled-{number}")) for _ in range(READERS)]
                stalled_s.append(flood.run())
                if number == 0:
                    unsent = unsent_bytes(server.port)
                    check_bodies(readers)
            if number + 1 >= ROUNDS and min(alone_s) / min(stalled_s) >= 1 - SLOWER:
                break
    speed = min(alone_s) / min(stalled_s)
    growth_kib = status_kib(server.pid, "VmHWM") - before_kib
    with capsys.disabled():
        print(  # noqa: T201
            f"\n{READERS} stalled readers: {EVENTS / min(stalled_s):.0f} events/s beside {EVENTS / min(alone_s):.0f}"
            f" alone ({speed:.2f}, {len(alone_s)} rounds), memory +{growth_kib / 1024:.1f} MiB,"
            f" {unsent / READERS / 1024:.0f} KiB unsent for each"
        )
    assert growth_kib <= GROWTH_KIB
    assert 0 < unsent <= READERS * UNSENT_BYTES
    assert speed >= 1 - SLOWER


def check_bodies(readers: list[Reader]) -> None:
    """Every reader gets every event in order: one body is read strictly, the others must be the same bytes."""
    bodies = resumed(readers)
    first = next(bodies)
    reader = StreamReader()
    events = list(reader.feed(first))
    assert len(events) == EVENTS
    assert [event.data["content"] for event in events[1:-1]] == [f"chunk {number}" for number in range(EVENTS - 2)]
    assert (events[0].event, events[-1].event) == ("started", "completed")
    assert sum(body == first for body in bodies) == len(readers) - 1
