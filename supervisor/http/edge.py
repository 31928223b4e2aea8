"""The HTTP edge: bearer before body, bodies capped while they are read, errors as problem documents (RFC 9457)."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from aiohttp import hdrs, web
from aiohttp.http import HttpProcessingError

from protocol import canonical
from protocol.api import MAX_BODY_BYTES, Problem
from protocol.errors import (
    BodyTimedOut,
    CrewError,
    ExpectationUnknown,
    InputInvalid,
    InputTooLarge,
    MethodNotAllowed,
    ReadOnlyToken,
    RequestUnreadable,
    RouteUnknown,
    Unauthorized,
)
from supervisor.http.declare import READING_METHODS
from supervisor.http.openapi import PROBLEM_TYPE
from supervisor.log import get_log
from supervisor.tokens import bearer_matches

log = get_log(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
#: Routes that answer without a token.
OPEN_PATHS = frozenset({"/livez", "/readyz"})
FLEET_OPEN_PATHS = frozenset({"/ready"})
#: Open as well, where the dashboard is served; nothing but its files is below.
DASHBOARD_FILES = "/dashboard/"
#: A whole body must have come within this many seconds.
BODY_DEADLINE_S = 30.0
#: Details may quote what a caller sent; no more of them than this leaves again, in characters.
MAX_DETAIL = 2000


def json_response(body: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """A JSON answer of a struct, or of bytes that are JSON already."""
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return web.Response(body=data, status=status, content_type="application/json", headers=headers)


def problem(error: CrewError) -> web.Response:
    """The answer to an error of ours."""
    document = Problem(
        type=f"urn:crew-supervisor:error:{error.code}",
        title=error.title,
        status=error.status,
        detail=_printable(error.detail)[:MAX_DETAIL],
        code=error.code,
        action_id=None if error.action_id is None else _printable(error.action_id),
        retryable=error.retryable,
    )
    headers = {}
    if isinstance(error, Unauthorized):
        headers[hdrs.WWW_AUTHENTICATE] = "Bearer"
    if error.retry_after_s is not None:
        headers[hdrs.RETRY_AFTER] = str(error.retry_after_s)
    return web.Response(
        body=msgspec.json.encode(document), status=error.status, content_type=PROBLEM_TYPE, headers=headers
    )


def _printable(text: str) -> str:
    """Text that came as bytes of no UTF-8 holds lone surrogates, which no JSON document can carry."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def raw_header(request: web.BaseRequest, name: str) -> bytes | None:
    """The first header of that name as it came, outer whitespace stripped."""
    wanted = name.lower().encode("ascii")
    for key, value in request.raw_headers:
        if key.lower() == wanted:
            return value.strip(b" \t")
    return None


#: Set on a request for what a stranger may read too: whether its sender may read more.
MAY_READ = "may_read"
#: Set on a request that repeats a start exactly.
REPLAYED = "replayed"
REPLAYED_HEADER = "Idempotency-Replayed"


async def finish_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Say nothing of the software in use, and mark the answer to an exact repeat."""
    response.headers.pop(hdrs.SERVER, None)
    if request.get(REPLAYED):
        response.headers[REPLAYED_HEADER] = "true"


def keep_garbage_quiet(record: logging.LogRecord) -> bool:
    """A filter of aiohttp's log: bytes that are no HTTP request are the sender's error and none of ours."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError | web.RequestPayloadError):
        record.levelno, record.levelname = logging.INFO, "INFO"
        record.msg, record.args, record.exc_info = "request_garbled", (), None
        record.fields = {"error_type": type(error).__name__}
    return True


