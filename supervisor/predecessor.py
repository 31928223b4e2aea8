"""What a predecessor left in the cgroup that systemd gave to this unit: found, killed, and shown to be gone.

After the end of a main process systemd kills what is left in the unit's cgroup (KillMode=, systemd.kill(5)) before it
starts the next one, and goes on after a while where something does not die. So its start alone proves nothing; this
looks itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from protocol.api import Stray
from supervisor.cgroup import Tree
from supervisor.journal import WorkerIdentity
from supervisor.loader import is_sealed
from supervisor.processes import boot_id, command, identify, pid_namespace
from supervisor.stop import Pause


class Predecessor:
    """Whoever was in our cgroup before we started anything in it."""

    def __init__(self, tree: Tree | None) -> None:
        # Where other things than us were started in it, they are none of our business.
        self._tree = tree if tree is not None and tree.alone else None
        self._seen: frozenset[int] = frozenset()
        self._strays: dict[int, Stray] = {}
        #: Set before something of ours is started: from then on only those are watched who were there before.
        self.closed = False

    @property
    def strays(self) -> tuple[Stray, ...]:
        """Those that were outside of every leaf, and were killed."""
        return tuple(self._strays.values())

    def covers(self, worker: WorkerIdentity) -> bool:
        """Whether nothing that worker started can be anywhere else than in our cgroup.

        It could not leave the one that its supervisor had been given, and that was ours, by its path: systemd removes a
        unit's cgroup only when it is empty, so whatever lives is still in it.
        """
        if self._tree is None or worker.leaf is None or not is_sealed(worker.method):
            return False
        here = worker.boot_id == boot_id() and worker.pid_ns == pid_namespace()
        return here and Path(worker.leaf).parent.parent == self._tree.own.path

    async def vacate(self) -> None:
        """Kill them, except in the leaves, which their own jobs empty; return once the kernel shows nobody but us."""
        pause = Pause()
        while found := self._look():
            for pid in found:
                self._strike(pid)
            await pause.wait()

    def _look(self) -> frozenset[int]:
        """The cgroup's own lists and nothing of /proc, which may hide the members of a former PrivateUsers=."""
        if self._tree is None:
            return frozenset()
        found = self._tree.strangers()
        if self.closed:
            # Killed before anything of ours was started, they make no new ones. A pid of theirs that one of ours has
            # by now only delays the word.
            return found & self._seen
        self._seen |= found
        return found

    def _strike(self, pid: int) -> None:
        assert self._tree is not None
        if pid in self._tree.base.pids() or self.closed:
            return
        if pid not in self._strays:
            identity = identify(pid)
            started_at = None if identity is None else identity.started_at
            self._strays[pid] = Stray(pid=pid, started_at=started_at, command=command(pid))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
