"""A job's events from the first one wanted to the terminal one, over as many connections as it takes."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

import aiohttp
import msgspec

from supervisor.client import requests, sse
from supervisor.client.answers import Event
from supervisor.client.connection import Connection, decode_job
from supervisor.client.failures import (
    ClientFailure,
    InvalidStream,
    RemoteTemporary,
    ResponseTooLarge,
    TransportFailed,
)
from supervisor.client.requests import Call

#: Silence that ends a connection whose server keeps its streams alive: it sends a comment every 15 s. Seconds.
STALL_TIMEOUT_S = 60.0
#: How long the end of the body is waited for after the terminal event, to see that nothing contradicts it. Seconds.
END_TIMEOUT_S = 1.0
REPLAYED_HEADER = "Idempotency-Replayed"


class Retry(msgspec.Struct, frozen=True, kw_only=True):
    """How often a broken stream is taken up again without an event in between, and how long is waited before it.

    The wait grows from ``first_delay_s`` to ``max_delay_s`` by doubling, less up to half of it at random; a server's
    ``Retry-After`` or ``retry:`` lengthens it, up to ``max_delay_s``. ``attempts = 0`` takes nothing up again.
    """

    attempts: int = 8
    first_delay_s: float = 0.2
    max_delay_s: float = 5.0

    def delay_s(self, attempt: int, asked_s: float = 0.0) -> float:
        """The wait before ``attempt`` (from 1), seconds."""
        longest = min(self.first_delay_s * 2.0 ** (attempt - 1), self.max_delay_s)
        return max(longest * random.uniform(0.5, 1.0), min(asked_s, self.max_delay_s))


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How patient a client is; the Client explains each."""

    retry: Retry
    stall_timeout_s: float
    cancel_timeout_s: float


class EventStream:
    """Iterates the events of one job; stops after the terminal one, which ``last`` is then.

    A connection that breaks, falls silent or ends too early is taken up again behind the last event seen. Raises
    ClientFailure: InvalidStream for a gap, another order, an event after the terminal one, bytes that are no strict
    JSON in UTF-8, or a stream that keeps ending early; ResponseTooLarge above a frame of 1 MiB, 100,000 events or the
    bound of a response. Events that came before the fault are yielded first. To be closed, or used in ``async with``.
    """

    def __init__(
        self,
        connection: Connection,
        first: Call,
        *,
        action_id: str,
        crew_id: str | None = None,
        cursor: int = 0,
        options: Options,
    ) -> None:
        self.action_id = action_id
        #: The start repeats an admitted one exactly; None before the answer, and where the server does not say.
        self.replayed: bool | None = None
        #: The server has answered with a stream, so the job is durable there.
        self.admitted = False
        self.last: Event | None = None
        self._connection = connection
        self._call = first
        self._starts = first.method == "POST"
        self._action = first.action
        self._crew_id = crew_id
        self._cursor = cursor
        self._reader = sse.EventReader(first=cursor, max_bytes=connection.max_response_bytes)
        self._retry = options.retry
        self._stall_timeout_s = options.stall_timeout_s
        self._attempts = 0
        self._response: aiohttp.ClientResponse | None = None
        self._failure: ClientFailure | None = None
        #: The start may have arrived, and no answer to it came.
        self._unanswered: ClientFailure | None = None
        self._over = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Drop the connection; the job does not notice."""
        self._disconnect()
        self._over = True

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        while True:
            if self._reader.events:
                self.last = self._reader.events.popleft()
                return self.last
            if self._failure is not None:
                self._disconnect()
                raise self._failure
            if self._over:
                raise StopAsyncIteration
            await self._advance()

    async def open(self) -> None:
        """Return once the server has answered with a stream. Raises ClientFailure if it does not."""
        while self._response is None and self._failure is None and not self._over:
            await self._connect()
        if self._failure is not None:
            raise self._failure

    async def _advance(self) -> None:
        """Read one piece, or connect, or decide that it is over."""
        if self._response is None:
            await self._connect()
            return
        try:
            piece = await self._piece(self._response)
        except ClientFailure as failure:
            await self._lost(failure)
            return
        if not piece:
            await self._ended_early()
            return
        before = self._reader.next_sequence
        try:
            self._reader.feed(piece)
            if self._reader.ended:
                await self._see_the_end(self._response)
        except sse.Malformed as error:
            self._failure = self._call.failed(InvalidStream, str(error))
        except sse.AboveBound as error:
            self._failure = self._call.failed(ResponseTooLarge, str(error))
        if self._reader.next_sequence > before:
            self._attempts = 0

    async def _piece(self, response: aiohttp.ClientResponse) -> bytes:
        """The next bytes, b"" at the end. Raises TransportFailed."""
        limit_s = self._stall_timeout_s if self._reader.kept_alive else None
        try:
            async with asyncio.timeout(limit_s):
                return await response.content.readany()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            text = f"the stream broke off: {type(error).__name__}"
            raise self._call.failed(TransportFailed, text) from error

    async def _see_the_end(self, response: aiohttp.ClientResponse) -> None:
        """Read behind the terminal event: a contradiction there makes it worthless. Raises Malformed, AboveBound."""
        # A connection that breaks or stays open now takes nothing back: the event was whole.
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with asyncio.timeout(END_TIMEOUT_S):
                while piece := await response.content.readany():
                    self._reader.feed(piece)
        self._reader.finish()
        self._over = True
        self._disconnect()

    async def _connect(self) -> None:
        try:
            self._response = await self._connection.request(self._call)
        except ClientFailure as failure:
            await self._unconnected(failure)
            return
        if self._call.method == "POST":
            self.replayed = self._response.headers.get(REPLAYED_HEADER) == "true"
        self.admitted = True

    async def _unconnected(self, failure: ClientFailure) -> None:
        """A start is sent once. Where it may have arrived its job is looked for, and reads may be repeated."""
        if self._call.method == "POST":
            again = isinstance(failure, TransportFailed) and failure.sent
            self._unanswered = failure if again else None
        else:
            again = isinstance(failure, TransportFailed | RemoteTemporary)
        if again:
            await self._lost(failure)
        else:
            self._failure = self._unanswered if self._unanswered is not None and not self.admitted else failure

    async def _lost(self, failure: ClientFailure) -> None:
        """Wait, and go on behind the last event; or give up."""
        self._disconnect()
        self._attempts += 1
        if self._attempts > self._retry.attempts:
            self._failure = self._unanswered if self._unanswered is not None and not self.admitted else failure
            return
        self._reader.reconnected()
        follow = requests.events(self.action_id, self._reader.next_sequence, stream=True, crew_id=self._crew_id)
        action = self._action
        self._call = msgspec.structs.replace(
            follow, action=action, mutation=action is not None and action.mutates, admitted=self.admitted
        )
        asked_s = max(failure.retry_after_s or 0.0, (self._reader.retry_ms or 0) / 1000)
        await asyncio.sleep(self._retry.delay_s(self._attempts, asked_s))

    async def _ended_early(self) -> None:
        """The body has ended without a terminal event: at the end of a job that had ended, that is all there is."""
        if not self._starts and self._reader.next_sequence == self._cursor:
            call = requests.show(self.action_id, crew_id=self._crew_id)
            with contextlib.suppress(ClientFailure):
                reply = await self._connection.exchange(call)
                job = decode_job(call, reply.document, self.action_id)
                if job.ended and job.event_count <= self._cursor:
                    self._over = True
                    self._disconnect()
                    return
        await self._lost(self._call.failed(InvalidStream, "the stream ended before a terminal event"))

    def _disconnect(self) -> None:
        if self._response is not None:
            self._response.close()
            self._response = None
