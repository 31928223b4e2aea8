"""What the kernel says of processes, and what the heartbeat file says of its writer."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

#: Between two looks at a fact that no event announces, seconds.
LOOK_S = 0.002


class Process(NamedTuple):
    """A process for certain: pids are used again, a pid with its start ticks (proc_pid_stat(5)) is not."""

    pid: int
    start_ticks: int


class Beat(NamedTuple):
    """One heartbeat; ``at_ns`` on CLOCK_MONOTONIC, which all processes share."""

    process: Process
    at_ns: int

    @property
    def at_unix(self) -> float:
        """The same moment in Unix seconds."""
        return time.time() - (time.monotonic_ns() - self.at_ns) / 1e9


def _stat(pid: int) -> list[str]:
    with suppress(FileNotFoundError, ProcessLookupError):
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        return text.rpartition(")")[2].split()
    return []


def identify(pid: int) -> Process | None:
    """The process that has ``pid`` now."""
    fields = _stat(pid)
    return Process(pid, int(fields[19])) if fields else None


def parent(pid: int) -> int | None:
    """Its parent's pid."""
    fields = _stat(pid)
    return int(fields[1]) if fields else None


def here(process: Process) -> Process:
    """The same process by our pid: a worker may live in a PID namespace and call itself otherwise (NSpid).

    Source: proc_pid_status(5). Start ticks are the same inside and outside.
    """
    fields = _stat(process.pid)
    if fields and int(fields[19]) == process.start_ticks:
        return process
    for entry in os.listdir("/proc"):
        with suppress(FileNotFoundError, ProcessLookupError, IndexError):
            if entry.isdigit() and int(_stat(int(entry))[19]) == process.start_ticks:
                status = Path(f"/proc/{entry}/status").read_text(encoding="utf-8", errors="replace")
                inner = next(line for line in status.splitlines() if line.startswith("NSpid:"))
                if int(inner.split()[-1]) == process.pid:
                    return Process(int(entry), process.start_ticks)
    return process


def alive(process: Process) -> bool:
    """Whether that very process can still run code. A zombie cannot, unless only its first thread has ended."""
    process = here(process)
    fields = _stat(process.pid)
    if not fields or int(fields[19]) != process.start_ticks:
        return False
    with suppress(FileNotFoundError, ProcessLookupError):
        return fields[0] not in "ZX" or len(os.listdir(f"/proc/{process.pid}/task")) > 1
    return False


def beats(path: Path) -> list[Beat]:
    """Every whole line of a heartbeat file; the last one may have been cut off by a kill."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="ascii").rpartition("\n")[0].splitlines()
    return [Beat(Process(int(pid), int(ticks)), int(at)) for pid, ticks, at in (line.split() for line in lines)]


def wait_until(fact: Callable[[], bool], limit_s: float) -> float | None:
    """Wait for ``fact``. Returns after how many seconds it was true, None if it was not within ``limit_s``."""
    began = time.monotonic()
    while not fact():
        if time.monotonic() - began > limit_s:
            return None
        time.sleep(LOOK_S)
    return time.monotonic() - began


def empty_cgroup(path: Path, limit_s: float = 5.0) -> bool:
    """Kill everything in a cgroup and remove it. Returns whether it is gone. For cleaning up after a kill -9."""

    def empty() -> bool:
        for directory, _, _ in os.walk(path):
            with suppress(OSError):
                for pid in Path(directory, "cgroup.procs").read_text(encoding="ascii").split():
                    os.kill(int(pid), signal.SIGKILL)
        return "populated 0" in (path / "cgroup.events").read_text(encoding="ascii")

    with suppress(OSError):
        (path / "cgroup.kill").write_text("1", encoding="ascii")
        wait_until(empty, limit_s)
        for directory, _, _ in os.walk(path, topdown=False):
            os.rmdir(directory)
    return not path.exists()
