"""A server of raw bytes for a client to be tested with, in the test's own event loop: each answer is a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from tests.client.listener import Listener, Request

REASONS = {200: "OK", 202: "Accepted"}


class Wire:
    """The other end of one connection, after its request."""

    def __init__(self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.request = request
        self._reader, self._writer = reader, writer

    async def head(self, status: int = 200, *lines: str, content_type: str = "text/event-stream") -> None:
        """Status line and headers of an answer that ends with its connection."""
        reason = REASONS.get(status, "Status")
        head = [f"HTTP/1.1 {status} {reason}", f"Content-Type: {content_type}", "Connection: close", *lines, "", ""]
        await self.send("\r\n".join(head).encode())

    async def send(self, data: bytes) -> None:
        """Some bytes."""
        self._writer.write(data)
        await self._writer.drain()

    async def json(self, document: Any, status: int = 200, *lines: str) -> None:
        """A whole JSON answer."""
        await self.head(status, *lines, content_type="application/json")
        await self.send(json.dumps(document).encode())

    async def gone(self) -> None:
        """Wait until the client has hung up."""
        await self._reader.read()

    def reset(self) -> None:
        """Break the connection."""
        self._writer.transport.abort()


Script = Callable[[Wire], Awaitable[None]]


@dataclass
class Rogue(Listener):
    """Answers requests by ``METHOD /path`` with their scripts in turn; the last one again and again."""

    scripts: dict[str, list[Script]] = field(default_factory=dict)

    def on(self, line: str, *scripts: Script) -> Self:
        """Answer ``line`` so."""
        self.scripts[line] = list(scripts)
        return self

    async def handle(self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Play the script."""
        scripts = self.scripts.get(request.line, [refuse(404, {"detail": "Not Found"})])
        await (scripts.pop(0) if len(scripts) > 1 else scripts[0])(Wire(request, reader, writer))


def frame(sequence: Any, name: str = "chunk", data: Any = None) -> bytes:
    """One well-formed frame, whatever its sequence is."""
    document = json.dumps({"event": name, "sequence": sequence, "data": {} if data is None else data})
    return f"event: {name}\ndata: {document}\n\n".encode()


STARTED = frame(0, "started", {"status": "running"})
DONE = {"raw": "done"}
COMPLETED = frame(2, "completed", DONE)
GOOD = STARTED + frame(1, data={"content": "hello", "channel": "messages"}) + COMPLETED


def stream(*pieces: bytes, status: int = 200, content_type: str = "text/event-stream") -> Script:
    """Answer with these pieces, each in a write of its own, and close."""

    async def script(wire: Wire) -> None:
        await wire.head(status, content_type=content_type)
        for piece in pieces:
            await wire.send(piece)

    return script


def open_stream(*pieces: bytes, until: asyncio.Event | None = None, then: bytes = b"") -> Script:
    """Answer with these pieces and stay open: until the client goes, or until the event, then ``then``."""

    async def script(wire: Wire) -> None:
        await wire.head()
        for piece in pieces:
            await wire.send(piece)
        await (wire.gone() if until is None else until.wait())
        await wire.send(then)

    return script


def answer(document: Any, status: int = 200) -> Script:
    """Answer with a JSON document."""

    async def script(wire: Wire) -> None:
        await wire.json(document, status)

    return script


def refuse(status: int, document: Any = None, *lines: str) -> Script:
    """Answer with a status that is no success, with a JSON body or none."""

    async def script(wire: Wire) -> None:
        if document is None:
            await wire.head(status, "Content-Length: 0", *lines)
        else:
            await wire.json(document, status, *lines)

    return script


async def break_off(wire: Wire) -> None:
    """Break the connection without an answer."""
    wire.reset()


async def say_nothing(wire: Wire) -> None:
    """Never answer."""
    await wire.gone()


def view(status: str, **fields: Any) -> dict[str, Any]:
    """A record as the reference has it: six fields."""
    record: Mapping[str, Any] = {
        "action_id": "a",
        "crew_id": "crew",
        "operation": "run",
        "status": status,
        "event_count": 3,
        "output": DONE if status == "completed" else None,
    }
    return {**record, **fields}


def evidence(*, confirmed: bool) -> dict[str, Any]:
    """Evidence of a stop."""
    return {
        "confirmed": confirmed,
        "method": "cgroup" if confirmed else "group",
        "reason": "cancelled",
        "requested_at": 1.0,
        "confirmed_at": 2.0 if confirmed else None,
    }
