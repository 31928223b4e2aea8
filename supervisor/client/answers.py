"""What the server answers, read leniently: a field that an older or another server does not send is None."""

from __future__ import annotations

from typing import Any

import msgspec

from protocol.api import StopEvidence, WorkerView
from protocol.states import TERMINAL, EffectState, Status


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a job; ``sequence`` counts from 0, ``data`` is any JSON value."""

    event: str
    sequence: int
    data: Any = None


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A job's record. Times are Unix seconds; ``output`` is an object once it is completed, and left out of lists.

    ``stop`` is the evidence of the end of its work; where it is None nothing was proved.
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
    version: str | None = None
    instance_id: str | None = None
    epoch: int | None = None
    stop_method: str | None = None
    checks: dict[str, bool] | None = None


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """One effect of a tool call. ``key_id``: 64 hex digits. ``etag``: the version it was read at, for a reconciliation.

    ``receipt`` is the tool's stored result, any JSON value; times are Unix seconds.
    """

    key_id: str
    state: EffectState
    tool: str | None = None
    scope: str | None = None
    scope_id: str | None = None
    policy: str | None = None
    preimage: Any = None
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
    replays: int | None = None
    reason: str | None = None
    actor: str | None = None
    decision: str | None = None
    evidence: Any = None
    etag: str | None = None


class EffectPage(msgspec.Struct, frozen=True, kw_only=True):
    """Effects; ``next_cursor`` is None on the last page."""

    effects: tuple[Effect, ...]
    next_cursor: str | None = None
