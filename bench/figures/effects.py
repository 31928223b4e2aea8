"""How many effects a second the ledger takes, durably, and how long one waits: beside bare transactions of SQLite."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from bench.measure import Scale, Series, Step, Values
from bench.watching import processor_s
from tests.support.client import Client
from tests.support.server import Server

#: Workers and threads in each; 50 clients in two shapes.
SHAPES = ((1, 1), (5, 10), (50, 1))
#: Effects of one client in one step.
EFFECTS = {1: 400, 50: 100}
BARE = 2000


class Effects:
    """Claim and settle, from the worker's call to the durable answer and back."""

    name = "effects"
    title = "Effects: claim, then settle, each answered after its commit"
    notes = (
        "a client claims a key of its own and settles it with a receipt of 100 bytes, again and again",
        "processor time: of the supervisor process, with the starts and ends of the workers",
        "bare: a connection of its own in the same directory, WAL, synchronous=FULL, two transactions an effect: "
        "insert of such a row and update with the receipt",
        "target: at least 2,000 effects/s at 50 clients, p50 at most 2 ms for one",
    )
    series = (
        *(
            series
            for workers, threads in SHAPES
            for series in (
                Series(f"{workers} workers x {threads} threads, processor time each", "us"),
                Series(f"{workers} workers x {threads} threads, effects", "1/s"),
                Series(f"{workers} workers x {threads} threads, claim and settle", "ms"),
            )
        ),
        Series("bare SQLite, effects", "1/s", baseline=True),
    )
    rounds = (2, 5)

    @contextmanager
    def open(self, directory: Path, scale: Scale) -> Iterator[Sequence[Step]]:
        """One server of fakes."""
        with ExitStack() as stack:
            server = Server(
                directory / "server",
                registry="bench.effect_crews:CREWS",
                settings={
                    "max_concurrency": 64,
                    "max_effects_per_run": 1_000_000,
                    "template": {"preload": []},
                },
            )
            stack.enter_context(server)
            names = count()
            ours = [
                Step(f"{workers}x{threads}", partial(run, server, workers, threads, scale, names))
                for workers, threads in SHAPES[: scale.pick(1, 3, 3, 3)]
            ]
            yield [*ours, Step("bare", partial(_bare, directory, names))]


def run(
    server: Server, workers: int, threads: int, scale: Scale, names: Iterator[int], *, scope: str = "action"
) -> Values:
    """All workers begin once every one of them stands."""
    effects = EFFECTS[min(workers * threads, 50)] // scale.pick(20, 2, 1, 1)
    number = next(names)
    gate = server.directory / f"gate-{number}"
    gate.mkdir()
    given = {"threads": threads, "effects": effects, "gate": str(gate), "workers": workers, "scope": scope}

    def start(worker: int) -> Any:
        client: Client = server.client(timeout_s=600)
        return client.start(f"effects-{number}-{worker}", "claims", input=given).expect(200)

    before_s = processor_s(server.pid)
    with ThreadPoolExecutor(workers) as pool:
        outputs = list(pool.map(start, range(workers)))
    began, ended = min(output["began_ns"] for output in outputs), max(output["ended_ns"] for output in outputs)
    waits = [wait for output in outputs for wait in output["waits_ms"]]
    what = f"{workers} workers x {threads} threads"
    return {
        f"{what}, effects": [len(waits) / (ended - began) * 1e9],
        f"{what}, claim and settle": waits,
        f"{what}, processor time each": [(processor_s(server.pid) - before_s) / len(waits) * 1e6],
    }


def _bare(directory: Path, names: Iterator[int]) -> Values:
    database = sqlite3.connect(directory / f"bare-{next(names)}.db", isolation_level=None)
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = FULL")
    database.execute("CREATE TABLE effects(key_id TEXT PRIMARY KEY, state TEXT, preimage BLOB, receipt BLOB)")
    began = time.monotonic()
    for number in range(BARE):
        key = f"{number:064x}"
        database.execute("INSERT INTO effects VALUES(?, 'claimed', ?, NULL)", (key, b"p" * 120))
        database.execute("UPDATE effects SET state = 'settled', receipt = ? WHERE key_id = ?", (b"r" * 100, key))
    spent = time.monotonic() - began
    database.close()
    return {"bare SQLite, effects": [BARE / spent]}
