"""Server-sent events and JSON as the host's connector reads them (wire contract, sections 16.3 and 16.4). Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

MAX_FRAME_BYTES = 1 << 20
MAX_EVENTS = 100_000
MAX_DEPTH = 127
TERMINAL = frozenset({"completed", "cancelled", "failed"})
_BREAK = re.compile(rb"\n\n|\r\n\r\n")


class InvalidStream(Exception):
    """The stream or document breaks a rule."""


class TooLarge(Exception):
    """A bound on bytes is exceeded."""


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One event as the host hands it on."""

    event: str
    sequence: int
    data: Any

    @property
    def kind(self) -> str:
        """tool, data, progress, done or error."""
        if self.event == "chunk":
            channel = self.data.get("channel") if isinstance(self.data, dict) else None
            return {"tools": "tool", "llm": "data", "messages": "data"}.get(str(channel), "progress")
        return {"completed": "done", "cancelled": "done", "failed": "error"}.get(self.event, "progress")

    @property
    def text(self) -> str | None:
        """The text part that the host makes of it."""
        data = self.data if isinstance(self.data, dict) else {}
        inner = data.get("data")
        for found in (data.get("content"), inner.get("chunk") if isinstance(inner, dict) else None):
            if isinstance(found, str) and found:
                return found
        return None


def parse_json(data: bytes) -> Any:
    """Strict JSON: UTF-8, finite numbers, whole surrogate pairs, bounded depth. Raises InvalidStream."""
    try:
        value = json.loads(data.decode("utf-8"), parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise InvalidStream(f"not JSON: {error}") from None
    if rb"\u" in data or rb"\U" in data:
        _check_text(value)
    if data.count(b"{") + data.count(b"[") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        raise InvalidStream("nested too deep")
    return value


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{text} is out of range")
    return value


def _check_text(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidStream("lone surrogate") from None


def _depth(value: Any) -> int:
    level, depth = [value], 0
    while level:
        depth += any(isinstance(item, dict | list) for item in level)
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
    return depth


class StreamReader:
    """Takes the bytes of a body in pieces of any size and yields its events, up to the terminal one."""

    def __init__(self, *, first: int = 0, max_bytes: int = 64 << 20) -> None:
        self._rest = b""
        self._next = first
        self._left = max_bytes
        self._count = 0
        self.events: list[StreamEvent] = []
        self.comments = 0
        #: The terminal event was read: the client reads no further.
        self.ended = False

    def feed(self, data: bytes) -> Iterator[StreamEvent]:
        """Yield the events that ``data`` completes. Raises InvalidStream, TooLarge."""
        self._left -= len(data)
        if self._left < 0:
            raise TooLarge("the body")
        buffer, start = self._rest + data, 0
        for found in _BREAK.finditer(buffer):
            frame, start = buffer[start : found.start()], found.end()
            if len(frame) > MAX_FRAME_BYTES:
                raise TooLarge("a frame")
            event = self._frame(frame)
            if event is not None:
                yield event
            if self.ended:
                return
        self._rest = buffer[start:]
        if len(self._rest) > MAX_FRAME_BYTES:
            raise TooLarge("an unterminated frame")

    def close(self) -> Iterator[StreamEvent]:
        """The body has ended. Raises InvalidStream unless the terminal event was read."""
        if not self.ended:
            raise InvalidStream("the body ended before a terminal event")
        return iter(())

    def _frame(self, frame: bytes) -> StreamEvent | None:
        name, data = None, []
        for line in frame.splitlines():
            field, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if not field:
                self.comments += 1
            elif field == b"event":
                name = value.decode("utf-8")
            elif field == b"data":
                data.append(value)
        if not data:
            return None
        event = self._event(name, parse_json(b"\n".join(data)))
        self._next += 1
        self._count += 1
        if self._count > MAX_EVENTS:
            raise InvalidStream(f"more than {MAX_EVENTS} events")
        self.events.append(event)
        self.ended = event.event in TERMINAL
        return event

    def _event(self, name: str | None, document: Any) -> StreamEvent:
        if not isinstance(document, dict):
            raise InvalidStream("data is no object")
        sequence = document.get("sequence")
        if type(sequence) is not int or sequence < 0:
            raise InvalidStream(f"sequence {sequence!r} is no unsigned integer")
        if sequence != self._next:
            raise InvalidStream(f"sequence {sequence}, expected {self._next}")
        name = name or document.get("event")
        if not isinstance(name, str) or not name:
            raise InvalidStream("an event without a name")
        return StreamEvent(name, sequence, document.get("data"))
