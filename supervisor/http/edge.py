"""The HTTP edge: bearer before body, bodies capped while they are read, errors as problem documents (RFC 9457)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from aiohttp import hdrs, web

from protocol import canonical
from protocol.api import MAX_BODY_BYTES, Problem
from protocol.errors import CrewError, InputInvalid, InputTooLarge, Unauthorized
from supervisor.log import get_log
from supervisor.tokens import bearer_matches

log = get_log(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
PROBLEM_TYPE = "application/problem+json"
#: Routes that answer without a token.
OPEN_PATHS = frozenset({"/livez", "/readyz"})
HTTP_CODES = {404: "not_found", 405: "method_not_allowed"}


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


def _http_problem(error: web.HTTPException) -> web.Response:
    document = Problem(
        type="about:blank",
        title=error.reason,
        status=error.status,
        detail=error.reason,
        code=HTTP_CODES.get(error.status, "http_error"),
    )
    headers = {name: error.headers[name] for name in (hdrs.ALLOW, hdrs.LOCATION) if name in error.headers}
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


async def without_server_header(request: web.Request, response: web.StreamResponse) -> None:
    """Say nothing of the software in use."""
    response.headers.pop(hdrs.SERVER, None)


class Edge:
    """Middleware and expect handler around the routes."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self.tokens = tuple(tokens)

    def _authorized(self, request: web.BaseRequest) -> bool:
        if not self.tokens or request.path in OPEN_PATHS:
            return True
        return bearer_matches(raw_header(request, "Authorization"), self.tokens)

    async def expect(self, request: web.Request) -> web.StreamResponse | None:
        """Answer ``Expect: 100-continue`` after the credentials: without them no body is asked for."""
        if not self._authorized(request):
            return problem(Unauthorized("the bearer token is missing or wrong"))
        if request.headers.get(hdrs.EXPECT, "").lower() != "100-continue":
            return web.Response(status=417)
        assert request.transport is not None
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return None

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the token before anything else, and make a document of every error."""
        try:
            if not self._authorized(request):
                raise Unauthorized("the bearer token is missing or wrong")
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
        if error.status == 404 and request.path != "/" and request.path.endswith("/"):
            return _http_problem(web.HTTPTemporaryRedirect(request.rel_url.with_path(request.path.rstrip("/"))))
        return _http_problem(error)


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
