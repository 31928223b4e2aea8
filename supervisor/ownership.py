"""Several supervisors, as the rest of one knows of them: whose an Action is, who there is. Alone, nobody is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Protocol

import msgspec

from protocol.effects import Claim, EffectRecord, Granted, Reconciliation, Replayed, Scope
from protocol.errors import CrewError
from protocol.fleet import FleetView, Retirement
from protocol.states import EffectState
from supervisor.journal import NewJob, Owner, Seen
from supervisor.journal.effects import EffectPage


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """The replica that owns an Action, and where it is reached."""

    action_id: str
    replica_id: str
    url: str


class OwnedElsewhere(Exception):
    """The Action belongs to another replica, which is alive: the request is for it. No error, so no CrewError."""

    def __init__(self, place: Place) -> None:
        super().__init__(place.replica_id)
        self.place = place


class Ownership(Protocol):
    """Decides it."""

    async def take(self, new: NewJob) -> None:
        """Make the Action ours, durably, before anything of it is here. Does nothing where it is ours already.

        Raises OwnedElsewhere, ActionConflict, ActionArchived, ActionFailed, OwnerUnavailable, LeaseInvalid,
        FleetUnavailable: then it must not be admitted here.
        """
        ...

    async def seek(self, new: NewJob) -> None:
        """Raise what ``take`` would raise for an Action that somebody has; do nothing for one that nobody has."""
        ...


class LeaseState(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's lease as it sees it itself. ``recovered_at``: Unix seconds; None if it was never recovered."""

    valid: bool
    why: str | None
    recovered_at: float | None
    heartbeat_failures: int
    recovery_attempts: int
    recoveries: int


class Membership(Protocol):
    """This supervisor's part in the fleet, and the others."""

    def lease_state(self) -> LeaseState:
        """From memory."""
        ...

    async def view(self) -> FleetView:
        """The fleet as the database has it. Raises FleetUnavailable."""
        ...

    async def retire(self, replica_id: str, *, actor: str, evidence: str) -> Retirement:
        """Write off a replica whose machine is gone. Raises ReplicaUnknown, ReplicaLive, FleetUnavailable."""
        ...


Reported = asyncio.Future[EffectRecord | CrewError | None]


class EffectLedger(Protocol):
    """Decides which call may be made: ``supervisor.journal.Ledger`` alone, with others what they share.

    Raises as the methods of ``Ledger`` do; EffectLedgerUnavailable, FleetUnavailable and LeaseInvalid where nothing
    can be decided.
    """

    def claim(self, wanted: Claim) -> asyncio.Future[Granted | Replayed]:
        """Decide a claim."""
        ...

    def settle(
        self, who: Owner, key_id: str, *, epoch: int, args_hash: str, receipt: bytes | None, audited: bool = True
    ) -> Reported:
        """Record that the effect happened."""
        ...

    def not_applied(self, who: Owner, key_id: str, *, epoch: int, audited: bool = True) -> Reported:
        """Record that nothing happened."""
        ...

    def lose(self, who: Owner, key_id: str, *, epoch: int, reason: str, audited: bool = True) -> Reported:
        """Record that nobody will say what happened."""
        ...

    def deliver(self, who: Owner, key_id: str) -> Reported:
        """Record that the caller of the tool has the receipt."""
        ...

    def found_out(
        self, who: Owner, key_id: str, *, version: int, found: Reconciliation, audited: bool = True
    ) -> Reported:
        """Record what a job learned from the provider."""
        ...

    def refuse(self, who: Owner, key_id: str, error: CrewError, *, audited: bool = True) -> Reported:
        """Record a report that is no use."""
        ...

    def lose_all(self, who: Owner, lost: Mapping[str, tuple[int, str]]) -> asyncio.Future[int]:
        """Make claims of the job unknown."""
        ...

    async def reconcile(
        self, key_id: str, found: Reconciliation, *, versions: Collection[int], by: str
    ) -> EffectRecord:
        """Record an operator's decision."""
        ...

    async def look(self, key_id: str) -> Seen:
        """One effect."""
        ...

    async def page(
        self,
        *,
        state: EffectState | None = None,
        crew_id: str | None = None,
        scope: Scope | None = None,
        before: int | None = None,
        shared_before: int | None = None,
        limit: int = 100,
    ) -> EffectPage:
        """A page of effects; ``before`` and ``shared_before`` are of the page before, the one or the other."""
        ...
