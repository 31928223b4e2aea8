"""What a fleet costs and brings: admissions and jobs of one supervisor alone, one in a fleet, and two in a fleet."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

from bench.measure import Scale, Series, Step, Unmet, Values
from tests.support.fleet import registered
from tests.support.postgres import Postgres, free_port, program
from tests.support.server import Server

CLIENTS = 16
ALONE, ONE, TWO = "alone", "one replica", "two replicas"


class Amount(NamedTuple):
    """Requests in one run of a step, from many clients and from one."""

    jobs: int
    one_by_one: int


class Fleet:
    """Starts of an instant crew: one after the other, and from many clients; half of them at each of two replicas."""

    name = "fleet"
    title = "Fleet: the cost of an owner per admission, and two replicas beside one"
    notes = (
        "admission: from the request to its 202, one client, one after the other",
        f"jobs: {CLIENTS} clients that wait for each output; all of it on this machine, PostgreSQL included",
        "passed on: the same request repeated at the replica that is not the owner",
    )
    series = (
        *(Series(f"{what}, admission", "ms", baseline=what == ALONE) for what in (ALONE, ONE)),
        *(Series(f"{what}, jobs", "1/s", baseline=what == ALONE) for what in (ALONE, ONE, TWO)),
        Series("repeat at the owner", "ms", baseline=True),
        Series("repeat passed on", "ms"),
    )
    rounds = (3, 8)

    @contextmanager
    def open(self, directory: Path, scale: Scale) -> Iterator[Sequence[Step]]:
        """PostgreSQL, a supervisor without it, and three replicas in two fleets."""
        if shutil.which(program("initdb")) is None:
            raise Unmet("PostgreSQL is not installed")
        amount = Amount(jobs=scale.pick(16, 80, 160, 640), one_by_one=scale.pick(5, 20, 40, 40))
        with ExitStack() as stack:
            postgres = stack.enter_context(Postgres())
            solo, pair = postgres.dsn(postgres.create()), postgres.dsn(postgres.create())
            alone = stack.enter_context(_server(directory / "alone", None))
            one = stack.enter_context(_server(directory / "one", solo))
            two = [stack.enter_context(_server(directory / f"two-{number}", pair)) for number in range(2)]
            for server in (one, *two):
                registered(server)
            names = count()
            yield [
                Step(ALONE, partial(_measure, [alone], ALONE, names, amount)),
                Step(ONE, partial(_measure, [one], ONE, names, amount)),
                Step(TWO, partial(_measure, two, TWO, names, amount)),
                Step("passed on", partial(_repeat, two, names, amount)),
            ]


def _server(directory: Path, database: str | None) -> Server:
    port = free_port()
    settings = {"port": port, "max_concurrency": 8, "max_retained_runs": 100_000, "max_queue": 10_000}
    environment: dict[str, str | None] = {}
    if database is not None:
        settings |= {"fleet": {"replica": directory.name, "url": f"http://127.0.0.1:{port}"}}
        environment["CREW_SUPERVISOR_FLEET_DATABASE"] = database
    return Server(directory, registry="tests.crews.fake_crews:CREWS", settings=settings, environment=environment)


def _measure(servers: list[Server], what: str, names: Iterator[int], amount: Amount) -> Values:
    found: dict[str, Sequence[float]] = {}
    if len(servers) == 1:
        found[f"{what}, admission"] = [_admit(servers[0], f"a-{next(names)}") for _ in range(amount.one_by_one)]
    began = time.monotonic()
    with ThreadPoolExecutor(CLIENTS) as pool:
        jobs = [(servers[number % len(servers)], f"j-{next(names)}") for number in range(amount.jobs)]
        for answer in pool.map(lambda job: job[0].client().start(job[1], "instant"), jobs):
            answer.expect(200)
    found[f"{what}, jobs"] = [amount.jobs / (time.monotonic() - began)]
    return found


def _admit(server: Server, action_id: str) -> float:
    body = {"crew_id": "instant", "action_id": action_id, "operation": "run", "input": {}}
    headers = {"Idempotency-Key": action_id, "Prefer": "respond-async"}
    client = server.client()
    began = time.monotonic()
    answer = client.request("POST", "/jobs", body=body, headers=headers)
    spent = (time.monotonic() - began) * 1000
    answer.expect(202)
    return spent


def _repeat(servers: list[Server], names: Iterator[int], amount: Amount) -> Values:
    action_id = f"r-{next(names)}"
    servers[0].client().start(action_id, "instant").expect(200)
    found: list[list[float]] = [[], []]
    for _ in range(amount.one_by_one):
        for spent, server in zip(found, servers, strict=True):
            client = server.client()
            began = time.monotonic()
            answer = client.start(action_id, "instant")
            spent.append((time.monotonic() - began) * 1000)
            answer.expect(200)
    return {"repeat at the owner": found[0], "repeat passed on": found[1]}
