"""The edge by itself: bodies that do not come, or come broken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
from aiohttp import web

from protocol.api import Problem
from supervisor.http import edge
from tests.support.raw import head

JSON = {"Content-Type": "application/json"}
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connected(reached: asyncio.Event | None = None) -> AsyncIterator[Connection]:
    """A connection to a server that answers with the JSON it was sent; ``reached``: it begins to read the body."""

    async def echo(request: web.Request) -> web.StreamResponse:
        if reached is not None:
            reached.set()
        return edge.json_response(await edge.read_json(request))

    app = web.Application(middlewares=[edge.Edge([]).middleware])
    app.router.add_post("/", echo)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        reader, writer = await asyncio.open_connection(*runner.addresses[0][:2])
        try:
            yield reader, writer
        finally:
            writer.close()
    finally:
        await runner.cleanup()


async def problem_of(reader: asyncio.StreamReader) -> Problem:
    """The problem document that comes next."""
    headers = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(headers.split(b"content-length: ")[1].split(b"\r\n")[0])
    assert b"content-type: application/problem+json" in headers
    return msgspec.json.decode(await reader.readexactly(length), type=Problem)


@pytest.mark.parametrize(
    ("headers", "pieces"),
    [
        ({"Content-Length": "10"}, ()),
        ({"Content-Length": "10"}, (b"[1",)),
        ({"Transfer-Encoding": "chunked"}, (b"2\r\n[1\r\n",)),
        # The parser gives up on the connection without a word to whoever waits for the body.
        ({"Transfer-Encoding": "chunked"}, (b"2\r\n[1\r\n", b"zz\r\n")),
    ],
)
async def test_a_body_that_does_not_come_is_given_up(
    monkeypatch: pytest.MonkeyPatch, headers: dict[str, str], pieces: tuple[bytes, ...]
) -> None:
    monkeypatch.setattr(edge, "BODY_DEADLINE_S", 0.3)
    reached = asyncio.Event()
    async with connected(reached) as (reader, writer), asyncio.timeout(20):
        writer.write(head("POST", b"/", headers={**JSON, **headers}))
        await reached.wait()
        for piece in pieces:
            writer.write(piece)
        problem = await problem_of(reader)
    assert (problem.status, problem.code) == (408, "body_timed_out")


async def test_a_body_that_comes_in_time_is_read_whole() -> None:
    async with connected() as (reader, writer), asyncio.timeout(20):
        writer.write(head("POST", b"/", headers={**JSON, "Content-Length": "5"}))
        for byte in b"[1,2]":
            writer.write(bytes([byte]))
            await writer.drain()
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        assert await reader.readexactly(5) == b"[1,2]"


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_a_body_that_breaks_its_encoding_is_the_senders_error(coding: str) -> None:
    async with connected() as (reader, writer), asyncio.timeout(20):
        headers = {**JSON, "Content-Encoding": coding, "Content-Length": "7"}
        writer.write(head("POST", b"/", headers=headers) + b"no gzip")
        problem = await problem_of(reader)
    assert (problem.status, problem.code) == (400, "request_unreadable")


async def test_what_a_caller_sent_can_always_be_told_to_him() -> None:
    async with connected() as (reader, writer), asyncio.timeout(20):
        headers: dict[str, bytes | str] = {"Content-Type": b"text/\xff" + b"x" * 5000, "Content-Length": "2"}
        writer.write(head("POST", b"/", headers=headers) + b"{}")
        problem = await problem_of(reader)
    assert (problem.status, problem.code) == (422, "input_invalid")
    assert len(problem.detail) <= edge.MAX_DETAIL
