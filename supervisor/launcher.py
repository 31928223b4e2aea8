"""Decides between forking from a template and standby interpreters, and keeps the chosen means ready."""

from __future__ import annotations

import asyncio
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine

from protocol import frames
from protocol.errors import StartError
from supervisor.loader import RESTART_DELAYS_S, Launched, Loader
from supervisor.log import bind, get_log
from supervisor.template import TemplateFailed, TemplateProcess

log = get_log(__name__)
#: How long a launch waits for a template that is being restarted, seconds.
RESTART_PATIENCE_S = 30.0
#: Between two replacements of a template that grows, seconds.
RECYCLE_PAUSE_S = 10.0


class Mode(ABC):
    """One way of launching."""

    name: str

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._tasks: set[asyncio.Task[None]] = set()
        self.restarts = 0
        self.last_failure: str | None = None
        #: Told what a template reports that was started without being asked for.
        self.on_loaded: Callable[[frames.Ready], None] = lambda report: None

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether a launch could be made now."""

    @abstractmethod
    async def launch(self, launch: frames.Launch, descriptors: list[int], name: str) -> Launched:
        """Make one worker. Raises LaunchFailed or TemplateFailed; nothing of it is left then."""

    @abstractmethod
    async def reload(self) -> frames.Ready:
        """Load the registry anew and launch from it from now on. Raises TemplateFailed and keeps the old one."""

    def _own(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load_persistently(self, role: str) -> tuple[TemplateProcess, frames.Ready]:
        for attempt in itertools.count():
            try:
                loaded = await self._loader.load(role)
            except TemplateFailed as error:
                self.last_failure = error.detail
                log.error("template_start_failed", role=role, attempt=attempt + 1)
                await asyncio.sleep(RESTART_DELAYS_S[min(attempt, len(RESTART_DELAYS_S) - 1)])
                continue
            self.last_failure = None
            return loaded
        raise AssertionError("unreachable")

    async def close(self) -> None:
        """Stop the upkeep; the processes are the loader's to kill."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class ForkMode(Mode):
    """Fork from one template; start another when it dies."""

    name = "fork"

    def __init__(self, loader: Loader, template: TemplateProcess) -> None:
        super().__init__(loader)
        self._present = asyncio.Event()
        self._template: TemplateProcess | None = None
        self._recycle_after = time.monotonic()
        self._adopt(template)

    @property
    def alive(self) -> bool:
        return self._template is not None and self._template.usable

    def _adopt(self, template: TemplateProcess) -> None:
        self._template = template
        template.on_lost = self._lost
        self._present.set()

    def _lost(self, template: TemplateProcess) -> None:
        if template is self._template:
            log.error("template_lost", pid=template.child.pid)
            self._template = None
            self._present.clear()
            self.restarts += 1
            self._own(self._restart(template))

    async def _restart(self, lost: TemplateProcess) -> None:
        await self._loader.discard(lost)
        template, report = await self._load_persistently("template")
        if self._template is not None:
            await self._loader.discard(template)  # a reload was quicker
            return
        self._adopt(template)
        self.on_loaded(report)

    async def launch(self, launch: frames.Launch, descriptors: list[int], name: str) -> Launched:
        try:
            async with asyncio.timeout(RESTART_PATIENCE_S):
                await self._present.wait()
        except TimeoutError:
            raise TemplateFailed(f"no template: {self.last_failure or 'it is being restarted'}") from None
        assert self._template is not None
        launched = await self._loader.fork(self._template, launch, descriptors, name)
        self._look_at_growth()
        return launched

    def _look_at_growth(self) -> None:
        """Replace a template that its forks have made too large. One read of /proc a launch, no timer."""
        limit, template = self._loader.settings.recycle_growth_bytes, self._template
        if not limit or template is None or time.monotonic() < self._recycle_after:
            return
        grown = template.grown_bytes
        if grown > limit:
            self._recycle_after = time.monotonic() + RECYCLE_PAUSE_S
            self._own(self._recycle(template.child.pid, grown))

    async def _recycle(self, pid: int, grown_bytes: int) -> None:
        try:
            self.on_loaded(await self.reload())
        except TemplateFailed as error:
            log.error("template_not_recycled", pid=pid, grown_bytes=grown_bytes, detail=error.detail)
        else:
            log.info("template_recycled", pid=pid, grown_bytes=grown_bytes)

    async def reload(self) -> frames.Ready:
        template, report = await self._loader.load("template")
        unsafe = unsafe_to_fork(report)
        if unsafe:
            await self._loader.discard(template)
            raise TemplateFailed(f"the registry now leaves {unsafe} behind; restart the supervisor to launch by spawn")
        old, self._template = self._template, None
        self._adopt(template)
        if old is not None:
            self._own(self._retire(old))
        return report

    async def _retire(self, template: TemplateProcess) -> None:
        # Children whose status is relayed need it to live on.
        while template.launches_pending or template.relayed:
            for child in list(template.relayed.values()):
                await child.gone.wait()
            await asyncio.sleep(0.01)
        await self._loader.discard(template)


