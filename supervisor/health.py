"""What the supervisor says of itself: the contract's health document and the readiness checks behind it."""

from __future__ import annotations

import os
from importlib import metadata

import msgspec

from protocol.operations import CONTROL_OPERATIONS
from supervisor.cgroup import Tree
from supervisor.jobs import Jobs
from supervisor.ownership import Membership
from supervisor.run.means import Means

try:
    VERSION = metadata.version("crew-supervisor")
except metadata.PackageNotFoundError:
    VERSION = "0+unknown"

#: Actions named in the reason of a check.
MAX_NAMED = 10


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
    """``GET /livez``: ``ok``."""

    status: str


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """``why`` it is not, null where it is."""

    ok: bool
    why: str | None = None


class Readiness(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``GET /readyz``: ``ready`` or ``not_ready``; to whoever has a token, the checks.

    ``readiness`` decides the status. ``durability``: whether what was said is on the disk. ``outcome``: whether it is
    known what became of work that has run; people decide where it is not, and new work goes on meanwhile.
    """

    status: str
    readiness: dict[str, Check] | msgspec.UnsetType = msgspec.UNSET
    durability: dict[str, Check] | msgspec.UnsetType = msgspec.UNSET
    outcome: dict[str, Check] | msgspec.UnsetType = msgspec.UNSET


class HealthReport:
    """Answers from memory only: nothing of it waits for a disk, a worker or a crew."""

    def __init__(self, means: Means, jobs: Jobs, tree: Tree | None, fleet: Membership | None = None) -> None:
        """``fleet``: None where this supervisor stands alone."""
        self._means = means
        self._jobs = jobs
        self._tree = tree
        self._fleet = fleet
        fallback = "keeper" if means.launcher.loader.settings.keeper else "group"
        #: How the stops of jobs are carried out.
        self.stop_method = fallback if tree is None else "cgroup"

    def checks(self) -> dict[str, bool]:
        """Each thing that new work needs, and whether it is there."""
        return {name: check.ok for name, check in self._readiness().items()}

    @property
    def ready(self) -> bool:
        """Whether new work would be admitted and could run."""
        return all(self.checks().values())

    def probe(self, *, details: bool) -> Readiness:
        """The readiness document; ``details``: the caller may know why."""
        status = "ready" if self.ready else "not_ready"
        if not details:
            return Readiness(status=status)
        return Readiness(
            status=status, readiness=self._readiness(), durability=self._durability(), outcome=self._outcome()
        )

    @property
    def storage_fault(self) -> str | None:
        """Why nothing can be recorded on this machine; None while something can."""
        return self._journal().why

    @property
    def worker_fault(self) -> str | None:
        """Why no worker could be started here, or stopped for certain; None while one could."""
        checks = self._local()
        if self._tree is not None and not os.access(self._tree.base.path, os.W_OK):
            checks["stops"] = _check(f"the cgroup {self._tree.base.path} cannot be used any more, so no stop is proved")
        return next((check.why for name, check in checks.items() if name != "journal" and not check.ok), None)

    def local_faults(self) -> list[str]:
        """Why work could not be carried out on this machine, whatever else there is to say; empty while it could."""
        return [fault for fault in (self.storage_fault, self.worker_fault) if fault is not None]

    def _local(self) -> dict[str, Check]:
        jobs, alive = self._jobs, self._means.launcher.mode.alive
        stuck = f"every slot waits for a proof: {_named(jobs.unproved)}"
        return {
            "journal": self._journal(),
            "template": _check(None if alive else "no template is alive; it is being started again, see the log"),
            "slots": _check(None if jobs.usable_slots > 0 else stuck),
        }

    def _readiness(self) -> dict[str, Check]:
        checks = {**self._local(), "accepting": _check(self._jobs.why_draining)}
        if self._fleet is None:
            return checks
        lease = self._fleet.lease_state()
        return {**checks, "lease": _check(None if lease.valid else f"there is no valid lease: {lease.why}")}

    def _journal(self) -> Check:
        fault = self._means.journal.fault
        return _check(fault and f"the journal cannot be written: {fault}")

    def _durability(self) -> dict[str, Check]:
        late, ephemeral = self._jobs.unrecorded, self._means.settings.ephemeral
        return {
            "journal": self._journal(),
            "endings": _check(f"gone, and not recorded yet: {_named(late)}" if late else None),
            "kept": _check("there is no state_file: nothing outlives this process" if ephemeral else None),
        }

    def _outcome(self) -> dict[str, Check]:
        stuck, unknown = self._jobs.unproved, self._means.journal.effects.unknown
        return {
            "stops": _check(f"not shown to be gone: {_named(stuck)}" if stuck else None),
            "effects": _check(f"{unknown} of unknown outcome, see /effects?state=unknown" if unknown else None),
        }

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


def _check(why: str | None) -> Check:
    return Check(ok=why is None, why=why)


def _named(action_ids: list[str]) -> str:
    """Some of the ids, and how many more there are."""
    more = len(action_ids) - MAX_NAMED
    return ", ".join(action_ids[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
