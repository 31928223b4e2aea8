"""A worker or the supervisor is killed at each moment of a call; a new Action of that key learns what is known."""

from __future__ import annotations

import os
import signal
import statistics
import sys
import time
from collections.abc import Callable

import pytest

from tests.effects.supervised.conftest import MakePayers, Planned
from tests.support import procs, scripts
from tests.support.crash_build import HOLD, KILL, Plan
from tests.support.payers import INVOICE, NONE, UNKNOWN, WAIT_S, Payers

KILLS = 50
#: The promised figure, and what is asserted on a machine that others use too, milliseconds.
PROMISE_MS = 100
ASSERTED_MS = 5 * PROMISE_MS
#: Long after what must be at once, and shorter than what a broken mechanism waits for, seconds.
SOON_S = 3.0

# --- the worker ------------------------------------------------------------------------------------------------------


@pytest.mark.effect_case(5)
def test_a_worker_killed_before_its_claim_is_sent_leaves_nothing(payers: Payers) -> None:
    payers.begin("e5", "e5", until="start")
    payers.kill_worker("e5")
    view = payers.ended("e5")
    assert (view["status"], view["effects"]) == ("failed", NONE)
    assert payers.effect("e5") is None
    assert payers.pay_one("e5-next", "e5").startswith("charge ")
    assert payers.charges("e5") == 1


@pytest.mark.effect_case(5)
def test_a_worker_killed_while_its_claim_is_being_committed_has_done_nothing_and_the_next_call_is_granted(
    planned: Planned,
) -> None:
    """The claim was on its way to the journal when its worker died: nobody ever heard the grant."""
    planned.begin("e5", until="start")
    pid = planned.worker("e5")
    planned.server.plan.arm(Plan("journal.effect", HOLD))
    planned.release("e5", "start")
    procs.wait_until(lambda: planned.server.plan.fired, WAIT_S, "the claim is being committed")
    os.kill(pid, signal.SIGKILL)
    procs.wait_until(lambda: planned.client.get("e5").json()["phase"] == "stopping", WAIT_S, "the death is noticed")
    planned.server.plan.disarm()
    assert planned.ended("e5")["effects"] == NONE | {"not_applied": 1}
    assert not planned.reached("e5", "body")
    assert planned.pay_one("next") == "charge 1"
    view = planned.until("settled")
    assert (view["attempt"], view["action_id"], planned.charges()) == (2, "next", 1)


@pytest.mark.effect_case(6)
def test_a_worker_killed_before_the_effect_leaves_it_unknown_and_nobody_says_that_it_happened(payers: Payers) -> None:
    payers.begin("e6", "e6", until="body")
    payers.kill_worker("e6")
    check_unknown(payers, "e6", charges=0)


@pytest.mark.effect_case(7)
def test_a_worker_killed_after_the_effect_leaves_it_unknown_and_a_retry_is_blocked(payers: Payers) -> None:
    payers.begin("e7", "e7", until="charged")
    payers.kill_worker("e7")
    check_unknown(payers, "e7", charges=1)


@pytest.mark.effect_case(7)
@pytest.mark.parametrize(
    "settings", [{"pid_namespace": None}, {"stop_method": "keeper"}], ids=["as it is installed", "keeper"]
)
def test_that_is_so_however_workers_are_held(make_payers: MakePayers, settings: dict[str, object]) -> None:
    payers = make_payers(settings=settings)
    payers.begin("e7", "e7", until="charged")
    payers.kill_worker("e7")
    check_unknown(payers, "e7", charges=1)


def check_unknown(payers: Payers, action_id: str, *, charges: int) -> None:
    """Nobody knows what became of the payment of that name, and that is all anybody says."""
    view = payers.until("unknown", action_id)
    assert (view["reason"], view["receipt"], view["settled_at"]) == ("worker_died", None, None)
    assert payers.ended(action_id)["effects"] == NONE | {"unknown": 1}
    for number in range(2):
        assert payers.pay_one(f"{action_id}-next{number}", action_id) == UNKNOWN
    again = payers.until("unknown", action_id)
    assert (again["attempt"], again["action_id"], again["version"]) == (1, action_id, view["version"])
    assert payers.charges(action_id) == charges


