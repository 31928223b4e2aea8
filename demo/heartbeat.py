"""A child process that does not want to be found: it leaves its session and its parent, and beats in a file.

Run with a file name: ``pid start_ticks monotonic_ns`` is appended every INTERVAL_S. It imports nothing of CrewAI or
of this project, and ends by itself after LIFETIME_S should nobody kill it.
"""

from __future__ import annotations

import os
import sys
import time

INTERVAL_S = 0.02
LIFETIME_S = 120.0


def main(path: str) -> None:
    """Fork, start a session, fork again: the process that beats has no tie left to the job's process."""
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)
    with open("/proc/self/stat", encoding="ascii", errors="replace") as stat:
        start_ticks = stat.read().rpartition(")")[2].split()[19]
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    end = time.monotonic() + LIFETIME_S
    while time.monotonic() < end:
        os.write(file, f"{os.getpid()} {start_ticks} {time.monotonic_ns()}\n".encode())
        time.sleep(INTERVAL_S)


if __name__ == "__main__":
    main(sys.argv[1])
