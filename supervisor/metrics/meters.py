"""What is counted when it happens: admissions, starts, endings, commits. A few additions each, no IO, no text."""

from __future__ import annotations

import time

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from protocol.errors import ActionConflict, CrewError
from protocol.states import Method
from supervisor.journal import JobRecord
from supervisor.journal.watch import Watch
from supervisor.metrics.table import ENDINGS, MAX_CREWS, OTHER_CREWS, Metric, metric

#: Refusals that are there with 0 from the start, so that the first one is seen as an increase.
EXPECTED_REFUSALS = ("journal_full", "journal_unavailable", "not_accepting")

# One more series for each counter, saying when it was made: our counters are all as old as the process.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]


class Meters(Watch):
    """Counters and histograms of one supervisor, in a registry of its own. Safe to use from any thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._crews: set[str] = set()
        self._begun: set[str] = set()
        self._admissions = self._counter("crew_supervisor_admissions_total")
        self._ended = self._counter("crew_supervisor_jobs_ended_total")
        self._start_s = self._histogram("crew_supervisor_start_seconds")
        self._launch_s = self._histogram("crew_supervisor_launch_seconds")
        self._stop_s = self._histogram("crew_supervisor_stop_seconds")
        self._stops = self._counter("crew_supervisor_stops_total")
        self._commit_s = self._histogram("crew_supervisor_journal_commit_seconds")
        self._batch = self._histogram("crew_supervisor_journal_commit_operations")
        self._failures = self._counter("crew_supervisor_journal_failures_total")
        self._refused_operations = self._counter("crew_supervisor_journal_refused_operations_total")
        self._events = self._counter("crew_supervisor_events_total")
        #: ``with meters.streams.track_inprogress()`` counts one open stream.
        self.streams: Gauge = Gauge(*_described(metric("crew_supervisor_streams_open")), registry=self.registry)
        #: Requests to start work, however they ended; those that were refused; those that were passed on.
        self.requests = self.rejected = self.relayed = 0
        self._begin_at_zero()

    def _counter(self, name: str) -> Counter:
        return Counter(*_described(metric(name)), registry=self.registry)

    def _histogram(self, name: str) -> Histogram:
        row = metric(name)
        return Histogram(*_described(row), unit=row.unit, registry=self.registry, buckets=row.buckets)

    def _begin_at_zero(self) -> None:
        for result in ("fresh", "repeat"):
            self._admissions.labels(result, "")
        self._admissions.labels("conflict", ActionConflict.code)
        for code in EXPECTED_REFUSALS:
            self._admissions.labels("refused", code)
        for method in Method:
            for confirmed in ("true", "false"):
                self._stops.labels(method.value, confirmed)

    def _begin_endings(self, crew_id: str) -> None:
        self._begun.add(crew_id)
        for status, reason in ENDINGS:
            self._ended.labels(self.crew_label(crew_id), status.value, reason)

    def crew_label(self, crew_id: str) -> str:
        """The value of ``crew_id`` for a crew: its id while there are few, so that series stay few."""
        if crew_id in self._crews:
            return crew_id
        if len(self._crews) >= MAX_CREWS:
            return OTHER_CREWS
        self._crews.add(crew_id)
        return crew_id

    # --- requests and runs ---------------------------------------------------------------------------------------

    def admitted(self, crew_id: str, *, fresh: bool) -> None:
        """A request to start work was answered with a record."""
        if crew_id not in self._begun:
            self._begin_endings(crew_id)
        self.requests += 1
        self._admissions.labels("fresh" if fresh else "repeat", "").inc()

    def refused(self, error: CrewError) -> None:
        """A request to start work was answered with an error."""
        self.requests += 1
        self.rejected += 1
        self._admissions.labels("conflict" if isinstance(error, ActionConflict) else "refused", error.code).inc()

    def passed_on(self) -> None:
        """A request to start work went to another replica, which counts it too."""
        self.requests += 1
        self.relayed += 1

    def told_to_go(self, *, admitted_at: float, launch_s: float) -> None:
        """A worker got its ``go``; ``admitted_at`` is Unix seconds."""
        self._start_s.observe(max(time.time() - admitted_at, 0.0))
        self._launch_s.observe(launch_s)

    # --- the journal ---------------------------------------------------------------------------------------------

    def committed(self, operations: int, seconds: float) -> None:
        self._commit_s.observe(seconds)
        self._batch.observe(operations)

    def failed(self) -> None:
        self._failures.inc()

    def refused_operations(self, operations: int) -> None:
        self._refused_operations.inc(operations)

    def appended(self, events: int) -> None:
        self._events.inc(events)

    def ended(self, record: JobRecord, reason: str) -> None:
        self._ended.labels(self.crew_label(record.crew_id), record.status.value, reason).inc()
        stop = record.stop
        if stop is None:
            return
        self._stops.labels(stop.method, "true" if stop.confirmed else "false").inc()
        if stop.confirmed and stop.elapsed_ms is not None:
            self._stop_s.labels(stop.method).observe(stop.elapsed_ms / 1000)


def _described(row: Metric) -> tuple[str, str, tuple[str, ...]]:
    return row.name, row.help, row.labels
