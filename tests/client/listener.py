"""A server in the test's own event loop that takes one request on each connection, and remembers it."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self


@dataclass(frozen=True)
class Request:
    """A request as it came; header names in lower case."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def line(self) -> str:
        """Method and path, without the query."""
        return f"{self.method} {self.target.partition('?')[0]}"

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


async def read_request(reader: asyncio.StreamReader) -> Request:
    """Read one request with its whole body. Raises asyncio.IncompleteReadError at the end of the connection."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("utf-8")
    first, *lines = head.split("\r\n")[:-2]
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    method, target, _ = first.split(" ")
    return Request(method, target, headers, body)


@dataclass
class Listener(ABC):
    """Listens on loopback; what becomes of a request is ``handle``'s affair."""

    requests: list[Request] = field(default_factory=list, init=False)

    async def __aenter__(self) -> Self:
        self._arrived = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._listens_at = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Take no more connections, and drop those that there are."""
        self._server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    @property
    def url(self) -> str:
        """Base URL, also after the end."""
        return f"http://127.0.0.1:{self._listens_at}"

    def lines(self) -> list[str]:
        """What was asked, in order."""
        return [request.line for request in self.requests]

    async def asked(self, line: str, times: int = 1) -> Request:
        """Wait until ``line`` has been asked so often; the request that made it so."""
        async with self._arrived, asyncio.timeout(30):
            await self._arrived.wait_for(lambda: self.lines().count(line) >= times)
        return [request for request in self.requests if request.line == line][times - 1]

    @abstractmethod
    async def handle(self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer, or not."""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            request = await read_request(reader)
            async with self._arrived:
                self.requests.append(request)
                self._arrived.notify_all()
            await self.handle(request, reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()
