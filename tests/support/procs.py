"""Processes as the kernel shows them: identity, life, children; and the heartbeat files that test tools write."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

#: Polling interval for facts that no event announces, seconds.
POLL_S = 0.005

T = TypeVar("T")


class Beat(NamedTuple):
    """One heartbeat: who wrote it, and when on CLOCK_MONOTONIC (system-wide, so comparable between processes)."""

    pid: int
    start_ticks: int
    at_ns: int

    @property
    def at_unix(self) -> float:
        """The beat on the wall clock, Unix seconds, if that has not been set since."""
        return time.time() - (time.monotonic_ns() - self.at_ns) / 1e9


def read_beats(path: Path) -> list[Beat]:
    """Parse lines ``pid start_ticks monotonic_ns``; a last line without its newline is one that a kill cut off."""
    if not path.exists():
        return []
    whole, _, _ = path.read_text(encoding="ascii").rpartition("\n")
    return [Beat(*(int(word) for word in line.split())) for line in whole.splitlines()]


def beat_line() -> bytes:
    """One heartbeat of the calling process, to be written with a single write(2) to a file opened with O_APPEND."""
    return f"{os.getpid()} {start_ticks(os.getpid())} {time.monotonic_ns()}\n".encode("ascii")


def _stat(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text[text.rindex(b")") + 2 :].decode("ascii").split()


def start_ticks(pid: int) -> int | None:
    """Clock ticks from boot to the start of ``pid`` (field 22 of proc_pid_stat(5)), None without such a process."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def outer_pid(pid: int, ticks: int) -> int:
    """Our pid of the process that started at ``ticks`` and calls itself ``pid``, maybe inside a PID namespace.

    ``pid`` itself when there is none. Source: NSpid in proc_pid_status(5); start ticks are the same everywhere.
    """
    fields = _stat(pid)
    if fields is not None and int(fields[19]) == ticks:
        return pid
    for entry in os.listdir("/proc"):
        if entry.isdigit() and start_ticks(int(entry)) == ticks and _inner_pid(entry) == pid:
            return int(entry)
    return pid


def _inner_pid(pid: str) -> int | None:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    return None


def alive(pid: int, ticks: int | None = None) -> bool:
    """Whether ``pid`` can still run code; with ``ticks``, only if it is that very process, as it names itself.

    A zombie is dead only when no other thread is left: state Z alone says just that its leader thread has exited.
    """
    if ticks is not None:
        pid = outer_pid(pid, ticks)
    fields = _stat(pid)
    if fields is None or (ticks is not None and int(fields[19]) != ticks):
        return False
    if fields[0] not in {"Z", "X"}:
        return True
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return len(os.listdir(f"/proc/{pid}/task")) > 1
    return False


def children(pid: int) -> list[int]:
    """Live children of ``pid``, of all its threads."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found += [int(child) for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split()]
    return sorted(found)


def descendants(pid: int) -> list[int]:
    """Children, their children and so on, as far as parentage still shows it."""
    found: list[int] = []
    for child in children(pid):
        found += [child, *descendants(child)]
    return found


def pids() -> Iterator[int]:
    """Every process of this pid namespace."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            yield int(name)


def cgroup2_mount() -> Path | None:
    """Where the v2 hierarchy is mounted (proc_pid_mountinfo(5))."""
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        fields, _, tail = line.partition(" - ")
        if tail.startswith("cgroup2 "):
            return Path(fields.split()[4])
    return None


def with_environment(needle: str) -> list[int]:
    """Live processes whose initial environment contains ``needle``, ours excepted.

    Forked processes show the environment of the last program that was executed above them.
    """
    found = []
    for pid in pids():
        with contextlib.suppress(OSError):
            if pid != os.getpid() and needle.encode() in Path(f"/proc/{pid}/environ").read_bytes() and alive(pid):
                found.append(pid)
    return found


def wait_until(predicate: Callable[[], T], deadline_s: float, what: str) -> T:
    """Return the first true value of ``predicate``. Only for facts that no event announces. Raises AssertionError."""
    give_up = time.monotonic() + deadline_s
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() > give_up:
            raise AssertionError(f"not within {deadline_s:g} s: {what}")
        time.sleep(POLL_S)


def kill(pid: int, ticks: int) -> None:
    """SIGKILL that very process, wherever it stands. Raises AssertionError if it is another one by now."""
    pid = outer_pid(pid, ticks)
    fd = os.pidfd_open(pid)
    try:
        # The pidfd is of whoever had the pid when it was opened; from here on the pid cannot change hands unseen.
        assert start_ticks(pid) == ticks, f"{pid} is not the process that started at {ticks}"
        signal.pidfd_send_signal(fd, signal.SIGKILL)
    finally:
        os.close(fd)
