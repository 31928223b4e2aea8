"""The supervisor's HTTP interface with nothing but the standard library."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

TERMINAL = ("completed", "failed", "cancelled")
TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Answer:
    """A response: its status and its JSON document."""

    status: int
    document: Any


@dataclass(frozen=True)
class Event:
    """One event of a job and the moment when it came, monotonic seconds."""

    name: str
    sequence: int
    data: Any
    at: float

    @property
    def kind(self) -> str:
        """The ``type`` of a progress or tool chunk, empty for anything else."""
        return str(self.data.get("type", ""))


class Client:
    """One connection a request."""

    def __init__(self, host: str, port: int, token: str) -> None:
        self._host, self._port, self._token = host, port, token

    def _send(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
        sent = {
            "Authorization": f"Bearer {self._token}",
            "Content-Type": "application/json",
            "Connection": "close",
            **(headers or {}),
        }
        connection.request(method, path, None if body is None else json.dumps(body), sent)
        return connection.getresponse()

    def request(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        """Send a request and read the whole answer."""
        with self._send(method, path, body, headers) as response:
            return Answer(response.status, json.loads(response.read()))

    def get(self, path: str) -> Answer:
        """Read something."""
        return self.request("GET", path)

    def start(self, body: dict[str, Any]) -> Answer:
        """Start a job, or repeat a start, and wait for its end."""
        return self.request("POST", "/jobs", body, _key(body))

    def stream(self, body: dict[str, Any]) -> Iterator[Event]:
        """Start a job, or repeat a start, and yield its events."""
        yield from self._events("POST", "/jobs/stream", body, _key(body))

    def follow(self, action_id: str, cursor: int) -> Iterator[Event]:
        """Yield the events of a job from ``cursor`` on."""
        path = f"/jobs/{action_id}/events?cursor={cursor}"
        yield from self._events("GET", path, None, {"Accept": "text/event-stream"})

    def cancel(self, action_id: str, crew_id: str, reason: str) -> Answer:
        """Cancel a job and wait for the proof."""
        body = {"crew_id": crew_id, "action_id": action_id, "reason": reason}
        return self.request("POST", f"/jobs/{action_id}/cancel", body)

    def _events(self, method: str, path: str, body: Any, headers: dict[str, str]) -> Iterator[Event]:
        with self._send(method, path, body, headers) as response:
            if response.status != 200:
                raise RuntimeError(f"{method} {path} answered {response.status}: {response.read(2000)!r}")
            for line in response:
                if line.startswith(b"data: "):
                    document = json.loads(line[6:])
                    yield Event(document["event"], document["sequence"], document["data"], time.monotonic())


def _key(body: dict[str, Any]) -> dict[str, str]:
    return {"Idempotency-Key": f"demo-{body['action_id']}"}
