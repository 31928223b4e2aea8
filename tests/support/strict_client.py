"""The demands of the host's connector (wire contract, section 16) as a client of ours: what it sends, refuses and makes
of an answer. Nothing of the project is imported here, so that no mistake of the server's is shared.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from tests.support.strict_stream import InvalidStream, StreamEvent, StreamReader, TooLarge, parse_json

STREAMED = frozenset({"run", "batch_run", "replay", "train", "test"})
READS = frozenset({"status", "events", "knowledge_query"})
#: A running one of these may be cancelled by the host itself.
CANCELLABLE = frozenset({"run", "batch_run"})
RUNTIME_REASON = "cancelled by AIP runtime"
MAX_RESPONSE_BYTES = 64 << 20
MAX_INPUT_BYTES = 1 << 20
MAX_REQUEST_BYTES = MAX_INPUT_BYTES + 65_536
MAX_KEY_BYTES = 512
MAX_REASON_BYTES = 2048
#: Bytes asked of the connection at once: more than a frame may have.
READ_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class Result:
    """What becomes of an Action: ``kind`` completed, cancelled or failed; the other fields as section 16.5 and 16.7."""

    kind: str
    output: Any = None
    code: str | None = None
    category: str | None = None
    retryable: bool = False
    uncertain: bool = False
    details: Any = None
    events: list[StreamEvent] = field(default_factory=list)


class Refused(Exception):
    """The client itself does not send such a request."""


#: (code, category) by cause, section 16.7.
FAILURES = {
    "authentication": "auth",
    "remote_temporary": "temporary",
    "remote_rejected": "permanent",
    "transport": "transport",
    "invalid_stream": "connector",
    "response_too_large": "connector",
    "cancelled_unconfirmed": "temporary",
}
RETRYABLE_READS = frozenset({"remote_temporary", "transport", "invalid_stream"})
UNCERTAIN_MUTATIONS = frozenset(
    {"remote_temporary", "transport", "invalid_stream", "response_too_large", "cancelled_unconfirmed"}
)


def failure(cause: str, *, operation: str, connected: bool = True, details: Any = None) -> Result:
    """The failure of an Action by its cause; ``connected`` is false when nothing was sent."""
    read = operation in READS
    return Result(
        kind="failed",
        code=f"connector.crewai.{cause}",
        category=FAILURES[cause],
        retryable=read and cause in RETRYABLE_READS,
        uncertain=not read and cause in UNCERTAIN_MUTATIONS and connected,
        details=details,
    )


def cause_of_status(status: int) -> str | None:
    """The cause that a status stands for, None for a success."""
    if 200 <= status <= 299:
        return None
    if status in {401, 403}:
        return "authentication"
    return "remote_temporary" if status == 429 or status >= 500 else "remote_rejected"


def result_of(last: StreamEvent) -> Result:
    """The result that a terminal event stands for, section 16.5."""
    if last.event == "failed":
        return Result(
            kind="failed", code="connector.crewai.execution_failed", category="connector", details=last.data
        )
    return Result(kind=last.event, output=last.data)


def rust_json(value: Any) -> bytes:
    """As serde_json writes it: insertion order, no spaces, UTF-8."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode("utf-8")


