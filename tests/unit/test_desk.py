"""The desk of one job: frames from a peer on a socket, answers after the commit, endings, a journal that fails."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from protocol import frames
from protocol.effects import Decision, Policy, Scope
from protocol.errors import EffectNotFound
from protocol.states import EffectState
from supervisor.effects import MAX_AUDITED, PAUSE_REQUESTS
from tests.support.desk_peer import PATIENCE_S, Peer, at_work
from tests.support.effects import ARGS, OTHER_ARGS, RECEIPT, claim_frame, key_of
from tests.unit.test_journal_faults import BROKEN, FULL, Gate

KEY = key_of().key_id


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


@pytest.fixture
async def peer(path: Path) -> AsyncIterator[Peer]:
    async with at_work(path) as peer:
        yield peer


def settled(call: int, epoch: int, **changes: Any) -> frames.EffectSettled:
    said: dict[str, Any] = {"key_id": KEY, "epoch": epoch, "args_hash": ARGS, "receipt": RECEIPT, **changes}
    return frames.EffectSettled(call=call, **said)


# --- one call --------------------------------------------------------------------------------------------------------


async def test_a_claim_is_granted_settled_delivered_and_replayed(peer: Peer) -> None:
    granted = await peer.claim()
    assert (granted.call, granted.epoch, granted.attempt) == (1, peer.journal.epoch, 1)
    assert peer.desk.open == 1
    assert await peer.ask(settled(2, granted.epoch)) == frames.EffectNoted(call=2)
    assert peer.desk.open == 0
    peer.say(frames.EffectDelivered(key_id=KEY))
    replay = await peer.ask(claim_frame(3))
    assert (type(replay), replay.call, replay.receipt) == (frames.EffectReplayed, 3, RECEIPT)
    record = await peer.journal.effects.get(KEY)
    assert (record.replays, record.delivered_at is not None, record.settled_at) == (1, True, replay.settled_at)


@pytest.mark.parametrize(
    ("frame", "state"),
    [
        (frames.EffectNotApplied(call=2, key_id=KEY, epoch=1), (EffectState.NOT_APPLIED, "")),
        (frames.EffectLost(call=2, key_id=KEY, epoch=1, reason="TimeoutError"), (EffectState.UNKNOWN, "TimeoutError")),
    ],
)
async def test_a_call_may_say_that_nothing_happened_or_that_it_cannot_say(
    peer: Peer, frame: frames.Frame, state: tuple[EffectState, str]
) -> None:
    await peer.claim()
    assert await peer.ask(frame) == frames.EffectNoted(call=2)
    assert await peer.state() == state
    assert peer.desk.open == 0


async def test_refusals_have_the_codes_of_their_errors(peer: Peer) -> None:
    await peer.claim()
    in_flight = await peer.ask(claim_frame(2))
    assert (type(in_flight), in_flight.call, in_flight.code) == (frames.EffectRefused, 2, "effect_in_flight")
    assert (await peer.ask(claim_frame(3, args_hash=OTHER_ARGS))).code == "effect_conflict"
    assert (await peer.ask(claim_frame(4, preimage=b"nonsense"))).code == "effect_malformed"
    another = key_of(scope=Scope.ACTION, scope_id="another").preimage
    assert (await peer.ask(claim_frame(5, preimage=another))).code == "effect_malformed"
    await peer.ask(frames.EffectLost(call=6, key_id=KEY, epoch=peer.journal.epoch, reason="TimeoutError"))
    unknown = await peer.ask(claim_frame(7))
    assert (unknown.code, unknown.version) == ("effect_outcome_unknown", 2)
    assert peer.mailbox.take() is None, "a bad claim does not end the job"


async def test_a_provider_that_was_asked_settles_an_unknown_outcome(peer: Peer) -> None:
    granted = await peer.claim()
    await peer.ask(frames.EffectLost(call=2, key_id=KEY, epoch=granted.epoch, reason="TimeoutError"))
    found: dict[str, Any] = {"decision": Decision.SETTLED, "actor": "pay:lookup", "evidence": "ch_1", "receipt": b"{}"}
    stale = await peer.ask(frames.EffectReconciled(call=3, key_id=KEY, version=1, **found))
    assert stale.code == "effect_changed"
    assert await peer.ask(frames.EffectReconciled(call=4, key_id=KEY, version=2, **found)) == frames.EffectNoted(call=4)
    assert (await peer.ask(claim_frame(5))).receipt == b"{}"


@pytest.mark.effect_case(35)
@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"epoch": 77}, "effect_stale"),
        ({"key_id": "0" * 64}, "effect_stale"),
        ({"args_hash": OTHER_ARGS}, "effect_stale"),
        ({"receipt": b"{"}, "effect_malformed"),
        ({"receipt": b'{"a":NaN}'}, "effect_malformed"),
        ({"receipt": b'{"a":1,"a":2}'}, "effect_malformed"),
    ],
)
async def test_a_stale_or_malformed_report_is_refused_and_recorded(
    peer: Peer, changes: dict[str, Any], code: str
) -> None:
    await peer.claim()
    fields: dict[str, Any] = {"key_id": KEY, "epoch": 1, "args_hash": ARGS, "receipt": RECEIPT, **changes}
    refused = await peer.ask(frames.EffectSettled(call=2, **fields))
    assert (refused.call, refused.code) == (2, code)
    assert (await peer.state())[0] is EffectState.CLAIMED
    [entry] = await peer.journal.audit_of("a-1")
    note = json.loads(entry.detail or b"")
    assert (entry.act, note) == ("effect_refused", {"key_id": changes.get("key_id", KEY), "code": code})
    assert peer.desk.open == 1


async def test_a_worker_that_goes_on_reporting_nonsense_does_not_fill_the_journal(peer: Peer) -> None:
    for call in range(MAX_AUDITED + 20):
        assert (await peer.ask(settled(call, 1))).code == "effect_stale"
    assert len(await peer.journal.audit_of("a-1")) == MAX_AUDITED


async def test_a_call_asks_one_thing_at_a_time(path: Path) -> None:
    gate = Gate()
    async with at_work(path, faults=gate) as peer:
        blocker = await gate.hold(peer.journal)
        peer.say(claim_frame(1, "one"), claim_frame(1, "two"))
        assert (await peer.hear()).code == "effect_malformed"
        gate.go.set()
        assert type(await peer.hear()) is frames.EffectGranted
        await blocker


async def test_a_job_has_a_bound_of_claims(path: Path) -> None:
    async with at_work(path, limit=2) as peer:
        await peer.claim(1, "one")
        await peer.claim(2, "two")
        refused = await peer.ask(claim_frame(3, "three"))
        assert (refused.code, "max_effects_per_run = 2" in refused.detail) == ("effect_malformed", True)


@pytest.mark.parametrize("kind", [frames.EffectClaim, frames.EffectSettled])
async def test_nothing_is_answered_before_its_commit(path: Path, kind: type[frames.Frame]) -> None:
    gate = Gate()
    async with at_work(path, faults=gate) as peer:
        frame: frames.Frame = claim_frame(1)
        if kind is frames.EffectSettled:
            frame = settled(2, (await peer.claim()).epoch)
        gate.hold_at = "commit"
        peer.say(frame)
        await asyncio.to_thread(gate.held.wait, PATIENCE_S)
        gate.hold_at = None
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await peer.hear()
        # The row is written and not committed: readers must see the state before it.
        with contextlib.suppress(EffectNotFound):
            assert (await peer.state())[0] is EffectState.CLAIMED
            assert kind is frames.EffectSettled
        gate.go.set()
        assert type(await peer.hear()) in (frames.EffectGranted, frames.EffectNoted)


async def test_requests_share_commits_and_a_flood_pauses_the_pipe(path: Path) -> None:
    gate = Gate()
    async with at_work(path, faults=gate, limit=10_000) as peer:
        blocker = await gate.hold(peer.journal)
        count = 2 * PAUSE_REQUESTS
        peer.say(*(claim_frame(number, f"n-{number}") for number in range(count)))
        await peer.pressed.wait()
        assert peer.presses == [True]
        gate.go.set()
        answers = [await peer.hear() for _ in range(count)]
        await blocker
        assert {type(answer) for answer in answers} == {frames.EffectGranted}
        assert gate.reached["commit"] < count // 10
        assert peer.presses[-1] is False


# --- endings ---------------------------------------------------------------------------------------------------------


@pytest.mark.effect_case(30)
async def test_once_an_ending_is_decided_claims_are_refused_and_reports_are_taken(peer: Peer) -> None:
    granted = await peer.claim()
    peer.desk.close_claims("cancelled")
    refused = await peer.ask(claim_frame(2, "another"))
    assert (refused.code, "cancelled" in refused.detail) == ("effect_stopping", True)
    assert await peer.ask(settled(3, granted.epoch)) == frames.EffectNoted(call=3)
    with pytest.raises(EffectNotFound):
        await peer.state("another")


@pytest.mark.effect_case(30)
@pytest.mark.parametrize(
    ("policy", "earlier", "after"),
    [
        (Policy.ONCE, False, EffectState.NOT_APPLIED),
        (Policy.PROVIDER, False, EffectState.NOT_APPLIED),
        (Policy.PROVIDER, True, EffectState.UNKNOWN),
    ],
)
async def test_a_claim_whose_commit_comes_after_the_decision_is_taken_back(
    path: Path, policy: Policy, earlier: bool, after: EffectState
) -> None:
    """An earlier attempt of unknown outcome stays unknown: only this attempt is known to have done nothing."""
    gate = Gate()
    async with at_work(path, faults=gate) as peer:
        if earlier:
            granted = await peer.claim(7, policy=policy)
            await peer.ask(frames.EffectLost(call=8, key_id=KEY, epoch=granted.epoch, reason="TimeoutError"))
        blocker = await gate.hold(peer.journal)
        peer.say(claim_frame(1, policy=policy))
        await peer.taken()
        peer.desk.close_claims("timeout")
        gate.go.set()
        assert (await peer.hear()).code == "effect_stopping"
        await blocker
        await peer.until(after)
        assert peer.desk.open == 0


async def test_what_is_open_becomes_unknown_when_the_worker_dies_and_what_it_had_said_counts(peer: Peer) -> None:
    for call, name in enumerate(("open", "said", "unheard")):
        await peer.claim(call, name)
    peer.say(settled(10, 1, key_id=key_of("said").key_id), claim_frame(11, "late"))
    peer.die()
    assert await peer.until(EffectState.UNKNOWN, "open") == "worker_died"
    assert await peer.until(EffectState.UNKNOWN, "unheard") == "worker_died"
    assert (await peer.state("said"))[0] is EffectState.SETTLED
    with pytest.raises(EffectNotFound):
        await peer.state("late")


async def test_an_end_whose_last_words_came_with_it_is_no_death(peer: Peer) -> None:
    await peer.claim()
    peer.die("worker_ended")
    assert await peer.until(EffectState.UNKNOWN) == "worker_ended"


async def test_a_death_after_a_decision_is_told_by_the_decision(peer: Peer) -> None:
    await peer.claim()
    peer.desk.close_claims("cancelled")
    peer.die()
    assert await peer.until(EffectState.UNKNOWN) == "cancelled"


async def test_the_grace_waits_for_open_claims(peer: Peer) -> None:
    await asyncio.wait_for(peer.desk.settled(), PATIENCE_S)
    granted = await peer.claim()
    waiting = asyncio.ensure_future(peer.desk.settled())
    await asyncio.sleep(0)
    assert not waiting.done()
    await peer.ask(settled(2, granted.epoch))
    await asyncio.wait_for(waiting, PATIENCE_S)


async def test_the_end_waits_for_the_commits_under_way(path: Path) -> None:
    gate = Gate()
    async with at_work(path, faults=gate) as peer:
        granted = await peer.claim()
        blocker = await gate.hold(peer.journal)
        peer.say(settled(2, granted.epoch))
        await peer.taken()
        ending = asyncio.ensure_future(peer.desk.finish())
        await asyncio.sleep(0.02)
        assert not ending.done()
        gate.go.set()
        await ending
        await blocker
        assert (await peer.state())[0] is EffectState.SETTLED


# --- a journal that fails --------------------------------------------------------------------------------------------


@pytest.mark.effect_case(13)
@pytest.mark.effect_case(12)
@pytest.mark.parametrize("text", [FULL, BROKEN])
async def test_a_claim_that_cannot_be_written_is_refused(path: Path, text: str) -> None:
    gate = Gate()
    async with at_work(path, faults=gate) as peer:
        gate.fail("commit", text)
        refused = await peer.ask(claim_frame(1))
        assert (type(refused), refused.code) == (frames.EffectRefused, "effect_ledger_unavailable")
        assert peer.desk.open == 0
        await peer.claim(2)


@pytest.mark.effect_case(13)
@pytest.mark.parametrize("text", [FULL, BROKEN])
async def test_a_settlement_that_cannot_be_written_becomes_an_unknown_outcome(path: Path, text: str) -> None:
    gate = Gate()
    async with at_work(path, faults=gate) as peer:
        granted = await peer.claim()
        # Each attempt on a full disk fails twice, the second time in the reserve's room.
        gate.fail("commit", text, times=6)
        refused = await peer.ask(settled(2, granted.epoch))
        assert (refused.call, refused.code) == (2, "effect_ledger_unavailable")
        assert await peer.until(EffectState.UNKNOWN) == "settle_not_recorded"
        await peer.desk.finish()
        assert (peer.desk.lost, peer.desk.open) == ({}, 0)
        # The worker may say it again: the claim is still its own.
        assert await peer.ask(settled(3, granted.epoch)) == frames.EffectNoted(call=3)


@pytest.mark.effect_case(13)
@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (frames.EffectNotApplied(call=2, key_id=KEY, epoch=1), "not_applied_not_recorded"),
        (frames.EffectLost(call=2, key_id=KEY, epoch=1, reason="OSError"), "OSError"),
    ],
)
async def test_so_does_any_other_report(path: Path, frame: frames.Frame, reason: str) -> None:
    gate = Gate()
    async with at_work(path, faults=gate) as peer:
        await peer.claim()
        gate.fail("commit", BROKEN)
        assert (await peer.ask(frame)).code == "effect_ledger_unavailable"
        assert await peer.until(EffectState.UNKNOWN) == reason


async def test_what_the_journal_does_not_take_is_left_to_the_terminal_record(path: Path) -> None:
    gate = Gate()
    async with at_work(path, faults=gate) as peer:
        granted = await peer.claim()
        gate.errors["begin"] = iter(lambda: sqlite3.OperationalError(BROKEN), None)
        assert (await peer.ask(settled(2, granted.epoch))).code == "effect_ledger_unavailable"
        await asyncio.wait_for(peer.desk.finish(), PATIENCE_S)
        assert peer.desk.lost == {KEY: "settle_not_recorded"}
        gate.errors.clear()
        assert (await peer.state())[0] is EffectState.CLAIMED


async def test_a_fault_of_our_own_is_answered_too(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any, **keywords: Any) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr("supervisor.journal.ledger.table.load", broken)
    assert (await peer.ask(claim_frame(1))).code == "effect_ledger_unavailable"
