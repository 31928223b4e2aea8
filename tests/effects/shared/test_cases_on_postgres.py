"""The cases of the effect ledger again, on the ledger that replicas share. What is not here has its reason below."""

from __future__ import annotations

import sys

import pytest

from protocol.states import EffectState
from tests.effects.supervised.conftest import Planned
from tests.effects.supervised.test_crews import (
    test_a_global_key_is_met_by_a_new_action,
    test_a_native_call_that_raises_has_one_effect,
    test_a_task_that_is_entered_again_gets_the_receipt,
    test_of_two_parallel_calls_under_one_key_one_acts,
    test_the_configuration_names_key_scope_and_what_may_be_reworded,
    test_the_loop_that_repeats_a_react_call_has_one_effect,
)
from tests.effects.supervised.test_deaths import (
    kill_at,
    restart,
    strike,
    test_a_supervisor_killed_after_the_delivery_leaves_a_receipt,
    test_a_supervisor_killed_before_or_after_the_effect_leaves_it_unknown,
    test_a_supervisor_that_dies_before_a_settlement_is_written_leaves_it_unknown,
    test_a_supervisor_that_dies_between_claim_and_grant_leaves_it_unknown_and_no_body_has_run,
    test_a_supervisor_that_dies_between_settlement_and_reply_leaves_a_receipt,
    test_a_worker_killed_after_the_delivery_leaves_a_receipt,
    test_a_worker_killed_after_the_effect_leaves_it_unknown_and_a_retry_is_blocked,
    test_a_worker_killed_after_the_settlement_and_before_the_reply_leaves_a_receipt,
    test_a_worker_killed_before_its_claim_is_sent_leaves_nothing,
    test_a_worker_killed_before_the_effect_leaves_it_unknown_and_nobody_says_that_it_happened,
    test_a_worker_killed_while_its_claim_is_being_committed_has_done_nothing_and_the_next_call_is_granted,
)
from tests.effects.supervised.test_outcomes import (
    test_a_call_that_was_not_applied_is_made_again_and_counted,
    test_a_cancel_after_the_effect_leaves_it_settled,
    test_a_cancel_before_the_effect_lets_nothing_be_claimed,
    test_a_cancel_during_the_effect_makes_it_unknown,
    test_a_claim_that_cannot_be_written_is_refused_and_the_body_does_not_run,
    test_a_job_is_archived_when_nothing_of_it_is_open_and_its_effects_go_on_answering,
    test_a_lookup_that_finds_nothing_lets_the_call_be_made,
    test_a_lookup_that_says_unknown_changes_nothing_and_one_that_knows_ends_it,
    test_a_new_action_acts_again_unless_its_key_is_global,
    test_a_replay_says_so_and_the_key_recomputes_from_what_is_published,
    test_a_restarted_supervisor_keeps_what_blocks_and_takes_nothing_from_an_older_epoch,
    test_a_result_too_long_to_be_kept_is_settled_and_the_call_is_not_repeated,
    test_a_settlement_that_cannot_be_written_is_unknown_and_the_agent_hears_so,
    test_a_settlement_within_the_grace_counts,
    test_a_thread_that_settles_after_its_tool_gave_up_settles_the_unknown_outcome,
    test_an_acknowledgement_that_is_lost_is_unknown,
    test_another_amount_under_the_invoices_key_is_a_conflict,
    test_arguments_without_a_canonical_form_are_refused_before_anything_is_claimed,
    test_jobs_that_failed_or_were_cancelled_say_how_many_outcomes_are_unknown,
    test_while_the_journal_stands_still_a_body_waits_and_does_not_run,
)
from tests.effects.supervised.test_races import (
    test_of_8_jobs_on_one_key_one_acts,
    test_of_50_jobs_on_one_key_one_acts,
    test_while_one_job_acts_slowly_49_others_are_told_that_it_is_in_flight,
)
from tests.http.test_effects import (
    test_a_decision_needs_the_version_that_there_is,
    test_a_decision_without_its_reasons_is_refused,
    test_a_state_that_is_not_unknown_takes_no_decision,
    test_of_two_decisions_at_once_one_wins,
)
from tests.support import procs
from tests.support.crash_build import HOLD, KILL, Plan
from tests.support.fleet import Registering
from tests.support.numbered import EFFECT_CASES
from tests.support.payers import NONE, UNKNOWN, WAIT_S

