"""What a worker takes after it has run a crew, and what the template takes that it shares pages with."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path

from bench.measure import Scale, Series, Size, Step, Values
from bench.watching import memory_mb
from tests.support import procs
from tests.support.server import ROOT, Server

KINDS = ("resident", "proportional", "unique")
#: How long a template is left alone before the first fork, by size.
SETTLE_S = (0.0, 3.0, 5.0, 5.0)


class Memory:
    """The same real crew, forked from the template and in processes that imported CrewAI for themselves."""

    name = "memory"
    title = "Memory: a worker after one kickoff of a real crew with two agents"
    notes = (
        "resident: shared pages included; proportional (PSS): each shared page divided among those that share it; "
        "unique (USS): pages of that process alone",
        "the proportional size depends on how many share: so many workers live at once as one round has values",
        "cold: launch = spawn, standby = 0. multiprocessing: start method spawn, the same crew",
        "template: it has imported CrewAI and the registry; workers share its pages until they write to them",
    )
    series = (
        *(Series(f"forked worker, {kind}", "MB") for kind in KINDS),
        *(Series(f"template, {kind}", "MB") for kind in KINDS),
        *(Series(f"cold worker, {kind}", "MB", baseline=True) for kind in KINDS),
        *(Series(f"multiprocessing child, {kind}", "MB", baseline=True) for kind in KINDS),
    )
    rounds = (2, 4)

    @contextmanager
    def open(self, directory: Path, scale: Scale) -> Iterator[Sequence[Step]]:
        """Two servers with the same registry."""
        many = scale.pick(1, 4, 8, 16)
        registry = "bench.light_registry" if scale.size is Size.SMOKE else "bench.registry"
        numbers = count()
        with ExitStack() as stack:
            forked = stack.enter_context(_server(directory / "forked", registry, {"launch": "fork"}))
            # Its heap is moved into huge pages while it is idle, which takes away what workers share meanwhile.
            time.sleep(scale.pick(*SETTLE_S))
            steps = [Step("forked", partial(_workers, forked, "forked", many, numbers))]
            if scale.size is not Size.SMOKE:
                spawned = {"launch": "spawn", "standby": 0, "launch_timeout_s": 300.0}
                cold = stack.enter_context(_server(directory / "cold", registry, spawned))
                # The first launch takes the interpreter that reported the crews.
                steps.append(Step("cold", partial(_workers, cold, "cold", 1, numbers), every=2))
            steps.append(Step("multiprocessing", partial(_spawned, directory, registry), every=2))
            yield steps


def _server(directory: Path, registry: str, settings: dict[str, object]) -> Server:
    return Server(
        directory,
        registry=f"{registry}:CREWS",
        settings={"grace_s": 0.0, "max_concurrency": 32, "template": {"preload": []}, **settings},
    )


def _workers(server: Server, how: str, many: int, numbers: Iterator[int]) -> Values:
    names = [f"kept-{next(numbers)}" for _ in range(many)]
    client = server.client(timeout_s=300)
    found: dict[str, list[float]] = {}
    with ExitStack() as streams:
        for stream in [streams.enter_context(client.stream(name, "kept")) for name in names]:
            while stream.next().data.get("content") != "ready":
                pass
        for name in names:
            _add(found, f"{how} worker", client.get(name).expect(200)["worker"]["pid"])
        if how == "forked":
            workers = {client.get(name).expect(200)["worker"]["pid"] for name in names}
            (template,) = set(procs.children(server.pid)) - workers
            _add(found, "template", template)
        for name in names:
            client.cancel(name, "kept").expect(200)
    return found


def _add(found: dict[str, list[float]], name: str, pid: int) -> None:
    for kind, value in memory_mb(pid).items():
        found.setdefault(f"{name}, {kind}", []).append(value)


def _spawned(directory: Path, registry: str) -> Values:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(directory), "CREWAI_STORAGE_DIR": str(directory)}
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.spawned", registry],
        cwd=ROOT,
        env={**environment, "CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true", "CREWAI_TESTING": "true"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    found: dict[str, list[float]] = {}
    with process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith("ready "))
        _add(found, "multiprocessing child", int(line.split()[1]))
        process.communicate("")
    return found
