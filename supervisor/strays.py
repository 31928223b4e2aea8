"""Finds processes that left their job's leaf: children of the supervisor that belong nowhere.

The supervisor is a subreaper, so whatever a dead worker leaves behind becomes its child, wherever it moved itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable

from protocol.api import Stray
from supervisor.cgroup import Leaf
from supervisor.loader import Loader
from supervisor.processes import Identity, Reaper, cgroup_of, command, identify

#: A newborn made by plain clone is in its template's leaf until its first act moves it; one that is still there after
#: this many seconds is no newborn.
NEWBORN_S = 1.0


class Hunter:
    """Looks at the supervisor's children and kills those that belong nowhere."""

    def __init__(self, reaper: Reaper, loader: Loader, live_leaves: Callable[[], Iterable[Leaf]]) -> None:
        self._reaper = reaper
        self._loader = loader
        self._live_leaves = live_leaves
        self._suspects: dict[Identity, float] = {}

    def pass_once(self) -> tuple[list[Stray], bool]:
        """Reap, look at every child, kill the strays. Returns (strays killed, whether none and no suspect was seen)."""
        self._reaper.reap()
        leaves = list(self._live_leaves())
        newborn = self._loader.newborn_leaves
        strays: list[Stray] = []
        suspects: dict[Identity, float] = {}
        for pid in self._reaper.unknown():
            where = cgroup_of(pid) or ""
            identity = identify(pid)
            if identity is None or self._loader.is_resident(identity):
                continue
            if where in newborn or any(_within(where, leaf) for leaf in leaves):
                continue
            if self._loader.may_be_newborn(where):
                suspects[identity] = self._suspects.get(identity, time.monotonic())
                if time.monotonic() - suspects[identity] < NEWBORN_S:
                    continue
            strays.append(Stray(pid=pid, started_at=identity.started_at, command=command(pid)))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # our own unreaped child: the pid cannot be a stranger's
        self._suspects = suspects
        return strays, not strays and not suspects


def _within(proc_path: str, leaf: Leaf) -> bool:
    return proc_path == leaf.proc_path or proc_path.startswith(leaf.proc_path + "/")
