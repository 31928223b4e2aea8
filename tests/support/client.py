"""A small, strict, synchronous client. Each call opens its own connection, so threads can share one client."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import msgspec

from protocol import canonical

TERMINAL_EVENTS = frozenset({"completed", "failed", "cancelled"})
#: Bound of one SSE frame in the wire contract, section 16.4.
MAX_FRAME_BYTES = 1_048_576

#: Nesting that the wire's client reads (serde_json's own bound).
CLIENT_DEPTH = 127


class Answer(msgspec.Struct, frozen=True):
    """A whole response; header names in lower case, first of duplicates."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """The body as strict JSON."""
        return canonical.parse(self.body, max_depth=CLIENT_DEPTH)

    def expect(self, status: int) -> Any:
        """The body as JSON, if the status is ``status``. Raises AssertionError with the body otherwise."""
        assert self.status == status, f"status {self.status}, not {status}: {self.body[:2000]!r}"
        return self.json()


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One SSE event; the times say when its last byte was read here."""

    event: str
    sequence: int
    data: Any
    id: str | None
    received_ns: int
    received_at: float


class StreamError(AssertionError):
    """The stream breaks a rule of the wire contract, section 16.4."""


class Stream:
    """Iterates the events of a response strictly, up to the server's end of it.

    Checked: one ``event:`` and one ``data:`` line per frame, strict JSON of exactly event, sequence and data, equal
    names, sequences from ``first`` without a gap, frames within the bound, nothing after a terminal event. Comment
    lines are counted and skipped. With ``complete`` an end before a terminal event is an error too.
    """

    def __init__(
        self,
        connection: http.client.HTTPConnection,
        response: http.client.HTTPResponse,
        *,
        first: int = 0,
        complete: bool = True,
    ) -> None:
        self._connection = connection
        self._response = response
        self._complete = complete
        self.next_sequence = first
        self.comments = 0
        self.events: list[Event] = []
        self.headers = {name.lower(): value for name, value in response.getheaders()}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drop the connection."""
        self._response.close()
        self._connection.close()

    def __iter__(self) -> Iterator[Event]:
        for lines in self._frames():
            event = self._parse(lines)
            if self.events and self.events[-1].event in TERMINAL_EVENTS:
                raise StreamError(f"event after the terminal one: {event}")
            self.events.append(event)
            self.next_sequence += 1
            yield event
        if self._complete and not (self.events and self.events[-1].event in TERMINAL_EVENTS):
            raise StreamError(f"the stream ended without a terminal event, after {self.events[-1:]}")

    def next(self) -> Event:
        """Read one more event. Raises StreamError at the end of the stream."""
        for event in self:
            return event
        raise StreamError("the stream has ended")

    def until(self, name: str) -> Event:
        """Read up to and including the next event called ``name``."""
        for event in self:
            if event.event == name:
                return event
        raise StreamError(f"the stream has no {name} event; it had {[event.event for event in self.events]}")

    def rest(self) -> list[Event]:
        """Read to the end; returns every event since the beginning."""
        for _ in self:
            pass
        return self.events

    def _frames(self) -> Iterator[list[str]]:
        lines: list[str] = []
        size = 0
        while line := self._response.readline(MAX_FRAME_BYTES + 2):
            size += len(line)
            if size > MAX_FRAME_BYTES:
                raise StreamError(f"frame above {MAX_FRAME_BYTES} bytes")
            if not line.endswith(b"\n") or line.endswith(b"\r\n"):
                raise StreamError(f"line without a plain LF at its end: {line[-80:]!r}")
            text = line[:-1].decode("utf-8")
            if text.startswith(":"):
                self.comments += 1
            elif text:
                lines.append(text)
            else:
                if any(not field.startswith("retry:") for field in lines):
                    yield lines
                lines, size = [], 0
        if lines:
            raise StreamError(f"the stream ended inside a frame: {lines}")

    def _parse(self, lines: list[str]) -> Event:
        fields: dict[str, str] = {}
        for line in lines:
            name, colon, value = line.partition(":")
            if not colon or name not in {"event", "data", "id", "retry"} or name in fields:
                raise StreamError(f"unexpected line {line[:200]!r}")
            fields[name] = value.removeprefix(" ")
        if "event" not in fields or "data" not in fields:
            raise StreamError(f"frame without event or data: {lines}")
        document = canonical.parse(fields["data"].encode("utf-8"), max_depth=CLIENT_DEPTH)
        if not isinstance(document, dict) or list(document) != ["event", "sequence", "data"]:
            raise StreamError(f"data is not {{event, sequence, data}}: {fields['data'][:200]}")
        if document["event"] != fields["event"]:
            raise StreamError(f"event name {fields['event']!r} is not that of the data: {document['event']!r}")
        if type(document["sequence"]) is not int or document["sequence"] != self.next_sequence:
            raise StreamError(f"sequence {document['sequence']!r}, expected {self.next_sequence}")
        if fields.get("id", str(self.next_sequence)) != str(self.next_sequence):
            raise StreamError(f"id {fields['id']!r} is not the sequence {self.next_sequence}")
        return Event(
            **document, id=fields.get("id"), received_ns=time.monotonic_ns(), received_at=time.time()
        )


class Client:
    """The routes of the wire contract with the headers that its Rust client sends."""

    def __init__(self, host: str, port: int, *, token: str | None = None, timeout_s: float = 60.0) -> None:
        self.host = host
        self.port = port
        self.token = token
        self.timeout_s = timeout_s

    def request(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        headers: Mapping[str, str | bytes] | None = None,
    ) -> Answer:
        """Send one request and read the whole answer. ``body``: bytes as they are, anything else as JSON."""
        connection, response = self._send(method, path, body=body, headers=headers)
        with contextlib.closing(connection):
            return _whole(response)

    def _send(
        self, method: str, path: str, *, body: Any, headers: Mapping[str, str | bytes] | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        sent: dict[str, str | bytes] = {}
        if self.token is not None:
            sent["Authorization"] = b"Bearer " + self.token.encode("utf-8")
        payload = body if body is None or isinstance(body, bytes) else json.dumps(body).encode("ascii")
        if payload is not None:
            sent["Content-Type"] = "application/json"
        connection = http.client.HTTPConnection(self.host, self.port, timeout=self.timeout_s)
        try:
            connection.request(method, path, body=payload, headers={**sent, **(headers or {})})
            return connection, connection.getresponse()
        except BaseException:
            connection.close()
            raise

    def start(
        self,
        action_id: str,
        crew_id: str,
        *,
        operation: str | None = "run",
        input: Any = None,
        timeout_ms: int | None = None,
        key: str | bytes | None = None,
        path: str = "/jobs",
        headers: Mapping[str, str | bytes] | None = None,
    ) -> Answer:
        """Start (or repeat) an operation and wait for its end."""
        body = start_body(action_id, crew_id, operation=operation, input=input, timeout_ms=timeout_ms)
        return self.request("POST", path, body=body, headers={**_start_headers(action_id, key), **(headers or {})})

    def stream(
        self,
        action_id: str,
        crew_id: str,
        *,
        operation: str | None = "run",
        input: Any = None,
        timeout_ms: int | None = None,
        key: str | bytes | None = None,
        path: str = "/jobs/stream",
        complete: bool = True,
    ) -> Stream:
        """Start (or repeat) an operation and stream its events. Raises AssertionError unless the status is 200."""
        body = start_body(action_id, crew_id, operation=operation, input=input, timeout_ms=timeout_ms)
        return self._stream("POST", path, body=body, headers=_start_headers(action_id, key), complete=complete)

    def follow(
        self,
        action_id: str,
        *,
        cursor: int | None = None,
        complete: bool = True,
        headers: Mapping[str, str] | None = None,
    ) -> Stream:
        """Stream the events of a job from ``cursor``."""
        sent = {"Accept": "text/event-stream", **(headers or {})}
        path = _events_path(action_id, cursor)
        return self._stream("GET", path, body=None, headers=sent, first=cursor or 0, complete=complete)

    def _stream(
        self,
        method: str,
        path: str,
        *,
        body: Any,
        headers: Mapping[str, str | bytes],
        complete: bool,
        first: int = 0,
    ) -> Stream:
        connection, response = self._send(method, path, body=body, headers=headers)
        if response.status != 200:
            with contextlib.closing(connection):
                _whole(response).expect(200)
        return Stream(connection, response, first=first, complete=complete)

    def events(self, action_id: str, *, cursor: int | None = None) -> Answer:
        """The events of a job as one JSON slice."""
        return self.request("GET", _events_path(action_id, cursor))

    def get(self, action_id: str) -> Answer:
        """The record view of a job."""
        return self.request("GET", f"/jobs/{action_id}")

    def cancel(
        self,
        action_id: str,
        crew_id: str,
        *,
        reason: str | None = None,
        headers: Mapping[str, str | bytes] | None = None,
    ) -> Answer:
        """Cancel a job and wait for the proof that it is stopped."""
        body = {"crew_id": crew_id, "action_id": action_id} | ({} if reason is None else {"reason": reason})
        return self.request("POST", f"/jobs/{action_id}/cancel", body=body, headers=headers)

    def archive(self, action_id: str, *, confirmation: str | None = None) -> Answer:
        """Archive a job; ``confirmation`` replaces the id in the confirming header, an empty one omits it."""
        confirmed = action_id if confirmation is None else confirmation
        headers = {"X-AIP-Archive-Confirmation": confirmed} if confirmed else {}
        return self.request("DELETE", f"/jobs/{action_id}", headers=headers)

    def health(self) -> Answer:
        """The readiness document."""
        return self.request("GET", "/health")


def start_body(
    action_id: str, crew_id: str, *, operation: str | None, input: Any, timeout_ms: int | None
) -> dict[str, Any]:
    """Body of a start; fields that are None stay out, as the Rust client has it."""
    body: dict[str, Any] = {"crew_id": crew_id, "action_id": action_id}
    optional = {"operation": operation, "input": {} if input is None else input, "timeout_ms": timeout_ms}
    return body | {name: value for name, value in optional.items() if value is not None}


def _start_headers(action_id: str, key: str | bytes | None) -> dict[str, str | bytes]:
    # http.client would send text as latin-1; the Rust client sends raw UTF-8.
    raw = f"key-{action_id}".encode() if key is None else key.encode() if isinstance(key, str) else key
    headers: dict[str, str | bytes] = {"X-AIP-Action-ID": action_id}
    return headers if raw == b"" else {**headers, "Idempotency-Key": raw}


def _events_path(action_id: str, cursor: int | None) -> str:
    return f"/jobs/{action_id}/events" + ("" if cursor is None else f"?cursor={cursor}")


def _whole(response: http.client.HTTPResponse) -> Answer:
    headers: dict[str, str] = {}
    for name, value in response.getheaders():
        headers.setdefault(name.lower(), value)
    return Answer(response.status, headers, response.read())
