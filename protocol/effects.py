"""The effect ledger's pure part: keys, records, and what each request makes of a record.

No IO and no clock: whoever stores records gives the time and makes the answer durable before it is heard.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec

from protocol import canonical, jcs
from protocol.errors import (
    BadJson,
    CrewError,
    EffectAbandoned,
    EffectChanged,
    EffectConflict,
    EffectInFlight,
    EffectMalformed,
    EffectNotOpen,
    EffectOutcomeUnknown,
    EffectStale,
    IllegalTransition,
)
from protocol.states import EffectState, EffectStep, advance_effect

#: First element of every preimage; another one would be another derivation.
DERIVATION = "effect/1"
MAX_PREIMAGE_BYTES = 16_384
#: A longer result is settled without being stored.
MAX_RECEIPT_BYTES = 65_536
MAX_TEXT = 2048


class Scope(StrEnum):
    """How far a key reaches: one Action, one crew, or everything that shares the ledger."""

    ACTION = "action"
    CREW = "crew"
    GLOBAL = "global"


#: Scopes that reach beyond one Action, and with it beyond the replica that executes it.
SHARED_SCOPES = frozenset({Scope.CREW, Scope.GLOBAL})


class Policy(StrEnum):
    """``once``: at most one effect. ``provider``: the provider tells repeats by the key, so an unknown outcome may be
    tried again. ``read``: no effect, nothing is claimed.
    """

    ONCE = "once"
    PROVIDER = "provider"
    READ = "read"


class Decision(StrEnum):
    """What somebody found out about an unknown outcome."""

    SETTLED = "settled"
    NOT_APPLIED = "not_applied"
    ABANDONED = "abandoned"


_RECONCILING = {
    Decision.SETTLED: EffectStep.RECONCILE_SETTLED,
    Decision.NOT_APPLIED: EffectStep.RECONCILE_NOT_APPLIED,
    Decision.ABANDONED: EffectStep.RECONCILE_ABANDONED,
}


class ToolPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a tool is guarded.

    ``key``: names of arguments that make up the business key; empty for a key per call. ``volatile``: arguments that
    may change between repeats. ``reconcile``: ``module:function`` that asks the provider what became of a call.
    ``pass_key_as``: argument that gets the key id as the provider's idempotency key.
    """

    policy: Policy = Policy.ONCE
    scope: Scope = Scope.ACTION
    key: tuple[str, ...] = ()
    volatile: tuple[str, ...] = ()
    reconcile: str | None = None
    pass_key_as: str | None = None


class EffectKey(msgspec.Struct, frozen=True, kw_only=True):
    """What names one effect. ``identity``: ``["key", business key]`` or ``["call", task index, args hash, ordinal]``.

    ``scope_id``: the Action's or the crew's id, "" for the global scope.
    """

    scope: Scope
    scope_id: str
    tool: str
    identity: tuple[Any, ...]

    @property
    def preimage(self) -> bytes:
        """Canonical JSON of ``["effect/1", scope, scope_id, tool, identity]``. Raises NotCanonical."""
        return jcs.encode([DERIVATION, self.scope.value, self.scope_id, self.tool, list(self.identity)])

    @property
    def key_id(self) -> str:
        """Lower-case hex SHA-256 of the preimage. Raises NotCanonical."""
        return key_id_of(self.preimage)


def key_id_of(preimage: bytes) -> str:
    """The key id that a published preimage gives."""
    return hashlib.sha256(preimage).hexdigest()


def parse_preimage(preimage: bytes) -> EffectKey:
    """The key of a preimage that another process made. Raises EffectMalformed unless it is exactly canonical."""
    if len(preimage) > MAX_PREIMAGE_BYTES:
        raise EffectMalformed(f"an effect's preimage is above {MAX_PREIMAGE_BYTES} bytes; use a shorter key")
    try:
        value = canonical.parse(preimage)
        derivation, scope, scope_id, tool, identity = value
        key = msgspec.convert(
            {"scope": scope, "scope_id": scope_id, "tool": tool, "identity": identity}, EffectKey, strict=True
        )
        good = derivation == DERIVATION and _is_identity(key.identity) and key.preimage == preimage
    except (BadJson, CrewError, TypeError, ValueError) as error:
        raise EffectMalformed(f"an effect's preimage cannot be read: {error}") from None
    if not good:
        raise EffectMalformed("an effect's preimage is not canonical")
    return key


def _is_identity(identity: tuple[Any, ...]) -> bool:
    return (len(identity) == 2 and identity[0] == "key") or (len(identity) == 4 and identity[0] == "call")


class EffectRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One effect as it is stored; every ledger has a column of that name for each field.

    ``version`` grows with each change. ``epoch``: the incarnation of the owner that granted the last claim, ``attempt``
    counts claims. Times are Unix seconds. ``receipt``: JSON text of the tool's result; None before the settlement, and
    where the result was not stored. ``reason``: why the outcome is unknown. ``actor``, ``decision`` and ``evidence``
    are of the last reconciliation. ``job``: row of the job, None outside a supervisor.
    """

    key_id: str
    preimage: bytes
    scope: Scope
    scope_id: str
    tool: str
    policy: Policy
    args_hash: str
    state: EffectState
    version: int
    epoch: int
    attempt: int
    action_id: str
    crew_id: str
    job: int | None
    claimed_at: float
    settled_at: float | None = None
    delivered_at: float | None = None
    receipt: bytes | None = None
    replays: int = 0
    reason: str = ""
    actor: str = ""
    decision: str = ""
    evidence: str = ""


FIELDS = EffectRecord.__struct_fields__
#: For CREATE TABLE: column definitions in the order of FIELDS.
COLUMNS = """key_id TEXT PRIMARY KEY NOT NULL, preimage BLOB NOT NULL, scope TEXT NOT NULL, scope_id TEXT NOT NULL,
    tool TEXT NOT NULL, policy TEXT NOT NULL, args_hash TEXT NOT NULL, state TEXT NOT NULL, version INTEGER NOT NULL,
    epoch INTEGER NOT NULL, attempt INTEGER NOT NULL, action_id TEXT NOT NULL, crew_id TEXT NOT NULL, job INTEGER,
    claimed_at REAL NOT NULL, settled_at REAL, delivered_at REAL, receipt BLOB, replays INTEGER NOT NULL,
    reason TEXT NOT NULL, actor TEXT NOT NULL, decision TEXT NOT NULL, evidence TEXT NOT NULL"""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Who wants to make a call, and what it is. ``args_hash``: JCS digest of its validated arguments."""

    preimage: bytes
    args_hash: str
    policy: Policy
    action_id: str
    crew_id: str
    job: int | None = None


class Granted(msgspec.Struct, frozen=True):
    """The call may be made once ``record`` is durable."""

    record: EffectRecord


class Replayed(msgspec.Struct, frozen=True):
    """The effect happened before; ``record`` has its receipt, and one replay more."""

    record: EffectRecord


def claim(record: EffectRecord | None, wanted: Claim, *, epoch: int, at: float) -> Granted | Replayed:
    """Decide a claim; ``record`` is what the ledger has of its key.

    Raises EffectConflict for other arguments, EffectInFlight while another call is under way, EffectOutcomeUnknown,
    EffectAbandoned, EffectMalformed. Nothing changes then.
    """
    if record is None:
        return Granted(_first(wanted, epoch=epoch, at=at))
    _check_same(record, wanted)
    match record.state:
        case EffectState.SETTLED:
            return Replayed(_changed(record, replays=record.replays + 1))
        case EffectState.NOT_APPLIED:
            step = EffectStep.CLAIM
        case EffectState.UNKNOWN if record.policy is Policy.PROVIDER:
            step = EffectStep.REPEAT
        case EffectState.CLAIMED:
            raise EffectInFlight(f"{_named(record)} is under way in another call; wait for it")
        case EffectState.UNKNOWN:
            raise EffectOutcomeUnknown(
                f"{_named(record)} was begun and nobody knows whether it happened ({record.reason}); "
                "it is not repeated until it is reconciled",
                version=record.version,
            )
        case EffectState.ABANDONED:
            raise EffectAbandoned(f"{_named(record)} was abandoned by {record.actor}; it is never repeated")
    return Granted(
        _changed(
            record,
            state=advance_effect(record.state, step),
            epoch=epoch,
            attempt=record.attempt + 1,
            action_id=wanted.action_id,
            crew_id=wanted.crew_id,
            job=wanted.job,
            claimed_at=at,
            reason="",
        )
    )


def _first(wanted: Claim, *, epoch: int, at: float) -> EffectRecord:
    key = parse_preimage(wanted.preimage)
    if wanted.policy is Policy.READ:
        raise EffectMalformed(f"tool {key.tool!r} only reads; nothing of it is claimed")
    return EffectRecord(
        key_id=key_id_of(wanted.preimage),
        preimage=wanted.preimage,
        scope=key.scope,
        scope_id=key.scope_id,
        tool=key.tool,
        policy=wanted.policy,
        args_hash=wanted.args_hash,
        state=advance_effect(None, EffectStep.CLAIM),
        version=1,
        epoch=epoch,
        attempt=1,
        action_id=wanted.action_id,
        crew_id=wanted.crew_id,
        job=wanted.job,
        claimed_at=at,
    )


