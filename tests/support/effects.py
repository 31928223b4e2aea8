"""Effects for tests: keys, claims, stored records in every state, frames."""

from __future__ import annotations

from typing import Any

import msgspec

from protocol import effects, frames, jcs
from protocol.effects import Claim, Decision, EffectKey, EffectRecord, Granted, Policy, Reconciliation, Scope
from protocol.errors import CrewError
from protocol.states import EffectState
from supervisor.journal import Journal, Owner

ARGS = jcs.digest({"amount": 12.5})
OTHER_ARGS = jcs.digest({"amount": 99})
RECEIPT = b'{"paid":true}'
EPOCH = 7


def key_of(name: str = "invoice-1", *, scope: Scope = Scope.GLOBAL, scope_id: str = "", tool: str = "pay") -> EffectKey:
    """A business key."""
    return EffectKey(scope=scope, scope_id=scope_id, tool=tool, identity=("key", name))


def claim_of(name: str = "invoice-1", **changes: Any) -> Claim:
    """A claim of a global business key by Action a-1 of the crew ``crew``."""
    claim = Claim(
        preimage=key_of(name).preimage,
        args_hash=ARGS,
        policy=Policy.ONCE,
        action_id="a-1",
        crew_id="crew",
        job=1,
    )
    return msgspec.structs.replace(claim, **changes)


def claimed(name: str = "invoice-1", *, epoch: int = EPOCH, at: float = 10.0, **changes: Any) -> EffectRecord:
    """A record that was claimed just now."""
    decided = effects.claim(None, claim_of(name, **changes), epoch=epoch, at=at)
    assert isinstance(decided, Granted)
    return decided.record


def in_state(state: EffectState, *, policy: Policy = Policy.ONCE) -> EffectRecord:
    """A record that came to ``state`` by the reducer."""
    record = claimed(policy=policy)
    if state is EffectState.CLAIMED:
        return record
    if state is EffectState.SETTLED:
        return effects.settle(record, epoch=EPOCH, args_hash=ARGS, receipt=RECEIPT, at=11.0)
    if state is EffectState.NOT_APPLIED:
        return effects.not_applied(record, epoch=EPOCH)
    lost = effects.lose(record, epoch=EPOCH, reason="worker_died")
    if state is EffectState.UNKNOWN:
        return lost
    return effects.reconcile(lost, decision(Decision.ABANDONED), version=None, at=12.0)


def decision(kind: Decision, *, receipt: bytes | None = None) -> Reconciliation:
    """A decision of an operator."""
    return Reconciliation(decision=kind, actor="ops", evidence="the bank's statement", receipt=receipt)


def claim_frame(call: int, name: str = "invoice-1", **changes: Any) -> frames.EffectClaim:
    """What a worker sends to claim the key."""
    frame = frames.EffectClaim(call=call, preimage=key_of(name).preimage, args_hash=ARGS, policy=Policy.ONCE)
    return msgspec.structs.replace(frame, **changes)


def who(row: int = 1, **changes: Any) -> Owner:
    """The job that speaks."""
    return msgspec.structs.replace(Owner(action_id="a-1", crew_id="crew", row=row), **changes)


async def claim(journal: Journal, name: str = "invoice-1", **changes: Any) -> EffectRecord:
    """Claim a key that is free and return its record."""
    decided = await journal.effects.claim(claim_of(name, **changes))
    assert isinstance(decided, Granted)
    return decided.record


async def settle(journal: Journal, record: EffectRecord, **changes: Any) -> EffectRecord | CrewError | None:
    """Settle a claim as the job that made it."""
    said: dict[str, Any] = {"epoch": record.epoch, "args_hash": ARGS, "receipt": RECEIPT, **changes}
    return await journal.effects.settle(who(record.job or 0), record.key_id, **said)


async def known(journal: Journal, name: str = "invoice-1") -> EffectRecord:
    """What the journal has of a key."""
    return await journal.effects.get(key_of(name).key_id)
