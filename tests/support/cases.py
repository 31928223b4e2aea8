"""What several tests of the numbered cases look at."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support import procs
from tests.support.client import Client
from tests.support.server import Server
from tests.support.strict_client import StrictClient

REGISTRY = "tests.crews.case_crews:CREWS"
#: Deadlines are asserted at this multiple of the promised figure, since tests share their machine.
SLACK = 5
WAIT_S = 30.0
RESPOND_ASYNC = {"Prefer": "respond-async"}


def strict(server: Server, **options: Any) -> StrictClient:
    """The host's connector for that server."""
    assert server.token is not None
    return StrictClient(server.host, server.port, server.token, **options)


def events_of(client: Client, action_id: str, cursor: int | None = None) -> list[dict[str, Any]]:
    """The events of a job as the JSON route has them."""
    events: list[dict[str, Any]] = client.events(action_id, cursor=cursor).expect(200)["events"]
    return events


def names_of(client: Client, action_id: str) -> list[str]:
    """The names of a job's events."""
    return [event["event"] for event in events_of(client, action_id)]


def wait_for_phase(client: Client, action_id: str, phase: str) -> dict[str, Any]:
    """Wait until a job is in ``phase``; returns its view."""

    def view() -> dict[str, Any] | None:
        answer = client.get(action_id)
        found: dict[str, Any] | None = answer.json() if answer.status == 200 else None
        return found if found is not None and found["phase"] == phase else None

    return procs.wait_until(view, WAIT_S, f"{action_id} is {phase}") or {}


def wait_for_status(client: Client, action_id: str) -> str:
    """Wait until a job has ended; returns its status."""
    return str(wait_for_phase(client, action_id, "done")["status"])


def witnessed(path: Path, matches: Callable[[list[Any]], bool] = lambda words: True) -> list[list[Any]]:
    """The calls that the crew ``witness`` has noted."""
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text(encoding="ascii").splitlines()]
    return [words for words in lines if matches(words)]
