"""The template process: imports CrewAI and the registry once, runs nothing, forks one worker per launch.

The same program is a *standby* where forking is unsafe: it imports the same things and becomes the worker itself.
"""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import select
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from importlib import metadata
from typing import NoReturn

from protocol import frames, points
from protocol.errors import ProtocolViolation
from worker import heap, keeper, registry, sandbox
from worker.channel import Channel, PipeClosed
from worker.job import EXIT_PIPE, Descriptors, become_worker
from worker.sibling import ForkMethod, SiblingForker

TemplateChannel = Channel[frames.ToTemplate]
ROLES = ("template", "standby")
#: Descriptors that a fork must not share: their owners would both use them.
UNSAFE_PREFIXES = ("socket:", "anon_inode:[eventpoll]", "anon_inode:[io_uring]")
UNSAFE_SUFFIXES = (".db", ".sqlite", ".sqlite3", ".db-wal", ".db-shm")


def threads() -> tuple[str, ...]:
    """Names of every thread but the main one, native ones included; none means that fork is safe."""
    found = []
    for tid in os.listdir("/proc/self/task"):
        if int(tid) != os.getpid():
            with contextlib.suppress(OSError), open(f"/proc/self/task/{tid}/comm", encoding="utf-8") as comm:
                found.append(comm.read().strip())
    return tuple(sorted(found))


def unsafe_descriptors(ours: int) -> tuple[str, ...]:
    """What the import left open that a fork must not share."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if int(name) > 2 and int(name) != ours and _is_unsafe(target):
                found.append(target)
    return tuple(sorted(found))


def _is_unsafe(target: str) -> bool:
    return target.startswith(UNSAFE_PREFIXES) or target.endswith(UNSAFE_SUFFIXES)


class Template:
    """State of one template or standby process."""

    def __init__(self, channel: TemplateChannel, load: frames.Load) -> None:
        self._channel = channel
        self._load = load
        self._crews: Mapping[str, object] = {}
        self._evaluators: Mapping[str, object] = {}
        self._effects: registry.Policies = {}
        #: Workers that could not be made the supervisor's own children.
        self._children: set[int] = set()
        self._filling: list[object] = []

    def prepare(self) -> None:
        """Import, check and report. Raises whatever the import raises."""
        began = time.monotonic()
        self._crews = registry.load(self._load.registry, self._load.preload)
        self._evaluators = registry.evaluators(self._load.registry)
        self._effects = registry.effects(self._load.registry, self._crews)
        gc.collect()
        if self._load.role == "template":
            self._filling = heap.fill_holes()
            heap.tidy()
        gc.freeze()
        points.reach("template.loaded")
        self._channel.send(
            frames.Ready(
                version=frames.PROTOCOL_VERSION,
                pid=os.getpid(),
                python=platform.python_version(),
                crewai=_crewai_version(),
                crews=registry.report(self._crews),
                registry_digest=registry.digest(self._load.registry, self._crews),
                threads=threads(),
                descriptors=unsafe_descriptors(self._channel.sock.fileno()),
                import_s=time.monotonic() - began,
            )
        )

    def serve_template(self) -> None:
        """Fork a worker per Launch until the supervisor closes the pipe, then exit."""
        forker = SiblingForker()
        wake = sandbox.wake_on_children()
        poll = select.poll()
        poll.register(self._channel.sock, select.POLLIN)
        poll.register(wake, select.POLLIN)
        collapsing = heap.collapse()
        done = False
        while True:
            ready = {fd for fd, _ in poll.poll(None if done else 0)}
            if not ready:
                done = next(collapsing, self) is self
            if wake in ready:
                sandbox.drain_wake(wake)
                self._relay()
            if self._channel.sock.fileno() in ready:
                for _ in collapsing:
                    pass  # before the first fork: it would take pages apart that a worker shares
                self._fork(forker, *self._receive_launch())

    def serve_standby(self) -> None:
        """Become the worker of the one Launch that comes."""
        launch, received = self._receive_launch()
        descriptors = Descriptors(launch, received)
        self._channel.send(frames.Launched(launch_id=launch.launch_id, pid=os.getpid(), method="standby"))
        self._become(launch, descriptors, in_leaf=False, namespace=False, parent_pid=launch.supervisor_pid)

    def _receive_launch(self) -> tuple[frames.Launch, list[int]]:
        frame, received = self._channel.receive()
        if not isinstance(frame, frames.Launch):
            raise ProtocolViolation(f"expected launch, got {type(frame).__name__}")
        return frame, received

    def _fork(self, forker: SiblingForker, launch: frames.Launch, received: list[int]) -> None:
        try:
            descriptors = Descriptors(launch, received)
            points.reach("template.asked")
            made = forker.fork(descriptors.leaf, namespace=launch.namespace)
            if made.pid == 0:
                parent = None if made.method is ForkMethod.FORK else launch.supervisor_pid
                if descriptors.keeper is not None:
                    self._keep(launch, descriptors)
                self._become(
                    launch, descriptors, in_leaf=made.in_leaf, namespace=made.namespace, parent_pid=parent
                )
            points.reach("template.forked")
            if made.method is ForkMethod.FORK:
                self._children.add(made.pid)
            self._channel.send(
                frames.Launched(
                    launch_id=launch.launch_id, pid=made.pid, method=made.method.value, namespace=made.namespace
                )
            )
        except (OSError, ProtocolViolation) as error:
            detail = f"{type(error).__name__}: {error}"
            self._channel.send(frames.LaunchFailed(launch_id=launch.launch_id, detail=detail))
        finally:
            for fd in received:
                os.close(fd)

    def _keep(self, launch: frames.Launch, descriptors: Descriptors) -> NoReturn:
        assert descriptors.keeper is not None

        def run_worker(keeper_pid: int) -> NoReturn:
            self._become(launch, descriptors, in_leaf=True, namespace=False, parent_pid=keeper_pid)

        keeper.keep(descriptors.keeper, launch.directories.job, run_worker)

    def _relay(self) -> None:
        """Collect our children that have ended, and no other process of the import's; tell their statuses."""
        for child in list(self._children):
            ended = sandbox.next_ended(child)
            if ended is not None:
                pid, status = ended
                self._channel.send(frames.Exited(pid=pid, status=status))
                os.waitpid(pid, 0)
                self._children.discard(pid)

    def _become(
        self,
        launch: frames.Launch,
        descriptors: Descriptors,
        *,
        in_leaf: bool,
        namespace: bool,
        parent_pid: int | None,
    ) -> NoReturn:
        become_worker(
            launch,
            descriptors,
            crews=self._crews,
            evaluators=self._evaluators,
            effects=self._effects,
            open_files=self._load.open_files,
            in_leaf=in_leaf,
            namespace=namespace,
            parent_pid=parent_pid,
        )


