"""What the supervisor says of itself: the contract's health document and the readiness checks behind it."""

from __future__ import annotations

from importlib import metadata

import msgspec

from protocol.operations import CONTROL_OPERATIONS
from supervisor.cgroup import Tree
from supervisor.jobs import Jobs
from supervisor.run.means import Means

try:
    VERSION = metadata.version("crew-supervisor")
except metadata.PackageNotFoundError:
    VERSION = "0+unknown"


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /health``. The fields down to ``training_directory`` are the contract's."""

    status: str
    crews: list[str]
    active_runs: int
    retained_runs: int
    max_retained_runs: int
    durable_journal: bool
    stream_checkpoint_events: int
    operations: list[str]
    training_directory: bool
    version: str
    instance_id: str
    epoch: int
    config_digest: str
    registry_digest: str
    crewai_version: str | None
    launch_mode: str
    launch_reason: str
    stop_method: str
    running: int
    queued: int
    effects_unknown: int
    checks: dict[str, bool]


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /livez`` (``ok``) and ``GET /readyz`` (``ready`` or ``not_ready``)."""

    status: str


class HealthReport:
    """Answers from memory only: nothing of it waits for a disk, a worker or a crew."""

    def __init__(self, means: Means, jobs: Jobs, tree: Tree | None) -> None:
        self._means = means
        self._jobs = jobs
        fallback = "keeper" if means.launcher.loader.settings.keeper else "group"
        #: How the stops of jobs are carried out.
        self.stop_method = fallback if tree is None else "cgroup"

    def checks(self) -> dict[str, bool]:
        """Each thing that new work needs, and whether it is there."""
        return {
            "journal": self._means.journal.writable,
            "template": self._means.launcher.mode.alive,
            "slots": self._jobs.usable_slots > 0,
            "accepting": not self._jobs.draining,
        }

    @property
    def ready(self) -> bool:
        """Whether new work would be admitted and could run."""
        return all(self.checks().values())

    def document(self) -> Health:
        """The health document."""
        means, settings, report = self._means, self._means.settings, self._means.launcher.report
        return Health(
            status="ready" if self.ready else "not_ready",
            crews=sorted(means.launcher.crew_ids),
            active_runs=self._jobs.active,
            retained_runs=means.journal.retained,
            max_retained_runs=settings.max_retained_runs,
            durable_journal=not settings.ephemeral,
            stream_checkpoint_events=settings.stream_checkpoint_events,
            operations=sorted({operation.value for operation in settings.allowed_operations} | CONTROL_OPERATIONS),
            training_directory=settings.training_dir is not None,
            version=VERSION,
            instance_id=means.journal.instance_id,
            epoch=means.journal.epoch,
            config_digest=means.config_digest,
            registry_digest=report.registry_digest,
            crewai_version=report.crewai,
            launch_mode=means.launcher.mode.name,
            launch_reason=means.launcher.reason,
            stop_method=self.stop_method,
            running=self._jobs.running,
            queued=self._jobs.queued,
            effects_unknown=means.journal.effects.unknown,
            checks=self.checks(),
        )
