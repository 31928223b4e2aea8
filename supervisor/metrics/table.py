"""Every metric of the supervisor, in one list; docs/metrics.md is made of it.

Names and units follow prometheus.io/docs/practices/naming. No label has an id of an Action, a process or a host in it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from protocol.states import Status

#: Crews that get a value of the label ``crew_id`` of their own, the first that are met; the others share OTHER_CREWS.
MAX_CREWS = 100
OTHER_CREWS = "other"


class Kind(StrEnum):
    """Type of a metric, as the exposition names it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Metric(NamedTuple):
    """One row; ``unit`` ends the name (of a counter: before ``_total``), ``buckets`` are a histogram's upper bounds."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    unit: str = ""
    buckets: tuple[float, ...] = ()


#: What a label's values are; each set is small and known before the first request comes.
LABELS: dict[str, str] = {
    "crew_id": f"id of a crew: configuration, not input; crews beyond the first {MAX_CREWS} share `{OTHER_CREWS}`",
    "check": "checks of `/health`: `journal`, `template`, `slots`, `accepting`; in a fleet `lease`",
    "code": "a code of [errors.md](errors.md), empty for what was admitted",
    "confirmed": "`true` or `false`",
    "launch_mode": "`fork` or `spawn`",
    "method": "a stop method, see [stopping.md](stopping.md#methods)",
    "phase": "a phase, see [http.md](http.md#the-record)",
    "reason": "why the job ended: " + "`completed`, `cancelled`, `failed`, `timeout`, `crashed`, `violation`, "
    "`launch_failed`, `shutdown`, `journal`, `restart`",
    "result": "`fresh`, `repeat` (an exact one), `conflict` (other material under the id) or `refused`",
    "state": "a state of the effect ledger",
    "status": "`completed`, `failed` or `cancelled`",
    "stop_method": "`cgroup`, `keeper` or `group`",
    "version": "version of the program",
}
#: Every pair of status and reason with which a job can end.
ENDINGS: tuple[tuple[Status, str], ...] = (
    (Status.COMPLETED, "completed"),
    (Status.CANCELLED, "cancelled"),
    (Status.FAILED, "failed"),
    (Status.FAILED, "timeout"),
    (Status.FAILED, "crashed"),
    (Status.FAILED, "violation"),
    (Status.FAILED, "launch_failed"),
    (Status.FAILED, "shutdown"),
    (Status.FAILED, "journal"),
    (Status.FAILED, "restart"),
)

_FAST_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_START_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0, 120.0, 600.0, 3600.0)
_BATCH = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)

METRICS: tuple[Metric, ...] = (
    Metric(
        "crew_supervisor_info", Kind.GAUGE, "Always 1; the labels say what runs.",
        ("version", "launch_mode", "stop_method"),
    ),
    Metric("crew_supervisor_ready", Kind.GAUGE, "Whether new work would be admitted and could run, as /readyz says."),
    Metric("crew_supervisor_ready_check", Kind.GAUGE, "Each thing that readiness needs: 1 if it is there.", ("check",)),
    # --- jobs
    Metric(
        "crew_supervisor_jobs", Kind.GAUGE, "Jobs without a terminal record (status running), by phase.",
        ("crew_id", "phase"),
    ),
    Metric(
        "crew_supervisor_jobs_ended_total", Kind.COUNTER, "Terminal records made durable by this process.",
        ("crew_id", "status", "reason"),
    ),
    Metric("crew_supervisor_jobs_retained", Kind.GAUGE, "Jobs that the journal keeps, running ones included."),
    Metric("crew_supervisor_jobs_retained_limit", Kind.GAUGE, "max_retained_runs."),
    Metric(
        "crew_supervisor_admissions_total", Kind.COUNTER,
        "Answers to requests to start work that came with a valid token.", ("result", "code"),
    ),
    Metric("crew_supervisor_queue_jobs", Kind.GAUGE, "Jobs that wait for a slot."),
    Metric("crew_supervisor_queue_limit", Kind.GAUGE, "max_queue."),
    Metric(
        "crew_supervisor_queue_oldest_seconds", Kind.GAUGE,
        "How long the job that waits longest for a slot has waited; 0 if none does.", unit="seconds",
    ),
    Metric("crew_supervisor_slots", Kind.GAUGE, "max_concurrency."),
    Metric(
        "crew_supervisor_slots_usable", Kind.GAUGE,
        "Slots that are not held by a job whose stop cannot be proved.",
    ),
    Metric(
        "crew_supervisor_start_seconds", Kind.HISTOGRAM,
        "From admission until the worker was told to go; waiting for a slot included.", (), "seconds", _START_S,
    ),
    Metric(
        "crew_supervisor_launch_seconds", Kind.HISTOGRAM,
        "From the slot until the worker was told to go.", (), "seconds", _FAST_S,
    ),
    # --- stops
    Metric(
        "crew_supervisor_stop_seconds", Kind.HISTOGRAM,
        "From the request for a stop until it was confirmed; the grace is part of it. Confirmed stops only.",
        ("method",), "seconds", _FAST_S,
    ),
    Metric(
        "crew_supervisor_stops_total", Kind.COUNTER,
        "Stops of jobs that ended, and whether nothing was left for certain.", ("method", "confirmed"),
    ),
    Metric(
        "crew_supervisor_stops_unconfirmed", Kind.GAUGE,
        "Jobs past stop_timeout_s whose stop is not proved yet; each keeps a slot out of service.",
    ),
    # --- journal
    Metric(
        "crew_supervisor_journal_commit_seconds", Kind.HISTOGRAM,
        "Duration of a transaction that was committed, from its begin until it was durable.", (), "seconds", _FAST_S,
    ),
    Metric(
        "crew_supervisor_journal_commit_operations", Kind.HISTOGRAM,
        "Operations that shared one commit.", (), "", _BATCH,
    ),
    Metric("crew_supervisor_journal_failures_total", Kind.COUNTER, "Transactions that could not be committed."),
    Metric(
        "crew_supervisor_journal_refused_operations_total", Kind.COUNTER,
        "Operations that were not recorded because the journal could not be written.",
    ),
    Metric("crew_supervisor_events_total", Kind.COUNTER, "Events appended to the journal and durable."),
    Metric(
        "crew_supervisor_effects", Kind.GAUGE,
        "Effects in the ledger, by state.", ("state",),
    ),
    # --- processes
    Metric("crew_supervisor_workers", Kind.GAUGE, "Workers that exist."),
    Metric(
        "crew_supervisor_workers_memory_bytes", Kind.GAUGE,
        "Memory of all workers: of their cgroups where the memory controller is delegated, else resident.",
        unit="bytes",
    ),
    Metric(
        "crew_supervisor_worker_memory_max_bytes", Kind.GAUGE, "Memory of the worker that has most.", unit="bytes"
    ),
    Metric(
        "crew_supervisor_template_restarts_total", Kind.COUNTER,
        "Templates or standby interpreters that ended on their own and were replaced.",
    ),
    Metric("crew_supervisor_template_processes", Kind.GAUGE, "Templates and standby interpreters that exist."),
    Metric(
        "crew_supervisor_template_memory_bytes", Kind.GAUGE,
        "Resident memory of templates and standby interpreters.", unit="bytes",
    ),
    # --- readers
    Metric("crew_supervisor_streams_open", Kind.GAUGE, "Event streams that readers hold open."),
)  # fmt: skip

#: Of a replica of a fleet: those of the reference's host, under our prefix, and our own.
FLEET_METRICS: tuple[Metric, ...] = (
    Metric("crew_supervisor_host_ready", Kind.GAUGE, "Whether new work would be admitted, as /ready says."),
    Metric("crew_supervisor_host_storage_ready", Kind.GAUGE, "Whether the journal can be written."),
    Metric("crew_supervisor_host_in_flight", Kind.GAUGE, "Jobs of this replica without a terminal record."),
    Metric(
        "crew_supervisor_host_requests_total", Kind.COUNTER,
        "Requests to start work that came with a valid token, those passed on to another replica included.",
    ),
    Metric("crew_supervisor_host_rejected_total", Kind.COUNTER, "Those of them that were refused here."),
    Metric(
        "crew_supervisor_host_heartbeat_failures_total", Kind.COUNTER,
        "Heartbeats and registrations that the database did not answer.",
    ),
    Metric(
        "crew_supervisor_host_lease_recovery_attempts_total", Kind.COUNTER,
        "Registrations sent after a lease had ended.",
    ),
    Metric("crew_supervisor_host_lease_recoveries_total", Kind.COUNTER, "Those of them that were granted."),
    Metric("crew_supervisor_fleet_lease_valid", Kind.GAUGE, "Whether the lease is valid, as this machine sees it."),
    Metric("crew_supervisor_fleet_outbox_endings", Kind.GAUGE, "Endings that the fleet has not been told yet."),
    Metric(
        "crew_supervisor_fleet_relayed_total", Kind.COUNTER,
        "Requests to start work that were passed on to their owner.",
    ),
)  # fmt: skip

_BY_NAME = {metric.name: metric for metric in (*METRICS, *FLEET_METRICS)}


def metric(name: str) -> Metric:
    """The row of that name. Raises KeyError."""
    return _BY_NAME[name]
