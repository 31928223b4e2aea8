"""The effect ledger's state machine and its reducer: every pair of state and request has an answer."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import msgspec
import pytest

from protocol import canonical, effects, jcs
from protocol.effects import (
    COLUMNS,
    FIELDS,
    MAX_PREIMAGE_BYTES,
    MAX_RECEIPT_BYTES,
    Decision,
    EffectKey,
    EffectRecord,
    Granted,
    Policy,
    Replayed,
    Scope,
    key_id_of,
    parse_preimage,
)
from protocol.errors import (
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
from protocol.states import EFFECT_TRANSITIONS, OPEN_EFFECTS, EffectState, EffectStep, advance_effect
from tests.support.effects import ARGS, EPOCH, OTHER_ARGS, RECEIPT, claim_of, claimed, decision, in_state, key_of

C, S, N, U, A = EffectState
STEPS = EffectStep
#: Written out a second time: a table that agrees with itself says nothing.
EXPECTED = {
    (None, STEPS.CLAIM): C,
    (N, STEPS.CLAIM): C,
    (C, STEPS.SETTLE): S,
    (C, STEPS.NOT_APPLY): N,
    (C, STEPS.LOSE): U,
    (U, STEPS.SETTLE): S,
    (U, STEPS.REPEAT): C,
    (U, STEPS.RECONCILE_SETTLED): S,
    (U, STEPS.RECONCILE_NOT_APPLIED): N,
    (U, STEPS.RECONCILE_ABANDONED): A,
}


@pytest.mark.parametrize(("state", "step"), list(product((None, *EffectState), EffectStep)))
def test_each_pair_is_legal_or_raises(state: EffectState | None, step: EffectStep) -> None:
    if (state, step) in EXPECTED:
        assert advance_effect(state, step) is EXPECTED[state, step]
    else:
        with pytest.raises(IllegalTransition, match=step.value):
            advance_effect(state, step)


def test_what_is_settled_or_abandoned_stays_so() -> None:
    assert [pair for pair in EFFECT_TRANSITIONS if pair[0] in (S, A)] == []


def test_nothing_leads_back_to_a_claim_without_somebody_who_says_so() -> None:
    """From UNKNOWN a once-only effect is claimed again only past a reconciliation; no step is the passing of time."""
    back = {step for (state, step), after in EFFECT_TRANSITIONS.items() if state is U and after is C}
    assert back == {STEPS.REPEAT}
    assert set(OPEN_EFFECTS) == {C, U}


# --- claims ----------------------------------------------------------------------------------------------------------

CLAIMS: dict[tuple[EffectState, Policy], Any] = {
    (C, Policy.ONCE): EffectInFlight,
    (C, Policy.PROVIDER): EffectInFlight,
    (S, Policy.ONCE): Replayed,
    (S, Policy.PROVIDER): Replayed,
    (N, Policy.ONCE): Granted,
    (N, Policy.PROVIDER): Granted,
    (U, Policy.ONCE): EffectOutcomeUnknown,
    (U, Policy.PROVIDER): Granted,
    (A, Policy.ONCE): EffectAbandoned,
    (A, Policy.PROVIDER): EffectAbandoned,
}


@pytest.mark.parametrize(("state", "policy"), CLAIMS)
def test_a_claim_of_a_known_key_is_decided_by_its_state(state: EffectState, policy: Policy) -> None:
    known, expected = in_state(state, policy=policy), CLAIMS[state, policy]
    wanted = claim_of(policy=policy, action_id="a-2", job=2)
    if issubclass(expected, CrewError):
        with pytest.raises(expected, match=known.key_id):
            effects.claim(known, wanted, epoch=8, at=20.0)
        return
    decided = effects.claim(known, wanted, epoch=8, at=20.0)
    assert type(decided) is expected
    if isinstance(decided, Granted):
        assert (decided.record.state, decided.record.attempt, decided.record.epoch) == (C, known.attempt + 1, 8)
        assert (decided.record.action_id, decided.record.job, decided.record.claimed_at) == ("a-2", 2, 20.0)
    else:
        assert decided.record == msgspec.structs.replace(known, replays=1, version=known.version + 1)


@pytest.mark.effect_case(27)
def test_what_was_not_applied_is_claimed_again_with_the_next_attempt() -> None:
    record = effects.not_applied(claimed(), epoch=EPOCH)
    again = effects.claim(record, claim_of(), epoch=EPOCH, at=12.0)
    assert (again.record.attempt, again.record.state) == (2, C)


@pytest.mark.parametrize("state", EffectState)
@pytest.mark.parametrize("changes", [{"args_hash": OTHER_ARGS}, {"policy": Policy.PROVIDER}, {"policy": Policy.READ}])
def test_other_material_under_a_known_key_is_a_conflict_in_every_state(
    state: EffectState, changes: dict[str, Any]
) -> None:
    with pytest.raises(EffectConflict):
        effects.claim(in_state(state), claim_of(**changes), epoch=EPOCH, at=20.0)


def test_a_refusal_of_an_unknown_outcome_says_which_version_was_seen() -> None:
    known = in_state(U)
    with pytest.raises(EffectOutcomeUnknown) as refused:
        effects.claim(known, claim_of(), epoch=8, at=20.0)
    assert refused.value.version == known.version == 2


def test_a_tool_that_only_reads_claims_nothing() -> None:
    with pytest.raises(EffectMalformed, match="only reads"):
        effects.claim(None, claim_of(policy=Policy.READ), epoch=1, at=1.0)


# --- reports ---------------------------------------------------------------------------------------------------------

Request = Callable[[EffectRecord], EffectRecord | None]
REPORTS: dict[str, tuple[Request, dict[EffectState, EffectState]]] = {
    "settle": (
        lambda record: effects.settle(record, epoch=EPOCH, args_hash=ARGS, receipt=RECEIPT, at=20.0),
        {C: S, U: S},
    ),
    "not_applied": (lambda record: effects.not_applied(record, epoch=EPOCH), {C: N}),
    "lose": (lambda record: effects.lose(record, epoch=EPOCH, reason="x"), {C: U}),
    **{
        f"reconcile {kind.value}": (
            lambda record, kind=kind: effects.reconcile(record, decision(kind), version=record.version, at=20.0),
            {U: after},
        )
        for kind, after in ((Decision.SETTLED, S), (Decision.NOT_APPLIED, N), (Decision.ABANDONED, A))
    },
}


@pytest.mark.effect_case(36)
@pytest.mark.effect_case(37)
@pytest.mark.parametrize(("name", "state"), list(product(REPORTS, EffectState)))
def test_a_report_meets_its_state_or_is_refused(name: str, state: EffectState) -> None:
    request, legal = REPORTS[name]
    known = in_state(state)
    if state in legal:
        made = request(known)
        assert made is not None
        assert (made.state, made.version) == (legal[state], known.version + 1)
    else:
        with pytest.raises(EffectNotOpen, match=known.key_id):
            request(known)


@pytest.mark.effect_case(35)
@pytest.mark.parametrize("name", ["settle", "not_applied", "lose"])
@pytest.mark.parametrize("state", EffectState)
def test_another_epoch_has_no_say(name: str, state: EffectState) -> None:
    with pytest.raises(EffectStale):
        REPORTS[name][0](msgspec.structs.replace(in_state(state), epoch=EPOCH + 1))


def test_a_report_of_what_nobody_claimed_is_stale() -> None:
    for request in (
        lambda: effects.settle(None, epoch=1, args_hash=ARGS, receipt=None, at=1.0),
        lambda: effects.not_applied(None, epoch=1),
        lambda: effects.lose(None, epoch=1, reason="x"),
    ):
        with pytest.raises(EffectStale):
            request()
    assert effects.deliver(None, at=1.0) is None


def test_a_receipt_for_other_arguments_is_stale() -> None:
    with pytest.raises(EffectStale, match="other arguments"):
        effects.settle(claimed(), epoch=EPOCH, args_hash=OTHER_ARGS, receipt=RECEIPT, at=11.0)


def test_a_receipt_has_a_bound_and_none_is_one_too() -> None:
    largest = b'"' + b"x" * (MAX_RECEIPT_BYTES - 2) + b'"'
    assert effects.settle(claimed(), epoch=EPOCH, args_hash=ARGS, receipt=largest, at=11.0).receipt == largest
    with pytest.raises(EffectMalformed):
        effects.settle(claimed(), epoch=EPOCH, args_hash=ARGS, receipt=largest + b" ", at=11.0)
    unstored = effects.settle(claimed(), epoch=EPOCH, args_hash=ARGS, receipt=None, at=11.0)
    assert (unstored.state, unstored.receipt, unstored.settled_at) == (S, None, 11.0)


@pytest.mark.effect_case(46)
def test_a_delivery_counts_once_and_only_of_what_is_settled() -> None:
    settled = in_state(S)
    delivered = effects.deliver(settled, at=30.0)
    assert delivered is not None
    assert (delivered.delivered_at, delivered.version) == (30.0, settled.version + 1)
    assert effects.deliver(delivered, at=31.0) is None
    assert [effects.deliver(in_state(state), at=30.0) for state in EffectState if state is not S] == [None] * 4


@pytest.mark.effect_case(38)
def test_a_decision_on_another_version_changes_nothing() -> None:
    known = in_state(U)
    for version in (known.version - 1, known.version + 1):
        with pytest.raises(EffectChanged, match=f"version {known.version}"):
            effects.reconcile(known, decision(Decision.ABANDONED), version=version, at=1.0)
    assert effects.reconcile(known, decision(Decision.ABANDONED), version=None, at=1.0).state is A


def test_a_decision_keeps_who_decided_and_why() -> None:
    made = effects.reconcile(in_state(U), decision(Decision.SETTLED, receipt=RECEIPT), version=2, at=40.0)
    assert (made.actor, made.decision, made.evidence) == ("ops", "settled", "the bank's statement")
    assert (made.receipt, made.settled_at) == (RECEIPT, 40.0)


@pytest.mark.effect_case(41)
@pytest.mark.parametrize("at", [-3600.0, 3600.0, 366 * 86_400.0])
@pytest.mark.parametrize("state", EffectState)
def test_no_age_and_no_jump_of_the_clock_turns_a_state_into_another_answer(state: EffectState, at: float) -> None:
    """Time is an argument of the reducer: an hour back, an hour on, a year on."""
    known = in_state(state)
    answers = []
    for when in (known.claimed_at, known.claimed_at + at):
        try:
            answers.append(type(effects.claim(known, claim_of(), epoch=EPOCH, at=when)))
        except CrewError as error:
            answers.append(type(error))
    assert answers[0] is answers[1]
    assert (answers[0] is Granted) == (state is N)


# --- keys ------------------------------------------------------------------------------------------------------------


@pytest.mark.effect_case(46)
def test_a_key_is_the_digest_of_its_published_preimage() -> None:
    key = EffectKey(scope=Scope.CREW, scope_id="crew", tool="pay", identity=("call", 0, ARGS, 2))
    assert key.preimage == jcs.encode(["effect/1", "crew", "crew", "pay", ["call", 0, ARGS, 2]])
    assert key.key_id == key_id_of(key.preimage) == canonical.digest(key.preimage)
    assert parse_preimage(key.preimage) == key


@pytest.mark.effect_case(16)
def test_every_part_of_a_key_makes_another_one() -> None:
    keys = [
        key_of("a"),
        key_of("b"),
        key_of("a", tool="mail"),
        key_of("a", scope=Scope.CREW, scope_id="crew"),
        key_of("a", scope=Scope.CREW, scope_id="other"),
        key_of("a", scope=Scope.ACTION, scope_id="crew"),
        *(
            EffectKey(scope=Scope.ACTION, scope_id="a", tool="pay", identity=("call", *rest))
            for rest in ((0, ARGS, 0), (0, ARGS, 1), (1, ARGS, 0), (0, OTHER_ARGS, 0))
        ),
    ]
    assert len({key.key_id for key in keys}) == len(keys)


@pytest.mark.parametrize(
    "preimage",
    [
        b"",
        b"[]",
        b'["effect/2","global","","pay",["key","a"]]',
        b'["effect/1","everywhere","","pay",["key","a"]]',
        b'["effect/1","global","","pay",["key"]]',
        b'["effect/1","global","","pay",["name","a"]]',
        b'["effect/1","global","","pay",["call",0,"x"]]',
        b'["effect/1","global","","pay",["key","a"],1]',
        b'["effect/1", "global","","pay",["key","a"]]',
        b'["effect/1","global","","pay",["key",1.0]]',
        b'["effect/1","global","","pay",["key",{"b":1,"a":2}]]',
        b'["effect/1","global","","pay",["key",{"a":1,"a":1}]]',
        b'["effect/1","global","",7,["key","a"]]',
        b'["effect/1","global","","pay",["key","\xff"]]',
        b'["effect/1","global","","pay",["key",NaN]]',
        b'["effect/1","global","","pay",["key","' + b"x" * MAX_PREIMAGE_BYTES + b'"]]',
    ],
)
def test_a_preimage_that_is_not_exactly_canonical_is_refused(preimage: bytes) -> None:
    with pytest.raises(EffectMalformed):
        effects.claim(None, claim_of(preimage=preimage), epoch=1, at=1.0)


def test_the_columns_are_the_fields() -> None:
    assert tuple(column.split()[0] for column in COLUMNS.split(",")) == FIELDS
