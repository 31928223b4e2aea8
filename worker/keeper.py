"""The keeper: parent and subreaper of one worker where no cgroup is writable.

Whatever the worker leaves behind becomes the keeper's child, so it can be told from other jobs' processes, killed, and
waited for until the kernel says ECHILD. Sources: PR_SET_CHILD_SUBREAPER in prctl(2), wait(2).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from typing import NoReturn

from protocol import frames, points
from protocol.errors import ProtocolViolation
from worker import sandbox
from worker.channel import Channel, PipeClosed

#: Left in the job's directory by a keeper that outlived its supervisor and found everything gone.
EMPTY_FILE = "empty"
EXIT_SWEPT = 0
EXIT_BROKEN = 72
#: Between two rounds of a sweep, seconds: newborns of dying parents appear in between. It doubles while no others come.
SWEEP_PAUSE_S = 0.0005
LONGEST_PAUSE_S = 0.02
#: Looks for newcomers before the kill.
FREEZE_LOOKS = 50

KeeperChannel = Channel[frames.ToKeeper]


def keep(control_fd: int, job_directory: str, run_worker: Callable[[int], NoReturn]) -> NoReturn:
    """Fork the worker and keep it. Never returns.

    ``run_worker`` gets the keeper's pid and turns the child into the worker; every descriptor of the worker must be
    open here and is closed after the fork.
    """
    code = EXIT_BROKEN
    try:
        sandbox.reset_signals()
        os.setsid()
        sandbox.adopt_orphans()
        me = os.getpid()
        worker = os.fork()
        if worker == 0:
            run_worker(me)
        points.reach("keeper.forked")
        control = sandbox.keep_only(control_fd)
        code = _Keeper(KeeperChannel(socket.socket(fileno=control), frames.ToKeeper), worker, job_directory).serve()
    except BaseException:  # noqa: BLE001 - the process boundary; the supervisor sees the exit
        pass
    finally:
        os._exit(code)


class _Keeper:
    """State of one keeper; it has one thread."""

    def __init__(self, channel: KeeperChannel, worker: int, job_directory: str) -> None:
        self._channel = channel
        self._worker = worker
        self._job_directory = job_directory
        self._status: int | None = None
        self._killed: set[int] = set()

    def serve(self) -> int:
        """Report the worker's end, sweep when told to or when the supervisor is gone. Returns the exit code."""
        ticks = sandbox.start_ticks(self._worker)
        self._channel.send(frames.Kept(pid=self._worker, start_ticks=ticks))
        wake = sandbox.wake_on_children()
        poll = select.poll()
        poll.register(self._channel.sock, select.POLLIN)
        poll.register(wake, select.POLLIN)
        try:
            self._reap()
            while True:
                ready = {fd for fd, _ in poll.poll()}
                if wake in ready:
                    sandbox.drain_wake(wake)
                    self._reap()
                if self._channel.sock.fileno() in ready:
                    self._channel.receive()
                    self._sweep()
                    points.reach("keeper.swept")
                    self._channel.send(frames.Empty(status=self._status, killed=len(self._killed)))
        except (PipeClosed, ProtocolViolation):
            self._sweep()
            self._leave_word()
            return EXIT_SWEPT

    def _reap(self) -> bool:
        """Collect what has ended. Returns whether any child is left (False: the kernel said ECHILD)."""
        while True:
            try:
                ended = sandbox.next_ended()
            except ChildProcessError:
                return False
            if ended is None:
                return True
            pid, status = ended
            if pid == self._worker:
                self._status = status
                with contextlib.suppress(PipeClosed):  # its end is seen, and acted on, where it is read
                    self._channel.send(frames.Ended(status=status))
            os.waitpid(pid, 0)

    def _sweep(self) -> None:
        """Kill and reap until the kernel says that no child is left: no orphan can appear after that."""
        pause_s, before = SWEEP_PAUSE_S, set[int]()
        while self._reap():
            frozen = self._freeze()
            for process in frozen:
                sandbox.send_signal(process, signal.SIGKILL)
            found = {process.pid for process in frozen}
            self._killed |= found
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S) if found <= before else SWEEP_PAUSE_S
            before = found
            time.sleep(pause_s)

    def _freeze(self) -> set[sandbox.Descendant]:
        """Stop everything below until a look finds no newcomer; returns all that was seen.

        A fork bomb at its limit refills every place that a death frees. Stopped, it keeps its places and forks no
        more: fork(2) does not complete while a signal is pending. No proof rests on this.
        """
        seen = set[sandbox.Descendant]()
        for _ in range(FREEZE_LOOKS):
            newcomers = set(sandbox.descendants(os.getpid())) - seen
            for process in newcomers:
                sandbox.send_signal(process, signal.SIGSTOP)
            seen |= newcomers
            if not newcomers:
                break
        return seen

    def _leave_word(self) -> None:
        """Make the sweep's outcome durable for the next supervisor."""
        path = os.path.join(self._job_directory, EMPTY_FILE)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        points.write("keeper.word")
        os.write(fd, f"{os.getpid()} {-1 if self._status is None else self._status}\n".encode("ascii"))
        os.fsync(fd)
        os.close(fd)
