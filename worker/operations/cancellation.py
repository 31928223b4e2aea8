"""Asking a running operation to close. Only asyncio work can be asked; the rest is ended by the kill that follows."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Cancellation:
    """Shared by the operation (main thread) and the reader of the protocol (its own thread)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requested = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None

    @property
    def requested(self) -> bool:
        """Whether a cancel has arrived."""
        return self._requested

    def request(self) -> bool:
        """Ask for the end. Returns whether something is being closed that is worth waiting for. Never blocks."""
        with self._lock:
            self._requested = True
            if self._loop is None or self._task is None:
                return False
            self._loop.call_soon_threadsafe(self._task.cancel)
            return True

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` to its end on an event loop of its own, cancellable by request().

        Raises asyncio.CancelledError if it was cancelled. Threads that the work left in the loop's executor are not
        waited for, unlike in ``asyncio.run``: they cannot be cancelled.
        """
        loop = asyncio.new_event_loop()
        try:
            asyncio.set_event_loop(loop)
            task = loop.create_task(work)
            with self._lock:
                self._loop, self._task = loop, task
                if self._requested:
                    task.cancel()
            try:
                return loop.run_until_complete(task)
            finally:
                with self._lock:
                    self._loop = self._task = None
                loop.run_until_complete(_finish(loop))
        finally:
            asyncio.set_event_loop(None)
            loop.close()


async def _finish(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel what the work left behind, and close its generators."""
    left = [task for task in asyncio.all_tasks(loop) if task is not asyncio.current_task(loop)]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    await loop.shutdown_asyncgens()