class Edge:
    """Middleware and expect handler around the routes."""

    def __init__(
        self,
        tokens: Sequence[str],
        read_tokens: Sequence[str] = (),
        *,
        dashboard: bool = False,
        fleet: bool = False,
    ) -> None:
        """``dashboard``, ``fleet``: what is open there is open, the rest of it is not there."""
        self._dashboard = dashboard
        self._heard: weakref.WeakSet[asyncio.BaseTransport] = weakref.WeakSet()
        self._open_paths = OPEN_PATHS | FLEET_OPEN_PATHS if fleet else OPEN_PATHS
        self.set_tokens(tokens, read_tokens)

    def set_tokens(self, tokens: Sequence[str], read_tokens: Sequence[str]) -> None:
        """Replace the tokens in force; requests that were let in go on."""
        self._tokens = tuple(tokens)
        self._read_tokens = tuple(read_tokens)

    def is_silent(self, connection: asyncio.BaseTransport | None) -> bool:
        """Whether an open connection has not brought a request yet."""
        return connection is not None and not connection.is_closing() and connection not in self._heard

    def _authorize(self, request: web.BaseRequest) -> None:
        if not self._tokens or self._is_open(request.path):
            return
        presented = raw_header(request, "Authorization")
        if bearer_matches(presented, self._tokens):
            return
        if not bearer_matches(presented, self._read_tokens):
            raise Unauthorized("the bearer token is missing or wrong")
        if request.method not in READING_METHODS:
            raise ReadOnlyToken(f"this token may not {request.method}; use one that may change things")

    def _is_open(self, path: str) -> bool:
        return path in self._open_paths or (self._dashboard and (path == "/" or path.startswith(DASHBOARD_FILES)))

    def _knows(self, request: web.BaseRequest) -> bool:
        """Whether the request has a token, where one is needed at all."""
        presented = raw_header(request, "Authorization")
        return not self._tokens or bearer_matches(presented, (*self._tokens, *self._read_tokens))

    async def expect(self, request: web.Request) -> web.StreamResponse | None:
        """Answer ``Expect: 100-continue`` after the credentials: without them no body is asked for."""
        try:
            self._authorize(request)
            if request.headers.get(hdrs.EXPECT, "").lower() != "100-continue":
                raise ExpectationUnknown("Expect may ask for 100-continue only")
        except CrewError as error:
            answer = problem(error)
            # The body may never come: what follows on this connection could be either (RFC 9110, 10.1.1).
            answer.force_close()
            return answer
        assert request.transport is not None
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return None

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the token before anything else, and make a document of every error."""
        if request.transport is not None:
            self._heard.add(request.transport)
        try:
            self._authorize(request)
            if request.path in self._open_paths:
                request[MAY_READ] = self._knows(request)
            return await handler(request)
        except CrewError as error:
            if error.status >= 500 and error.code == CrewError.code:
                log.failure("request_broke", error, path=request.path)
            return problem(error)
        except web.HTTPException as error:
            return _router_refusal(request, error)
        except ConnectionError:
            raise
        except Exception as error:  # noqa: BLE001 - the edge: whatever broke, the caller gets a document and the log a line
            log.failure("request_broke", error, path=request.path)
            return problem(CrewError("the supervisor met a fault of its own; its log names the place"))


def _router_refusal(request: web.Request, error: web.HTTPException) -> web.StreamResponse:
    """A target without a path (``CONNECT host:port``, ``OPTIONS *``) meets no resource, the last one neither."""
    if error.status == 404:
        return problem(RouteUnknown(f"no route {request.path[:200]}; see /openapi.json"))
    return problem(CrewError(f"the server answered {error.status}"))


async def unrouted(rows: Sequence[web.AbstractResource], request: web.Request) -> web.StreamResponse:
    """Answer a request that meets no row: 405 with the path's methods, 307 to the path without its last slash, 404."""
    methods = await _methods(rows, request)
    if methods:
        answer = problem(MethodNotAllowed(f"{request.method} is not among the methods of {request.path[:200]}"))
        answer.headers[hdrs.ALLOW] = ",".join(sorted(methods))
        return answer
    path = request.rel_url.raw_path
    if path.endswith("/"):
        there = request.rel_url.with_path(path.rstrip("/") or "/", encoded=True)
        # Only to a path of ours: "//host/" would otherwise lead to another server.
        if await _methods(rows, request.clone(rel_url=there)):
            location = str(there.with_query(request.rel_url.query))
            return web.Response(status=307, headers={hdrs.LOCATION: location})
    return problem(RouteUnknown(f"no route {request.path[:200]}; see /openapi.json"))


async def _methods(rows: Sequence[web.AbstractResource], request: web.Request) -> set[str]:
    """The methods of the request's path."""
    found: set[str] = set()
    for row in rows:
        found |= (await row.resolve(request))[1]
    return found


#: Set on a request whose body somebody else may still want as it came: the bytes, once they are read.
KEPT_BODY = "kept_body"


async def read_json(request: web.Request) -> Any:
    """Read a strict JSON body of at most MAX_BODY_BYTES.

    Raises InputInvalid, InputTooLarge, BodyTimedOut, RequestUnreadable, BadJson.
    """
    content_type = request.content_type
    if content_type != "application/json" and not (
        content_type.startswith("application/") and content_type.endswith("+json")
    ):
        raise InputInvalid(f"content type {content_type} is not JSON; send application/json")
    body = await read_body(request)
    if KEPT_BODY in request:
        request[KEPT_BODY] = body
    return canonical.parse(body)


async def read_body(request: web.Request) -> bytes:
    """Read a body of at most MAX_BODY_BYTES. Raises InputTooLarge, BodyTimedOut, RequestUnreadable."""
    if request.content_length is not None and request.content_length > MAX_BODY_BYTES:
        raise _too_large()
    try:
        async with asyncio.timeout(BODY_DEADLINE_S):
            return await _read_capped(request)
    except TimeoutError:
        raise BodyTimedOut(f"the body did not arrive within {BODY_DEADLINE_S:g} s") from None
    except (web.RequestPayloadError, OSError):
        # Bad framing or encoding, or the caller is gone in the middle of it.
        raise RequestUnreadable("the body breaks its own framing or encoding") from None


async def _read_capped(request: web.Request) -> bytes:
    parts = bytearray()
    async for block in request.content.iter_any():
        parts += block
        if len(parts) > MAX_BODY_BYTES:
            raise _too_large()
    return bytes(parts)


def _too_large() -> InputTooLarge:
    return InputTooLarge(f"the body is above {MAX_BODY_BYTES} bytes")
