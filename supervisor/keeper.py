"""The supervisor's side of a keeper: parent and subreaper of one worker where no cgroup is writable."""

from __future__ import annotations

import asyncio
import socket

from protocol import frames
from protocol.errors import ProtocolViolation
from supervisor.channel import Channel
from supervisor.processes import Child, Identity, Reaper, boot_id, children, pid_namespace
from supervisor.template import LaunchFailed


class Keeper:
    """One keeper and the worker below it."""

    def __init__(self, child: Child, sock: socket.socket, reaper: Reaper) -> None:
        self.child = child
        self._dismissed = False
        self._reaper = reaper
        self._kept: asyncio.Future[Child] = asyncio.get_running_loop().create_future()
        self._empty: asyncio.Future[frames.Empty] | None = None
        self._channel: Channel[frames.FromKeeper] = Channel(
            sock, frames.FromKeeper, on_frame=self._on_frame, on_end=self._on_end
        )

    async def worker(self, timeout_s: float) -> Child:
        """The worker, once the keeper has made it. Raises LaunchFailed."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._kept
        except TimeoutError:
            raise LaunchFailed(f"keeper {self.child.pid} made no worker within {timeout_s:g} s") from None

    def _on_frame(self, frame: frames.FromKeeper) -> None:
        match frame:
            case frames.Kept(pid=pid, start_ticks=ticks):
                if not self._kept.done():
                    self._adopt(pid, ticks)
            case frames.Ended(status=status):
                if self._kept.done() and not self._kept.exception():
                    self._kept.result().settle(status)
            case frames.Empty():
                if self._empty is not None and not self._empty.done():
                    self._empty.set_result(frame)

    def _adopt(self, pid: int, ticks: int) -> None:
        identity = Identity(pid=pid, start_ticks=ticks, boot_id=boot_id(), pid_ns=pid_namespace())
        try:
            worker = Child(identity, relayed=True)
        except OSError as error:
            self._kept.set_exception(LaunchFailed(f"worker {pid} of a keeper: {error.strerror}"))
            return
        # If the keeper dies, its worker becomes our own child, whose status must not be taken for an orphan's.
        self._reaper.add(worker)
        self._kept.set_result(worker)

    def _on_end(self, why: ProtocolViolation | None) -> None:
        if not self._kept.done():
            self._kept.set_exception(LaunchFailed(f"keeper {self.child.pid} ended before it made a worker"))
            self._kept.exception()
        if self._empty is not None and not self._empty.done():
            self._empty.cancel()

    async def sweep(self, limit_s: float) -> frames.Empty | None:
        """Have everything below the keeper killed. Returns its word that the kernel said ECHILD, None without it."""
        if self._channel.ended:
            return None
        answer = self._empty = asyncio.get_running_loop().create_future()
        self._channel.send(frames.Sweep())
        await asyncio.wait({answer}, timeout=limit_s)
        return answer.result() if answer.done() and not answer.cancelled() else None

    def below(self) -> list[int]:
        """Children of the keeper as the kernel lists them; empty when it is gone."""
        return children(self.child.pid)

    async def dismiss(self) -> None:
        """Kill and reap the keeper; whatever is still below it becomes our own child. A second call does nothing."""
        if self._dismissed:
            return
        self._dismissed = True
        self.child.kill()
        await self.child.gone.wait()
        self._channel.drain()  # a wait status that it sent before it reaped is nowhere else
        self._channel.close()
        self.child.collect()
        self._reaper.forget(self.child)
