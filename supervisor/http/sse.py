"""Server-sent events of a job: from the live feed while a reader keeps up, from the journal when it does not."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator

from aiohttp import web

from supervisor.events import SSE_RETRY_MS, CommittedEvent, Feed
from supervisor.journal import Journal

#: A comment after this silence, seconds, keeps proxies from cutting the connection.
KEEPALIVE_S = 15.0
#: Events are written in pieces of about this size; a stalled reader holds no more than one piece and a socket buffer.
PIECE_BYTES = 65_536
PAGE_EVENTS = 256
PAGE_BYTES = 1 << 18
#: Kernel memory of a stream's unsent bytes. Left to itself, the kernel takes megabytes for each reader that stalls.
SEND_BUFFER_BYTES = 1 << 17
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


async def follow(
    journal: Journal, row: int, cursor: int, *, feed: Feed | None, count: int
) -> AsyncIterator[list[CommittedEvent]]:
    """Yield events from ``cursor`` on until the terminal one; an empty list after KEEPALIVE_S of silence.

    ``feed`` is None for a job that has ended with ``count`` events.
    """
    while True:
        events = feed.since(cursor) if feed is not None else None
        if events is None and (feed is not None or cursor < count):
            stored = await journal.events(row, cursor, limit=PAGE_EVENTS, limit_bytes=PAGE_BYTES)
            events = [CommittedEvent(event.seq, event.name, event.data) for event in stored]
        if events:
            yield events
            cursor = events[-1].sequence + 1
            continue
        if feed is None or feed.ended:
            return
        try:
            async with asyncio.timeout(KEEPALIVE_S):
                await feed.wait(cursor)
        except TimeoutError:
            yield []


async def respond(
    request: web.Request, events: AsyncIterator[list[CommittedEvent]], action_id: str
) -> web.StreamResponse:
    """Write the stream. A reader that goes away ends it quietly; the job does not notice."""
    response = web.StreamResponse(headers=HEADERS)
    response.content_type = "text/event-stream"
    response.charset = "utf-8"
    try:
        await response.prepare(request)
        bound_send_buffer(request)
        await response.write(b"retry: %d\n\n" % SSE_RETRY_MS)
        async for batch in events:
            if not batch:
                await response.write(b": alive\n\n")
            for piece in _pieces(batch, action_id):
                await response.write(piece)
        await response.write_eof()
    except ConnectionError:
        pass
    return response


def bound_send_buffer(request: web.Request) -> None:
    """Keep the kernel from taking megabytes for a reader that stalls."""
    connection = request.transport.get_extra_info("socket") if request.transport is not None else None
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)


def _pieces(batch: list[CommittedEvent], action_id: str) -> Iterator[bytes]:
    waiting: list[bytes] = []
    size = 0
    for event in batch:
        frame = event.sse(action_id)
        waiting.append(frame)
        size += len(frame)
        if size >= PIECE_BYTES:
            yield b"".join(waiting)
            waiting, size = [], 0
    if waiting:
        yield b"".join(waiting)
