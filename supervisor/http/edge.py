"""The HTTP edge: bearer before body, bodies capped while they are read, errors as problem documents (RFC 9457)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from aiohttp import hdrs, web

from protocol import canonical
from protocol.api import MAX_BODY_BYTES, Problem
from protocol.errors import (
    CrewError,
    InputInvalid,
    InputTooLarge,
    MethodNotAllowed,
    ReadOnlyToken,
    RouteUnknown,
    Unauthorized,
)
from supervisor.log import get_log
from supervisor.tokens import bearer_matches

log = get_log(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
PROBLEM_TYPE = "application/problem+json"
#: Routes that answer without a token.
READING_METHODS = frozenset({"GET", "HEAD"})
OPEN_PATHS = frozenset({"/livez", "/readyz"})


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
        detail=error.detail,
        code=error.code,
        action_id=error.action_id,
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


def raw_header(request: web.BaseRequest, name: str) -> bytes | None:
    """The first header of that name as it came, outer whitespace stripped."""
    wanted = name.lower().encode("ascii")
    for key, value in request.raw_headers:
        if key.lower() == wanted:
            return value.strip(b" \t")
    return None


#: Set on a request that repeats a start exactly.
REPLAYED = "replayed"
REPLAYED_HEADER = "Idempotency-Replayed"


async def finish_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Say nothing of the software in use, and mark the answer to an exact repeat."""
    response.headers.pop(hdrs.SERVER, None)
    if request.get(REPLAYED):
        response.headers[REPLAYED_HEADER] = "true"


class Edge:
    """Middleware and expect handler around the routes."""

    def __init__(self, tokens: Sequence[str], read_tokens: Sequence[str] = ()) -> None:
        self.set_tokens(tokens, read_tokens)

    def set_tokens(self, tokens: Sequence[str], read_tokens: Sequence[str]) -> None:
        """Replace the tokens in force; requests that were let in go on."""
        self._tokens = tuple(tokens)
        self._read_tokens = tuple(read_tokens)

    def _authorize(self, request: web.BaseRequest) -> None:
        if not self._tokens or request.path in OPEN_PATHS:
            return
        presented = raw_header(request, "Authorization")
        if bearer_matches(presented, self._tokens):
            return
        if not bearer_matches(presented, self._read_tokens):
            raise Unauthorized("the bearer token is missing or wrong")
        if request.method not in READING_METHODS:
            raise ReadOnlyToken(f"this token may not {request.method}; use one that may change things")

    async def expect(self, request: web.Request) -> web.StreamResponse | None:
        """Answer ``Expect: 100-continue`` after the credentials: without them no body is asked for."""
        try:
            self._authorize(request)
        except CrewError as error:
            return problem(error)
        if request.headers.get(hdrs.EXPECT, "").lower() != "100-continue":
            return web.Response(status=417)
        assert request.transport is not None
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return None

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the token before anything else, and make a document of every error."""
        try:
            self._authorize(request)
            return await handler(request)
        except CrewError as error:
            if error.status >= 500 and error.code == CrewError.code:
                log.failure("request_broke", error, path=request.path)
            return problem(error)
        except web.HTTPException as error:
            return self._http_error(request, error)
        except (ConnectionError, TimeoutError):
            raise
        except Exception as error:  # noqa: BLE001 - the edge: whatever broke, the caller gets a document and the log a line
            log.failure("request_broke", error, path=request.path)
            return problem(CrewError("the supervisor met a fault of its own; its log names the place"))

    def _http_error(self, request: web.Request, error: web.HTTPException) -> web.StreamResponse:
        """aiohttp's own refusals: unknown path, wrong method."""
        raw_path = request.rel_url.raw_path
        if error.status == 404 and len(raw_path) > 1 and raw_path.endswith("/"):
            there = request.rel_url.with_path(raw_path.rstrip("/"), encoded=True)
            return web.Response(status=307, headers={hdrs.LOCATION: str(there.with_query(request.rel_url.query))})
        if error.status == 404:
            return problem(RouteUnknown(f"no route {request.path[:200]}; see /openapi.json"))
        if error.status == 405:
            answer = problem(MethodNotAllowed(f"{request.method} is not among the methods of {request.path[:200]}"))
            answer.headers[hdrs.ALLOW] = error.headers[hdrs.ALLOW]
            return answer
        return problem(CrewError(f"the server answered {error.status}"))


async def read_json(request: web.Request) -> Any:
    """Read a strict JSON body of at most MAX_BODY_BYTES. Raises InputTooLarge, InputInvalid, BadJson."""
    content_type = request.content_type
    if content_type != "application/json" and not (
        content_type.startswith("application/") and content_type.endswith("+json")
    ):
        raise InputInvalid(f"content type {content_type} is not JSON; send application/json")
    if request.content_length is not None and request.content_length > MAX_BODY_BYTES:
        raise _too_large()
    parts = bytearray()
    async for block in request.content.iter_any():
        parts += block
        if len(parts) > MAX_BODY_BYTES:
            raise _too_large()
    return canonical.parse(bytes(parts))


def _too_large() -> InputTooLarge:
    return InputTooLarge(f"the body is above {MAX_BODY_BYTES} bytes")
