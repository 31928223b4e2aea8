"""Starts templates and standbys, waits for their report, discards them, and knows which of them live."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections.abc import Mapping
from pathlib import Path

import msgspec

from protocol import frames, points
from supervisor.cgroup import Leaf, Tree
from supervisor.config import Settings
from supervisor.environment import worker_environment
from supervisor.keeper import Keeper
from supervisor.limits import plan
from supervisor.processes import Child, Identity, Reaper, cgroup_of, identify
from supervisor.template import LaunchFailed, Role, TemplateFailed, TemplateProcess, empty_and_remove
from supervisor.workspace import Workspace

#: Waits between attempts to start a template that failed, seconds; the last repeats.
RESTART_DELAYS_S = (0.1, 0.5, 2.0, 5.0, 15.0)
#: End of the launch method of a worker in a PID namespace.
NAMESPACED = "+pid_namespace"
#: End of the launch method of a worker that cannot leave the cgroup that was given to its supervisor.
SEALED = "+sealed"


class LaunchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What launching needs of the configuration; ``mode``: auto, fork or spawn; times in seconds."""

    registry: str
    preload: tuple[str, ...]
    mode: str
    standby: int
    launch_timeout_s: float
    registry_timeout_s: float
    environment: Mapping[str, str]
    open_files: tuple[int, int]
    output_directory: Path
    #: Of the journal; tells leaves of this process from what an earlier one left.
    epoch: int
    #: Growth of a template that has it replaced; 0: never.
    recycle_growth_bytes: int = 0
    #: Whom workers run as; None: as the supervisor.
    user: frames.User | None = None
    #: Whether each worker is to be the init of a PID namespace, where the kernel allows it.
    namespace: bool = False
    #: Whether each worker gets a keeper where there is no cgroup.
    keeper: bool = False

    @classmethod
    def of(
        cls,
        settings: Settings,
        *,
        open_files: tuple[int, int],
        workspace: Workspace,
        epoch: int,
        user: frames.User | None,
    ) -> LaunchSettings:
        """What the settings say about launching; ``open_files`` are the limits that we were started with."""
        environment = worker_environment(os.environ, settings.worker_user, home=workspace.template)
        return cls(
            registry=settings.registry,
            preload=settings.preload,
            recycle_growth_bytes=settings.recycle_growth_bytes,
            mode=settings.launch,
            standby=settings.standby,
            launch_timeout_s=settings.launch_timeout_s,
            registry_timeout_s=settings.registry_timeout_s,
            environment=environment | {"CREWAI_STORAGE_DIR": str(workspace.template)},
            open_files=open_files,
            output_directory=workspace.root,
            epoch=epoch,
            keeper=settings.stop_method != "group",
            user=user,
            namespace=settings.pid_namespace == "auto" and user is None and os.geteuid() == 0,
        )


