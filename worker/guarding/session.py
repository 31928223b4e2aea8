"""The ledger that this process or context reports to, and on whose behalf."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from protocol.effects import Claim, Reconciliation, Scope
from protocol.errors import EffectLedgerUnavailable, EffectMalformed
from worker.guarding.places import Place, Seats
from worker.guarding.policies import Guarding


@dataclass(frozen=True)
class Granted:
    """The claim is durable and the body may run. ``epoch`` goes with everything that is said about it."""

    epoch: int
    attempt: int


@dataclass(frozen=True)
class Replayed:
    """The effect happened before. ``receipt``: JSON text, None where the result was not stored."""

    receipt: bytes | None
    settled_at: float


class Ledger(Protocol):
    """Where claims and outcomes are made durable before the method returns.

    Every method but ``deliver`` raises a CrewError when nothing was recorded: the reducer's own refusals, or
    EffectLedgerUnavailable. All may be called from any thread.
    """

    def claim(self, wanted: Claim) -> Granted | Replayed:
        """May this call be made?"""

    def settle(self, key_id: str, *, epoch: int, args_hash: str, receipt: bytes | None) -> None:
        """It took effect."""

    def not_applied(self, key_id: str, *, epoch: int) -> None:
        """The tool says that nothing happened."""

    def lose(self, key_id: str, *, epoch: int, reason: str) -> None:
        """Nobody knows."""

    def deliver(self, key_id: str) -> None:
        """The caller has the receipt. Raises nothing; the fact may be lost with the process."""

    def reconcile(self, key_id: str, found: Reconciliation, *, version: int) -> None:
        """The provider was asked and knows."""

    def close(self) -> None:
        """Let go of what reaches the ledger; what is in flight fails."""


@dataclass(kw_only=True)
class Session:
    """One Action of one crew on one ledger. ``policies``: those of the registry and the configuration, by tool name."""

    ledger: Ledger
    action_id: str
    crew_id: str
    policies: Mapping[str, Guarding] = field(default_factory=dict)
    root: Place = field(default_factory=lambda: Place([]))
    seats: Seats = field(init=False)

    def __post_init__(self) -> None:
        self.seats = Seats(self.root)

    def scope_id(self, scope: Scope) -> str:
        """What a key of that scope belongs to. Raises EffectMalformed where it has no name here."""
        if scope is Scope.GLOBAL:
            return ""
        name = self.action_id if scope is Scope.ACTION else self.crew_id
        if not name:
            raise EffectMalformed(f"an effect of scope {scope.value!r} needs {scope.value}= where the ledger is named")
        return name


_default: Session | None = None
_here: contextvars.ContextVar[Session | None] = contextvars.ContextVar("effect_session", default=None)


def begin(session: Session | None) -> None:
    """Make ``session`` the one of this process, wherever no other is named."""
    global _default
    _default = session


@contextlib.contextmanager
def using(session: Session) -> Iterator[Session]:
    """Use ``session`` in this context and what is started from it."""
    token = _here.set(session)
    try:
        yield session
    finally:
        _here.reset(token)


def known() -> Session | None:
    """The session, None where no ledger was named."""
    return _here.get() or _default


def current() -> Session:
    """The session. Raises EffectLedgerUnavailable where no ledger was named: then nothing is done."""
    if (session := known()) is None:
        raise EffectLedgerUnavailable("no effect ledger was named, so nothing was done; call effect.use_ledger first")
    return session
