"""The bound on the captured output of all jobs together: the logs of those that ended first go first."""

from __future__ import annotations

import asyncio
import contextlib
import os
from array import array
from collections.abc import Callable, Collection
from pathlib import Path

from supervisor.log import get_log
from supervisor.workspace import Workspace

log = get_log(__name__)
#: What is left of the bound when logs had to go, so that not every later end looks through the directory again.
KEPT_SHARE = 0.9


class JobLogs:
    """Removes logs of ended jobs while theirs are more than ``limit_bytes`` together.

    Memory does not grow with the number of logs: the directory is looked through when the sum, kept as a number, is
    above the bound. ``live``: rows of jobs that have not ended; their logs are bounded one by one, and stay.
    """

    def __init__(self, workspace: Workspace, limit_bytes: int, live: Callable[[], Collection[int]]) -> None:
        self._workspace = workspace
        self._limit_bytes = limit_bytes
        self._live = live
        self._lock = asyncio.Lock()
        #: Bytes at least that ended jobs have; None before the first look. Archives make it less than it says.
        self._total_bytes: int | None = None

    async def ended(self, row: int) -> None:
        """Count the log of a job that has ended, and mark when that was."""
        size = await asyncio.to_thread(_mark_end, self._workspace.log(row))
        if self._total_bytes is not None:
            self._total_bytes += size
        await self.trim()

    async def trim(self) -> None:
        """Remove what is above the bound."""
        async with self._lock:
            if self._total_bytes is None or self._total_bytes > self._limit_bytes:
                live = frozenset(self._live())
                left, removed, freed = await asyncio.to_thread(self._look_through, live)
                self._total_bytes = left
                if removed:
                    log.warning("job_logs_removed", count=removed, bytes=freed, log_total_bytes=self._limit_bytes)

    def _look_through(self, live: Collection[int]) -> tuple[int, int, int]:
        """Sum up, and remove the oldest where it is too much. Returns bytes left, files removed and their bytes."""
        rows, ends, sizes = array("q"), array("q"), array("q")
        with contextlib.suppress(OSError), os.scandir(self._workspace.root / "logs") as entries:
            for entry in entries:
                name = entry.name.partition(".")[0]
                if name.isdigit() and int(name) not in live:
                    with contextlib.suppress(OSError):
                        found = entry.stat(follow_symlinks=False)
                        rows.append(int(name))
                        ends.append(found.st_mtime_ns)
                        sizes.append(found.st_size)
        left, removed, freed = sum(sizes), 0, 0
        if left <= self._limit_bytes:
            return left, 0, 0
        for at in sorted(range(len(rows)), key=lambda at: (ends[at], rows[at])):
            if left <= self._limit_bytes * KEPT_SHARE:
                break
            if sizes[at]:
                with contextlib.suppress(OSError):
                    self._workspace.log(rows[at]).unlink()
                    left, removed, freed = left - sizes[at], removed + 1, freed + sizes[at]
        return left, removed, freed


def _mark_end(path: Path) -> int:
    """Make the file as old as its job's end; returns its size, 0 where there is none."""
    try:
        os.utime(path)
        return path.stat().st_size
    except OSError:
        return 0
