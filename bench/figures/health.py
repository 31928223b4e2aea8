"""How soon health is answered while others behave badly."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from bench.load import send_load
from bench.measure import Scale, Series, Step, Values
from bench.watching import address, fake_server
from tests.support.server import ROOT, TOKEN, Server

#: Between two questions, seconds.
PERIOD_S = 0.01


class Health:
    """GET /health at a fixed pace by another process."""

    name = "health"
    title = "Health: GET /health every 10 ms, whether the ones before were answered or not"
    notes = (
        "idle: nothing else is asked of the server; a factory blocks: for 3 s, in its worker; "
        "a worker floods: chunks as fast as they are taken, nobody reads",
        "a client stalls: the same flood, followed by a reader that does not read",
        "in its own process: an aiohttp server that calls the same factory in its event loop",
    )
    series = (
        *(
            Series(f"{what}, answer", "ms")
            for what in ("idle", "a factory blocks", "a worker floods", "a client stalls")
        ),
        Series("in its own process, a factory blocks, answer", "ms", baseline=True),
    )
    rounds = (2, 4)

    @contextmanager
    def open(self, directory: Path, scale: Scale) -> Iterator[Sequence[Step]]:
        """One server of fakes, and one that does everything itself."""
        numbers = count()
        with ExitStack() as stack:
            server = stack.enter_context(fake_server(directory / "server", {"max_concurrency": 4}))
            port = stack.enter_context(_in_process_server())
            steps = [
                Step(what, partial(_ask, server, what, disturbance, scale, numbers))
                for what, disturbance in DISTURBANCES.items()
            ]
            yield [*steps, Step("in its own process", partial(_ask_in_process, port, scale))]


def _probe(scale: Scale, **order: Any) -> list[float]:
    found: list[float] = send_load(
        "probe", path="/health", count=scale.pick(20, 100, 250, 500), period_s=PERIOD_S, **order
    )["latencies_ms"]
    return found


@contextmanager
def _nothing(server: Server, action_id: str) -> Iterator[None]:
    yield


@contextmanager
def _job(server: Server, action_id: str, *, crew: str, stalled: bool = False) -> Iterator[None]:
    """A job that runs meanwhile and is cancelled afterwards."""
    client = server.client()
    given = {"chunks": -1}
    client.start(action_id, crew, input=given, headers={"Prefer": "respond-async"}).expect(202)
    reader = None
    if stalled:
        reader = socket.create_connection((server.host, server.port))
        head = f"GET /jobs/{action_id}/events HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
        reader.sendall(f"{head}Accept: text/event-stream\r\n\r\n".encode("ascii"))
    try:
        yield
    finally:
        if reader is not None:
            reader.close()
        client.cancel(action_id, crew).expect(200)


Disturbance = Callable[[Server, str], AbstractContextManager[None]]
DISTURBANCES: dict[str, Disturbance] = {
    "idle": _nothing,
    "a factory blocks": partial(_job, crew="blocking_factory"),
    "a worker floods": partial(_job, crew="flood"),
    "a client stalls": partial(_job, crew="flood", stalled=True),
}


def _ask(server: Server, what: str, disturbance: Disturbance, scale: Scale, numbers: Iterator[int]) -> Values:
    with disturbance(server, f"health-{next(numbers)}"):
        return {f"{what}, answer": _probe(scale, **address(server))}


@contextmanager
def _in_process_server() -> Iterator[int]:
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.in_process"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def _ask_in_process(port: int, scale: Scale) -> Values:
    with socket.create_connection(("127.0.0.1", port)) as disturber:
        disturber.sendall(b"POST /factory HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        values = _probe(scale, host="127.0.0.1", port=port, token=TOKEN)
    return {"in its own process, a factory blocks, answer": values}
