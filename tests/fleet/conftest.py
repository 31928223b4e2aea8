"""One PostgreSQL for all of these tests, an empty database for each, and replicas on machines of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from supervisor.fleet.database import Line
from tests.support.fleet import Network, Replicas, network
from tests.support.postgres import Postgres
from tests.support.server import Server

Starts = Callable[[int], list[Server]]
Expire = Callable[[str], None]


class Lasting(NamedTuple):
    """A fleet that lasts for all tests, and the name of its database."""

    replicas: Replicas
    servers: list[Server]
    database: str


@pytest.fixture
def database(postgres: Postgres) -> str:
    """Name of an empty database."""
    return postgres.create()


@pytest.fixture
def dsn(postgres: Postgres, database: str) -> str:
    """Where it is."""
    return postgres.dsn(database)


@pytest.fixture
async def line(dsn: str) -> AsyncIterator[Line]:
    line = Line(dsn, "tests", patience_s=10)
    yield line
    await line.close()


@pytest.fixture
def expire(postgres: Postgres, database: str) -> Expire:
    """End a replica's lease, as time would."""

    def end(replica_id: str) -> None:
        statement = "UPDATE crew_supervisor.replicas SET expires_at = clock_timestamp() WHERE replica_id = %s"
        postgres.ask(database, statement, replica_id)

    return end


@pytest.fixture
def machines(postgres: Postgres, database: str) -> Iterator[Network]:
    """Three machines."""
    with network(postgres, database, 3) as made:
        yield made


@pytest.fixture
def replicas(tmp_path: Path, machines: Network) -> Iterator[Replicas]:
    """Their supervisors, none of them started yet."""
    made = Replicas(tmp_path, machines)
    yield made
    made.close()


@pytest.fixture
def starts(replicas: Replicas) -> Starts:
    """Start as many replicas."""
    return replicas.start


@pytest.fixture
def three(replicas: Replicas) -> list[Server]:
    """Three replicas of one fleet, to do with as the test likes."""
    return replicas.start(3)


@pytest.fixture(scope="session")
def lasting(postgres: Postgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lasting]:
    """Three replicas that many tests use, so none of these may harm them."""
    name = postgres.create()
    with network(postgres, name, 3) as made:
        replicas = Replicas(tmp_path_factory.mktemp("fleet"), made)
        try:
            yield Lasting(replicas, replicas.start(3), name)
        finally:
            replicas.close()
