"""Loads the registry as a start would, in a process of its own that is killed afterwards with all that it started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from protocol.errors import CrewError, StartError
from protocol.frames import User
from supervisor import processes
from supervisor.cgroup import Tree
from supervisor.config import Settings, resolve_worker_user
from supervisor.doctor.finding import Said, failure, ok, warning
from supervisor.doctor.kernel import probed_tree
from supervisor.launcher import Launcher
from supervisor.loader import LaunchSettings, Loader
from supervisor.workspace import Workspace

#: How long the end of what the import left running is waited for, seconds.
CLEAN_DEADLINE_S = 5.0


def registry(settings: Settings) -> Said:
    """Whether it can be imported, what it has, and how workers would be launched from it."""
    try:
        user = resolve_worker_user(settings)
    except CrewError as error:
        return failure(f"not loaded: {error.detail}", "see worker_user")
    with tempfile.TemporaryDirectory(prefix="crew-supervisor-doctor-") as made:
        workspace = Workspace(Path(made), None if user is None else (user.uid, user.gid))
        try:
            with _orphans_removed():
                launcher = asyncio.run(_load(settings, user, workspace))
        except StartError as error:
            return _refused(error.detail, settings)
    return _judge(launcher)


def _refused(text: str, settings: Settings) -> Said:
    """The first line says it all; the others are the traceback."""
    detail, _, advice = text.partition("\n")[0].partition("; ")
    if detail.startswith("the registry import leaves"):
        return failure(detail, advice)
    detail = text.partition("\n")[0].partition("; see ")[0]
    if "registry_timeout_s" in detail:
        return failure(detail, "import less, or raise registry_timeout_s")
    module = settings.registry.partition(":")[0]
    return failure(detail, f"make `python -c 'import {module}'` work in this environment and directory")


def _judge(launcher: Launcher) -> Said:
    report = launcher.report
    crewai = f"crewai {report.crewai}" if report.crewai else "no crewai"
    detail = f"{len(report.crews)} crews, {crewai}, imported in {report.import_s:.1f} s"
    if launcher.mode.name == "fork":
        return ok(f"{detail}; no thread is left, so that workers are forked")
    detail = f"{detail}; workers are spawned, which takes seconds: {launcher.reason}"
    if launcher.loader.settings.mode == "spawn":
        return ok(detail)
    return warning(detail, "build crews inside functions, so that the import starts nothing")


async def _load(settings: Settings, user: User | None, workspace: Workspace) -> Launcher:
    """Choose a mode as the start does, then kill what was started for it. Raises StartError."""
    reaper = processes.Reaper()
    reaper.install()
    launching = LaunchSettings.of(
        settings, open_files=resource.getrlimit(resource.RLIMIT_NOFILE), workspace=workspace, epoch=0, user=user
    )
    tree = _tree(settings)
    launcher = Launcher(Loader(msgspec.structs.replace(launching, standby=1), tree, reaper))
    try:
        await launcher.start()
        return launcher
    finally:
        await launcher.close()
        if tree is not None:
            tree.remove()


def _tree(settings: Settings) -> Tree | None:
    if settings.stop_method in ("group", "keeper"):
        return None
    try:
        return probed_tree(settings)
    except StartError:
        return None


@contextlib.contextmanager
def _orphans_removed() -> Iterator[None]:
    """Adopt what the import leaves running, and kill it; children that were there before are left alone."""
    before = set(processes.children())
    processes.become_subreaper()
    try:
        yield
    finally:
        give_up = time.monotonic() + CLEAN_DEADLINE_S
        while (left := set(processes.children()) - before) and time.monotonic() < give_up:
            for pid in left:
                os.kill(pid, signal.SIGKILL)  # our own unreaped child: the pid cannot be a stranger's
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)
