"""The serving process: what it needs, in the order in which it needs it, and back."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from protocol.errors import ConfigError, CrewError, StartError
from protocol.frames import User
from protocol.operations import Operation
from supervisor import processes
from supervisor.cgroup import Tree, open_tree
from supervisor.config import Settings, load, prepare_training_dir, resolve_worker_user
from supervisor.environment import raise_descriptor_limit
from supervisor.health import VERSION, HealthReport
from supervisor.http.edge import Edge
from supervisor.http.routes import Routes
from supervisor.init import serve_below_init
from supervisor.jobs import Jobs
from supervisor.journal import Journal, open_journal
from supervisor.launcher import Launcher
from supervisor.loader import LaunchSettings, Loader
from supervisor.log import bind, configure, get_log
from supervisor.metrics.exposition import Exposition
from supervisor.metrics.meters import Meters
from supervisor.notify import Notifier
from supervisor.pulse import Pulse, status_line
from supervisor.recovery import Recovery
from supervisor.run.mailbox import first
from supervisor.run.means import Means
from supervisor.sockets import inherited, is_local, place
from supervisor.strays import Hunter
from supervisor.threads import started_pool
from supervisor.workspace import Workspace

if TYPE_CHECKING:
    from supervisor.fleet import Fleet

log = get_log(__name__)
EXIT_OK = 0
#: Work is left running whose stop could not be proved.
EXIT_UNPROVED = 1
EXIT_CONFIG = 2
EXIT_START = 3
#: For short work on files, of all jobs.
IO_THREADS = 6
#: aiohttp's own wait for handlers at the end; ours have ended by then, seconds.
HTTP_SHUTDOWN_S = 1.0
#: Connections that may wait to be accepted.
BACKLOG = 1024
#: A connection that was accepted last may take this long to send its request, seconds; and between two looks.
LAST_REQUEST_S, LAST_REQUEST_POLL_S = 2.0, 0.01
#: What a start may take beside the bounded waits in it, seconds.
START_SLACK_S = 30.0
#: An idle connection, or one that never ends its request's head, is closed after this, seconds.
KEEPALIVE_S = 75.0
#: Allocations until the collector looks at what is young, and how many such looks until it looks at what is older, and
#: at all. By its own numbers it goes through every live job again and again, a quarter of an admission's time; by
#: larger ones what nobody needs any more stays for longer, and memory grows.
COLLECT_AFTER = (5_000, 10, 10)


def _collect_seldom() -> None:
    """What was made until now stays; of what comes and goes, little is left to the collector."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)


