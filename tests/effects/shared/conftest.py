"""The fixtures of ``tests.effects.supervised`` on PostgreSQL: replicas, each alone in a fleet of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from demo.payments.provider import Provider
from tests.effects.conftest import MakeProvider
from tests.effects.supervised.conftest import SETTINGS, MakePayers, Planned
from tests.effects.supervised.test_crews import EFFECTS, Crews
from tests.effects.supervised.test_crews import REGISTRY as CREWS
from tests.support import scripts
from tests.support.client import Client
from tests.support.fleet import PlannedReplica, Registering
from tests.support.payers import REGISTRY, Payers
from tests.support.postgres import Postgres

#: A business key that is the crew's, for tools which are decorated without one.
SHARED = {"policy": "once", "key": ["invoice"], "scope": "crew"}


def replica(postgres: Postgres, directory: Path, **options: Any) -> Registering:
    """One that is not started, on a database of its own."""
    made = Registering(directory, **options)
    made.join(postgres, postgres.create())
    return made


@pytest.fixture(scope="module")
def payers(tmp_path_factory: pytest.TempPathFactory, postgres: Postgres) -> Iterator[Payers]:
    """Payers on one replica for the module."""
    home = tmp_path_factory.mktemp("payers")
    provider = Provider(home / "provider.db").start()
    try:
        with replica(postgres, home / "server", registry=REGISTRY, settings=SETTINGS) as server:
            yield Payers(server, provider, home / "gates")
    finally:
        provider.kill()


@pytest.fixture
def make_payers(postgres: Postgres, make_provider: MakeProvider, tmp_path: Path) -> Iterator[MakePayers]:
    """Start a replica for one test."""
    made: list[Registering] = []

    def make(*, registry: str = REGISTRY, settings: dict[str, Any] | None = None, **options: Any) -> Payers:
        given = SETTINGS | (settings or {})
        made.append(replica(postgres, tmp_path / f"replica{len(made)}", registry=registry, settings=given, **options))
        return Payers(made[-1].start(), make_provider(), tmp_path / "gates")

    yield make
    for server in made:
        server.close()


@pytest.fixture
def planned(postgres: Postgres, make_provider: MakeProvider, tmp_path: Path) -> Iterator[Planned]:
    """Payers on a replica that follows a plan."""
    server = PlannedReplica(tmp_path / "planned", registry=REGISTRY, settings=SETTINGS)
    server.join(postgres, postgres.create())
    try:
        yield Planned(server.start(), make_provider(), tmp_path / "gates")
    finally:
        server.close()


@pytest.fixture(scope="module")
def crews(tmp_path_factory: pytest.TempPathFactory, postgres: Postgres) -> Iterator[Crews]:
    """Real crews, whose tools have keys of their crews by the configuration."""
    home = tmp_path_factory.mktemp("charging")
    provider = Provider(home / "provider.db").start()
    names = ("react_raises", "native_raises", "react_model_fails", "native_model_fails")
    effects = EFFECTS | {name: {"pay": SHARED} for name in names}
    effects["third_party"] = {"Third Party": SHARED | {"volatile": ["memo"]}}
    settings = {"crews": {crew_id: {"effects": tools} for crew_id, tools in effects.items()}}
    environment = {"PAYMENTS_URL": provider.url}
    made = replica(postgres, home / "server", registry=CREWS, settings=settings, environment=environment)
    try:
        with made:
            yield Crews(made, provider)
    finally:
        provider.kill()


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, postgres: Postgres) -> Iterator[Client]:
    """A client of one replica for the tests of ``tests.http``."""
    settings = {"grace_s": 0.3, "linger_s": 0.2}
    home = tmp_path_factory.mktemp("scripted")
    with replica(postgres, home, registry=scripts.REGISTRY, settings=settings) as server:
        yield server.client()
