"""One job's events on their way to the journal: batched by the commit under way, shown after it, bounded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from protocol import points
from protocol.errors import JournalUnavailable
from supervisor.events import Feed
from supervisor.journal import Item, Journal

#: Uncommitted events (or their bytes) at which the worker's pipe is paused, and below which it is read again.
PAUSE_EVENTS = 1024
RESUME_EVENTS = 256
PAUSE_BYTES = 8 << 20
RESUME_BYTES = 2 << 20


class Recorder:
    """Appends events in order. No timer: whatever came in during one commit goes into the next."""

    def __init__(
        self,
        journal: Journal,
        row: int,
        feed: Feed,
        *,
        on_failure: Callable[[], None],
    ) -> None:
        self._journal = journal
        self._row = row
        self._feed = feed
        #: Told whether too much waits, so that the worker's pipe is paused.
        self.on_pressure: Callable[[bool], None] = lambda pressed: None
        self._on_failure = on_failure
        self._pending: list[Item] = []
        self._pending_bytes = 0
        self._pressed = False
        self._flush: asyncio.Task[None] | None = None
        self._halted = False

    @property
    def total(self) -> int:
        """Events committed and waiting."""
        return self._feed.count + len(self._pending)

    def add(self, name: str, data: bytes) -> None:
        """Take one event."""
        self._pending.append((name, data))
        self._pending_bytes += len(data)
        full = len(self._pending) >= PAUSE_EVENTS or self._pending_bytes >= PAUSE_BYTES
        if full and not self._pressed:
            self._pressed = True
            self.on_pressure(True)
        if self._flush is None and not self._halted:
            self._flush = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        try:
            while self._pending and not self._halted:
                batch = tuple(self._pending)
                await self._journal.append_events(self._row, self._feed.count, batch, at=time.time())
                points.reach("events.recorded")
                self._committed(len(batch))
        except JournalUnavailable:
            self._halted = True
            self._on_failure()
        finally:
            self._flush = None

    def _committed(self, count: int) -> None:
        batch = self._pending[:count]
        del self._pending[:count]
        self._pending_bytes -= sum(len(data) for _, data in batch)
        self._feed.publish(batch)
        few = len(self._pending) <= RESUME_EVENTS and self._pending_bytes <= RESUME_BYTES
        if self._pressed and few:
            self._pressed = False
            self.on_pressure(False)

    async def halt(self) -> tuple[Item, ...]:
        """Let the commit under way end and start none. Returns what waits, for the terminal transaction."""
        self._halted = True
        if self._flush is not None:
            await self._flush
        return tuple(self._pending)

    def finished(self, terminal: Item) -> None:
        """The terminal transaction is durable: show what waited and the terminal event."""
        self._feed.publish([*self._pending, terminal])
        self._pending.clear()
        self._feed.end()