def main(config_path: Path | None) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit status."""
    serve_below_init()
    configure(environ=os.environ)
    bind(version=VERSION)
    # The watchdog's SIGABRT names the place where a blocked process stood.
    faulthandler.enable()
    try:
        # First of all: what is started from here on must not inherit them.
        sockets = inherited(os.environ)
        settings = load(config_path, os.environ)
        bind(config_digest=settings.digest)
        _check_exposure(settings, sockets)
        if Operation.TRAIN in settings.allowed_operations and settings.training_dir is not None:
            prepare_training_dir(settings.training_dir)
        user = resolve_worker_user(settings)
        return asyncio.run(Supervisor(settings, user, sockets).serve())
    except ConfigError as error:
        log.error("config_refused", detail=error.detail)
        return EXIT_CONFIG
    except StartError as error:
        log.error("start_refused", detail=error.detail)
        return EXIT_START


def _check_exposure(settings: Settings, sockets: list[socket.socket]) -> None:
    """Passed sockets take the place of host and port, and so must their check."""
    reachable = [place(found) for found in sockets if not is_local(found)]
    if reachable and not (settings.tokens and settings.state_file):
        raise ConfigError(
            f"socket {reachable[0]} was passed, which is not loopback, so the server cannot run without a bearer token"
            " and a state_file; set them, or ListenStream=127.0.0.1:8090"
        )


class Supervisor:
    """One serving process."""

    def __init__(self, settings: Settings, user: User | None, sockets: list[socket.socket]) -> None:
        self._settings = settings
        self._user = user
        self._sockets = sockets
        self._notifier = Notifier(os.environ)
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._reload = asyncio.Event()
        self._edge = Edge(
            settings.tokens, settings.read_tokens, dashboard=settings.dashboard, fleet=settings.fleet is not None
        )

    async def serve(self) -> int:
        """Start, serve, drain. Raises StartError; nothing is left running then."""
        async with contextlib.AsyncExitStack() as stack:
            return await self._serve(stack)

    async def _serve(self, stack: contextlib.AsyncExitStack) -> int:
        settings = self._settings
        # Recovery, and at most two imports of the registry.
        self._notifier.send(STATUS="recovering, then loading the registry")
        self._notifier.extend(settings.stop_timeout_s + 2 * settings.registry_timeout_s + START_SLACK_S)
        open_files, warning = raise_descriptor_limit(settings.max_concurrency)
        if warning:
            log.warning("descriptors_few", detail=warning)
        processes.become_undumpable()
        processes.become_subreaper()
        asyncio.get_running_loop().set_default_executor(started_pool(IO_THREADS, "io"))
        state_file, work_dir = self._places(stack)
        meters = Meters()
        journal = open_journal(state_file, import_limit_bytes=settings.max_state_bytes, watch=meters)
        stack.push_async_callback(journal.close)
        bind(instance_id=journal.instance_id)
        for text in journal.warnings:
            log.warning("journal_warning", detail=text)
        fleet = await self._join(journal, stack)
        user = self._user
        workspace = Workspace(work_dir, None if user is None else (user.uid, user.gid))
        tree = self._open_tree(journal, stack)
        reaper = processes.Reaper()
        reaper.install()
        recovery = Recovery(
            journal, tree, workspace, stop_timeout_s=settings.stop_timeout_s, confined=user is not None
        )
        recovered = await recovery.run()
        launching = LaunchSettings.of(
            settings, open_files=open_files, workspace=workspace, epoch=journal.epoch, user=user
        )
        loader = Loader(launching, tree, reaper)
        launcher = Launcher(loader)
        stack.push_async_callback(launcher.close)
        await launcher.start()
        jobs: Jobs
        hunter = Hunter(
            reaper,
            loader,
            lambda: [job.worker.work.leaf for job in jobs.live() if job.worker and job.worker.work.leaf],
        )
        means = Means(
            settings=settings,
            journal=journal,
            launcher=launcher,
            reaper=reaper,
            hunter=hunter,
            workspace=workspace,
            config_digest=settings.digest,
            meters=meters,
            effects=journal.effects if fleet is None else fleet.effects,
        )
        jobs = Jobs(means, None if fleet is None else fleet.ownership)
        hunter.on_killed = jobs.note_strays
        for job, task in recovered:
            jobs.adopt(job, task)
        jobs.trim_logs()
        health = HealthReport(means, jobs, tree, fleet)
        exposition = Exposition(means, jobs, health, fleet)
        if fleet is not None:
            fleet.attend(jobs, health)
        routes = Routes(means, jobs, health, exposition, fleet=fleet)
        return await self._listen(routes, jobs, means)

    async def _join(self, journal: Journal, stack: contextlib.AsyncExitStack) -> Fleet | None:
        """Be a replica of the fleet, if there is one. Raises StartError."""
        settings = self._settings.fleet
        if settings is None:
            return None
        try:
            from supervisor.fleet import Fleet
        except ImportError as error:
            raise StartError(f"fleet is set, but {error}; install crew-supervisor[fleet]") from None
        fleet = Fleet(settings, journal, version=VERSION)
        stack.push_async_callback(fleet.close)
        await fleet.enable()
        return fleet

    def _places(self, stack: contextlib.AsyncExitStack) -> tuple[Path, Path]:
        settings = self._settings
        if settings.state_file is not None and settings.work_dir is not None:
            return settings.state_file, settings.work_dir
        root = Path(tempfile.mkdtemp(prefix="crew-supervisor-"))
        stack.callback(shutil.rmtree, root, ignore_errors=True)
        return root / "journal.db", root / "work"

    def _open_tree(self, journal: Journal, stack: contextlib.AsyncExitStack) -> Tree | None:
        method = self._settings.stop_method
        if method == "group":
            log.warning("stops_unproved", detail='stop_method = "group": stops are carried out and never confirmed')
        if method in ("group", "keeper"):
            return None
        try:
            main = processes.is_main_of_unit(os.environ)
            tree = open_tree(self._settings.cgroup_root, journal.instance_id, main=main)
        except StartError as error:
            if method == "auto":
                log.info("stop_method", method="keeper", reason=error.detail)
                return None
            raise StartError(
                f"{error.detail}; give the supervisor a writable cgroup v2 directory (Delegate=yes, or cgroup_root), "
                'or set stop_method = "keeper"'
            ) from None
        stack.callback(tree.remove)
        log.info("stop_method", method="cgroup", cgroup=str(tree.base.path))
        return tree

    async def _listen(self, routes: Routes, jobs: Jobs, means: Means) -> int:
        runner = web.AppRunner(
            routes.application(self._edge),
            access_log=None,
            shutdown_timeout=HTTP_SHUTDOWN_S,
            keepalive_timeout=KEEPALIVE_S,
        )
        await runner.setup()
        try:
            await self._open_sites(runner)
            self._install_signals()
            address = runner.addresses[0]
            host, port = address[:2] if isinstance(address, tuple) else (address, None)
            log.info("listening", host=host, port=port, pid=os.getpid())
            _collect_seldom()
            async with self._pulsing(jobs, means) as pulse:
                self._notifier.send(READY=1)
                await self._until_stopped(means.launcher)
                self._notifier.send(STOPPING=1)
                pulse.draining = True
                pulse.beat()
                log.info("draining", running=jobs.running, queued=jobs.queued)
                proved = await jobs.shut_down(self._hurry)
                routes.close_streams()
                await self._stop_accepting(runner)
        finally:
            await runner.cleanup()
        log.info("stopped", proved=proved)
        return EXIT_OK if proved else EXIT_UNPROVED

    async def _open_sites(self, runner: web.AppRunner) -> None:
        settings = self._settings
        if self._sockets:
            for found in self._sockets:
                await web.SockSite(runner, found, backlog=BACKLOG).start()
                log.info("listening_on_passed_socket", address=place(found), ignored=f"{settings.host}:{settings.port}")
        else:
            try:
                await web.TCPSite(runner, settings.host, settings.port, backlog=BACKLOG).start()
            except OSError as error:
                raise StartError(f"cannot listen on {settings.host}:{settings.port}: {error.strerror}") from None

    async def _stop_accepting(self, runner: web.AppRunner) -> None:
        """Leave what still comes to the next process, to which the manager hands the same sockets."""
        if not self._sockets:
            return
        for site in list(runner.sites):
            await site.stop()
        log.info("listener_left")
        give_up = time.monotonic() + LAST_REQUEST_S
        # Who was accepted and is closed now would be told of a reset, though the next process could have answered.
        while runner.server and any(self._edge.is_silent(each.transport) for each in runner.server.connections):
            if time.monotonic() > give_up:
                break
            await asyncio.sleep(LAST_REQUEST_POLL_S)

    @contextlib.asynccontextmanager
    async def _pulsing(self, jobs: Jobs, means: Means) -> AsyncIterator[Pulse]:
        def status() -> str:
            journal = () if means.journal.writable else ("the journal cannot be written",)
            faults = (*journal, *(("drained by an operator",) if jobs.drain_asked else ()))
            unknown = means.journal.effects.unknown
            return status_line(running=jobs.running, queued=jobs.queued, unknown_effects=unknown, faults=faults)

        pulse = Pulse(self._notifier, means.journal, status)
        beating = asyncio.get_running_loop().create_task(pulse.run())
        try:
            pulse.beat()
            yield pulse
        finally:
            beating.cancel()
            await asyncio.wait({beating})

    def _install_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_stop_signal)
        loop.add_signal_handler(signal.SIGHUP, self._reload.set)

    def _on_stop_signal(self) -> None:
        """The first asks for a drain, the second ends it."""
        (self._hurry if self._stop.is_set() else self._stop).set()

    async def _until_stopped(self, launcher: Launcher) -> None:
        while not self._stop.is_set():
            waits = [asyncio.ensure_future(event.wait()) for event in (self._stop, self._reload)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
            if self._reload.is_set() and not self._stop.is_set():
                self._reload.clear()
                await self._reload_all(launcher)

    async def _reload_all(self, launcher: Launcher) -> None:
        """Read the tokens and load the registry anew; a stop does not wait for an import."""
        self._notifier.reloading()
        self._reload_tokens()
        reload = asyncio.get_running_loop().create_task(launcher.reload())
        await first(asyncio.wait({reload}), self._stop.wait())
        reload.cancel()
        try:
            await reload
        except asyncio.CancelledError:
            log.warning("reload_cut_short")
        except CrewError as error:
            log.error("reload_failed", detail=error.detail)
        self._notifier.send(READY=1)

    def _reload_tokens(self) -> None:
        """Read the tokens again; of the other settings none changes without a restart."""
        try:
            fresh = load(self._settings.config_file, os.environ)
        except ConfigError as error:
            log.error("tokens_not_reloaded", detail=error.detail)
            return
        self._edge.set_tokens(fresh.tokens, fresh.read_tokens)
        log.info("tokens_reloaded", tokens=len(fresh.tokens), read_tokens=len(fresh.read_tokens))
