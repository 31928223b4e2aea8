"""One origin over HTTP/1.1: requests out, answers within bounds in, everything that goes wrong as a ClientFailure."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from protocol import canonical
from protocol.errors import BadJson
from supervisor.client import sse
from supervisor.client.answers import Job
from supervisor.client.failures import (
    InvalidCredential,
    InvalidRequest,
    InvalidStream,
    Refusal,
    ResponseTooLarge,
    TransportFailed,
    of_refusal,
)
from supervisor.client.requests import Call

CONNECT_TIMEOUT_S = 10.0
#: How long an idle connection is kept, seconds: less than servers do, so that no start meets one that is being closed.
IDLE_S = 4.0
#: Longer than any Action may take, so that a waiting caller is not cut before its answer.
TIMEOUT_S = 3660.0
MAX_RESPONSE_BYTES = 64 << 20
#: What is read of an answer that is no success, and shown of its text.
REFUSAL_BYTES = 65_536
REFUSAL_TIMEOUT_S = 5.0
DETAIL_CHARACTERS = 500
MAX_TOKEN_BYTES = 16_384
MAX_RETRY_AFTER_S = 3600

T = TypeVar("T")


class Reply(msgspec.Struct, frozen=True):
    """A whole answer that is a success; ``document`` is None for an empty body."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    document: Any


def check_origin(base_url: str) -> str:
    """The origin, without a slash at its end. Raises InvalidRequest unless it is https, or http to this machine.

    Accepted as this machine: ``localhost`` and loopback addresses, IPv6 in brackets.
    """
    try:
        parts = urlsplit(base_url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise InvalidRequest(f"base URL {base_url!r} cannot be read") from None
    extra = parts.username or parts.password or parts.query or parts.fragment or parts.path not in ("", "/")
    if parts.scheme not in ("http", "https") or not host or extra or base_url.endswith(("?", "#")):
        raise InvalidRequest("the base URL must be an origin: http(s)://host[:port] and nothing more")
    if parts.scheme == "http" and not _is_loopback(host):
        raise InvalidRequest(f"http is for this machine only; use https for {host}")
    shown = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown}" + ("" if port is None else f":{port}")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_token(token: str) -> str:
    """Raises InvalidCredential unless the token is 1..16384 bytes without white space and control characters."""
    if not token or len(token.encode("utf-8", "replace")) > MAX_TOKEN_BYTES:
        raise InvalidCredential(f"a token has 1..{MAX_TOKEN_BYTES} bytes")
    if any(char.isspace() or not char.isprintable() for char in token):
        raise InvalidCredential("a token has no white space and no control characters")
    return token


class Connection:
    """The HTTP session. Answers are read up to ``max_response_bytes``; redirects are not followed."""

    def __init__(
        self,
        base_url: str,
        *,
        token: str | None,
        tls: ssl.SSLContext | None,
        timeout_s: float,
        max_response_bytes: int,
    ) -> None:
        self.max_response_bytes = max_response_bytes
        self._origin = check_origin(base_url)
        self._headers = {"Accept-Encoding": "identity"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {check_token(token)}"
        self._tls = tls
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def connect(self) -> None:
        """Make the session; connections are made when they are needed."""
        # No bound on connections: open streams must never keep a cancel waiting.
        connector = aiohttp.TCPConnector(
            limit=0, keepalive_timeout=IDLE_S, ssl=self._tls if self._tls is not None else True
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers=self._headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )
        # aiohttp repeats GET and DELETE by itself once; an archive that came through would then seem refused. It has no
        # public switch for that; a test watches this one.
        self._session._retry_connection = False

    async def close(self) -> None:
        """Drop every connection."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def request(self, call: Call) -> aiohttp.ClientResponse:
        """Send ``call`` and return its answer with the body unread; the caller closes it.

        An ``endless`` call is not cut after the time of a request. Raises ClientFailure if there is no answer, or one
        that is no success.
        """
        if self._session is None:
            raise RuntimeError("the client is not open; use it in `async with`")
        headers = dict(call.headers)
        if call.body is not None:
            headers["Content-Type"] = "application/json"
        try:
            response = await self._session.request(
                call.method,
                self._origin + call.path,
                data=call.body,
                headers=headers,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(
                    total=None if call.endless else self._timeout_s, sock_connect=CONNECT_TIMEOUT_S
                ),
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            # Also a handshake that failed: nothing of the request was sent.
            failure = call.failed(TransportFailed, f"no connection: {_named(error)}", doubt=False)
            failure.sent = False
            raise failure from error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise call.failed(TransportFailed, f"the connection broke: {_named(error)}") from error
        if 200 <= response.status < 300:
            return response
        async with response:
            raise of_refusal(await _refusal(response), **call.about)

    @asynccontextmanager
    async def open(self, call: Call) -> AsyncIterator[aiohttp.ClientResponse]:
        """The same, closed at the end."""
        async with await self.request(call) as response:
            yield response

    async def exchange(self, call: Call) -> Reply:
        """Send ``call`` and read the whole answer. Raises ClientFailure."""
        async with self.open(call) as response:
            body = await self._read(call, response)
            return Reply(response.status, response.headers, body, _document(call, body))

    async def pieces(self, call: Call) -> AsyncIterator[bytes]:
        """Send ``call`` and yield its answer as it comes, however long it is. Raises ClientFailure."""
        async with self.open(call) as response:
            try:
                async for block in response.content.iter_any():
                    yield block
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                raise call.failed(TransportFailed, f"the answer broke off: {_named(error)}") from error

    async def _read(self, call: Call, response: aiohttp.ClientResponse) -> bytes:
        parts = bytearray()
        try:
            async for block in response.content.iter_any():
                parts += block
                if len(parts) > self.max_response_bytes:
                    raise call.failed(ResponseTooLarge, f"the answer is above {self.max_response_bytes} bytes")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise call.failed(TransportFailed, f"the answer broke off: {_named(error)}") from error
        return bytes(parts)


def _document(call: Call, body: bytes) -> Any:
    try:
        return sse.parse(body) if body else None
    except sse.Malformed as error:
        raise call.failed(InvalidStream, f"the answer is not strict JSON: {error}") from None


def decode(call: Call, document: Any, kind: type[T]) -> T:
    """A struct of an answer. Raises InvalidStream."""
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        raise call.failed(InvalidStream, f"the answer is no {kind.__name__}: {error}") from None


def decode_job(call: Call, document: Any, action_id: str) -> Job:
    """The record of that job and of no other. Raises InvalidStream."""
    job = decode(call, document, Job)
    if job.action_id != action_id:
        raise call.failed(InvalidStream, f"the answer is about {job.action_id[:256]!r}, not {action_id!r}")
    return job


async def _refusal(response: aiohttp.ClientResponse) -> Refusal:
    """What can be read of an answer that is no success; the status is enough."""
    after = response.headers.get("Retry-After", "")
    retry_after_s = min(int(after), MAX_RETRY_AFTER_S) if after.isascii() and after.isdigit() else None
    code, detail = None, None
    with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError, BadJson):
        body = b""
        async with asyncio.timeout(REFUSAL_TIMEOUT_S):
            while len(body) < REFUSAL_BYTES and (block := await response.content.read(REFUSAL_BYTES)):
                body += block
        document = canonical.parse(body)
        if isinstance(document, dict):
            code, detail = _text(document.get("code")), _text(document.get("detail"))
    return Refusal(status=response.status, code=code, detail=detail, retry_after_s=retry_after_s)


def _text(value: Any) -> str | None:
    return value[:DETAIL_CHARACTERS] if isinstance(value, str) else None


def _named(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
