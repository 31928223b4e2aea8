"""A server that dies, fails or stands at a named point: ``python -m tests.support.crash_build serve --config FILE``.

The file that CRASH_PLAN names says which point, how, and at which passing of it; without that file nothing happens, so
that one server can go through many plans. Templates, workers and keepers follow the same plan when the registry is
``tests.crews.crash_crews``. The product has no switch for any of this: the points in its code do nothing.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import sqlite3
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

from protocol import points

PLAN = "CRASH_PLAN"
#: ``hold``: the thread that passes stands there until the plan is disarmed or another one counts.
KILL, ENOSPC, EIO, HOLD = "kill", "enospc", "eio", "hold"
HOLD_POLL_S = 0.002
SQLITE_TEXT = {ENOSPC: "database or disk is full", EIO: "disk I/O error"}
ERRNO = {ENOSPC: errno.ENOSPC, EIO: errno.EIO}


class Plan(NamedTuple):
    """Passing number ``first`` of ``point`` does ``kind``; a write can go on failing for ``times`` passings."""

    point: str
    kind: str
    first: int = 1
    times: int = 1


class PlanFile:
    """The plan as tests and servers share it: a file, and beside it one byte for every passing and every firing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._passed = path.with_suffix(".passed")
        self._fired = path.with_suffix(".fired")

    def arm(self, plan: Plan) -> None:
        """Make ``plan`` the one that counts, from the next passing on."""
        for counter in (self._passed, self._fired):
            counter.unlink(missing_ok=True)
        fresh = self.path.with_suffix(".new")
        fresh.write_text(" ".join(map(str, plan)), encoding="ascii")
        fresh.replace(self.path)

    def disarm(self) -> None:
        """Let everything pass."""
        self.path.unlink(missing_ok=True)

    @property
    def fired(self) -> int:
        """How often the plan has struck, over all processes."""
        return self._fired.stat().st_size if self._fired.exists() else 0

    def read(self) -> Plan | None:
        """The plan that counts."""
        try:
            point, kind, first, times = self.path.read_text(encoding="ascii").split()
        except FileNotFoundError:
            return None
        return Plan(point, kind, int(first), int(times))

    def pass_by(self, name: str) -> None:
        """Called at every point in every process. Dies or raises when the plan says so."""
        plan = self.read()
        if plan is None or plan.point != name:
            return
        if plan.first <= _count_up(self._passed) < plan.first + plan.times:
            _count_up(self._fired)
            self._hold(plan) if plan.kind == HOLD else _strike(plan)

    def _hold(self, plan: Plan) -> None:
        while self.read() == plan:
            time.sleep(HOLD_POLL_S)


def _count_up(counter: Path) -> int:
    """Append one byte; returns how many there are now: O_APPEND gives every writer a number of its own."""
    fd = os.open(counter, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, b".")
        return os.lseek(fd, 0, os.SEEK_CUR)
    finally:
        os.close(fd)


def _strike(plan: Plan) -> None:
    if plan.kind == KILL:
        os.kill(os.getpid(), signal.SIGKILL)
        # The init of a PID namespace ignores the signals of its own members, but not the kernel's (pid_namespaces(7)).
        ctypes.string_at(0)
    if plan.point.startswith("journal."):
        raise sqlite3.OperationalError(SQLITE_TEXT[plan.kind])
    raise OSError(ERRNO[plan.kind], os.strerror(ERRNO[plan.kind]))


def install() -> None:
    """Follow the plan in this process and in those that it forks."""
    plan = PlanFile(Path(os.environ[PLAN]))

    def pass_by(name: str) -> None:
        plan.pass_by(name)

    points.reach = pass_by
    points.write = pass_by


def follow() -> None:
    """``install`` in a supervisor: its journal's own fault points follow the plan too."""
    from supervisor import serve
    from supervisor.journal import open_journal

    install()
    plan = PlanFile(Path(os.environ[PLAN]))
    assert "open_journal" in vars(serve), "the server opens its journal elsewhere"
    vars(serve)["open_journal"] = partial(open_journal, faults=lambda name: plan.pass_by(f"journal.{name}"))


def main() -> None:
    """Run the command line of a supervisor that follows the plan."""
    from supervisor import __main__ as entry

    follow()
    entry.main()


if __name__ == "__main__":
    main()
