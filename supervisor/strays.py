"""Finds processes that left their job's leaf: children of the supervisor that belong nowhere.

The supervisor is a subreaper, so whatever a dead worker leaves behind becomes its child, wherever it moved itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from protocol.api import Stray
from supervisor.cgroup import Leaf
from supervisor.loader import Loader
from supervisor.processes import Identity, Reaper, cgroup_of, command, descendants, identify, signal_identity

#: A newborn made by plain clone is in its template's leaf until its first act moves it; one that is still there after
#: this many seconds is no newborn.
NEWBORN_S = 1.0
#: Looks for newcomers before the kill.
FREEZE_LOOKS = 20


class Hunter:
    """Looks at the supervisor's children and kills those that belong nowhere."""

    def __init__(self, reaper: Reaper, loader: Loader, live_leaves: Callable[[], Iterable[Leaf]]) -> None:
        self._reaper = reaper
        self._loader = loader
        self._live_leaves = live_leaves
        self._suspects: dict[Identity, float] = {}
        #: Told what was killed.
        self.on_killed: Callable[[Sequence[Stray]], None] = lambda strays: None

    def pass_once(self) -> tuple[list[Stray], bool]:
        """Reap, look at every child, kill the strays. Returns (strays killed, whether none and no suspect was seen)."""
        self._reaper.reap()
        leaves = list(self._live_leaves())
        newborn = self._loader.newborn_leaves
        strays: list[Identity] = []
        suspects: dict[Identity, float] = {}
        hidden, unnamed = False, list[Stray]()
        for pid in self._reaper.unknown():
            where = cgroup_of(pid) or ""
            identity = identify(pid)
            if identity is None:
                hidden |= self._strike_hidden(pid, leaves, unnamed)
                continue
            if self._loader.is_resident(identity):
                continue
            if where in newborn or any(_within(where, leaf) for leaf in leaves):
                continue
            if self._loader.may_be_newborn(where):
                suspects[identity] = self._suspects.get(identity, time.monotonic())
                if time.monotonic() - suspects[identity] < NEWBORN_S:
                    continue
            strays.append(identity)
        self._suspects = suspects
        named = [Stray(pid=each.pid, started_at=each.started_at, command=command(each.pid)) for each in strays]
        for each in self._freeze(strays, leaves):
            signal_identity(each, signal.SIGKILL)
        killed = [*named, *unnamed]
        if killed:
            self.on_killed(killed)
        return killed, not killed and not suspects and not hidden

    def _freeze(self, strays: list[Identity], leaves: list[Leaf]) -> set[Identity]:
        """Stop strays and all below them until a look finds no newcomer; returns all that was seen.

        A fork bomb at its limit refills every place that a death frees. Stopped, it keeps its places and forks no
        more: fork(2) does not complete while a signal is pending. No proof rests on this.
        """
        seen: set[Identity] = set()
        for _ in range(FREEZE_LOOKS):
            newcomers = {*strays, *self._below(strays, leaves)} - seen
            for each in newcomers:
                signal_identity(each, signal.SIGSTOP)
            seen |= newcomers
            if not newcomers:
                break
        return seen

    def _below(self, strays: list[Identity], leaves: list[Leaf]) -> Iterator[Identity]:
        """What strays have started, but what is in the leaf of a live job."""
        for stray in strays:
            for pid in descendants(stray.pid):
                identity = identify(pid)
                where = cgroup_of(pid) or ""
                if identity is not None and not any(_within(where, leaf) for leaf in leaves):
                    yield identity

    def _strike_hidden(self, pid: int, leaves: Iterable[Leaf], unnamed: list[Stray]) -> bool:
        """Kill a child that /proc does not show, unless a cgroup of ours accounts for it. Returns whether it may live.

        One that we have not reaped cannot be gone: /proc hides the undumpable (hidepid=, systemd's ProtectProc=), even
        as zombies.
        """
        if self._reaper.collect_orphan(pid):
            return False
        if any(pid in leaf.pids() for leaf in (*leaves, *self._loader.leaves)):
            return False
        if not self._loader.newborn_leaves:
            unnamed.append(Stray(pid=pid))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return True


def _within(proc_path: str, leaf: Leaf) -> bool:
    return proc_path == leaf.proc_path or proc_path.startswith(leaf.proc_path + "/")
