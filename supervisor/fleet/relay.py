"""Requests about Actions of other replicas go to their owner, and the answer comes back byte for byte as it comes.

A request that was passed on is never passed on again. It carries the caller's own token, which is checked at both
ends, so replicas of a fleet have their tokens in common.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp
from aiohttp import hdrs, web
from multidict import CIMultiDict
from yarl import URL

from protocol.api import EffectCounts, JobView
from protocol.errors import OwnerRetired
from protocol.states import Phase, Status
from supervisor.fleet.ownership import FleetOwnership, Owned, unavailable
from supervisor.http.edge import KEPT_BODY, json_response, raw_header, read_body
from supervisor.http.sse import bound_send_buffer
from supervisor.http.start import FORWARDED_CALLER, FORWARDED_KEY, KEY_HEADER
from supervisor.job import NULL
from supervisor.jobs import Jobs
from supervisor.journal import Journal
from supervisor.log import get_log
from supervisor.ownership import OwnedElsewhere, Place

log = get_log(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
#: On a request that was passed on: by whom, to whom, for whom; and the key where its bytes are no UTF-8, in base64.
VIA = "X-Crew-Fleet-Via"
TO = "X-Crew-Fleet-To"
CALLER = "X-Crew-Fleet-Caller"
KEY = "X-Crew-Fleet-Key"
#: On an answer that was passed back: whose it is.
REPLICA = "X-Crew-Fleet-Replica"
#: What belongs to one connection (RFC 9110, 7.6.1), or is said anew on the other one.
HOP = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
     "transfer-encoding", "upgrade", "expect", "host", "content-length", VIA.lower(), TO.lower(), CALLER.lower(),
     KEY.lower()}
)  # fmt: skip
#: Of an answer the length goes along.
BACK = HOP - {"content-length"} | {"server", "date"}
CONNECT_S = 5.0
#: A silent connection is probed after so many seconds, so often, and given up after so many probes (tcp(7)).
KEEPALIVE = ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
USER_TIMEOUT_MS = 30_000
#: Routes of a record.
RECORDS = ("/jobs/{action_id}", "/runs/{action_id}")
_ACTION_ID = re.compile(r"[A-Za-z0-9._:~-]{1,256}")
_CALLER = re.compile(r"[A-Za-z0-9._:%-]{1,100}")


class Relay:
    """Finds the owner of each request's Action and, where that is another replica, talks to it."""

    def __init__(self, ownership: FleetOwnership, journal: Journal, *, replica_id: str) -> None:
        self._ownership = ownership
        self._journal = journal
        self._replica_id = replica_id
        self._jobs: Jobs | None = None
        self._session: aiohttp.ClientSession | None = None
        self._open: set[asyncio.Task[Any]] = set()

    def attend(self, jobs: Jobs) -> None:
        """Know the live jobs: what is among them is ours."""
        self._jobs = jobs

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Behind the check of the token, and in front of the handlers."""
        via = request.headers.get(VIA)
        if via is not None:
            return await self._receive(request, handler, via)
        action_id = request.match_info.get("action_id")
        if action_id is not None:
            found = await self._elsewhere(action_id)
            if found is not None and found.retired:
                return _epitaph(request, found)
            if found is not None:
                body = await read_body(request) if request.can_read_body else b""
                return await self._forward(request, found.place, body)
        elif request.method == hdrs.METH_POST:
            request[KEPT_BODY] = b""
        try:
            return await handler(request)
        except OwnedElsewhere as owned:
            return await self._forward(request, owned.place, request[KEPT_BODY])

    async def _receive(self, request: web.Request, handler: Handler, via: str) -> web.StreamResponse:
        """Answer for ourselves or not at all: what is passed on twice could go round for ever."""
        here = Place(action_id=request.match_info.get("action_id", ""), replica_id=request.headers.get(TO, ""), url="")
        if here.replica_id != self._replica_id:
            raise unavailable(here, f"is not {self._replica_id}, which answers at its address")
        caller = request.headers.get(CALLER, "")
        if _CALLER.fullmatch(caller) and _CALLER.fullmatch(via):
            request[FORWARDED_CALLER] = f"{caller} via {via}"
        if KEY in request.headers:
            try:
                request[FORWARDED_KEY] = base64.b64decode(request.headers[KEY], validate=True)
            except (binascii.Error, ValueError):
                request[FORWARDED_KEY] = b"\0"  # refused as every key with a control character is
        try:
            return await handler(request)
        except OwnedElsewhere as owned:
            raise unavailable(owned.place, f"was not known to {via} yet") from None

    async def _elsewhere(self, action_id: str) -> Owned | None:
        """The row of an Action that is another's. Raises OwnerUnavailable, FleetUnavailable, JournalUnavailable.

        What is known here is answered here, also while the database is away.
        """
        assert self._jobs is not None
        if self._jobs.get(action_id) is not None or not _ACTION_ID.fullmatch(action_id):
            return None
        if await self._journal.knows(action_id):
            return None
        found = await self._ownership.locate(action_id)
        if found is None or (found.replica_id == self._replica_id and not found.retired):
            return None
        if not found.alive and not found.retired:
            raise unavailable(found.place, "has no valid lease")
        return found

    async def _forward(self, request: web.Request, place: Place, body: bytes) -> web.StreamResponse:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            return await self._exchange(request, place, body)
        finally:
            self._open.discard(task)

    async def _exchange(self, request: web.Request, place: Place, body: bytes) -> web.StreamResponse:
        url = URL(place.url + request.rel_url.raw_path_qs, encoded=True)
        headers = self._headers(request, place)
        try:
            answer = await self._client().request(
                request.method, url, headers=headers, data=body or None, allow_redirects=False
            )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            log.warning("owner_unreachable", replica=place.replica_id, action_id=place.action_id, why=_kind(error))
            raise unavailable(place, f"does not answer ({_kind(error)})") from None
        async with answer:
            if answer.status == 401:
                raise unavailable(place, "does not take this token; replicas must have their tokens in common")
            return await self._pass_back(request, answer, place)

    async def _pass_back(
        self, request: web.Request, answer: aiohttp.ClientResponse, place: Place
    ) -> web.StreamResponse:
        kept = CIMultiDict((name, value) for name, value in answer.headers.items() if name.lower() not in BACK)
        kept[REPLICA] = place.replica_id
        response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=kept)
        try:
            await response.prepare(request)
            if answer.content_length is None:
                bound_send_buffer(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            await response.write_eof()
        except aiohttp.ClientPayloadError:
            # The owner broke off. So do we: an orderly end would say that this was all.
            log.warning("owner_broke_off", replica=place.replica_id, action_id=place.action_id)
            if request.transport is not None:
                request.transport.abort()
        except ConnectionError:
            pass  # the reader went away
        return response

    def _headers(self, request: web.Request, place: Place) -> CIMultiDict[str]:
        named = {name.strip().lower() for name in request.headers.get(hdrs.CONNECTION, "").split(",")}
        # What is no UTF-8 matters in the key alone, which therefore goes in a form that no library changes.
        sent = CIMultiDict(
            (name, value.encode("utf-8", "surrogateescape").decode("utf-8", "replace"))
            for name, value in request.headers.items()
            if name.lower() not in HOP | named
        )
        key = raw_header(request, KEY_HEADER)
        if key is not None and not key.isascii():
            sent[KEY] = base64.b64encode(key).decode("ascii")
        sent[VIA], sent[TO], sent[CALLER] = self._replica_id, place.replica_id, request.remote or "unknown"
        return sent

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            # A connection each: one that was kept may be closed by the owner just when a request is put on it.
            connector = aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=_make_socket)
            self._session = aiohttp.ClientSession(
                connector=connector,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=(hdrs.USER_AGENT, hdrs.ACCEPT, hdrs.ACCEPT_ENCODING, hdrs.CONTENT_TYPE),
            )
        return self._session

    def close_streams(self) -> None:
        """Cut the exchanges that are still under way, for the end of the supervisor."""
        for task in self._open:
            task.cancel()

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()


def _make_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """One that notices when the other machine is gone, however long nobody says anything."""
    made = socket.socket(family=address[0], type=address[1], proto=address[2])
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE:
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
    return made


def _kind(error: BaseException) -> str:
    """What went wrong, without addresses."""
    known: Mapping[type[BaseException], str] = {
        aiohttp.ConnectionTimeoutError: "no connection in time",
        aiohttp.ClientConnectorError: "no connection",
        aiohttp.ServerDisconnectedError: "it hung up",
    }
    return next((text for kind, text in known.items() if isinstance(error, kind)), type(error).__name__)


def _epitaph(request: web.Request, found: Owned) -> web.StreamResponse:
    """What can be said of an Action whose replica was retired: how it was written off, and nothing of a stop."""
    resource = request.match_info.route.resource
    if request.method != hdrs.METH_GET or resource is None or resource.canonical not in RECORDS:
        raise OwnerRetired(
            f"Action {found.action_id} failed with its replica {found.replica_id}, which was retired; its outcome is"
            " uncertain, and its events, output and stop are not known",
            action_id=found.action_id,
        )
    return json_response(
        JobView(
            action_id=found.action_id,
            crew_id=found.crew_id,
            operation=found.operation,
            status=Status(found.status or Status.FAILED),
            event_count=0,
            output=NULL,
            phase=Phase.DONE,
            uncertain_outcome=found.uncertain,
            timeout_ms=found.timeout_ms,
            admitted_at=found.admitted_at,
            started_at=None,
            ended_at=found.ended_at,
            worker=None,
            stop=None,
            effects=EffectCounts(),
            reconciliation=None,
        ),
        headers={REPLICA: found.replica_id},
    )
