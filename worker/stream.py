"""A job's chunks on their way out, counted against its bounds: messages exactly, progress as far as it fits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from protocol import frames
from worker import outputs

#: ``started`` and the terminal event take two of the job's events.
RESERVED_EVENTS = 2
#: Bound of a document that is cut to size afterwards.
UNBOUNDED = 1 << 30
#: Texts up to this many characters are not worth cutting.
SHORT_TEXT = 64


class Violation(Exception):
    """The crew broke a bound of its job, which fails the job."""

    error_type = "RegistryError"


class Stream:
    """Sends chunks from any thread, in the order of the calls.

    ``message`` is for what the operation itself streams: one that is too large, or one more than the job may have, is a
    Violation. ``progress`` is extra and never fails a job: from half of the bound on it is only counted, and one
    summary is sent at the end if there is room. Nor may it displace messages: where it has used up their room, the last
    messages travel joined in one chunk with ``merged``, their number.
    """

    def __init__(self, send: Callable[[frames.Frame], None], *, event_limit: int, event_limit_bytes: int) -> None:
        self._send = send
        self._limit_bytes = event_limit_bytes
        self._bound = max(0, event_limit - RESERVED_EVENTS)
        self._lock = threading.Lock()
        self._sent = 0
        self._messages = 0
        self._held: dict[str, Any] | None = None
        self._coalesced = 0
        self._last: dict[str, Any] | None = None
        self._closed = False

    @property
    def sent(self) -> int:
        """Chunks sent so far."""
        return self._sent

    def message(self, document: Mapping[str, Any]) -> None:
        """Send a chunk of the operation's own stream. Raises Violation, and what ``send`` raises."""
        try:
            clean = outputs.Sanitizer(self._limit_bytes).clean(document)
            data = outputs.encode(clean, self._limit_bytes)
        except outputs.TooLarge as error:
            raise Violation(f"chunk {self._messages + 1} is above the event bound: {error}") from None
        with self._lock:
            if self._closed:
                return
            self._messages += 1
            if self._messages > self._bound:
                raise Violation(f"the crew streamed more than the {self._bound} chunks that this job may have")
            # Without progress among them, messages may use the last room too; else it is kept for those held back.
            if self._held is None and (self._messages == self._sent + 1 or self._sent < self._bound - 1):
                self._put(data)
            else:
                self._hold(clean)

    def progress(self, document: Mapping[str, Any]) -> None:
        """Send a forwarded event, or count it. Raises only what ``send`` raises."""
        with self._lock:
            if self._closed:
                return
            if self._sent < self._bound // 2:
                self._put(self._fitted(document))
            else:
                self._coalesced += 1
                self._last = dict(document)

    def close(self) -> None:
        """Send what was held back, as far as there is room; later calls send nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._held is not None:
                self._put(self._fitted(self._held))
            if self._coalesced and self._sent < self._bound:
                summary = {"channel": "progress", "type": "coalesced", "count": self._coalesced, "last": self._last}
                self._put(self._fitted(summary))

    def _put(self, data: bytes) -> None:
        self._sent += 1
        self._send(frames.Chunk(data=data))

    def _hold(self, clean: dict[str, Any]) -> None:
        if self._held is None:
            self._held = clean | {"merged": 1}
            return
        held, more = self._held.get("content"), clean.get("content")
        if isinstance(held, str) and isinstance(more, str):
            self._held["content"] = (held + more)[: self._limit_bytes]
        self._held["merged"] += 1

    def _fitted(self, document: Mapping[str, Any]) -> bytes:
        """JSON of a chunk that must not fail: its longest texts halved until it fits, at worst nothing but its type."""
        clean: dict[str, Any] = outputs.Sanitizer(UNBOUNDED).clean(document)
        data = outputs.encode(clean, UNBOUNDED)
        while len(data) > self._limit_bytes:
            longest = max((name for name in clean if isinstance(clean[name], str)), key=lambda name: len(clean[name]))
            if len(clean[longest]) <= SHORT_TEXT:
                return outputs.encode({"channel": "progress", "type": "omitted", "bytes": len(data)}, UNBOUNDED)
            clean[longest] = clean[longest][: len(clean[longest]) // 2]
            clean["truncated"] = True
            data = outputs.encode(clean, UNBOUNDED)
        return data
