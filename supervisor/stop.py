"""Kill a job's work and prove that nothing of it is left.

A stop is confirmed by one look in which the leaf's ``cgroup.events`` says ``populated 0``, no stray is found among the
supervisor's children and the worker's wait status is in hand.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time

import msgspec

from protocol import points
from protocol.api import Stray, WorkerExit
from protocol.states import Method
from supervisor.cgroup import Leaf
from supervisor.keeper import Keeper
from supervisor.processes import Child
from supervisor.strays import Hunter

#: Waits between looks, seconds: from the first to the longest, doubling.
FIRST_PAUSE_S = 0.0003
LONGEST_PAUSE_S = 0.05
#: How long a keeper may take to say EMPTY before the supervisor looks itself, seconds.
KEEPER_PATIENCE_S = 1.0


class Pause:
    """Doubling waits between two looks at the kernel; cut short when the worker ends."""

    def __init__(self, child: Child | None = None) -> None:
        self._child = child
        self._next_s = FIRST_PAUSE_S

    async def wait(self) -> None:
        """Wait once."""
        if self._child is not None and not self._child.gone.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._next_s):
                    await self._child.gone.wait()
        else:
            await asyncio.sleep(self._next_s)
        self._next_s = min(self._next_s * 2, LONGEST_PAUSE_S)


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be stopped: the worker, and the leaf or the keeper that has everything it started below it.

    Neither of the two: stops are not proved here (``stop_method = "group"``).
    """

    child: Child
    leaf: Leaf | None
    keeper: Keeper | None = None

    @property
    def provable(self) -> bool:
        """Whether a stop can be proved at all."""
        return self.leaf is not None or self.keeper is not None

    def left(self) -> bool:
        """Whether something of the work can still be seen."""
        if not self.child.gone.is_set():
            return True
        if self.leaf is not None:
            return self.leaf.populated()
        return self.keeper is not None and bool(self.keeper.below())


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of an attempt; ``confirmed_at`` is Unix seconds, ``missing`` says what could not be shown."""

    confirmed: bool
    method: Method
    confirmed_at: float | None
    worker: WorkerExit
    killed: int
    strays: tuple[Stray, ...]
    left: int | None
    missing: str | None = None


class Stop:
    """One job's stop. ``attempt`` may be called again until it confirms; what was killed adds up."""

    def __init__(self, work: Work, hunter: Hunter) -> None:
        self._work = work
        self._hunter = hunter
        self._killed: set[int] = set()
        self._swept = 0
        self._strays: dict[tuple[int, float | None], Stray] = {}

    async def attempt(self, deadline_s: float) -> Proof:
        """Kill until the kernel says that nothing is left, at most ``deadline_s`` seconds."""
        leaf = self._work.leaf
        if self._work.keeper is not None:
            return await self._attempt_keeper(self._work.keeper, deadline_s)
        if leaf is None:
            return await self._kill_group(deadline_s)
        give_up = time.monotonic() + deadline_s
        pause = Pause(self._work.child)
        while True:
            self._strike(leaf)
            points.reach("stop.struck")
            missing = self._look(leaf)
            if missing is None:
                return self._proof(Method.CGROUP, confirmed=True, left=0)
            if time.monotonic() > give_up:
                return self._proof(Method.CGROUP, confirmed=False, left=len(leaf.pids()), missing=missing)
            await pause.wait()

    def _strike(self, leaf: Leaf) -> None:
        if not leaf.populated():
            return
        self._killed.update(leaf.pids())
        with contextlib.suppress(OSError):
            leaf.kill()
        leaf.sweep()

    def _look(self, leaf: Leaf) -> str | None:
        """One look without a pause inside. Returns what is missing for the proof."""
        status_in_hand = self._work.child.collect()
        clean = self._hunt()
        if leaf.populated():
            return "processes of the job are still alive"
        if not status_in_hand:
            return "the worker's wait status is not in hand"
        return None if clean else "processes outside of the job's cgroup are still alive"

    async def _attempt_keeper(self, keeper: Keeper, deadline_s: float) -> Proof:
        """Have the keeper sweep; one that says nothing is killed, which makes everything below it our own children."""
        give_up = time.monotonic() + deadline_s
        empty = await keeper.sweep(min(KEEPER_PATIENCE_S, deadline_s))
        if empty is not None and empty.status is not None:
            self._work.child.settle(empty.status)
            self._swept += empty.killed
            return self._proof(Method.KEEPER, confirmed=True, left=0)
        await keeper.dismiss()
        pause = Pause()
        while True:
            self._work.child.kill()
            status_in_hand = self._work.child.collect()
            clean = self._hunt()
            if clean and status_in_hand:
                return self._proof(Method.SUBREAPER, confirmed=True, left=0)
            if time.monotonic() > give_up:
                missing = "orphans of the job are still alive" if status_in_hand else "the wait status is not in hand"
                return self._proof(Method.SUBREAPER, confirmed=False, left=None, missing=missing)
            await pause.wait()

    def _hunt(self) -> bool:
        strays, clean = self._hunter.pass_once()
        for stray in strays:
            self._strays[stray.pid, stray.started_at] = stray
        return clean

    async def _kill_group(self, deadline_s: float) -> Proof:
        """Without a cgroup: the worker's process group dies, and nothing is proved about those who left it."""
        child = self._work.child
        if not child.exited.done():
            # Before the leader is reaped, or the group id could be a stranger's.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            child.kill()
            self._killed.add(child.pid)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(deadline_s):
                    await child.exited
        missing = "no cgroup is writable: what left the group is not seen"
        return self._proof(Method.GROUP, confirmed=False, left=None, missing=missing)

    def _proof(self, method: Method, *, confirmed: bool, left: int | None, missing: str | None = None) -> Proof:
        return Proof(
            confirmed=confirmed,
            method=method,
            confirmed_at=time.time() if confirmed else None,
            worker=worker_exit(self._work),
            killed=len(self._killed) + self._swept,
            strays=tuple(self._strays.values()),
            left=left,
            missing=missing,
        )


def worker_exit(work: Work) -> WorkerExit:
    """The worker's identity and what is known of its end."""
    child = work.child
    code, name = exit_of(child.exited.result()) if child.exited.done() else (None, None)
    kills = work.leaf.oom_kills() if work.leaf is not None and work.leaf.exists() else None
    return WorkerExit(
        pid=child.pid,
        started_at=child.identity.started_at,
        exit_code=code,
        exit_signal=name,
        oom=None if kills is None else kills > 0,
    )


def exit_of(status: int) -> tuple[int | None, str | None]:
    """(exit code, name of the signal) of a waitpid(2) status; one of them is None."""
    if os.WIFSIGNALED(status):
        return None, signal_name(os.WTERMSIG(status))
    return os.WEXITSTATUS(status), None


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9; real-time signals have no name of their own."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


async def settle(work: Work, limit_s: float) -> None:
    """Give finished work up to ``limit_s`` seconds to be gone on its own; returns as soon as nothing is left."""
    give_up = time.monotonic() + limit_s
    pause = Pause(work.child)
    while time.monotonic() < give_up:
        if not work.left():
            return
        await pause.wait()
