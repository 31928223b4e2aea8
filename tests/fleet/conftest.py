"""One PostgreSQL for all of these tests, and an empty database for each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.postgres import Postgres


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A running server. It listens everywhere, since replicas in network namespaces come from elsewhere."""
    with Postgres(addresses=("0.0.0.0",)) as server:
        yield server


@pytest.fixture
def database(postgres: Postgres) -> str:
    """Name of an empty database."""
    return postgres.create()


@pytest.fixture
def dsn(postgres: Postgres, database: str) -> str:
    """Where it is."""
    return postgres.dsn(database)