class SpawnMode(Mode):
    """Standby interpreters that have imported everything; each becomes one worker."""

    name = "spawn"

    def __init__(self, loader: Loader, first: TemplateProcess) -> None:
        super().__init__(loader)
        self._idle: asyncio.Queue[TemplateProcess] = asyncio.Queue()
        self._keep(first)
        for _ in range(loader.settings.standby - 1):
            self._own(self._refill())

    @property
    def alive(self) -> bool:
        return not self._idle.empty() or self.last_failure is None

    def _keep(self, standby: TemplateProcess) -> None:
        standby.on_lost = self._lost
        self._idle.put_nowait(standby)

    def _lost(self, standby: TemplateProcess) -> None:
        log.error("standby_lost", pid=standby.child.pid)
        self.restarts += 1

    async def _refill(self) -> None:
        standby, _ = await self._load_persistently("standby")
        self._keep(standby)

    async def launch(self, launch: frames.Launch, descriptors: list[int], name: str) -> Launched:
        while True:
            if self._idle.empty() and not self._loader.settings.standby:
                standby, _ = await self._loader.load("standby")
            else:
                standby = await self._idle.get()
                if self._loader.settings.standby:
                    self._own(self._refill())
            if standby.usable:
                standby.on_lost = lambda process: None
                return await self._loader.become(standby, launch, descriptors)
            await self._loader.discard(standby)

    async def reload(self) -> frames.Ready:
        standby, report = await self._loader.load("standby")
        while not self._idle.empty():
            self._own(self._replace(self._idle.get_nowait()))
        self._keep(standby)
        return report

    async def _replace(self, standby: TemplateProcess) -> None:
        standby.on_lost = lambda process: None
        await self._loader.discard(standby)
        if self._idle.qsize() < self._loader.settings.standby:
            await self._refill()


def unsafe_to_fork(report: frames.Ready) -> str:
    """What makes forking from that process unsafe, empty if nothing does."""
    return ", ".join(sorted({f"thread {name}" for name in report.threads} | set(report.descriptors)))


class Launcher:
    """The chosen mode, and why it was chosen."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self.mode: Mode
        self.reason = f'launch = "{loader.settings.mode}"'
        self.report: frames.Ready
        self.crew_ids: frozenset[str] = frozenset()

    def _adopt(self, report: frames.Ready) -> None:
        self.report = report
        bind(registry_digest=report.registry_digest)
        self.crew_ids = frozenset(crew.crew_id for crew in report.crews)

    async def start(self) -> None:
        """Load the registry and choose. Raises StartError with the import's traceback."""
        try:
            self.mode = await self._choose()
        except TemplateFailed as error:
            raise StartError(error.detail) from None
        self.mode.on_loaded = self._adopt
        log.info("launch_mode", mode=self.mode.name, reason=self.reason, import_s=round(self.report.import_s, 3))

    async def _choose(self) -> Mode:
        wanted = self.loader.settings.mode
        if wanted != "spawn":
            template, report = await self.loader.load("template")
            unsafe = unsafe_to_fork(report)
            if not unsafe:
                self._adopt(report)
                return ForkMode(self.loader, template)
            await self.loader.discard(template)
            self.reason = f"the registry import leaves {unsafe} behind, so forking is unsafe"
            if wanted == "fork":
                raise StartError(f'{self.reason}; build crews inside functions, or set launch = "spawn"')
        if self.loader.tree is None and self.loader.settings.keeper:
            raise StartError(
                f"{self.reason}, and without a writable cgroup the stop of a spawned worker could not be proved; "
                'give the supervisor a cgroup v2 directory, or set stop_method = "group" to accept stops without proof'
            )
        standby, report = await self.loader.load("standby")
        self._adopt(report)
        return SpawnMode(self.loader, standby)

    async def launch(self, launch: frames.Launch, descriptors: list[int], name: str) -> Launched:
        """Make one worker, in a leaf called ``name`` where a new one is made. See Mode.launch."""
        return await self.mode.launch(launch, descriptors, name)

    async def reload(self) -> frames.Ready:
        """See Mode.reload."""
        self._adopt(await self.mode.reload())
        log.info("registry_reloaded", digest=self.report.registry_digest)
        return self.report

    async def close(self) -> None:
        """Kill every template and standby."""
        if hasattr(self, "mode"):
            await self.mode.close()
        await self.loader.discard_all()
