"""How many admissions a second are made durable, whatever is retained, beside rewriting one JSON file for each."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

from bench.journals import LARGE_BYTES, build_journal, copy_journal, read_records
from bench.load import send_load
from bench.measure import Scale, Series, Size, Step, Values
from bench.watching import address, fake_server, processor_s
from tests.support.server import Server

CLIENTS = (1, 16, 128)


class Retained(NamedTuple):
    """What the journal holds before."""

    jobs: int
    record_bytes: int = 0

    @property
    def text(self) -> str:
        return f"{self.jobs:,} retained" + (f" of {self.record_bytes // 1000} kB" if self.record_bytes else "")


NOTHING, LARGE, MANY, MOST = Retained(0), Retained(2000, LARGE_BYTES), Retained(100_000), Retained(1_000_000)
RETAINED = (NOTHING, LARGE, MANY, MOST)
#: (retained, clients) by size.
CELLS: tuple[tuple[tuple[Retained, int], ...], ...] = (
    ((NOTHING, 16), (LARGE, 16)),
    ((NOTHING, 1), (NOTHING, 16), (LARGE, 16), (MANY, 16)),
    ((NOTHING, 1), (NOTHING, 16), (NOTHING, 128), (LARGE, 16), (MANY, 16), (MOST, 1), (MOST, 16)),
    tuple((retained, clients) for retained in RETAINED for clients in CLIENTS),
)
#: In the smallest size the large journal is not that large.
SMOKE_JOBS = 50


class Admission:
    """Starts with ``Prefer: respond-async``: the answer comes after the fsync."""

    name = "admission"
    title = "Admission: POST /jobs until 202, which is sent after the fsync"
    notes = (
        "one slot, held by a job that sleeps: nothing but admission runs, the queue grows; max_queue = 1,000,000",
        "instant crews: the same from a fresh journal with max_concurrency = 2 and crews that run and end meanwhile",
        "processor time: of the whole supervisor process, all threads, over the burst",
        "small records: a completed job with two events, its worker and its audit, about 1.4 kB in the file",
        "whole file: all records encoded, a temporary file, fsync, rename, fsync of the directory; without HTTP, in a "
        "process that does nothing else, records in memory",
    )
    series = tuple(
        series
        for retained in RETAINED
        for series in (
            *(
                Series(f"{retained.text}, {clients} clients, {what}", unit)
                for clients in CLIENTS
                for what, unit in (("admissions", "1/s"), ("latency", "ms"), ("processor time each", "us"))
            ),
            Series(f"{retained.text}, instant crews, 16 clients, admissions", "1/s"),
            Series(f"{retained.text}, instant crews, 16 clients, latency", "ms"),
            Series(f"{retained.text}, whole file rewritten, admissions", "1/s", baseline=True),
        )
    )
    rounds = (3, 5)

    @contextmanager
    def open(self, directory: Path, scale: Scale) -> Iterator[Sequence[Step]]:
        """A server for each retained set, all of them up at once so that rounds are interleaved."""
        cells = CELLS[scale.size]
        with ExitStack() as stack:
            built: dict[Retained, Path] = {}
            servers: dict[Retained, Server] = {}
            steps = []
            numbers = count()
            for retained in dict.fromkeys(retained for retained, _ in cells):
                built[retained] = directory / f"built-{retained.jobs}-{retained.record_bytes}" / "journal.db"
                jobs = min(retained.jobs, SMOKE_JOBS) if scale.size is Size.SMOKE else retained.jobs
                build_journal(built[retained], jobs, record_bytes=retained.record_bytes)
                servers[retained] = stack.enter_context(_server(directory, built[retained], retained))
                holding = servers[retained].client()
                holding.start("holds-the-slot", "idle", headers={"Prefer": "respond-async"}).expect(202)
                # What building the journal left to be written is not the burst's to wait for.
                os.sync()
            for retained, clients in cells:
                step = partial(_burst, servers[retained], retained, clients, scale, numbers)
                steps.append(Step(f"{retained.text}, {clients} clients", step))
            for retained in dict.fromkeys((NOTHING, LARGE)):
                step = partial(_instant, directory, built[retained], retained, scale, numbers)
                steps.append(Step(f"{retained.text}, instant crews", step))
            for retained, journal in built.items():
                whole = WholeFile(directory / "whole" / f"{retained.jobs}.json", journal, retained)
                # Half a minute for one admission: once is enough.
                once = retained.jobs >= MOST.jobs
                steps.append(Step(f"{retained.text}, whole file", whole.run, every=scale.rounds if once else 1))
            yield steps


def _server(directory: Path, journal: Path, retained: Retained) -> Server:
    server = fake_server(directory / f"held-{retained.jobs}-{retained.record_bytes}", {"max_concurrency": 1})
    copy_journal(journal, server.state_file)
    return server


def _burst(server: Server, retained: Retained, clients: int, scale: Scale, numbers: Iterator[int]) -> Values:
    jobs = scale.pick(20, 300, 600, 600) if clients == 1 else scale.pick(100, 1500, 2500, 4000)
    prefix = f"{retained.text}, {clients} clients"
    before_s = processor_s(server.pid)
    found = _send(server, jobs, clients, numbers)
    spent_s = processor_s(server.pid) - before_s
    return {
        f"{prefix}, admissions": [jobs / found["seconds"]],
        f"{prefix}, latency": found["latencies_ms"],
        f"{prefix}, processor time each": [spent_s / jobs * 1e6],
    }


def _send(server: Server, jobs: int, clients: int, numbers: Iterator[int]) -> dict[str, list[float]]:
    # Ids as callers make them: in no order.
    prefix = f"{os.urandom(8).hex()}-{next(numbers)}-"
    order = {**address(server), "count": jobs, "clients": clients, "crew": "instant", "prefix": prefix}
    found: dict[str, list[float]] = send_load("starts", **order, respond_async=True)
    return found


def _instant(directory: Path, journal: Path, retained: Retained, scale: Scale, numbers: Iterator[int]) -> Values:
    jobs = scale.pick(60, 1500, 2500, 4000)
    number = next(numbers)
    server = fake_server(directory / f"instant-{number}", {"max_concurrency": 2})
    copy_journal(journal, server.state_file)
    os.sync()
    with server:
        # The template's first fork is not the burst's.
        server.client().start("warm", "instant").expect(200)
        found = _send(server, jobs, 16, numbers)
    prefix = f"{retained.text}, instant crews, 16 clients"
    return {f"{prefix}, admissions": [jobs / found["seconds"]], f"{prefix}, latency": found["latencies_ms"]}


class WholeFile:
    """The baseline: a journal that is one JSON file, written anew for each admission."""

    def __init__(self, path: Path, journal: Path, retained: Retained) -> None:
        self._path = path
        self._journal = journal
        self._retained = retained
        self._records: list[object] | None = None

    def run(self) -> Values:
        """A few admissions, fewer where one takes long."""
        if self._records is None:
            self._path.parent.mkdir(exist_ok=True)
            self._records = list(read_records(self._journal))
        times = 1 if self._retained.jobs >= MANY.jobs else 3 if self._retained.jobs else 100
        began = time.monotonic()
        for number in range(times):
            record = {"action_id": f"{os.urandom(8).hex()}-{number}", "status": "running", "events": []}
            self._records.append(record)
            self._rewrite()
        spent = time.monotonic() - began
        del self._records[-times:]
        return {f"{self._retained.text}, whole file rewritten, admissions": [times / spent]}

    def _rewrite(self) -> None:
        temporary = self._path.with_suffix(".tmp")
        with temporary.open("w", encoding="utf-8") as file:
            file.write(json.dumps({"runs": self._records}, separators=(",", ":")))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._path)
        directory = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
