"""What a supervisor takes that does nothing, with nothing and with much retained; and how soon it is back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path

from bench.journals import build_journal, copy_journal, read_records
from bench.measure import Scale, Series, Step, Values
from bench.watching import MB, fake_server, memory_mb, processor_s
from tests.support import procs
from tests.support.client import Client

RETAINED = (0, 100_000, 1_000_000)
INTERRUPTED = 100
WATCHED_S = (0.5, 2.0, 3.0, 5.0)
#: The whole journal in memory, as one JSON file.
PLAIN = """
import json, sys, time
began = time.monotonic()
runs = json.load(open(sys.argv[1], encoding="utf-8"))
spent = time.monotonic() - began
status = open("/proc/self/status", encoding="ascii").read()
print(spent, status.partition("VmRSS:")[2].split()[0])
"""


class Footprint:
    """A fresh supervisor of fakes on a journal, and one that follows a SIGKILL."""

    name = "footprint"
    title = "Footprint: a supervisor that has nothing to do, and its start"
    notes = (
        "start: from the process's creation until it listens, registry of fakes loaded; resident: after that and a "
        "page of jobs",
        "processor idle: its share of one core while nobody asks for anything",
        f"recovery: start after a SIGKILL that interrupted {INTERRUPTED} running jobs, until it listens; their work is "
        "killed and proved gone, their records end before",
        "one JSON file: a bare interpreter that loads the same records into memory; its start is the load alone",
    )
    series = (
        *(
            Series(f"{retained:,} retained, {what}", unit)
            for retained in RETAINED
            for what, unit in (("start", "ms"), ("resident", "MB"), ("unique", "MB"), ("processor idle", "%"))
        ),
        Series(f"recovery of {INTERRUPTED} interrupted jobs", "ms"),
        *(
            series
            for retained in RETAINED
            for series in (
                Series(f"{retained:,} retained, one JSON file, loaded", "ms", baseline=True),
                Series(f"{retained:,} retained, one JSON file, resident", "MB", baseline=True),
            )
        ),
    )
    rounds = (2, 4)

    @contextmanager
    def open(self, directory: Path, scale: Scale) -> Iterator[Sequence[Step]]:
        """Journals are built once; a server starts in every step."""
        numbers = count()
        steps = []
        for retained in RETAINED[: scale.pick(1, 2, 2, 3)]:
            journal = directory / f"built-{retained}" / "journal.db"
            build_journal(journal, retained)
            whole = directory / f"whole-{retained}.json"
            whole.write_text(json.dumps({"runs": list(read_records(journal))}), encoding="utf-8")
            steps.append(Step(f"{retained:,} retained", partial(_fresh, directory, journal, retained, scale, numbers)))
            steps.append(Step(f"{retained:,}, one JSON file", partial(_load_whole, whole, retained)))
        os.sync()
        steps.append(Step("recovery", partial(_recover, directory, scale, numbers), every=2))
        yield steps


def _fresh(directory: Path, journal: Path, retained: int, scale: Scale, numbers: Iterator[int]) -> Values:
    server = fake_server(directory / f"server-{next(numbers)}")
    copy_journal(journal, server.state_file)
    began = time.monotonic()
    with server:
        spent_ms = (time.monotonic() - began) * 1000
        server.client().request("GET", "/jobs?limit=100").expect(200)
        memory = memory_mb(server.pid)
        before_s, since = processor_s(server.pid), time.monotonic()
        time.sleep(scale.pick(*WATCHED_S))
        idle = (processor_s(server.pid) - before_s) / (time.monotonic() - since) * 100
    server.state_file.unlink()
    name = f"{retained:,} retained"
    return {
        f"{name}, start": [spent_ms],
        f"{name}, resident": [memory["resident"]],
        f"{name}, unique": [memory["unique"]],
        f"{name}, processor idle": [idle],
    }


def _load_whole(whole: Path, retained: int) -> Values:
    output = subprocess.run([sys.executable, "-c", PLAIN, whole], check=True, capture_output=True, text=True).stdout
    spent_s, resident_kb = map(float, output.split())
    name = f"{retained:,} retained, one JSON file"
    return {f"{name}, loaded": [spent_s * 1000], f"{name}, resident": [resident_kb * 1024 / MB]}


def _recover(directory: Path, scale: Scale, numbers: Iterator[int]) -> Values:
    jobs = scale.pick(3, INTERRUPTED, INTERRUPTED, INTERRUPTED)
    server = fake_server(directory / f"server-{next(numbers)}", {"max_concurrency": jobs})

    def start(number: int) -> None:
        with suppress(OSError):
            server.client().start(f"interrupted-{number}", "idle", headers={"Prefer": "respond-async"}).expect(202)

    with server:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(start, range(jobs)))
        client = server.client()

        def all_run() -> bool:
            return bool(client.health().expect(200)["running"] == jobs) and _all_in_phase(client, jobs)

        procs.wait_until(all_run, 120, "every job runs")
        server.kill()
        began = time.monotonic()
        server.restart()
        spent_ms = (time.monotonic() - began) * 1000
        left = server.client().request("GET", "/jobs?status=running").expect(200)["jobs"]
        if left:
            raise RuntimeError(f"{len(left)} jobs are still running after the recovery")
    return {f"recovery of {INTERRUPTED} interrupted jobs": [spent_ms]}


def _all_in_phase(client: Client, jobs: int) -> bool:
    page = client.request("GET", "/jobs?status=running&limit=200").expect(200)["jobs"]
    return sum(job["phase"] == "running" for job in page) == jobs
