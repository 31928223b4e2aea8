"""Several supervisors, as the rest of one knows of them: whose an Action is, who there is. Alone, nobody is asked."""

from __future__ import annotations

from typing import Protocol

import msgspec

from protocol.api import FleetView, Retirement
from supervisor.journal import NewJob


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
