"""A small pool of connections that only read, each used by one thread at a time."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from protocol.errors import JournalUnavailable
from supervisor.journal.schema import reopen, set_up_reader
from supervisor.journal.writer import blames_journal
from supervisor.threads import started_pool

T = TypeVar("T")
READERS = 2


class Readers:
    """``READERS`` threads and as many connections. Raises sqlite3.Error or StartError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._free: queue.SimpleQueue[sqlite3.Connection] = queue.SimpleQueue()
        for _ in range(READERS):
            self._free.put(reopen(path, set_up_reader))
        self._pool = started_pool(READERS, "journal-reader")
        self._closed = False

    async def run(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        """Run ``fn`` in a thread of the pool. Raises JournalUnavailable, and what ``fn`` raises."""
        if self._closed:
            raise JournalUnavailable(f"journal {self._path} is closed")
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._run, fn)

    def close(self) -> None:
        """Wait for the reads that run and close the connections. Blocks."""
        self._closed = True
        self._pool.shutdown(wait=True)
        with contextlib.suppress(queue.Empty):
            while True:
                self._free.get_nowait().close()

    def _run(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        connection = self._free.get()
        try:
            return fn(connection)
        except sqlite3.Error as error:
            if not blames_journal(error):
                raise
            connection = self._replace(connection)
            raise JournalUnavailable(f"journal {self._path} cannot be read ({error}); try again later") from error
        finally:
            self._free.put(connection)

    def _replace(self, broken: sqlite3.Connection) -> sqlite3.Connection:
        """A new connection, or the broken one while none can be had."""
        try:
            fresh = reopen(self._path, set_up_reader)
        except sqlite3.Error:
            return broken
        with contextlib.suppress(sqlite3.Error):
            broken.close()
        return fresh
