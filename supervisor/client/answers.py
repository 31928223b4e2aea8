"""What the server answers, read leniently: a field that an older or another server does not send is None."""

from __future__ import annotations

from typing import Any

import msgspec

from protocol.api import JobReconciliation, ReconciliationView, StopEvidence, WorkerView
from protocol.states import TERMINAL, EffectState, Status


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a job; ``sequence`` counts from 0, ``data`` is any JSON value."""

    event: str
    sequence: int
    data: Any = None


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A job's record. Times are Unix seconds; ``output`` is an object once it is completed, and left out of lists.

    ``stop`` is the evidence of the end of its work; where it is None nothing was proved. ``reconciliation``: what
    somebody decided about an uncertain outcome, the newest.
    """

    action_id: str
    crew_id: str
    operation: str
    status: Status
    event_count: int
    output: Any = None
    phase: str | None = None
    uncertain_outcome: bool | None = None
    timeout_ms: int | None = None
    admitted_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    worker: WorkerView | None = None
    stop: StopEvidence | None = None
    effects: dict[str, Any] | None = None
    reconciliation: JobReconciliation | None = None

    @property
    def ended(self) -> bool:
        """Whether the record is terminal."""
        return self.status in TERMINAL


class JobPage(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs, newest first; ``next_cursor`` is None on the last page."""

    jobs: tuple[Job, ...]
    next_cursor: str | None = None


class EventPage(msgspec.Struct, frozen=True, kw_only=True):
    """Events from ``cursor`` on; ``next_cursor`` is where the next ones begin."""

    action_id: str
    cursor: int
    next_cursor: int
    status: Status
    events: tuple[Event, ...]


class Archived(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to an archive."""

    archived: bool
    action_id: str


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """What the server says of itself."""

    status: str
    crews: tuple[str, ...]
    operations: tuple[str, ...]
    durable_journal: bool
    active_runs: int | None = None
    retained_runs: int | None = None
    max_retained_runs: int | None = None
    stream_checkpoint_events: int | None = None
    training_directory: bool | None = None
    version: str | None = None
    instance_id: str | None = None
    epoch: int | None = None
    config_digest: str | None = None
    registry_digest: str | None = None
    crewai_version: str | None = None
    launch_mode: str | None = None
    launch_reason: str | None = None
    stop_method: str | None = None
    running: int | None = None
    queued: int | None = None
    effects_unknown: int | None = None
    checks: dict[str, bool] | None = None


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """One effect of a tool call. ``key_id``: 64 hex digits. ``etag``: the version it was read at, for a reconciliation.

    ``receipt`` is the tool's result, any JSON value, None where it was not stored; times are Unix seconds.
    """

    key_id: str
    state: EffectState
    tool: str | None = None
    scope: str | None = None
    scope_id: str | None = None
    identity: tuple[Any, ...] | None = None
    policy: str | None = None
    preimage: str | None = None
    args_hash: str | None = None
    version: int | None = None
    epoch: int | None = None
    attempt: int | None = None
    action_id: str | None = None
    crew_id: str | None = None
    claimed_at: float | None = None
    settled_at: float | None = None
    delivered_at: float | None = None
    receipt: Any = None
    receipt_stored: bool | None = None
    replays: int | None = None
    reason: str | None = None
    reconciliation: ReconciliationView | None = None
    etag: str | None = None


class EffectPage(msgspec.Struct, frozen=True, kw_only=True):
    """Effects; ``next_cursor`` is None on the last page."""

    effects: tuple[Effect, ...]
    next_cursor: str | None = None


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Who did what to a job, and when (Unix seconds); ``detail`` is an object or None."""

    at: float
    actor: str
    act: str
    detail: Any = None


class JobEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a job, in one document; digests are SHA-256 in hex, ``log_tail`` the end of its output."""

    action_id: str
    record: Job
    request_hash: str | None = None
    config_digest: str | None = None
    registry_digest: str | None = None
    stop: StopEvidence | None = None
    reconciliations: tuple[JobReconciliation, ...] = ()
    effects: tuple[Effect, ...] = ()
    effects_omitted: int | None = None
    log_tail: str = ""
    audit: tuple[AuditEntry, ...] = ()


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """A replica of a fleet as its database has it. ``lease_left_s`` is negative once the lease has ended."""

    replica_id: str
    url: str
    epoch: int
    lease_valid: bool
    lease_left_s: float
    draining: bool | None = None
    running: int | None = None
    queued: int | None = None
    unfinished: int | None = None
    version: str | None = None
    instance_id: str | None = None
    registered_at: float | None = None
    retired_at: float | None = None


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """The replicas, and how the one that answered does; ``outbox``: endings that it has not told the others yet."""

    replica_id: str
    epoch: int
    lease_valid: bool
    why: str | None = None
    outbox: int | None = None
    heartbeat_failures: int | None = None
    lease_recovery_attempts: int | None = None
    lease_recoveries: int | None = None
    replicas: tuple[Replica, ...] = ()


class Retirement(msgspec.Struct, frozen=True, kw_only=True):
    """A replica that was retired; ``actions``: how many were written off as failed with it."""

    replica_id: str
    retired_at: float
    actor: str | None = None
    evidence: str | None = None
    actions: int | None = None


class Draining(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the server refuses new work, and how many jobs run and wait there."""

    draining: bool
    running: int | None = None
    queued: int | None = None
