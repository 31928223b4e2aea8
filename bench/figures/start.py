"""How long it takes until a crew's own code runs: forked from the template, and beside it from a cold interpreter."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

from bench.measure import Scale, Series, Step, Values
from bench.registry import STAMPS
from tests.support.client import Client
from tests.support.server import Server

CREWS = ("fake", "real")
SIZES = (1, 16)
#: Forked starts alone in one step; a cold one takes too long to repeat.
SINGLES = 5
COLD = {
    "launch": "spawn",
    "standby": 0,
    "launch_timeout_s": 300.0,
    "registry_timeout_s": 300.0,
}
FORKED = {"launch": "fork"}


class Start:
    """Forked and cold starts, alone and 16 at once."""

    name = "start"
    title = (
        "Start: from the request sent until `started` is seen on SSE, and until the first line of the crew's factory"
    )
    notes = (
        "forked: from the template. cold: `python -m worker`, launch = spawn with standby = 0, bytecode compiled",
        "from sent: the clock starts before the client connects; from admitted: at the job's admitted_at",
        "16 at once: 16 client threads on the same machine; the values are of every single job",
        "fake: a factory without CrewAI objects; real: a factory of a crew with two agents, which also runs",
        "cold starts import CrewAI whichever the factory, so they are measured with the fake one",
    )
    series = tuple(
        Series(f"{how}, {size} at once, {what}", "ms")
        for how, crews in (("forked", CREWS), ("cold", CREWS[:1]))
        for size in SIZES
        for what in (
            "sent to `started` seen",
            *(f"{since} to factory, {crew}" for crew in crews for since in ("sent", "admitted")),
        )
    )
    rounds = (3, 8)

    @contextmanager
    def open(self, directory: Path, scale: Scale) -> Iterator[Sequence[Step]]:
        """Two servers with the same registry, one for each way of launching."""
        with ExitStack() as stack:
            forked = stack.enter_context(_server(directory / "forked", FORKED))
            cold = stack.enter_context(_server(directory / "cold", COLD))
            # The first spawned launch takes the interpreter that reported the crews: it is not a cold one.
            cold.client().start("warm", "fake").expect(200)
            names = count()
            steps = [
                Step(f"forked {crew} x{size}", partial(_burst, forked, crew, how="forked", size=size, names=names))
                for crew in CREWS
                for size in SIZES
            ]
            one, many = (partial(_burst, cold, CREWS[0], how="cold", size=size, names=names) for size in SIZES)
            steps.append(Step("cold x1", one))
            steps.append(Step("cold x16", many, every=scale.rounds if scale.quick else 4))
            yield steps


class _Sent(NamedTuple):
    """One job as its client saw it; monotonic ns."""

    action_id: str
    sent_ns: int
    seen_ns: int


def _server(directory: Path, settings: Mapping[str, object]) -> Server:
    return Server(
        directory,
        registry="bench.registry:CREWS",
        settings={"max_concurrency": 32, "template": {"preload": ["crewai"]}, **settings},
        environment={STAMPS: str(directory / "stamps")},
    )


def _burst(server: Server, crew: str, *, how: str, size: int, names: Iterator[int]) -> Values:
    """Start ``size`` jobs at once; for one at once, a few times, so that a round has more than one value."""
    found: dict[str, list[float]] = {}
    for _ in range(SINGLES if (how, size) == ("forked", 1) else 1):
        sent = _start_together(server, crew, size, names)
        stamps = _stamps(server.directory / "stamps")
        for job in sent:
            view = server.client().get(job.action_id).expect(200)
            called_ns = stamps[view["stop"]["worker"]["pid"]]
            admitted_ns = _monotonic_ns(view["admitted_at"])
            prefix = f"{how}, {size} at once,"
            found.setdefault(f"{prefix} sent to `started` seen", []).append((job.seen_ns - job.sent_ns) / 1e6)
            found.setdefault(f"{prefix} sent to factory, {crew}", []).append((called_ns - job.sent_ns) / 1e6)
            found.setdefault(f"{prefix} admitted to factory, {crew}", []).append((called_ns - admitted_ns) / 1e6)
    return found


def _start_together(server: Server, crew: str, size: int, names: Iterator[int]) -> list[_Sent]:
    (server.directory / "stamps").unlink(missing_ok=True)
    gate = threading.Barrier(size)
    found: list[_Sent] = []

    def start(client: Client, action_id: str) -> None:
        gate.wait()
        sent_ns = time.monotonic_ns()
        with client.stream(action_id, crew) as stream:
            seen_ns = stream.until("started").received_ns
            stream.rest()
        found.append(_Sent(action_id, sent_ns, seen_ns))

    clients = [
        threading.Thread(target=start, args=(server.client(timeout_s=600), f"start-{next(names)}")) for _ in range(size)
    ]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    if len(found) != size:
        raise RuntimeError(f"{size - len(found)} of {size} starts broke")
    return found


def _stamps(path: Path) -> dict[int, int]:
    """Pid of the worker to the moment of its factory's first line, monotonic ns."""
    return {int(pid): int(at) for pid, at in (line.split() for line in path.read_text(encoding="ascii").splitlines())}


def _monotonic_ns(unix_s: float) -> float:
    return time.monotonic_ns() - (time.time() - unix_s) * 1e9
