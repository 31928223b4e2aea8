"""How long it takes until a crew's own code runs: forked from the template, and beside it from cold interpreters."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

from bench.measure import Scale, Series, Size, Step, Values
from bench.pools import KINDS, measure_pool
from bench.stamps import STAMPS, read_stamps
from tests.support.client import Client
from tests.support.server import Server

CREWS = ("fake", "real")
SIZES = (1, 4, 16)
#: Forked starts alone in one step; a cold one takes too long to repeat.
SINGLES = 10
COLD = {
    "launch": "spawn",
    "standby": 0,
    "launch_timeout_s": 300.0,
    "registry_timeout_s": 300.0,
}
FORKED = {"launch": "fork"}


class Start:
    """Forked and cold starts, alone, four and 16 at once."""

    name = "start"
    title = (
        "Start: from the request sent until `started` is seen on SSE, and until the first line of the crew's factory"
    )
    notes = (
        "forked: from the template. cold: `python -m worker`, launch = spawn with standby = 0, bytecode compiled",
        "from sent: the clock starts before the client connects; from admitted: at the job's admitted_at",
        "at once: as many client threads on the same machine; the values are of every single job",
        "fake: a factory without CrewAI objects; real: a factory of a crew with two agents, which also runs",
        "cold starts import CrewAI whichever the factory, so they are measured with the fake one",
        "multiprocessing, futures, pebble: start method spawn, the child imports the same registry; one task a process",
    )
    series = (
        *(
            Series(f"{how}, {size} at once, {what}", "ms", baseline=how == "cold")
            for how, crews in (("forked", CREWS), ("cold", CREWS[:1]))
            for size in SIZES
            for what in (
                "sent to `started` seen",
                *(f"{since} to factory, {crew}" for crew in crews for since in ("sent", "admitted")),
            )
        ),
        *(
            Series(f"{kind}, {size} at once, started to factory", "ms", baseline=True)
            for kind in KINDS
            for size in SIZES
        ),
    )
    rounds = (2, 5)

    @contextmanager
    def open(self, directory: Path, scale: Scale) -> Iterator[Sequence[Step]]:
        """Two servers with the same registry, one for each way of launching."""
        smoke = scale.size is Size.SMOKE
        registry, preload = ("bench.light_registry", []) if smoke else ("bench.registry", ["crewai"])
        with ExitStack() as stack:
            forked = stack.enter_context(_server(directory / "forked", registry, {**FORKED, "preload": preload}))
            cold = stack.enter_context(_server(directory / "cold", registry, {**COLD, "preload": preload}))
            # The first spawned launch takes the interpreter that reported the crews: it is not a cold one.
            cold.client().start("warm", "fake").expect(200)
            names = count()
            steps = [
                Step(f"forked {crew} x{size}", partial(_burst, forked, crew, how="forked", size=size, names=names))
                for crew in (CREWS[:1] if smoke else CREWS)
                for size in (SIZES[:2] if smoke else SIZES)
            ]
            for size, every in _cold_sizes(scale).items():
                step = partial(_burst, cold, CREWS[0], how="cold", size=size, names=names)
                steps.append(Step(f"cold x{size}", step, every))
                for kind in KINDS:
                    if size == 1 or scale.size is Size.FULL:
                        step = partial(_pool, kind, size, registry, directory / "stamps")
                        steps.append(Step(f"{kind} x{size}", step, every))
            yield steps


def _cold_sizes(scale: Scale) -> dict[int, int]:
    """Sizes to every how many rounds; a cold start takes seconds, 16 at once take half a minute."""
    once = scale.rounds
    return scale.pick({1: once}, {1: once}, {1: 2, 4: once, 16: once}, {1: 1, 4: 2, 16: once})


def _pool(kind: str, size: int, registry: str, stamps: Path) -> Values:
    found = measure_pool(kind, size, registry=registry, stamps=stamps)
    return {f"{kind}, {size} at once, started to factory": found}


class _Sent(NamedTuple):
    """One job as its client saw it; monotonic ns."""

    action_id: str
    sent_ns: int
    seen_ns: int


def _server(directory: Path, registry: str, settings: Mapping[str, object]) -> Server:
    preload = settings["preload"]
    others = {name: value for name, value in settings.items() if name != "preload"}
    return Server(
        directory,
        registry=f"{registry}:CREWS",
        settings={"max_concurrency": 32, "template": {"preload": preload}, **others},
        environment={STAMPS: str(directory / "stamps")},
    )


def _burst(server: Server, crew: str, *, how: str, size: int, names: Iterator[int]) -> Values:
    """Start ``size`` jobs at once; for one at once, a few times, so that a round has more than one value."""
    found: dict[str, list[float]] = {}
    for _ in range(SINGLES if (how, size) == ("forked", 1) else 1):
        sent = _start_together(server, crew, size, names)
        stamps = read_stamps(server.directory / "stamps")
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


def _monotonic_ns(unix_s: float) -> float:
    return time.monotonic_ns() - (time.time() - unix_s) * 1e9
