"""What each kind of request makes of a shared effect: the reducer of ``protocol.effects`` on its row, without IO."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from protocol import effects
from protocol.effects import Claim, EffectRecord, Granted, Policy, Reconciliation
from protocol.errors import EffectNotFound, EffectNotOpen, EffectStale
from protocol.states import EFFECT_TRANSITIONS, EffectState, EffectStep
from supervisor.fleet.deciding import Made
from supervisor.fleet.effect_rows import Row
from supervisor.journal import Owner
from supervisor.journal.ledger import check_reach

#: Of a row that a journal has told: nobody claimed it at the database.
TOLD = "told by a journal"
_GRANTING = frozenset({EffectStep.CLAIM, EffectStep.REPEAT})
#: What a holder may make of its claim, from the one table of states.
_REPORTS = {(was, now) for (was, step), now in EFFECT_TRANSITIONS.items() if step not in _GRANTING}


class Repeated(msgspec.Struct, frozen=True):
    """The effect happened before; ``row`` has its receipt, and one replay more."""

    row: Row


class Overruled(msgspec.Struct, frozen=True):
    """What a journal says of an effect does not count: the row is another's, or past that."""

    row: Row
    error: EffectNotOpen


def _changed(row: Row, record: EffectRecord) -> Row:
    return msgspec.structs.replace(row, record=record)


def claim(
    row: Row | None, lease_epoch: int, *, wanted: Claim, claim_id: str, replica_id: str, epoch: int, at: float
) -> Made:
    """Decide a claim. One whose answer was lost is known by its ``claim_id``: asked again, it is granted once."""
    known = None if row is None else row.record
    if row is not None and row.claim_id == claim_id and row.record.state is EffectState.CLAIMED:
        return Made(None, Granted(row.record))
    if known is not None:
        check_reach(known, action_id=wanted.action_id, crew_id=wanted.crew_id)
    decided = effects.claim(known, wanted, epoch=epoch, at=at)
    record = decided.record
    check_reach(record, action_id=wanted.action_id, crew_id=wanted.crew_id)
    if isinstance(decided, Granted):
        made = Row(record=record, replica_id=replica_id, replica_epoch=lease_epoch, claim_id=claim_id)
        return Made(made, decided)
    assert row is not None, "only what is there is replayed"
    repeated = _changed(row, record)
    return Made(repeated, Repeated(repeated))


def withdraw(row: Row | None, lease_epoch: int, *, claim_id: str) -> Made:
    """Take back a claim whose grant nobody has heard. The answer: whether it was there."""
    if row is None or row.claim_id != claim_id or row.record.state is not EffectState.CLAIMED:
        return Made(None, False)
    record = row.record
    if record.policy is Policy.PROVIDER and record.attempt > 1:
        # An earlier attempt of unknown outcome stands behind it.
        return Made(_changed(row, effects.lose(record, epoch=record.epoch, reason="claim_withdrawn")), True)
    return Made(_changed(row, effects.not_applied(record, epoch=record.epoch)), True)


def adopt(row: Row | None, lease_epoch: int, *, local: EffectRecord, replica_id: str) -> Made:
    """Take over what the holder's journal has, if the claim is still its own and the table of states allows it.

    A key without a row comes from a journal that was not always in the fleet, or the database has lost it.
    """
    if row is None:
        made = Row(record=local, replica_id=replica_id, replica_epoch=lease_epoch, claim_id=TOLD)
        return Made(made, made)
    there = row.record
    if there.attempt == local.attempt and there.state is local.state:
        delivered = None if local.delivered_at is None else effects.deliver(there, at=local.delivered_at)
        same = row if delivered is None else _changed(row, delivered)
        return Made(None if delivered is None else same, same)
    if row.replica_id == replica_id:
        moved = there.attempt == local.attempt and (there.state, local.state) in _REPORTS
        # It was claimed again while this journal was not in the fleet, and nobody else did meanwhile.
        alone = there.attempt < local.attempt and there.state in (EffectState.NOT_APPLIED, EffectState.UNKNOWN)
        if moved or alone:
            taken: dict[str, Any] = {"version": there.version + 1, "replays": max(there.replays, local.replays)}
            new = _changed(row, msgspec.structs.replace(local, **taken))
            return Made(new, new)
    error = EffectNotOpen(
        f"effect {there.key_id} of tool {there.tool!r} is {there.state.value} in the fleet, claimed last by replica"
        f" {row.replica_id}; that it is {local.state.value} does not count"
    )
    return Made(None, Overruled(row, error))


def look(row: Row | None, lease_epoch: int) -> Made:
    """Only read."""
    return Made(None, row)


def deliver(row: Row | None, lease_epoch: int, *, who: Owner, at: float) -> Made:
    """A caller has the receipt of an effect that another replica holds."""
    if row is None:
        raise EffectStale("an effect was reported that nobody had claimed")
    check_reach(row.record, action_id=who.action_id, crew_id=who.crew_id)
    record = effects.deliver(row.record, at=at)
    return Made(None if record is None else _changed(row, record), row)


def reconcile(
    row: Row | None,
    lease_epoch: int,
    *,
    key_id: str,
    found: Reconciliation,
    versions: Collection[int],
    at: float,
    who: Owner | None = None,
) -> Made:
    """Record a decision on one of ``versions``. ``who``: the job that found it out, None for a person.

    A decision whose answer was lost is found to be there. Raises EffectNotFound, EffectChanged, EffectNotOpen.
    """
    if row is None:
        raise EffectNotFound(f"the ledger has no effect of the key {key_id[:64]!r}; see /effects")
    record = row.record
    if who is not None:
        check_reach(record, action_id=who.action_id, crew_id=who.crew_id)
    said = (record.decision, record.actor, record.evidence, record.receipt, record.settled_at)
    settled = found.decision is effects.Decision.SETTLED
    same = (found.decision.value, found.actor, found.evidence, found.receipt, at if settled else None)
    if record.version - 1 in versions and said == same:
        return Made(None, row)
    seen = record.version if record.version in versions else min(versions, default=0)
    made = _changed(row, effects.reconcile(record, found, version=seen, at=at))
    return Made(made, made)