class Launched(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that exists and has not said hello yet. ``leaf`` is where it and all that it starts live.

    ``method``: how it was made; ``+pid_namespace`` at its end if it is the init of a namespace of its own, ``+sealed``
    if it cannot leave the cgroup that was given to the supervisor.
    """

    child: Child
    leaf: Leaf | None
    method: str
    keeper: Keeper | None = None


class Loader:
    """Owns every template and standby process."""

    def __init__(self, settings: LaunchSettings, tree: Tree | None, reaper: Reaper) -> None:
        self.settings = settings
        self.tree = tree
        self._reaper = reaper
        self._names = itertools.count(1)
        self._processes: set[TemplateProcess] = set()
        self._newborn_leaves: set[str] = set()
        reaper.may_be_newborn = self._is_unannounced

    @property
    def pids(self) -> list[int]:
        """Templates and standbys that were started and not discarded."""
        return [process.child.pid for process in self._processes]

    @property
    def newborn_leaves(self) -> frozenset[str]:
        """Leaves of launches under way, as /proc/PID/cgroup names them."""
        return frozenset(self._newborn_leaves)

    @property
    def leaves(self) -> list[Leaf]:
        """Leaves of the templates and standbys that live."""
        return [process.leaf for process in self._processes if process.leaf is not None]

    def is_resident(self, identity: Identity) -> bool:
        """Whether the import of a template that lives started that process: it belongs to no job."""
        return any(identity in process.residents for process in self._processes)

    def may_be_newborn(self, where: str) -> bool:
        """Whether an unknown child in the cgroup ``where`` may be a launch that has not been announced yet.

        Plain clone makes the child in the template's leaf; it moves itself as its first act. Without cgroups any place
        will do.
        """
        pending = [process for process in self._processes if process.launches_pending]
        return any(process.leaf is None or process.leaf.proc_path == where for process in pending)

    def _is_unannounced(self, pid: int) -> bool:
        where = cgroup_of(pid) or ""
        return where in self._newborn_leaves or self.may_be_newborn(where)

    async def load(self, role_name: str) -> tuple[TemplateProcess, frames.Ready]:
        """Start one process and wait for its report. Raises TemplateFailed; nothing of it is left then."""
        settings = self.settings
        role = Role(
            name=role_name,
            registry=settings.registry,
            preload=settings.preload,
            environment=settings.environment,
            open_files=settings.open_files,
            output=settings.output_directory / f"{role_name}.log",
            user=settings.user,
        )
        leaf = self.tree.make(f"{role_name}-{settings.epoch}.{next(self._names)}") if self.tree else None
        process = TemplateProcess.start(role, leaf, self._reaper)
        self._processes.add(process)
        try:
            async with asyncio.timeout(settings.registry_timeout_s):
                return process, await asyncio.shield(process.ready)
        except TimeoutError:
            await self.discard(process)
            raise TemplateFailed(
                f"registry {settings.registry} was not loaded within registry_timeout_s = "
                f"{settings.registry_timeout_s:g} s; see {role.output}"
            ) from None
        except BaseException:
            await self.discard(process)
            raise

    async def discard(self, process: TemplateProcess) -> None:
        """Kill a process with all that its import started."""
        await process.destroy()
        self._processes.discard(process)

    def release(self, process: TemplateProcess) -> None:
        """A standby became a worker: it and its leaf are the job's now."""
        self._processes.discard(process)

    async def discard_all(self) -> None:
        """Kill everything that is left, for the end of the supervisor."""
        for process in list(self._processes):
            await self.discard(process)

    async def fork(
        self, process: TemplateProcess, launch: frames.Launch, descriptors: list[int], name: str
    ) -> Launched:
        """Have ``process`` fork one worker into a new leaf ``name``. Raises LaunchFailed or TemplateFailed."""
        if self.tree is None:
            return await self._fork_keeper(process, launch, descriptors)
        launch = msgspec.structs.replace(launch, namespace=self.settings.namespace)
        leaf = self.tree.make(name)
        points.reach("launch.leaf_made")
        leaf_fd = leaf.open()
        self._newborn_leaves.add(leaf.proc_path)
        try:
            launch = self._limited(launch, leaf)
            if self.settings.user is None:
                wanted = msgspec.structs.replace(launch, leaf=True)
                answer = await self._ask(process, wanted, [*descriptors, leaf_fd])
                child = self._adopt(process, answer)
            else:
                # Another user may not enter a leaf, nor leave one: the newborn waits in the template's for this move.
                answer = await self._ask(process, launch, descriptors)
                child = self._adopt(process, answer)
                leaf.add(child.pid)
            return Launched(child=child, leaf=leaf, method=self._method(answer))
        except BaseException:
            await empty_and_remove(leaf)
            raise
        finally:
            os.close(leaf_fd)
            self._newborn_leaves.discard(leaf.proc_path)

    async def _fork_keeper(
        self, process: TemplateProcess, launch: frames.Launch, descriptors: list[int]
    ) -> Launched:
        """Without a cgroup: have a keeper forked, which forks the worker."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            wanted = msgspec.structs.replace(launch, keeper=self.settings.keeper)
            passed = [*descriptors, theirs.fileno()] if self.settings.keeper else descriptors
            answer = await self._ask(process, wanted, passed)
        child = self._adopt(process, answer)
        if not self.settings.keeper:
            ours.close()
            return Launched(child=child, leaf=None, method=answer.method)
        keeper = Keeper(child, ours, self._reaper)
        try:
            worker = await keeper.worker(self.settings.launch_timeout_s)
        except BaseException:
            await keeper.dismiss()
            raise
        return Launched(child=worker, leaf=None, method=answer.method, keeper=keeper)

    async def become(self, process: TemplateProcess, launch: frames.Launch, descriptors: list[int]) -> Launched:
        """Have a standby become the worker, in the leaf it has. Raises LaunchFailed or TemplateFailed."""
        if process.leaf is not None:
            launch = self._limited(launch, process.leaf)
        answer = await self._ask(process, launch, descriptors)
        self.release(process)
        process.release()
        return Launched(child=process.child, leaf=process.leaf, method=self._method(answer))

    def _method(self, answer: frames.Launched) -> str:
        sealed = self.tree is not None and self.tree.sealed
        return answer.method + (SEALED if sealed else "") + (NAMESPACED if answer.namespace else "")

    def _limited(self, launch: frames.Launch, leaf: Leaf) -> frames.Launch:
        """Put the crew's limits in force in its leaf; what no controller does is left to the worker. Raises OSError."""
        assert self.tree is not None
        division = plan(launch.limits, self.tree.controllers)
        leaf.write(division.files)
        return msgspec.structs.replace(launch, limits=division.rlimits)

    async def _ask(self, process: TemplateProcess, launch: frames.Launch, descriptors: list[int]) -> frames.Launched:
        try:
            async with asyncio.timeout(self.settings.launch_timeout_s):
                return await process.launch(launch, descriptors)
        except TimeoutError:
            await self.discard(process)
            process.on_lost(process)
            raise LaunchFailed(
                f"the {process.role.name} did not answer within launch_timeout_s = "
                f"{self.settings.launch_timeout_s:g} s and was killed"
            ) from None

    def _adopt(self, process: TemplateProcess, answer: frames.Launched) -> Child:
        points.reach("launch.answered")
        identity = identify(answer.pid)
        if identity is None:
            raise LaunchFailed(f"worker {answer.pid} ended before it could be identified")
        child = Child(identity, relayed=answer.method == "fork")
        self._reaper.add(child)
        if child.relayed:
            process.relayed[answer.pid] = child
        return child


def is_namespaced(method: str) -> bool:
    """Whether a worker made so was the init of a PID namespace of its own."""
    return method.endswith(NAMESPACED)


def is_sealed(method: str) -> bool:
    """Whether a worker made so could not leave the cgroup that was given to its supervisor."""
    return SEALED in method