def _crewai_version() -> str | None:
    if "crewai" not in sys.modules:
        return None
    try:
        return metadata.version("crewai")
    except metadata.PackageNotFoundError:
        return None


def main(fd: int) -> None:
    """Entry of ``python -m worker FD``: the control socket is descriptor FD."""
    gc.disable()
    os.set_inheritable(fd, False)
    channel = TemplateChannel(socket.socket(fileno=fd), frames.ToTemplate)
    try:
        load, received = channel.receive()
        if not isinstance(load, frames.Load) or load.version != frames.PROTOCOL_VERSION or load.role not in ROLES:
            raise ProtocolViolation(f"expected load of version {frames.PROTOCOL_VERSION}")
        if load.leaf:
            sandbox.join_leaf(received[0])
        for descriptor in received:
            os.close(descriptor)
        if load.user is not None:
            sandbox.become_user(load.user)
        sandbox.die_with_parent(load.supervisor_pid)
        template = Template(channel, load)
        try:
            template.prepare()
        except BaseException as error:
            detail, trace = str(error)[:4096], traceback.format_exc()[-60_000:]
            channel.send(frames.LoadFailed(error_type=type(error).__name__, detail=detail, traceback=trace))
            raise
        if load.role == "template":
            template.serve_template()
        else:
            template.serve_standby()
    except (PipeClosed, ProtocolViolation, sandbox.ParentGone):
        os._exit(EXIT_PIPE)