#: Cases that say nothing about where a supervisor keeps its effects.
NOT_HERE = {
    4: "processes that open a file together; three replicas that begin on an empty database are in tests.fleet",
    15: "what makes a digest of arguments is the worker; that another digest is a conflict is E24",
    16: "keys are made in the worker; that two of them are two rows is the primary key",
    17: "a call without a business key has the scope action, which stays in the journal of the Action's owner",
    22: "a script without a supervisor has a ledger file of its own",
    29: "what an exception says is decided in the worker; on this ledger it is the same report as in E28",
    43: "canonical form: no ledger",
    44: "canonical form: no ledger",
}


def test_every_case_is_here_or_has_a_reason() -> None:
    module = sys.modules[__name__]
    here = {
        number
        for name, function in vars(module).items()
        if name.startswith("test_")
        for number in EFFECT_CASES._numbers_of(getattr(function, "pytestmark", ()))
    }
    assert here.isdisjoint(NOT_HERE)
    assert sorted(here | NOT_HERE.keys()) == list(EFFECT_CASES.numbers)


# --- a crash between the database's commit and the journal's ---------------------------------------------------------


def check_orphan(planned: Planned) -> None:
    """The claim is in the database and in no journal: nobody was granted it, and nobody says so."""
    assert not planned.reached("first", "body")
    view = planned.until("unknown")
    assert (view["reason"], view["attempt"]) == ("supervisor_restarted", 1)
    assert planned.client.get("first").expect(200)["effects"] == NONE
    assert planned.pay_one("next") == UNKNOWN
    assert planned.charges() == 0


@pytest.mark.effect_case(10)
@pytest.mark.effect_case(11)
def test_a_supervisor_killed_between_the_two_commits_of_a_claim_has_granted_nothing(planned: Planned) -> None:
    planned.begin("first", until="start")
    pid = planned.worker("first")
    planned.server.plan.arm(Plan("journal.effect", HOLD))
    planned.release("first", "start")
    procs.wait_until(lambda: planned.server.plan.fired, WAIT_S, "the claim is being copied")
    planned.server.kill()
    planned.server.plan.disarm()
    restart(planned, pid)
    check_orphan(planned)


@pytest.mark.effect_case(10)
@pytest.mark.effect_case(11)
def test_a_supervisor_that_dies_before_a_claim_is_copied_has_granted_nothing(planned: Planned) -> None:
    strike(planned, Plan("journal.effect", KILL), at="start")
    check_orphan(planned)


# --- the database's own crash, and age -------------------------------------------------------------------------------


@pytest.mark.effect_case(14)
def test_receipts_outlive_a_database_that_is_killed(planned: Planned) -> None:
    first = planned.pay_one("first")
    assert isinstance(planned.server, Registering)
    planned.server._postgres.restart()
    procs.wait_until(lambda: planned.client.request("GET", "/readyz").status == 200, WAIT_S, "ready again")
    assert planned.pay_one("next") == first
    assert planned.charges() == 1


@pytest.mark.effect_case(41)
def test_a_claim_that_is_a_year_old_is_a_claim(planned: Planned) -> None:
    planned.begin("old", until="body")
    assert isinstance(planned.server, Registering)
    older = "UPDATE crew_supervisor.effects SET claimed_at = claimed_at - 31536000, version = version + 1"
    planned.server._postgres.ask(planned.server._database, older)
    assert planned.pay_one("next") == "effect_in_flight"
    planned.release("old", "body")
    planned.ended("old")
    assert planned.effect()["state"] == EffectState.SETTLED  # type: ignore[index]
    assert planned.charges() == 1