@pytest.mark.effect_case(8)
def test_a_worker_killed_after_the_settlement_and_before_the_reply_leaves_a_receipt(planned: Planned) -> None:
    planned.begin("e8", until="charged")
    pid = planned.worker("e8")
    planned.server.plan.arm(Plan("effect.reported", HOLD))
    planned.release("e8", "charged")
    procs.wait_until(lambda: planned.server.plan.fired, WAIT_S, "the settlement is committed")
    os.kill(pid, signal.SIGKILL)
    planned.server.plan.disarm()
    view = planned.ended("e8")
    assert (view["status"], view["effects"]) == ("failed", NONE | {"settled": 1})
    assert not planned.reached("e8", "paid")
    check_undelivered(planned)


def check_undelivered(payers: Payers) -> None:
    """The payment is settled, and the first to hear of it is a new Action."""
    view = payers.until("settled")
    assert (view["receipt"], view["delivered_at"]) == ("charge 1", None)
    assert payers.pay_one("next") == "charge 1"
    payers.until_delivered()
    view = payers.until("settled")
    assert (view["replays"], payers.charges()) == (1, 1)


@pytest.mark.effect_case(9)
def test_a_worker_killed_after_the_delivery_leaves_a_receipt(payers: Payers) -> None:
    payers.begin("e9", "e9", until="paid")
    payers.kill_worker("e9")
    assert payers.ended("e9")["effects"] == NONE | {"settled": 1}
    view = payers.until("settled", "e9")
    assert view["delivered_at"] is not None
    assert payers.pay_one("e9-next", "e9") == view["receipt"]
    assert payers.until("settled", "e9")["delivered_at"] == view["delivered_at"]
    assert payers.charges("e9") == 1


def check_unknown_without_a_proof(payers: Payers) -> None:
    """What the dead worker has left keeps its job from ending, and yet its effect is unknown."""
    payers.begin("left", crew_id="leaving", until="body")
    payers.kill_worker("left")
    procs.wait_until(lambda: (payers.effect() or {})["state"] == "unknown", SOON_S, "the effect is unknown")
    assert payers.client.get("left").expect(200)["phase"] != "done"
    assert payers.pay_one("next") == UNKNOWN


def test_an_effect_is_unknown_though_nothing_of_its_job_can_be_killed(make_payers: MakePayers) -> None:
    check_unknown_without_a_proof(make_payers(mutant="toothless", settings={"drain_s": 0}))


def test_the_check_fails_where_a_death_says_nothing_of_effects(make_payers: MakePayers) -> None:
    with pytest.raises(AssertionError):
        check_unknown_without_a_proof(make_payers(mutant="hoping", settings={"drain_s": 0}))


