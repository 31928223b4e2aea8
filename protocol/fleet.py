"""HTTP bodies of a fleet: its replicas, their retirement, and what a reference host asks one for."""

from __future__ import annotations

from typing import Annotated

import msgspec

from protocol.api import ActorName, Count, Evidence

ReplicaId = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    """A replica of the fleet as the database has it; every time is the database's, in Unix seconds.

    ``lease_left_s`` is negative once the lease has ended. ``unfinished``: Actions of it without a terminal record.
    """

    replica_id: str
    url: str
    epoch: int
    lease_valid: bool
    lease_left_s: float
    draining: bool
    running: Count
    queued: Count
    unfinished: Count
    version: str
    instance_id: str
    registered_at: float
    retired_at: float | None


class FleetView(msgspec.Struct, frozen=True, kw_only=True):
    """The fleet, and what the answering replica knows of itself.

    ``outbox``: endings that it has not told yet. ``why`` its lease is not valid, null where it is. The counters began
    with its process.
    """

    replica_id: str
    epoch: int
    lease_valid: bool
    why: str | None
    outbox: Count
    heartbeat_failures: Count
    lease_recovery_attempts: Count
    lease_recoveries: Count
    replicas: list[ReplicaView]


class RetireRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of a retirement: who says that the replica's machine is off for good, and how that is known."""

    actor: ActorName
    evidence: Evidence


class Retirement(msgspec.Struct, frozen=True, kw_only=True):
    """A replica that was retired, when, by whom. ``actions``: how many were written off as failed at that time."""

    replica_id: str
    retired_at: float
    actor: str
    evidence: str
    actions: Count


class HostRecovery(msgspec.Struct, frozen=True, kw_only=True):
    """What is left to be made good; the names are the reference host's.

    ``recovered_at``: when the lease was last recovered. ``recoverable_transactions``: Actions whose end is not proved
    or not recorded yet. ``queued_results``: endings not told yet. Of the others there is none here.
    """

    recovered_at: float | None
    pending_approvals: Count = 0
    recoverable_transactions: Count = 0
    queued_results: Count = 0
    delegation_results: Count = 0
    callback_deliveries: Count = 0


class HostRuntime(msgspec.Struct, frozen=True, kw_only=True):
    """The journal: ``durable`` or ``ephemeral``, and whether it can be written."""

    durability: str
    ready: bool
    detail: str
    recovery: HostRecovery


class HostConnector(msgspec.Struct, frozen=True, kw_only=True):
    """Whether workers can be started and stopped for certain."""

    ready: bool
    detail: str


class HostReady(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /ready`` as the reference's host has it: ``ready`` or ``not_ready``. Details are for those with a token."""

    status: str
    lease_valid: bool
    draining: bool
    runtime: HostRuntime
    connector: HostConnector
