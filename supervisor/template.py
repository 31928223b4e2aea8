"""The parent side of one template or standby process: start, report, launches, end."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import os
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from protocol import frames, points
from protocol.errors import CrewError, ProtocolViolation
from supervisor.capture import Capture
from supervisor.cgroup import Leaf
from supervisor.channel import Channel
from supervisor.processes import Child, Identity, Reaper, descendants, identify, identify_child, resident_bytes

#: Descriptor of the control socket in the new process.
CONTROL_FD = 3
#: Kept of a template's output, for the report of a failed start.
OUTPUT_BYTES = 1 << 20


class TemplateFailed(CrewError):
    """The registry cannot be loaded, or the template died."""

    code = "template_failed"
    status = 503
    title = "Workers cannot be launched"


class LaunchFailed(CrewError):
    """A worker could not be made; ``go`` was never sent."""

    code = "launch_failed"
    status = 503
    title = "Worker could not be launched"


class Role(msgspec.Struct, frozen=True, kw_only=True):
    """How to start a process of ``python -m worker``."""

    name: str
    registry: str
    preload: tuple[str, ...]
    environment: Mapping[str, str]
    open_files: tuple[int, int]
    output: Path
    user: frames.User | None = None


class TemplateProcess:
    """One running template or standby. Make it with ``start``."""

    def __init__(self, role: Role, child: Child, leaf: Leaf | None, reaper: Reaper, capture: Capture) -> None:
        self.role = role
        self.child = child
        self.leaf = leaf
        self.ready: asyncio.Future[frames.Ready] = asyncio.get_running_loop().create_future()
        self.relayed: dict[int, Child] = {}
        self.on_lost: Callable[[TemplateProcess], None] = lambda process: None
        self._reaper = reaper
        self._capture = capture
        self._channel: Channel[frames.FromTemplate]
        self._launches: dict[int, asyncio.Future[frames.Launched]] = {}
        self._ids = itertools.count(1)
        self._destroyed = False
        #: Processes that the import itself left in the leaf; they belong to the template, not to a job.
        self.residents: frozenset[Identity] = frozenset()
        self._resident_at_ready: int | None = None

    @classmethod
    def start(cls, role: Role, leaf: Leaf | None, reaper: Reaper) -> TemplateProcess:
        """Start the process. Must run in the main thread: PDEATHSIG follows the thread that made the child."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        read_fd, write_fd = os.pipe()
        with theirs:
            pid = _spawn(role.environment, theirs.fileno(), write_fd)
        os.close(write_fd)
        identity = identify_child(pid)
        if identity is None:
            raise TemplateFailed(f"the {role.name} vanished at its start")
        child = Child(identity)
        reaper.add(child)
        capture = Capture(role.output, OUTPUT_BYTES)
        capture.attach(read_fd, role.name)
        process = cls(role, child, leaf, reaper, capture)
        process._open(ours)
        return process

    def _open(self, sock: socket.socket) -> None:
        self._channel = Channel(sock, frames.FromTemplate, on_frame=self._on_frame, on_end=self._on_end)
        leaf_fd = self.leaf.open() if self.leaf else None
        load = frames.Load(
            version=frames.PROTOCOL_VERSION,
            role=self.role.name,
            registry=self.role.registry,
            preload=self.role.preload,
            open_files=self.role.open_files,
            leaf=leaf_fd is not None,
            supervisor_pid=os.getpid(),
            user=self.role.user,
        )
        self._channel.send(load, [] if leaf_fd is None else [leaf_fd])
        if leaf_fd is not None:
            os.close(leaf_fd)  # a fresh socket has room: the message is in the kernel, and so is the descriptor

    @property
    def launches_pending(self) -> bool:
        """Whether a newborn may exist that nobody has told us of."""
        return bool(self._launches)

    @property
    def usable(self) -> bool:
        """Whether a launch may be sent."""
        return not self._channel.ended and self.ready.done() and self.ready.exception() is None

    @property
    def grown_bytes(self) -> int:
        """By how much its resident memory is more than when it was ready."""
        now = resident_bytes(self.child.pid)
        return now - self._resident_at_ready if now is not None and self._resident_at_ready is not None else 0

    async def launch(self, launch: frames.Launch, descriptors: list[int]) -> frames.Launched:
        """Have one worker made. Raises LaunchFailed, TemplateFailed when the process ends first."""
        launch_id = next(self._ids)
        answer: asyncio.Future[frames.Launched] = asyncio.get_running_loop().create_future()
        self._launches[launch_id] = answer
        try:
            if self._channel.ended:
                raise TemplateFailed(f"the {self.role.name} is gone")
            self._channel.send(msgspec.structs.replace(launch, launch_id=launch_id), descriptors)
            points.reach("launch.sent")
            return await answer
        finally:
            self._launches.pop(launch_id, None)

    def _on_frame(self, frame: frames.FromTemplate) -> None:
        match frame:
            case frames.Ready():
                self._settle_ready(frame)
            case frames.LoadFailed():
                detail = f"registry {self.role.registry}: {frame.error_type}: {frame.detail}\n{frame.traceback}"
                self._fail_ready(detail)
            case frames.Launched():
                answer = self._launches.get(frame.launch_id)
                if answer is not None and not answer.done():
                    answer.set_result(frame)
            case frames.LaunchFailed():
                answer = self._launches.get(frame.launch_id)
                if answer is not None and not answer.done():
                    answer.set_exception(LaunchFailed(frame.detail))
            case frames.Exited():
                child = self.relayed.pop(frame.pid, None)
                if child is not None:
                    child.settle(frame.status)

    def _settle_ready(self, frame: frames.Ready) -> None:
        if frame.version != frames.PROTOCOL_VERSION:
            self._fail_ready(f"the {self.role.name} speaks protocol {frame.version}, not {frames.PROTOCOL_VERSION}")
        elif not self.ready.done():
            self.residents = self._find_residents()
            self._resident_at_ready = resident_bytes(self.child.pid)
            self.ready.set_result(frame)

    def _find_residents(self) -> frozenset[Identity]:
        """What the import left running: in the leaf, or without one, below the template and orphaned to us."""
        pids = self.leaf.pids() if self.leaf is not None else [*descendants(self.child.pid), *self._reaper.unknown()]
        return frozenset(identity for identity in map(identify, pids) if identity is not None)

    def _fail_ready(self, detail: str) -> None:
        if not self.ready.done():
            self.ready.set_exception(TemplateFailed(detail))
            self.ready.exception()  # retrieved: a start that nobody awaits any more must not warn

    def _on_end(self, why: ProtocolViolation | None) -> None:
        reason = why.detail if why else f"the {self.role.name} (pid {self.child.pid}) ended"
        self._fail_ready(f"registry {self.role.registry}: {reason} while it was loaded; see {self.role.output}")
        self._fail_launches(reason)
        if not self._destroyed:
            self.on_lost(self)

    def _fail_launches(self, reason: str) -> None:
        for answer in self._launches.values():
            if not answer.done():
                answer.set_exception(TemplateFailed(f"the {self.role.name} ended before it answered: {reason}"))

    def release(self) -> None:
        """A standby became a worker: let go of the control pipe and of its output."""
        self._channel.close()
        self._capture.close()

    async def destroy(self) -> None:
        """Kill it with everything that its import started, and reap it. A second call does nothing."""
        if self._destroyed:
            return
        self._destroyed = True
        self._fail_launches("it was killed")
        self.child.kill()
        await self.child.gone.wait()
        self._channel.drain()  # a wait status that it sent before it reaped is nowhere else
        self._channel.close()
        self.child.collect()
        self._reaper.forget(self.child)
        self._capture.close()
        if self.leaf is not None:
            await empty_and_remove(self.leaf)


async def empty_and_remove(leaf: Leaf) -> None:
    """Kill what is in a leaf that belongs to no job, wait until the kernel calls it empty, remove it."""
    while leaf.populated():
        leaf.kill()
        leaf.sweep()
        await asyncio.sleep(0.001)
    with contextlib.suppress(OSError):
        leaf.remove()


def _spawn(environment: Mapping[str, str], control_fd: int, output_fd: int) -> int:
    # Sources above the targets: dup2 onto itself would keep close-on-exec.
    sources = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 16) for fd in (control_fd, output_fd)]
    try:
        return os.posix_spawn(
            sys.executable,
            [sys.executable, "-m", "worker", str(CONTROL_FD)],
            dict(environment),
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, sources[1], 1),
                (os.POSIX_SPAWN_DUP2, sources[1], 2),
                (os.POSIX_SPAWN_DUP2, sources[0], CONTROL_FD),
            ],
            setsid=True,
            setsigmask=(),
        )
    finally:
        for fd in sources:
            os.close(fd)
