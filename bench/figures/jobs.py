"""How many jobs a second go all the way, and what they leave behind in memory and on disk."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from bench.load import send_load
from bench.measure import Scale, Series, Step, Values
from bench.watching import address, fake_server, memory_mb, processor_s
from tests.support.server import ROOT, Server

CLIENTS = 16
SLOTS = 8
#: Growth is measured from here on.
FIRST_JOBS = 1000
#: And up to here; with fewer jobs nothing is said of it.
ALL_JOBS = 10_000
GROWTH = f"growth from {FIRST_JOBS:,} to {ALL_JOBS:,} jobs"
#: What a fake costs in a process of its own.
PLAIN = "from bench.fakes import CREWS; CREWS['instant']().kickoff({})"

#: Forks that do nothing, of a process that has nothing; prints how many a second.
FORKS = """
import os, sys, time
jobs, began = int(sys.argv[1]), time.monotonic()
for _ in range(jobs):
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
print(jobs / (time.monotonic() - began))
"""


class JobsEndToEnd:
    """Fakes that return at once: forked, told to go, killed, proved gone, recorded, answered."""

    name = "jobs"
    title = f"Jobs end to end: {CLIENTS} clients that wait for the output, {SLOTS} slots, a fake that returns at once"
    notes = (
        "processor time: of the supervisor process alone",
        f"growth: resident memory of the supervisor after {ALL_JOBS:,} jobs, less that after {FIRST_JOBS:,}",
        "on disk: the journal with its log, and what is kept of captured output, over the number of jobs so far",
        f"fresh interpreter: {SLOTS} threads that run the same fake in `python -c`, nothing recorded, nothing proved",
        "bare fork: fork, _exit and waitpid of a bare interpreter, one at a time",
    )
    series = (
        Series("jobs", "1/s"),
        Series("latency", "ms"),
        Series("processor time each", "ms"),
        Series("resident after a round", "MB"),
        Series(GROWTH, "MB"),
        Series("on disk each", "kB"),
        Series("fresh interpreter, jobs", "1/s", baseline=True),
        Series("bare fork, jobs", "1/s", baseline=True),
    )
    rounds = (3, 10)

    @contextmanager
    def open(self, directory: Path, scale: Scale) -> Iterator[Sequence[Step]]:
        """One server; every round adds to what it has run."""
        with fake_server(directory / "server", {"max_concurrency": SLOTS}) as server:
            load = _Load(server, scale)
            yield [
                Step("jobs", load.run),
                Step("fresh interpreter", lambda: _interpreters(scale), every=3),
                Step("bare fork", lambda: _forks(scale)),
            ]


class _Load:
    def __init__(self, server: Server, scale: Scale) -> None:
        self._server = server
        self._jobs = scale.pick(30, 200, 1000, 1000)
        self._numbers = count(1)
        self._done = 0
        self._first_mb = 0.0
        self._before_bytes = _disk_bytes(server)

    def run(self) -> Values:
        """One round; what is left is said of all jobs so far."""
        server, number = self._server, next(self._numbers)
        before_s = processor_s(server.pid)
        order = {**address(server), "count": self._jobs, "clients": CLIENTS, "crew": "instant"}
        found = send_load("starts", **order, prefix=f"job-{number}-")
        self._done += self._jobs
        resident_mb = memory_mb(server.pid)["resident"]
        values = {
            "jobs": [self._jobs / found["seconds"]],
            "latency": found["latencies_ms"],
            "processor time each": [(processor_s(server.pid) - before_s) / self._jobs * 1000],
            "resident after a round": [resident_mb],
        }
        if self._done >= FIRST_JOBS and not self._first_mb:
            self._first_mb = resident_mb
        elif self._first_mb and self._done >= ALL_JOBS:
            values[GROWTH] = [resident_mb - self._first_mb]
        values["on disk each"] = [(_disk_bytes(server) - self._before_bytes) / self._done / 1000]
        return values


def _disk_bytes(server: Server) -> int:
    """What is allocated below the state directory, without the reserve."""
    total = 0
    for directory, _, names in os.walk(server.state_file.parent):
        for name in names:
            if not name.endswith(".reserve"):
                total += (Path(directory) / name).lstat().st_blocks * 512
    return total


def _interpreters(scale: Scale) -> Values:
    jobs = scale.pick(4, 24, 40, 160)

    def run(_: int) -> None:
        subprocess.run([sys.executable, "-c", PLAIN], cwd=ROOT, check=True, stdin=subprocess.DEVNULL)

    began = time.monotonic()
    with ThreadPoolExecutor(SLOTS) as pool:
        list(pool.map(run, range(jobs)))
    return {"fresh interpreter, jobs": [jobs / (time.monotonic() - began)]}


def _forks(scale: Scale) -> Values:
    jobs = scale.pick(20, 200, 500, 1000)
    run = subprocess.run([sys.executable, "-c", FORKS, str(jobs)], capture_output=True, text=True, check=True)
    return {"bare fork, jobs": [float(run.stdout)]}
