"""A real server for each module, clients, and servers that break the contract."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from supervisor.client import Action, Client, Retry
from tests.client.relay import Relay
from tests.client.rogue import Rogue
from tests.support.cases import REGISTRY
from tests.support.server import TOKEN, Server

SETTINGS: dict[str, Any] = {"max_concurrency": 8, "grace_s": 0.1, "linger_s": 0.2}
#: Taken up again at once, a few times.
QUICK = Retry(attempts=3, first_delay_s=0.01, max_delay_s=0.02)
#: Until a server has been started again, on a busy machine too.
LONG = Retry(attempts=600, first_delay_s=0.05, max_delay_s=0.2)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for the module."""
    directory = tmp_path_factory.mktemp("server")
    environment: dict[str, str | None] = {
        "WITNESS_FILE": str(directory / "witness"),
        "HEARTBEAT_FILE": str(directory / "beats"),
    }
    with Server(directory, registry=REGISTRY, settings=SETTINGS, environment=environment) as running:
        yield running


@pytest.fixture
async def client(server: Server) -> AsyncIterator[Client]:
    """A client of the module's server."""
    async with Client(server.url, token=TOKEN, retry=QUICK) as made:
        yield made


@pytest.fixture
async def relay(server: Server) -> AsyncIterator[Relay]:
    """A relay to the module's server."""
    async with Relay(server.port) as made:
        yield made


@pytest.fixture
async def through(relay: Relay) -> AsyncIterator[Client]:
    """A client of the module's server that goes through the relay."""
    async with Client(relay.url, token=TOKEN, retry=QUICK) as made:
        yield made


@pytest.fixture
async def rogue() -> AsyncIterator[Rogue]:
    """A server that answers what the test says."""
    async with Rogue() as made:
        yield made


@pytest.fixture
async def misled(rogue: Rogue) -> AsyncIterator[Client]:
    """A client of ``rogue`` with little patience."""
    async with Client(
        rogue.url, token=TOKEN, retry=QUICK, stall_timeout_s=0.2, cancel_timeout_s=2.0, max_response_bytes=4 << 20
    ) as made:
        yield made


def action(crew_id: str = "crew", operation: str = "run", given: dict[str, Any] | None = None, **more: Any) -> Action:
    """An Action with an id of its own."""
    more.setdefault("action_id", f"act_{uuid.uuid4().hex[:12]}")
    return Action(crew_id=crew_id, operation=operation, input=given or {}, **more)
