"""What becomes of payments under the supervisor: failing disks, cancels, other Actions, archives, restarts."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from protocol.effects import MAX_RECEIPT_BYTES, Scope, key_id_of
from tests.effects.supervised.conftest import MakePayers, Planned
from tests.support import procs, scripts
from tests.support.client import Answer
from tests.support.crash_build import EIO, ENOSPC, HOLD, Plan
from tests.support.effects import key_of
from tests.support.payers import AMOUNT, CONFLICT, NONE, UNKNOWN, WAIT_S, Payers

# --- a journal that cannot write -------------------------------------------------------------------------------------


def ready_again(planned: Planned) -> None:
    """Let the journal write, and wait until the server says that it does."""
    assert planned.server.plan.fired
    planned.server.plan.disarm()
    procs.wait_until(lambda: planned.client.request("GET", "/readyz").status == 200, WAIT_S, "ready again")


@pytest.mark.effect_case(13)
@pytest.mark.parametrize(
    ("point", "kind"), [("journal.effect", EIO), ("journal.effect", ENOSPC), ("journal.commit", EIO)]
)
def test_a_claim_that_cannot_be_written_is_refused_and_the_body_does_not_run(
    planned: Planned, point: str, kind: str
) -> None:
    planned.begin("full", until="start")
    planned.server.plan.arm(Plan(point, kind, times=100))
    planned.release("full", "start")
    planned.wait("full", "paid")
    ready_again(planned)
    assert planned.ended("full")["effects"] == NONE
    assert outcome(planned, "full") == {"code": "effect_ledger_unavailable"}
    assert not planned.reached("full", "body")
    assert planned.charges() == 0
    assert planned.pay_one("next") == "charge 1"


@pytest.mark.effect_case(13)
@pytest.mark.parametrize(
    ("point", "kind", "times"), [("journal.effect", EIO, 1), ("journal.effect", ENOSPC, 2), ("journal.commit", EIO, 1)]
)
def test_a_settlement_that_cannot_be_written_is_unknown_and_the_agent_hears_so(
    planned: Planned, point: str, kind: str, times: int
) -> None:
    """A full disk is met twice: the first time the room that is kept for endings is given to the settlement."""
    planned.begin("full", until="charged")
    planned.server.plan.arm(Plan(point, kind, times=times))
    planned.release("full", "charged")
    view = planned.until("unknown")
    ready_again(planned)
    assert planned.ended("full")["effects"] == NONE | {"unknown": 1}
    assert outcome(planned, "full") == {"code": UNKNOWN}
    assert view["receipt"] is None
    assert planned.pay_one("next") == UNKNOWN
    assert planned.charges() == 1


@pytest.mark.effect_case(13)
def test_a_settlement_finds_room_on_a_full_disk(planned: Planned) -> None:
    planned.begin("full", until="charged")
    planned.server.plan.arm(Plan("journal.effect", ENOSPC))
    planned.release("full", "charged")
    planned.until("settled")
    ready_again(planned)
    planned.ended("full")
    assert outcome(planned, "full") == {"result": "charge 1"}


def outcome(payers: Payers, action_id: str) -> dict[str, object]:
    """What the one call of a job that has ended gave, from its terminal event."""
    (found,) = payers.last_event(action_id)["data"]["outcomes"]
    return dict(found)


# --- keys, scopes, arguments -----------------------------------------------------------------------------------------


@pytest.mark.effect_case(23)
def test_a_new_action_acts_again_unless_its_key_is_global(payers: Payers) -> None:
    for tool, charges in (("pay_here", 2), ("pay_loosely", 2), ("pay", 1)):
        first, second = (payers.pay_one(f"e23-{tool}-{at}", f"e23-{tool}", tool=tool) for at in range(2))
        assert (first == second, payers.charges(f"e23-{tool}")) == (charges == 1, charges)
    assert payers.pay_one("e23-crew", "e23-pay", crew_id="other_payer") == first


@pytest.mark.effect_case(17)
def test_without_a_key_two_equal_calls_of_one_action_are_two_effects(payers: Payers) -> None:
    first, second = payers.pay("e17", "e17", "e17", tool="pay_loosely")
    assert first != second
    assert payers.charges("e17") == 2
    third, fourth = payers.pay("e17-key", "e17-key", "e17-key", tool="pay_here")
    assert third == fourth
    assert payers.charges("e17-key") == 1


@pytest.mark.effect_case(24)
def test_another_amount_under_the_invoices_key_is_a_conflict(payers: Payers) -> None:
    first = payers.pay_one("e24", "e24")
    assert payers.pay_one("e24-more", "e24", amount=AMOUNT + 1) == CONFLICT
    assert not payers.reached("e24-more", "body")
    assert payers.pay_one("e24-same", "e24") == first
    assert payers.charges("e24") == 1


@pytest.mark.effect_case(26)
def test_a_result_too_long_to_be_kept_is_settled_and_the_call_is_not_repeated(payers: Payers) -> None:
    for name, chars, kept in (("e26-fits", MAX_RECEIPT_BYTES - 2, True), ("e26-long", MAX_RECEIPT_BYTES - 1, False)):
        first = payers.pay_one(name, name, chars=chars)
        assert len(first) == chars
        view = payers.until("settled", name)
        assert (view["receipt_stored"], view["receipt"]) == (kept, first if kept else None)
        again = payers.pay_one(f"{name}-next", name)
        assert again == first if kept else "not stored" in again
        assert payers.charges(name) == 1


@pytest.mark.effect_case(45)
def test_arguments_without_a_canonical_form_are_refused_before_anything_is_claimed(payers: Payers) -> None:
    assert payers.pay_one("e45", "e45", amount=2**53) == "effect_arguments_refused"
    assert payers.effect("e45") is None
    assert not payers.reached("e45", "body")


def test_a_process_that_a_worker_forks_has_no_ledger_and_does_nothing(payers: Payers) -> None:
    """Its answers would come to its parent."""
    assert payers.pay_one("forked", "forked", crew_id="forking").startswith("charge ")
    assert payers.outcome_file("forked") == {"code": "effect_ledger_unavailable"}
    assert payers.charges("forked") == 1


@pytest.mark.effect_case(27)
def test_a_call_that_was_not_applied_is_made_again_and_counted(payers: Payers) -> None:
    payers.provider.fault("fail")
    first, second = payers.pay("e27", "e27", "e27")
    assert first == {"code": "NotApplied"}
    assert second["result"].startswith("charge ")
    view = payers.until("settled", "e27")
    assert (view["attempt"], payers.charges("e27")) == (2, 1)
    payers.provider.fault("fail")
    assert payers.pay_one("e27-left", "e27-left") == "NotApplied"
    assert payers.until("not_applied", "e27-left")["attempt"] == 1
    assert payers.client.get("e27-left").expect(200)["effects"] == NONE | {"not_applied": 1}
    assert payers.pay_one("e27-next", "e27-left").startswith("charge ")
    view = payers.until("settled", "e27-left")
    assert (view["attempt"], view["action_id"]) == (2, "e27-next")


@pytest.mark.effect_case(28)
def test_an_acknowledgement_that_is_lost_is_unknown(payers: Payers) -> None:
    payers.provider.fault("lose_ack")
    first, second = payers.pay("e28", "e28", "e28")
    assert (first, second) == ({"code": "RemoteDisconnected"}, {"code": UNKNOWN})
    assert payers.until("unknown", "e28")["reason"] == "RemoteDisconnected"
    assert payers.charges("e28") == 1


@pytest.mark.effect_case(46)
def test_a_replay_says_so_and_the_key_recomputes_from_what_is_published(payers: Payers) -> None:
    invoice = "e46-\u00e9\U0001f600"
    first, second, third = (payers.pay(f"e46-{at}", invoice, crew_id="blocks") for at in range(3))
    assert first == [{"replayed": False, "result": None}]
    assert second == third == [{"replayed": True, "result": f"charge {payers.provider.charges()[-1]['id']}"}]
    payers.until_delivered(invoice, tool="charge")
    view = payers.until("settled", invoice, tool="charge")
    assert (view["replays"], view["action_id"]) == (2, "e46-0")
    delivered_at = view["delivered_at"]
    assert payers.pay("e46-3", invoice, crew_id="blocks") == second
    procs.wait_until(lambda: (payers.effect(invoice, tool="charge") or {})["replays"] == 3, WAIT_S, "another replay")
    assert payers.until("settled", invoice, tool="charge")["delivered_at"] == delivered_at
    assert key_id_of(view["preimage"].encode("utf-8")) == view["key_id"]
    assert payers.charges(invoice) == 1


def test_the_provider_is_given_the_key_id(payers: Payers) -> None:
    payers.pay_one("key", "key")
    view = payers.until("settled", "key")
    assert [charge["invoice"] for charge in payers.provider.charges(view["key_id"])] == ["key"]


@pytest.mark.effect_case(40)
def test_a_lookup_that_says_unknown_changes_nothing_and_one_that_knows_ends_it(payers: Payers) -> None:
    payers.provider.fault("lose_ack")
    assert payers.pay_one("e40", "e40", tool="pay_asking") == "RemoteDisconnected"
    for number in range(2):
        assert payers.pay_one(f"e40-{number}", "e40", tool="pay_asking", lookup="unknown") == UNKNOWN
    view = payers.until("unknown", "e40", tool="pay_asking")
    assert (view["version"], view["reconciliation"], view["attempt"]) == (2, None, 1)
    receipt = payers.pay_one("e40-known", "e40", tool="pay_asking")
    assert receipt.startswith("charge ")
    view = payers.until("settled", "e40", tool="pay_asking")
    assert view["reconciliation"] == {
        "decision": "settled", "actor": "tests.crews.payer_crews:ask", "evidence": "the provider's books"
    }  # fmt: skip
    assert payers.charges("e40") == 1


@pytest.mark.effect_case(40)
def test_a_lookup_that_finds_nothing_lets_the_call_be_made(payers: Payers) -> None:
    payers.begin("e40-dead", "e40-dead", tool="pay_asking", until="body")
    payers.kill_worker("e40-dead")
    payers.until("unknown", "e40-dead", tool="pay_asking")
    assert payers.pay_one("e40-again", "e40-dead", tool="pay_asking").startswith("charge ")
    assert payers.until("settled", "e40-dead", tool="pay_asking")["attempt"] == 2
    assert payers.charges("e40-dead") == 1


# --- cancels ---------------------------------------------------------------------------------------------------------


def cancel(payers: Payers, action_id: str, *, while_it_ends: Callable[[], None] = lambda: None) -> Answer:
    """Cancel a payer; once the cancel is recorded, and thus decided, ``while_it_ends`` is done."""
    answers: list[Answer] = []
    crew_id = payers.client.get(action_id).expect(200)["crew_id"]
    thread = threading.Thread(target=lambda: answers.append(payers.client.cancel(action_id, crew_id)))
    thread.start()
    procs.wait_until(lambda: "stop_requested" in acts(payers, action_id), WAIT_S, "the cancel is recorded")
    while_it_ends()
    thread.join(WAIT_S)
    return answers[0]


def acts(payers: Payers, action_id: str) -> list[str]:
    """What the audit has of a job."""
    evidence = payers.client.request("GET", f"/jobs/{action_id}/evidence").expect(200)
    return [entry["act"] for entry in evidence["audit"]]


@pytest.mark.effect_case(30)
def test_a_cancel_before_the_effect_lets_nothing_be_claimed(make_payers: MakePayers) -> None:
    """The crew closes within the grace, and its closing wants to pay."""
    payers = make_payers(settings={"grace_s": 15})
    payers.begin("before", crew_id="closing")
    payers.wait("before", "start")
    assert cancel(payers, "before").expect(200)["effects"] == NONE
    assert payers.outcome_file("before") == {"code": "effect_stopping"}
    assert payers.effect() is None
    assert payers.charges() == 0


@pytest.mark.effect_case(30)
@pytest.mark.effect_case(31)
def test_a_cancel_during_the_effect_makes_it_unknown(payers: Payers) -> None:
    payers.begin("e30-during", "e30-during", until="charged")
    view = cancel(payers, "e30-during").expect(200)
    assert (view["status"], view["effects"]) == ("cancelled", NONE | {"unknown": 1})
    assert payers.until("unknown", "e30-during")["reason"] == "cancelled"
    assert payers.pay_one("e30-during-next", "e30-during") == UNKNOWN
    assert payers.charges("e30-during") == 1


@pytest.mark.effect_case(30)
def test_a_settlement_within_the_grace_counts(make_payers: MakePayers) -> None:
    payers = make_payers(settings={"grace_s": 15})
    payers.begin("graced", holds=("paid",), until="charged")
    answer = cancel(payers, "graced", while_it_ends=lambda: payers.release("graced", "charged"))
    view = answer.expect(200)
    assert (view["status"], view["effects"]) == ("cancelled", NONE | {"settled": 1})
    assert view["stop"]["elapsed_ms"] < 10_000, "nothing is open any more, and the grace goes on"
    assert payers.pay_one("next") == "charge 1"
    assert payers.charges() == 1


@pytest.mark.effect_case(30)
def test_a_cancel_after_the_effect_leaves_it_settled(payers: Payers) -> None:
    payers.begin("e30-after", "e30-after", until="paid")
    view = cancel(payers, "e30-after").expect(200)
    assert (view["status"], view["effects"]) == ("cancelled", NONE | {"settled": 1})
    assert payers.pay_one("e30-after-next", "e30-after").startswith("charge ")
    assert payers.charges("e30-after") == 1


@pytest.mark.effect_case(31)
def test_jobs_that_failed_or_were_cancelled_say_how_many_outcomes_are_unknown(payers: Payers) -> None:
    counts = NONE | {"settled": 1, "unknown": 2}
    for name, then in (("e31-failed", "fail"), ("e31-cancelled", "end")):
        payers.begin(name, *(f"{name}-{at}" for at in range(3)), until="start", holds=("paid",), then=then)
        payers.provider.fault("lose_ack", times=2)
        payers.release(name, "start")
        payers.wait(name, "paid")
        if then == "fail":
            payers.release(name, "paid")
        else:
            cancel(payers, name).expect(200)
        view, last = payers.ended(name), payers.last_event(name)
        assert (f"e31-{last['event']}", f"e31-{view['status']}") == (name, name)
        assert view["effects"] == last["data"]["effects"] == counts
        with payers.client.follow(name) as stream:
            assert stream.rest()[-1].data == last["data"]


# --- late settlements ------------------------------------------------------------------------------------------------


@pytest.mark.effect_case(36)
def test_a_thread_that_settles_after_its_tool_gave_up_settles_the_unknown_outcome(payers: Payers) -> None:
    payers.begin("e36", "e36", crew_id="late", until="charged")
    payers.wait("e36", "timed_out")
    view = payers.until("unknown", "e36")
    assert view["reason"] == "TimeoutError"
    assert payers.pay_one("e36-between", "e36") == UNKNOWN
    payers.release("e36", "charged")
    assert payers.ended("e36")["effects"] == NONE | {"settled": 1}
    assert outcome(payers, "e36") == {"code": "TimeoutError"}
    assert payers.pay_one("e36-next", "e36") == payers.until("settled", "e36")["receipt"]
    assert payers.charges("e36") == 1


# --- restarts and archives -------------------------------------------------------------------------------------------


@pytest.mark.effect_case(34)
@pytest.mark.effect_case(35)
def test_a_restarted_supervisor_keeps_what_blocks_and_takes_nothing_from_an_older_epoch(
    make_payers: MakePayers,
) -> None:
    payers = make_payers()
    receipt = payers.pay_one("paid", "paid")
    payers.provider.fault("lose_ack")
    payers.pay_one("lost", "lost")
    payers.begin("open", "open", until="charged")
    for restart in range(2):
        payers.server.kill() if restart == 0 else payers.server.stop()
        payers.server.start()
        views = {name: payers.effect(name) or {} for name in ("paid", "lost", "open")}
        assert {name: view["state"] for name, view in views.items()} == {
            "paid": "settled", "lost": "unknown", "open": "unknown"
        }  # fmt: skip
        assert views["open"]["epoch"] < payers.client.health().expect(200)["epoch"]
        answers = {name: payers.pay_one(f"{name}-{restart}", name) for name in views}
        assert answers == {"paid": receipt, "lost": UNKNOWN, "open": UNKNOWN}
        said = {name: views["open"][name] for name in ("key_id", "epoch", "args_hash")}
        assert payers.pay_one(f"stale-{restart}", crew_id="stale", settle=said) == "effect_stale"
        assert "effect_refused" in acts(payers, f"stale-{restart}")
        assert payers.effect("open") == views["open"]
    assert [payers.charges(name) for name in views] == [1, 1, 1]


@pytest.mark.effect_case(32)
@pytest.mark.effect_case(33)
@pytest.mark.effect_case(42)
def test_a_job_is_archived_when_nothing_of_it_is_open_and_its_effects_go_on_answering(payers: Payers) -> None:
    payers.begin("e32", "e32", until="charged")
    assert payers.client.archive("e32").expect(409)["code"] == "action_running"
    payers.kill_worker("e32")
    payers.ended("e32")
    for _ in range(2):
        assert payers.client.archive("e32").expect(409)["code"] == "effects_open"
    found = {"decision": "settled", "receipt": "charge by hand"}
    scripts.reconcile(payers.client, payers.key("e32"), **found).expect(200)
    payers.client.archive("e32").expect(200)
    assert payers.client.get("e32").status == 404
    assert payers.pay_one("e32-next", "e32") == "charge by hand"
    assert payers.pay_one("e32-more", "e32", amount=1.0) == CONFLICT
    assert payers.charges("e32") == 1
    payers.pay("e33", "e33")
    payers.client.archive("e33").expect(200)
    assert payers.pay_one("e33-next", "e33").startswith("charge ")
    assert payers.charges("e33") == 1


@pytest.mark.effect_case(42)
def test_an_archived_action_is_not_made_again_under_its_own_key_either(payers: Payers) -> None:
    """The scope ``action``: the tombstone of the job keeps its Action from running, that of the effect stays too."""
    payers.pay("e42", "e42", tool="pay_here")
    key = key_of("e42", scope=Scope.ACTION, scope_id="e42", tool="pay_here")
    view = scripts.effect(payers.client, key).expect(200)
    payers.client.archive("e42").expect(200)
    refused = payers.client.start("e42", "payer", input=payers.input("e42", "e42", tool="pay_here"))
    assert refused.status != 200
    assert scripts.effect(payers.client, key).expect(200) == view
    assert payers.charges("e42") == 1


@pytest.mark.effect_case(12)
def test_while_the_journal_stands_still_a_body_waits_and_does_not_run(planned: Planned) -> None:
    planned.begin("waits", until="start")
    planned.server.plan.arm(Plan("journal.effect", HOLD))
    planned.release("waits", "start")
    procs.wait_until(lambda: planned.server.plan.fired, WAIT_S, "the claim is being written")
    assert not planned.reached("waits", "body")
    planned.server.plan.disarm()
    assert planned.ended("waits")["effects"] == NONE | {"settled": 1}
