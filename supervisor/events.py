"""Committed events of a running job: a bounded tail in memory, readers that wait, and their SSE frames."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import deque
from collections.abc import Sequence
from itertools import islice

#: Tail kept in memory for readers that keep up; one that is behind it reads the journal.
TAIL_BYTES = 1 << 20
#: What an event costs in memory beside its data and its frame, bytes.
EVENT_OVERHEAD_BYTES = 256
#: A reader gets about this much at once, in events and in bytes of data: one that stalls holds no more than that.
BATCH_EVENTS = 256
BATCH_BYTES = 65_536
#: No SSE frame may exceed the client's bound of 1 MiB; 4 KiB are left for the envelope.
SSE_DATA_BYTES = (1 << 20) - 4096
#: Milliseconds that an EventSource waits before it connects again.
SSE_RETRY_MS = 1000


class CommittedEvent:
    """One durable event. ``data`` is ASCII JSON without line breaks; its SSE frame is encoded once for all readers."""

    __slots__ = ("_sse", "data", "name", "sequence")

    def __init__(self, sequence: int, name: str, data: bytes) -> None:
        self.sequence = sequence
        self.name = name
        self.data = data
        self._sse: bytes | None = None

    @property
    def cost_bytes(self) -> int:
        """What it costs to keep: its data is there twice once a reader has asked for its frame."""
        return 2 * len(self.data) + EVENT_OVERHEAD_BYTES

    def document(self, data: bytes | None = None) -> bytes:
        """JSON of the whole event, in the wire's order."""
        shown = self.data if data is None else data
        return b'{"event":"%s","sequence":%d,"data":%s}' % (self.name.encode("ascii"), self.sequence, shown)

    def sse(self, action_id: str) -> bytes:
        """The event's frame; data above the bound is replaced by where to find it."""
        if self._sse is None:
            data = self.data if len(self.data) <= SSE_DATA_BYTES else self._omission(action_id)
            body = self.document(data)
            self._sse = b"id: %d\nevent: %s\ndata: %s\n\n" % (self.sequence, self.name.encode("ascii"), body)
        return self._sse

    def _omission(self, action_id: str) -> bytes:
        note = {
            "status": self.name,
            "output_omitted": True,
            "bytes": len(self.data),
            "sha256": hashlib.sha256(self.data).hexdigest(),
            "location": f"/jobs/{action_id}/events?cursor={self.sequence}",
        }
        return json.dumps(note, separators=(",", ":")).encode("ascii")


class Feed:
    """What readers of one job follow. Events are published after their commit, never before."""

    def __init__(self, first: int = 0) -> None:
        self._tail: deque[CommittedEvent] = deque()
        self._tail_bytes = 0
        self._waiters: set[asyncio.Future[None]] = set()
        self.count = first
        self.ended = False

    def publish(self, items: Sequence[tuple[str, bytes]]) -> None:
        """Show events that are durable now, at the next sequence numbers."""
        for name, data in items:
            event = CommittedEvent(self.count, name, data)
            self._tail.append(event)
            self._tail_bytes += event.cost_bytes
            self.count += 1
        while self._tail_bytes > TAIL_BYTES and len(self._tail) > 1:
            self._tail_bytes -= self._tail.popleft().cost_bytes
        self._wake()

    def end(self) -> None:
        """The terminal event was published: readers finish."""
        self.ended = True
        self._wake()

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    def since(self, cursor: int) -> list[CommittedEvent] | None:
        """The next events from ``cursor`` on, a batch at most; None if the tail does not reach back that far."""
        if cursor >= self.count:
            return []
        first = self._tail[0].sequence if self._tail else self.count
        if cursor < first:
            return None
        batch: list[CommittedEvent] = []
        size = 0
        for event in islice(self._tail, cursor - first, cursor - first + BATCH_EVENTS):
            batch.append(event)
            size += len(event.data)
            if size >= BATCH_BYTES:
                break
        return batch

    async def wait(self, cursor: int) -> None:
        """Wait until there is an event at ``cursor`` or the feed has ended."""
        while self.count <= cursor and not self.ended:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)