class StrictClient:
    """One connector. Every request has exactly the headers of section 16.2, besides those of HTTP itself."""

    def __init__(
        self, host: str, port: int, token: str, *, timeout_s: float = 60.0, max_response_bytes: int = MAX_RESPONSE_BYTES
    ) -> None:
        self._host, self._port, self._token = host, port, token
        self._timeout_s = timeout_s
        self._max_response_bytes = max_response_bytes

    # --- operations ----------------------------------------------------------------------------------------------

    def invoke(
        self,
        operation: str,
        crew_id: str,
        action_id: str,
        given: Mapping[str, Any] | None = None,
        *,
        legacy: bool = False,
        **options: Any,
    ) -> Result:
        """Do one Action to its end. ``legacy``: POST /jobs for all of them. ``options``: ``key``, ``timeout_ms``."""
        try:
            if operation in STREAMED and not legacy:
                with self.open(operation, crew_id, action_id, given, **options) as stream:
                    return stream.result()
            return self._plain(operation, *self._start(operation, crew_id, action_id, given, **options))
        except StatusRefused as refused:
            return failure(refused.cause, operation=operation)
        except InvalidStream:
            return failure("invalid_stream", operation=operation)
        except TooLarge:
            return failure("response_too_large", operation=operation)
        except ConnectionRefusedError:
            return failure("transport", operation=operation, connected=False)
        except (OSError, http.client.HTTPException):
            return failure("transport", operation=operation)

    def open(
        self, operation: str, crew_id: str, action_id: str, given: Mapping[str, Any] | None = None, **options: Any
    ) -> OpenStream:
        """Start an operation and hold its stream. Raises StatusRefused."""
        _, body, headers = self._start(operation, crew_id, action_id, given, **options)
        return self._stream("POST", "/jobs/stream", body, headers, 0)

    def follow(self, target: str, cursor: int | None = None) -> OpenStream:
        """The events capability. Raises StatusRefused."""
        query = "" if cursor is None else f"?cursor={cursor}"
        return self._stream("GET", f"/jobs/{target}/events{query}", None, {"Accept": "text/event-stream"}, cursor or 0)

    def status(self, target: str) -> Result:
        """The status capability."""
        return self._plain("status", f"/jobs/{target}", None, {}, method="GET")

    def cancel(self, crew_id: str, target: str, *, action_id: str, key: str, reason: str | None = None) -> Result:
        """The explicit cancel capability, an Action of its own."""
        if reason is not None and (len(reason.encode()) > MAX_REASON_BYTES or _has_control(reason)):
            raise Refused("reason")
        body = {"crew_id": crew_id, "action_id": target} | ({} if reason is None else {"reason": reason})
        headers = self._keyed(action_id, key)
        return self._plain("cancel", f"/jobs/{target}/cancel", rust_json(body), headers)

    def runtime_cancel(self, operation: str, crew_id: str, target: str) -> Result:
        """What the host does with a cancelled Action whose stream is open, section 16.6; Authorization only."""
        if operation not in CANCELLABLE:
            return failure("cancelled_unconfirmed", operation=operation)
        body = rust_json({"crew_id": crew_id, "action_id": target, "reason": RUNTIME_REASON})
        status, _ = self._exchange("POST", f"/jobs/{target}/cancel", body, {})
        if cause_of_status(status) is None:
            return Result(kind="cancelled", output={"remote_stop_confirmed": True})
        return failure("cancelled_unconfirmed", operation=operation)

    def ready(self, crews: set[str], operations: set[str]) -> bool:
        """The probe of section 16.9."""
        status, body = self._exchange("GET", "/health", None, {})
        if cause_of_status(status) is not None:
            return False
        health = parse_json(body)
        return (
            health["status"] == "ready"
            and health["durable_journal"] is True
            and crews <= set(health["crews"])
            and operations <= set(health["operations"])
        )

    # --- requests ------------------------------------------------------------------------------------------------

    def _start(
        self,
        operation: str,
        crew_id: str,
        action_id: str,
        given: Mapping[str, Any] | None,
        *,
        key: str | None = None,
        timeout_ms: int | None = None,
    ) -> tuple[str, bytes, dict[str, str | bytes]]:
        body: dict[str, Any] = {"crew_id": crew_id, "action_id": action_id, "operation": operation}
        body["input"] = dict(given or {})
        if timeout_ms is not None:
            body["timeout_ms"] = timeout_ms
        encoded = rust_json(body)
        if len(rust_json(body["input"])) > MAX_INPUT_BYTES or len(encoded) > MAX_REQUEST_BYTES:
            raise Refused("input")
        return "/jobs", encoded, self._keyed(action_id, f"key-{action_id}" if key is None else key)

    def _keyed(self, action_id: str, key: str) -> dict[str, str | bytes]:
        raw = key.encode("utf-8")
        if not key.strip() or len(raw) > MAX_KEY_BYTES or _has_control(key):
            raise Refused("key")
        return {"Idempotency-Key": raw, "X-AIP-Action-ID": action_id}

    def _plain(
        self, operation: str, path: str, body: bytes | None, headers: Mapping[str, str | bytes], method: str = "POST"
    ) -> Result:
        status, answer = self._exchange(method, path, body, headers)
        cause = cause_of_status(status)
        if cause is not None:
            return failure(cause, operation=operation)
        return Result(kind="completed", output=parse_json(answer) if answer else None)

    def _exchange(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str | bytes]
    ) -> tuple[int, bytes]:
        connection, response = self._send(method, path, body, headers)
        try:
            answer = response.read(self._max_response_bytes + 1)
            if len(answer) > self._max_response_bytes:
                raise TooLarge("response")
            return response.status, answer
        finally:
            connection.close()

    def _stream(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str | bytes], first: int
    ) -> OpenStream:
        connection, response = self._send(method, path, body, headers)
        cause = cause_of_status(response.status)
        if cause is not None:
            connection.close()
            raise StatusRefused(response.status, cause)
        return OpenStream(connection, response, first, self._max_response_bytes)

    def _send(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str | bytes]
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        connection.putrequest(method, path, skip_accept_encoding=True)
        connection.putheader("Authorization", f"Bearer {self._token}")
        for name, value in headers.items():
            connection.putheader(name, value)
        if body is not None:
            connection.putheader("Content-Type", "application/json")
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        return connection, connection.getresponse()


class StatusRefused(Exception):
    """A stream was answered with a status that is no success; nothing but the status counts."""

    def __init__(self, status: int, cause: str) -> None:
        super().__init__(f"status {status}")
        self.status = status
        self.cause = cause


class OpenStream:
    """A stream being read. Iterating stops at the terminal event; an end before it raises InvalidStream."""

    def __init__(
        self,
        connection: http.client.HTTPConnection,
        response: http.client.HTTPResponse,
        first: int,
        max_response_bytes: int,
    ) -> None:
        self._connection, self._response = connection, response
        self.reader = StreamReader(first=first, max_bytes=max_response_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._response.close()
        self._connection.close()

    def __iter__(self) -> Iterator[StreamEvent]:
        while not self.reader.ended:
            data = self._response.read1(READ_BYTES)
            yield from self.reader.feed(data) if data else self.reader.close()

    def until(self, name: str) -> StreamEvent:
        """Read up to the next event of that name. Raises InvalidStream if the stream ends first."""
        for event in self:
            if event.event == name:
                return event
        raise InvalidStream(f"no event {name}")

    def result(self) -> Result:
        """Read to the terminal event; the result it stands for, with every event read."""
        for _ in self:
            pass
        last = self.reader.events[-1]
        made = result_of(last)
        made.events.extend(self.reader.events)
        return made


def _has_control(text: str) -> bool:
    return any(char < " " or "\x7f" <= char <= "\x9f" for char in text)
