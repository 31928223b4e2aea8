"""A relay in front of a real server that holds, cuts or spoils what passes, as networks and proxies do."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from tests.client.listener import Listener, Request


@dataclass
class Rule:
    """What happens to the requests of one line: wait for ``go`` before they pass, for ``back`` before an answer does.

    ``spoil`` changes the bytes of the answer. ``cut``: after so many bytes of an answer the connection breaks.
    """

    go: asyncio.Event | None = None
    back: asyncio.Event | None = None
    spoil: Callable[[bytes], bytes] | None = None
    cut: int | None = None


@dataclass
class Relay(Listener):
    """Passes each connection's one request on to ``port``; ``rules`` by ``METHOD /path``, in the order of asking."""

    port: int
    rules: dict[str, list[Rule]] = field(default_factory=dict)

    def on(self, line: str, *rules: Rule) -> Self:
        """Apply a rule to each of the first requests of that line."""
        self.rules[line] = list(rules)
        return self

    async def handle(self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass it on, by its rule."""
        rules = self.rules.get(request.line)
        rule = rules.pop(0) if rules else Rule()
        if rule.go is not None:
            await rule.go.wait()
        await self._pass(request, writer, rule)

    async def _pass(self, request: Request, writer: asyncio.StreamWriter, rule: Rule) -> None:
        back, there = await asyncio.open_connection("127.0.0.1", self.port)
        with contextlib.closing(there):
            headers = {**request.headers, "connection": "close"}
            head = [f"{request.method} {request.target} HTTP/1.1", *(f"{name}: {headers[name]}" for name in headers)]
            there.write("\r\n".join([*head, "", ""]).encode() + request.body)
            if rule.back is not None:
                await rule.back.wait()
            passed = 0
            while data := await back.read(65_536):
                if rule.spoil is not None:
                    data = rule.spoil(data)
                if rule.cut is not None and passed + len(data) > rule.cut:
                    writer.write(data[: rule.cut - passed])
                    await writer.drain()
                    return
                passed += len(data)
                writer.write(data)
                await writer.drain()