def test_half_of_all_deaths_are_seen_over_http_within_the_promised_time(
    payers: Payers, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGKILL of the worker from outside, to the answer over HTTP that says unknown."""
    took = []
    client = payers.client
    for number in range(KILLS):
        name = f"killed-{number}"
        payers.begin(name, name, until="body")
        pid = payers.worker(name)
        since = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        took.append(scripts.milliseconds_until_unknown(client, payers.key(name), since))
    median = statistics.median(took)
    with capsys.disabled():
        sys.stdout.write(
            f"\nfrom SIGKILL to unknown over HTTP: median {median:.1f} ms, worst {max(took):.1f} ms of {KILLS}\n"
        )
    assert median <= ASSERTED_MS, took


# --- the supervisor --------------------------------------------------------------------------------------------------


def strike(planned: Planned, plan: Plan, *, at: str) -> None:
    """Let the payer ``first`` go on from ``at``, and the supervisor die where ``plan`` says; then start it again."""
    planned.begin("first", until=at)
    pid = planned.worker("first")
    planned.server.plan.arm(plan)
    planned.release("first", at)
    assert planned.server.wait_exit() == -signal.SIGKILL
    planned.server.plan.disarm()
    restart(planned, pid)


def kill_at(planned: Planned, at: str) -> None:
    """SIGKILL of the supervisor while the payer ``first`` stands at ``at``; then start it again."""
    planned.begin("first", until=at)
    pid = planned.worker("first")
    planned.server.kill()
    restart(planned, pid)


def restart(planned: Planned, worker: int) -> None:
    """Start the supervisor again; the old one's worker is gone by then."""
    planned.server.start()
    assert not procs.alive(worker)


def check_lost(planned: Planned, *, charges: int) -> None:
    """The new supervisor knows of a claim and of nothing else."""
    view = planned.until("unknown")
    assert (view["reason"], view["attempt"]) == ("supervisor_restarted", 1)
    assert planned.client.get("first").expect(200)["effects"] == NONE | {"unknown": 1}
    assert planned.last_event("first")["data"]["effects"] == NONE | {"unknown": 1}
    assert planned.pay_one("next") == UNKNOWN
    assert planned.charges() == charges


def check_killed_before_the_commit(planned: Planned, before: Callable[[], object] = lambda: None) -> None:
    """The supervisor is killed while the claim is being committed: no body has run, and the next call is granted."""
    planned.begin("first", until="start")
    pid = planned.worker("first")
    planned.server.plan.arm(Plan("journal.effect", HOLD))
    planned.release("first", "start")
    procs.wait_until(lambda: planned.server.plan.fired, WAIT_S, "the claim is being committed")
    before()
    planned.server.kill()
    planned.server.plan.disarm()
    restart(planned, pid)
    assert not planned.reached("first", "body")
    assert planned.effect() is None
    assert planned.pay_one("next") == "charge 1"
    assert (planned.until("settled")["attempt"], planned.charges()) == (1, 1)


@pytest.mark.effect_case(10)
@pytest.mark.effect_case(11)
def test_a_supervisor_killed_during_the_commit_of_a_claim_has_granted_nothing(planned: Planned) -> None:
    check_killed_before_the_commit(planned)


def test_the_check_fails_where_a_claim_is_granted_before_its_commit(
    make_planned: Callable[..., Planned],
) -> None:
    planned = make_planned(mutant="eager")
    with pytest.raises(AssertionError):
        check_killed_before_the_commit(planned, lambda: procs.wait_until(planned.charges, WAIT_S, "a charge"))
    assert planned.pay_one("again") in ("charge 1", "charge 2")
    assert planned.charges() == 2


@pytest.mark.effect_case(10)
@pytest.mark.effect_case(11)
def test_a_supervisor_that_dies_before_a_claim_is_written_leaves_nothing(planned: Planned) -> None:
    strike(planned, Plan("journal.effect", KILL), at="start")
    assert not planned.reached("first", "body")
    assert planned.effect() is None
    assert planned.pay_one("next") == "charge 1"
    assert planned.charges() == 1


@pytest.mark.effect_case(10)
@pytest.mark.effect_case(11)
def test_a_supervisor_that_dies_between_claim_and_grant_leaves_it_unknown_and_no_body_has_run(
    planned: Planned,
) -> None:
    strike(planned, Plan("effect.claimed", KILL), at="start")
    assert not planned.reached("first", "body")
    check_lost(planned, charges=0)


@pytest.mark.effect_case(10)
@pytest.mark.parametrize(("at", "charges"), [("body", 0), ("charged", 1)])
def test_a_supervisor_killed_before_or_after_the_effect_leaves_it_unknown(
    planned: Planned, at: str, charges: int
) -> None:
    kill_at(planned, at)
    check_lost(planned, charges=charges)


@pytest.mark.effect_case(10)
def test_a_supervisor_that_dies_before_a_settlement_is_written_leaves_it_unknown(planned: Planned) -> None:
    strike(planned, Plan("journal.effect", KILL), at="charged")
    assert not planned.reached("first", "paid")
    check_lost(planned, charges=1)


@pytest.mark.effect_case(10)
def test_a_supervisor_that_dies_between_settlement_and_reply_leaves_a_receipt(planned: Planned) -> None:
    strike(planned, Plan("effect.reported", KILL), at="charged")
    assert not planned.reached("first", "paid")
    assert planned.client.get("first").expect(200)["effects"] == NONE | {"settled": 1}
    check_undelivered(planned)


@pytest.mark.effect_case(10)
def test_a_supervisor_killed_after_the_delivery_leaves_a_receipt(planned: Planned) -> None:
    planned.begin("first", until="paid")
    planned.until_delivered()
    delivered_at = planned.until("settled")["delivered_at"]
    planned.server.kill()
    planned.server.start()
    assert planned.pay_one("next") == "charge 1"
    view = planned.until("settled")
    assert (view["delivered_at"], view["replays"], planned.charges(INVOICE)) == (delivered_at, 1, 1)
