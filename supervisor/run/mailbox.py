"""One job's mailbox: whatever may end it is put here, and the first one taken decides."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from typing import TypeVar

from supervisor.run.ending import Cause

C = TypeVar("C")


class Mailbox:
    """First in, first out; one taker."""

    def __init__(self) -> None:
        self._causes: deque[Cause] = deque()
        self._arrived = asyncio.Event()

    def put(self, cause: Cause) -> None:
        """Add a possible ending."""
        self._causes.append(cause)
        self._arrived.set()

    def take(self) -> Cause | None:
        """The first one, without waiting."""
        cause = self._causes.popleft() if self._causes else None
        if not self._causes:
            self._arrived.clear()
        return cause

    def peek(self) -> Cause | None:
        """The first one, which stays."""
        return self._causes[0] if self._causes else None

    async def get(self) -> Cause:
        """The first one."""
        await self._arrived.wait()
        cause = self.take()
        assert cause is not None
        return cause

    async def wait(self) -> None:
        """Wait until there is one, and leave it."""
        await self._arrived.wait()

    def find(self, kind: type[C]) -> C | None:
        """Take the first one of ``kind``, past any other."""
        for cause in self._causes:
            if isinstance(cause, kind):
                self._causes.remove(cause)
                return cause
        return None


async def first(*waits: Coroutine[object, object, object]) -> None:
    """Wait until the first of ``waits`` is over and give the others up."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
