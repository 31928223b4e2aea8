"""Effects that replicas share, decided in PostgreSQL, beside those of one journal, in the same rounds."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from bench.figures.effects import run
from bench.measure import Scale, Series, Step, Unmet, Values
from tests.support.fleet import Registering
from tests.support.postgres import Postgres, program
from tests.support.server import Server

#: Workers and threads in each.
SHAPES = ((1, 1), (50, 1))
LEDGERS = ("SQLite", "PostgreSQL")


class SharedEffects:
    """Claim and settle of global keys, by one supervisor alone and by one replica of a fleet."""

    name = "shared-effects"
    title = "Shared effects: claim, then settle, on the ledger of one journal and on PostgreSQL"
    notes = (
        "a client claims a global key of its own and settles it with a receipt of 100 bytes, again and again",
        "SQLite: a supervisor alone, two commits an effect. PostgreSQL: a replica of a fleet, four: a claim is "
        "committed there and copied into its journal, a settlement is committed in its journal and told there",
        "PostgreSQL runs on this machine with its defaults: fsync and synchronous_commit are on",
    )
    series = tuple(
        series
        for ledger, (workers, threads) in itertools.product(LEDGERS, SHAPES)
        for series in (
            Series(f"{ledger}, {workers} workers x {threads} threads, processor time each", "us", ledger == "SQLite"),
            Series(f"{ledger}, {workers} workers x {threads} threads, effects", "1/s", ledger == "SQLite"),
            Series(f"{ledger}, {workers} workers x {threads} threads, claim and settle", "ms", ledger == "SQLite"),
        )
    )
    rounds = (2, 5)

    @contextmanager
    def open(self, directory: Path, scale: Scale) -> Iterator[Sequence[Step]]:
        """Two servers of fakes, and a PostgreSQL of their own for one of them."""
        if shutil.which(program("initdb")) is None:
            raise Unmet("PostgreSQL is not installed")
        settings: dict[str, Any] = {"max_concurrency": 64, "max_effects_per_run": 1_000_000}
        options: dict[str, Any] = {"registry": "bench.effect_crews:CREWS", "settings": settings}
        with ExitStack() as stack:
            postgres = stack.enter_context(Postgres())
            replica = Registering(directory / "replica", **options)
            replica.join(postgres, postgres.create())
            servers: dict[str, Server] = {"SQLite": Server(directory / "alone", **options), "PostgreSQL": replica}
            for server in servers.values():
                stack.enter_context(server)
            names = itertools.count()
            yield [
                Step(f"{ledger} {shape}", partial(_measure, ledger, servers[ledger], shape, scale, names))
                for shape, ledger in itertools.product(SHAPES[: scale.pick(1, 2, 2, 2)], LEDGERS)
            ]


def _measure(ledger: str, server: Server, shape: tuple[int, int], scale: Scale, names: Iterator[int]) -> Values:
    found = run(server, *shape, scale, names, scope="global")
    return {f"{ledger}, {name}": values for name, values in found.items()}
