"""The lease of one replica as the replica sees it: one table of what may happen, and the time as an argument.

Only the database says who is alive, by its own clock. What is here is the cautious view of that from the machine: a
lease counts from the moment at which it was asked for, so it ends here no later than it ends there.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import msgspec

from protocol.errors import IllegalTransition


class Standing(StrEnum):
    """Where a replica stands.

    ``unregistered``: nothing was granted since the last refusal. ``asking``: a registration was sent whose answer is
    not known, so that one and no other is sent again. ``valid``: it may admit. ``expired``: it may not, and needs a
    new epoch. ``retired``: an operator took its place away for ever. ``released``: it gave it back.
    """

    UNREGISTERED = "unregistered"
    ASKING = "asking"
    VALID = "valid"
    EXPIRED = "expired"
    RETIRED = "retired"
    RELEASED = "released"


class Turn(StrEnum):
    """What can happen to it."""

    ASKED = "asked"
    GRANTED = "granted"
    REJECTED = "rejected"
    RENEWED = "renewed"
    FENCED = "fenced"
    LAPSED = "lapsed"
    RETIRED = "retired"
    RELEASED = "released"


#: Every legal (standing, turn); a pair that is missing is illegal.
TRANSITIONS: dict[tuple[Standing, Turn], Standing] = {
    (Standing.UNREGISTERED, Turn.ASKED): Standing.ASKING,
    (Standing.UNREGISTERED, Turn.RELEASED): Standing.RELEASED,
    (Standing.ASKING, Turn.ASKED): Standing.ASKING,
    (Standing.ASKING, Turn.GRANTED): Standing.VALID,
    (Standing.ASKING, Turn.REJECTED): Standing.UNREGISTERED,
    (Standing.ASKING, Turn.RETIRED): Standing.RETIRED,
    (Standing.ASKING, Turn.RELEASED): Standing.RELEASED,
    (Standing.VALID, Turn.RENEWED): Standing.VALID,
    (Standing.VALID, Turn.FENCED): Standing.EXPIRED,
    (Standing.VALID, Turn.LAPSED): Standing.EXPIRED,
    (Standing.VALID, Turn.RELEASED): Standing.RELEASED,
    (Standing.EXPIRED, Turn.ASKED): Standing.ASKING,
    (Standing.EXPIRED, Turn.RELEASED): Standing.RELEASED,
}


def move(standing: Standing, turn: Turn) -> Standing:
    """Return the standing after ``turn``. Raises IllegalTransition for a pair that the table does not have."""
    try:
        return TRANSITIONS[standing, turn]
    except KeyError:
        raise IllegalTransition(f"{turn.value} cannot happen to a replica that is {standing.value}") from None


class Payload(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica says of itself when it registers.

    ``instance_id`` is its journal's and ``journal_epoch`` how often that was opened: an id belongs to one journal,
    and an older copy of it does not know what was admitted since.
    """

    replica_id: str
    url: str
    instance_id: str
    journal_epoch: int
    lease_s: float
    version: str


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A registration. Sent again after an answer that was lost, it is the same in every field."""

    request_id: str
    payload: Payload


class Lease:
    """One replica's lease. ``now`` and ``sent_at`` are seconds of a clock that never goes back."""

    def __init__(self, payload: Payload, make_id: Callable[[], str]) -> None:
        self._payload = payload
        self._make_id = make_id
        self._request: Request | None = None
        self._ends_at = 0.0
        self.standing = Standing.UNREGISTERED
        #: Of the last registration that was granted; 0 before the first. Only its owner's writes are taken.
        self.epoch = 0
        #: Why the last registration or heartbeat was not granted; None once one is.
        self.why: str | None = "it has not registered yet"
        self.heartbeat_failures = 0
        self.recovery_attempts = 0
        self.recoveries = 0

    def _move(self, turn: Turn) -> None:
        self.standing = move(self.standing, turn)

    def look(self, now: float) -> None:
        """Let it lapse if its time is over."""
        if self.standing is Standing.VALID and now >= self._ends_at:
            self._move(Turn.LAPSED)
            self.why = self.why or "no heartbeat was answered in time"

    def valid(self, now: float) -> bool:
        """Whether work may be admitted as far as this machine can tell; the database has the last word."""
        self.look(now)
        return self.standing is Standing.VALID

    def left_s(self, now: float) -> float:
        """Seconds until it lapses; 0 where it is not valid."""
        return max(self._ends_at - now, 0.0) if self.standing is Standing.VALID else 0.0

    # --- registration --------------------------------------------------------------------------------------------

    def ask(self) -> Request:
        """The registration to send: the last one where its answer is not known, else a new one."""
        self._move(Turn.ASKED)
        if self.epoch:
            self.recovery_attempts += 1
        if self._request is None:
            self._request = Request(request_id=self._make_id(), payload=self._payload)
        return self._request

    def granted(self, epoch: int, *, sent_at: float) -> None:
        """The registration counts; ``sent_at``: it was not granted before."""
        self._move(Turn.GRANTED)
        if self.epoch:
            self.recoveries += 1
        self.epoch, self._ends_at = epoch, sent_at + self._payload.lease_s
        self._request, self.why = None, None

    def rejected(self, why: str, *, retired: bool = False) -> None:
        """The registration was refused: it is forgotten, and the next one is another."""
        self._move(Turn.RETIRED if retired else Turn.REJECTED)
        self._request, self.why = None, why

    # --- heartbeats ----------------------------------------------------------------------------------------------

    def renewed(self, *, sent_at: float) -> None:
        """A heartbeat was taken."""
        self._move(Turn.RENEWED)
        self._ends_at, self.why = sent_at + self._payload.lease_s, None

    def failed(self, why: str) -> None:
        """A heartbeat or a registration got no answer; the lease runs on."""
        self.heartbeat_failures += 1
        self.why = why

    def withheld(self, why: str) -> None:
        """No heartbeat was sent, since something here does not work; the lease runs on."""
        self.why = why

    def fenced(self, why: str) -> None:
        """The database does not take our epoch any more."""
        if self.standing is Standing.VALID:
            self._move(Turn.FENCED)
            self.why = why

    def release(self) -> None:
        """Nothing more will be admitted by this process."""
        if self.standing not in (Standing.RETIRED, Standing.RELEASED):
            self._move(Turn.RELEASED)
            self.why = "it was given back"
