"""The answer to a scrape: what was counted, and what is looked up in memory and /proc at that moment.

Formats: prometheus.io/docs/instrumenting/exposition_formats and OpenMetrics 1.0.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import Metric as Family
from prometheus_client import ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from protocol.states import Phase
from supervisor.health import VERSION, HealthReport
from supervisor.job import Job, LiveWorker
from supervisor.jobs import Jobs
from supervisor.metrics.meters import Meters
from supervisor.metrics.table import Kind, metric
from supervisor.ownership import Membership
from supervisor.processes import resident_bytes
from supervisor.run.means import Means

#: Label values and the value of one sample.
Sample = tuple[tuple[str, ...], float]


class Exposition:
    """Renders the metrics of one supervisor."""

    def __init__(self, means: Means, jobs: Jobs, health: HealthReport, fleet: Membership | None = None) -> None:
        self._registry = means.meters.registry
        self._registry.register(Lookup(means.meters, means, jobs, health))
        if fleet is not None:
            self._registry.register(FleetLookup(means, jobs, health, fleet))
        ProcessCollector(registry=self._registry)

    def render(self, accept: str) -> tuple[bytes, str]:
        """The metrics as text and its content type, in the format that an Accept header asks for."""
        try:
            encode, content_type = choose_encoder(accept)
        except (TypeError, ValueError):  # a version that is no number
            encode, content_type = choose_encoder("")
        return encode(self._registry), content_type


class Lookup(Collector):
    """The metrics that nobody counts: they are what is there at the scrape."""

    def __init__(self, meters: Meters, means: Means, jobs: Jobs, health: HealthReport) -> None:
        self._meters = meters
        self._means = means
        self._jobs = jobs
        self._health = health

    def collect(self) -> Iterable[Family]:
        """Every family, in the order of the table as far as they are ours."""
        yield from self._about_us()
        yield from self._about_jobs()
        yield from self._about_templates()
        totals = self._means.journal.effects.totals
        yield family("crew_supervisor_effects", *(((state,), total) for state, total in totals.items()))

    def _about_us(self) -> Iterator[Family]:
        launcher, checks = self._means.launcher, self._health.checks()
        shown = (VERSION, launcher.mode.name, self._health.stop_method)
        yield family("crew_supervisor_info", (shown, 1))
        yield single("crew_supervisor_ready", all(checks.values()))
        yield family("crew_supervisor_ready_check", *(((name,), there) for name, there in checks.items()))

    def _about_jobs(self) -> Iterator[Family]:
        jobs, settings, live = self._jobs, self._means.settings, self._jobs.live()
        # Very many may wait for a slot: these two passes are all that goes over each of them.
        queued = Counter([job.record.crew_id for job in live if job.phase is Phase.QUEUED])
        active = [job for job in live if job.phase not in _WITHOUT_WORK]
        yield family("crew_supervisor_jobs", *self._by_phase(queued, active).items())
        yield single("crew_supervisor_jobs_retained", self._means.journal.retained)
        yield single("crew_supervisor_jobs_retained_limit", settings.max_retained_runs)
        yield single("crew_supervisor_queue_jobs", jobs.queued)
        yield single("crew_supervisor_queue_limit", settings.max_queue)
        now = time.time()
        oldest = min((job.record.admitted_at for job in jobs.first_in_line()), default=now)
        yield single("crew_supervisor_queue_oldest_seconds", max(now - oldest, 0.0))
        yield single("crew_supervisor_slots", settings.max_concurrency)
        yield single("crew_supervisor_slots_usable", jobs.usable_slots)
        yield single("crew_supervisor_stops_unconfirmed", sum(job.unconfirmed.is_set() for job in active))
        yield from self._about_workers([job.worker for job in active if job.worker is not None])

    def _by_phase(self, queued: Mapping[str, int], active: list[Job]) -> Counter[tuple[str, ...]]:
        """Jobs by the values of crew_id and phase, with 0 for what a crew of the registry has none of."""
        label = self._meters.crew_label
        found: Counter[tuple[str, ...]] = Counter()
        for crew_id in sorted(self._means.launcher.crew_ids):
            found.update(dict.fromkeys(((label(crew_id), phase) for phase in _PHASES), 0))
        for crew_id, count in queued.items():
            found[label(crew_id), Phase.QUEUED.value] += count
        for job in active:
            found[label(job.record.crew_id), job.phase.value] += 1
        return found

    def _about_workers(self, workers: list[LiveWorker]) -> Iterator[Family]:
        memory = [worker.memory_bytes() or 0 for worker in workers]
        yield single("crew_supervisor_workers", len(workers))
        yield single("crew_supervisor_workers_memory_bytes", sum(memory))
        yield single("crew_supervisor_worker_memory_max_bytes", max(memory, default=0))

    def _about_templates(self) -> Iterator[Family]:
        launcher = self._means.launcher
        pids = launcher.loader.pids
        yield single("crew_supervisor_template_restarts_total", launcher.mode.restarts)
        yield single("crew_supervisor_template_processes", len(pids))
        yield single("crew_supervisor_template_memory_bytes", sum(resident_bytes(pid) or 0 for pid in pids))


class FleetLookup(Collector):
    """What a replica of a fleet has beside."""

    def __init__(self, means: Means, jobs: Jobs, health: HealthReport, fleet: Membership) -> None:
        self._means = means
        self._jobs = jobs
        self._health = health
        self._fleet = fleet

    def collect(self) -> Iterable[Family]:
        """Every family of FLEET_METRICS."""
        meters, lease = self._means.meters, self._fleet.lease_state()
        values = {
            "host_ready": self._health.ready and self._health.worker_fault is None,
            "host_storage_ready": self._health.storage_fault is None,
            "host_in_flight": self._jobs.active,
            "host_requests_total": meters.requests,
            "host_rejected_total": meters.rejected,
            "host_heartbeat_failures_total": lease.heartbeat_failures,
            "host_lease_recovery_attempts_total": lease.recovery_attempts,
            "host_lease_recoveries_total": lease.recoveries,
            "fleet_lease_valid": lease.valid,
            "fleet_outbox_endings": self._means.journal.outbox.waiting,
            "fleet_relayed_total": meters.relayed,
        }
        for name, value in values.items():
            yield single(f"crew_supervisor_{name}", value)


_WITHOUT_WORK = (Phase.QUEUED, Phase.DONE)
_PHASES = tuple(phase.value for phase in Phase if phase is not Phase.DONE)


def single(name: str, value: float) -> Family:
    """A metric without labels."""
    return family(name, ((), value))


def family(name: str, *samples: Sample) -> Family:
    """A gauge or counter of the table with its samples."""
    row = metric(name)
    kind = CounterMetricFamily if row.kind is Kind.COUNTER else GaugeMetricFamily
    made = kind(row.name, row.help, labels=row.labels, unit=row.unit)
    for labels, value in samples:
        made.add_metric(labels, float(value))
    return made
