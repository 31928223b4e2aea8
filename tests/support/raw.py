"""Requests as bytes: for what no HTTP library would send."""

from __future__ import annotations

import contextlib
import http.client
import io
import socket
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from tests.support.client import Answer


class _Reader(io.BufferedReader):
    """What HTTPResponse takes for a socket: one buffer for all answers, which no end of an answer closes."""

    def __init__(self, connected: socket.socket) -> None:
        super().__init__(socket.SocketIO(connected, "r"))

    def makefile(self, mode: str) -> _Reader:
        return self

    def close(self) -> None:
        """The connection closes it."""


class RawConnection:
    """One TCP connection. A server that closes it is an answer too: None."""

    def __init__(self, host: str, port: int, *, timeout_s: float = 30.0) -> None:
        self.socket = socket.create_connection((host, port), timeout_s)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = _Reader(self.socket)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()

    def send(self, *pieces: bytes) -> Self:
        """Send every piece in a segment of its own, as far as the server takes them."""
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                self.socket.sendall(piece)
        return self

    def finish(self) -> Self:
        """Say that no more bytes will come."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
        return self

    def answer(self, method: str = "GET") -> Answer | None:
        """The next answer, None when the server closes instead. Raises TimeoutError when it does neither."""
        response = http.client.HTTPResponse(self._reader, method=method)  # type: ignore[arg-type]
        try:
            response.begin()
            body = response.read()
        except (http.client.HTTPException, ConnectionError):
            return None
        headers: dict[str, str] = {}
        for name, value in response.getheaders():
            headers.setdefault(name.lower(), value)
        return Answer(response.status, headers, body)

    def rest(self) -> bytes:
        """Every byte up to the server's end of the connection. Raises TimeoutError when it does not end it."""
        received = b""
        with contextlib.suppress(ConnectionError):
            while data := self._reader.read1():
                received += data
        return received


def head(
    method: str = "GET",
    target: bytes = b"/health",
    *,
    token: str | None = None,
    headers: Mapping[str, bytes | str] | None = None,
) -> bytes:
    """A request up to its body: the line, Host, the credentials and ``headers``."""
    lines = [method.encode("ascii") + b" " + target + b" HTTP/1.1", b"Host: localhost"]
    if token is not None:
        lines.append(b"Authorization: Bearer " + token.encode("utf-8"))
    for name, value in (headers or {}).items():
        lines.append(name.encode("ascii") + b": " + (value if isinstance(value, bytes) else value.encode("utf-8")))
    return b"\r\n".join(lines) + b"\r\n\r\n"
