"""Supervisors with payers, and a provider for each that knows no idempotency keys: every call is one more charge."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from demo.payments.provider import Provider
from tests.effects.conftest import MakeProvider
from tests.support.payers import REGISTRY, Payers
from tests.support.planned import PlannedServer
from tests.support.server import Server, ServerFactory

SETTINGS: dict[str, Any] = {"max_concurrency": 60, "grace_s": 0.3, "linger_s": 0.1, "drain_s": 1}
MakePayers = Callable[..., Payers]


@pytest.fixture(scope="module")
def payers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Payers]:
    """Payers on one server for the module: each test has invoices and Actions of its own."""
    home = tmp_path_factory.mktemp("payers")
    provider = Provider(home / "provider.db").start()
    try:
        with Server(home / "server", registry=REGISTRY, settings=SETTINGS) as server:
            yield Payers(server, provider, home / "gates")
    finally:
        provider.kill()


@pytest.fixture
def make_payers(make_server: ServerFactory, make_provider: MakeProvider, tmp_path: Path) -> MakePayers:
    """Start a server for one test. ``settings`` go beside the module's; the rest is as for a Server."""

    def make(*, registry: str = REGISTRY, settings: dict[str, Any] | None = None, **options: Any) -> Payers:
        server = make_server(registry=registry, settings=SETTINGS | (settings or {}), **options).start()
        return Payers(server, make_provider(), tmp_path / "gates")

    return make


class Planned(Payers):
    """Payers on a server that follows a plan."""

    server: PlannedServer


@pytest.fixture
def make_planned(tmp_path: Path, make_provider: MakeProvider) -> Iterator[Callable[..., Planned]]:
    """Start a server for one test that dies, fails or stands still as its plan says."""
    made: list[PlannedServer] = []

    def make(*, mutant: str | None = None) -> Planned:
        directory = tmp_path / f"planned{len(made)}"
        made.append(PlannedServer(directory, registry=REGISTRY, settings=SETTINGS, mutant=mutant))
        made[-1].start()
        return Planned(made[-1], make_provider(), tmp_path / "gates")

    yield make
    for server in made:
        server.close()


@pytest.fixture
def planned(make_planned: Callable[..., Planned]) -> Planned:
    """Payers on the product, with a plan."""
    return make_planned()