def _check_same(record: EffectRecord, wanted: Claim) -> None:
    if record.args_hash != wanted.args_hash:
        raise EffectConflict(
            f"{_named(record)} was called before with other arguments; nothing was done, "
            "use the original arguments or another key"
        )
    if record.policy is not wanted.policy:
        raise EffectConflict(
            f"{_named(record)} was claimed under the policy {record.policy.value} and now comes under "
            f"{wanted.policy.value}; nothing was done"
        )


def settle(
    record: EffectRecord | None, *, epoch: int, args_hash: str, receipt: bytes | None, at: float
) -> EffectRecord:
    """The effect happened. Late, it settles an unknown outcome too.

    ``receipt``: JSON text, None for a result that is not stored. Raises EffectStale unless the claim is of that epoch
    and those arguments, EffectNotOpen for a record that is past it.
    """
    known = _own(record, epoch)
    if known.args_hash != args_hash:
        raise EffectStale(f"{_named(known)} was claimed with other arguments than those that come with the receipt")
    if receipt is not None and len(receipt) > MAX_RECEIPT_BYTES:
        raise EffectMalformed(f"a receipt of {_named(known)} is above {MAX_RECEIPT_BYTES} bytes")
    return _changed(known, state=_step(known, EffectStep.SETTLE), receipt=receipt, settled_at=at, reason="")


def not_applied(record: EffectRecord | None, *, epoch: int) -> EffectRecord:
    """The tool says that nothing happened. Raises EffectStale, EffectNotOpen."""
    known = _own(record, epoch)
    return _changed(known, state=_step(known, EffectStep.NOT_APPLY), reason="")


def lose(record: EffectRecord | None, *, epoch: int, reason: str) -> EffectRecord:
    """Nobody will say what became of the call. Raises EffectStale, EffectNotOpen."""
    known = _own(record, epoch)
    return _changed(known, state=_step(known, EffectStep.LOSE), reason=reason[:MAX_TEXT])


def deliver(record: EffectRecord | None, *, at: float) -> EffectRecord | None:
    """The caller has the receipt; only the first time counts. None: nothing changes."""
    if record is None or record.state is not EffectState.SETTLED or record.delivered_at is not None:
        return None
    return _changed(record, delivered_at=at)


class Reconciliation(msgspec.Struct, frozen=True, kw_only=True):
    """A decision about an unknown outcome: by whom, and what it rests on. ``receipt`` goes with ``settled`` only."""

    decision: Decision
    actor: str
    evidence: str
    receipt: bytes | None = None


def reconcile(record: EffectRecord, found: Reconciliation, *, version: int | None, at: float) -> EffectRecord:
    """Record what was found out. ``version``: the one that the decision was made on, None for whichever it is.

    Raises EffectChanged for another version, EffectNotOpen unless the outcome is unknown.
    """
    if version is not None and record.version != version:
        raise EffectChanged(
            f"{_named(record)} has changed: it is at version {record.version}, the decision was about {version}; "
            "look at it again"
        )
    settled = found.decision is Decision.SETTLED
    return _changed(
        record,
        state=_step(record, _RECONCILING[found.decision]),
        receipt=found.receipt if settled else None,
        settled_at=at if settled else None,
        actor=found.actor,
        decision=found.decision.value,
        evidence=found.evidence,
    )


def counts(states: Mapping[str, int]) -> dict[str, int]:
    """Numbers of effects by state, every state named, in the order of the states."""
    return {state.value: states.get(state.value, 0) for state in EffectState}


def _own(record: EffectRecord | None, epoch: int) -> EffectRecord:
    if record is None:
        raise EffectStale("an effect was reported that nobody had claimed")
    if record.epoch != epoch:
        raise EffectStale(f"{_named(record)} was claimed by epoch {record.epoch}; epoch {epoch} has no say in it")
    return record


def _step(record: EffectRecord, step: EffectStep) -> EffectState:
    try:
        return advance_effect(record.state, step)
    except IllegalTransition:
        raise EffectNotOpen(
            f"{_named(record)} is {record.state.value}; {step.value} is not possible any more"
        ) from None


def _changed(record: EffectRecord, **fields: Any) -> EffectRecord:
    return msgspec.structs.replace(record, version=record.version + 1, **fields)


def _named(record: EffectRecord) -> str:
    return f"effect {record.key_id} of tool {record.tool!r}"
