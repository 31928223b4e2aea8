"""A daemon that says until when it lived: run with a file name, it detaches for good and appends a line every 2 ms.

Each line is ``pid start_ticks monotonic_ns``. Plain script: no package imports, so that it starts fast and survives
whatever becomes of its starter. It ends by itself after LIFETIME_S, in case nobody kills it.
"""

from __future__ import annotations

import os
import sys
import time

INTERVAL_S = 0.002
LIFETIME_S = 180.0


def start_ticks() -> int:
    """Start time of this process in clock ticks since boot (field 22 in proc_pid_stat(5))."""
    with open("/proc/self/stat", encoding="ascii", errors="replace") as stat:
        return int(stat.read().rpartition(")")[2].split()[19])


def beat(path: str, ready_fd: int) -> None:
    """Append lines until the end of LIFETIME_S; ``ready_fd`` is closed after the first."""
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    identity = f"{os.getpid()} {start_ticks()}"
    end = time.monotonic() + LIFETIME_S
    while time.monotonic() < end:
        os.write(out, f"{identity} {time.monotonic_ns()}\n".encode())
        if ready_fd >= 0:
            os.close(ready_fd)
            ready_fd = -1
        time.sleep(INTERVAL_S)


def detach(path: str) -> None:
    """Start beating in a grandchild with a session of its own; returns once its first line is written."""
    ready, done = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            os.close(ready)
            try:
                beat(path, done)
            finally:
                os._exit(0)
        os._exit(0)
    os.close(done)
    os.waitpid(child, 0)
    os.read(ready, 1)
    os.close(ready)


if __name__ == "__main__":
    detach(sys.argv[1])
