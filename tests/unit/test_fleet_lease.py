"""The lease of a replica: every pair of the table, and what time and answers do to it."""

from __future__ import annotations

import itertools

import pytest

from protocol.errors import IllegalTransition
from supervisor.fleet.lease import TRANSITIONS, Lease, Payload, Standing, Turn, move

PAYLOAD = Payload(
    replica_id="a", url="http://a", instance_id="journal", journal_epoch=1, lease_s=10.0, version="1"
)


@pytest.fixture
def lease() -> Lease:
    numbers = itertools.count(1)
    return Lease(PAYLOAD, lambda: f"request {next(numbers)}")


def registered(lease: Lease, *, epoch: int = 1, at: float = 100.0) -> Lease:
    lease.ask()
    lease.granted(epoch, sent_at=at)
    return lease


@pytest.mark.parametrize(("standing", "turn"), [*itertools.product(Standing, Turn)])
def test_every_pair_moves_as_the_table_says_or_is_illegal(standing: Standing, turn: Turn) -> None:
    if (standing, turn) in TRANSITIONS:
        assert move(standing, turn) is TRANSITIONS[standing, turn]
    else:
        with pytest.raises(IllegalTransition):
            move(standing, turn)


def test_nothing_leads_out_of_a_retirement_or_a_release() -> None:
    assert not {standing for standing, _ in TRANSITIONS} & {Standing.RETIRED, Standing.RELEASED}


def test_only_a_grant_makes_it_valid() -> None:
    assert {turn for (_, turn), after in TRANSITIONS.items() if after is Standing.VALID} == {Turn.GRANTED, Turn.RENEWED}
    assert [before for (before, turn) in TRANSITIONS if turn is Turn.RENEWED] == [Standing.VALID]


def test_a_lease_runs_from_the_moment_it_was_asked_for(lease: Lease) -> None:
    registered(lease, at=100.0)
    assert lease.valid(109.9)
    assert lease.left_s(104.0) == 6.0
    assert not lease.valid(110.0)
    assert lease.standing is Standing.EXPIRED


def test_an_expired_lease_is_not_renewed_but_registered_again(lease: Lease) -> None:
    registered(lease, at=100.0)
    assert not lease.valid(111.0)
    with pytest.raises(IllegalTransition):
        lease.renewed(sent_at=111.0)
    lease.ask()
    lease.granted(2, sent_at=111.0)
    assert (lease.valid(112.0), lease.epoch) == (True, 2)


def test_an_answer_that_was_lost_repeats_the_same_request(lease: Lease) -> None:
    first = lease.ask()
    lease.failed("no answer")
    assert lease.ask() == first
    lease.granted(1, sent_at=100.0)
    lease.look(200.0)
    assert lease.ask().request_id != first.request_id


def test_a_rejection_forgets_the_request(lease: Lease) -> None:
    first = lease.ask()
    lease.rejected("a lease is still valid")
    assert lease.standing is Standing.UNREGISTERED
    assert lease.ask().request_id != first.request_id


def test_a_retired_replica_asks_no_more(lease: Lease) -> None:
    lease.ask()
    lease.rejected("retired", retired=True)
    with pytest.raises(IllegalTransition):
        lease.ask()


def test_a_first_registration_is_no_recovery(lease: Lease) -> None:
    registered(lease)
    assert (lease.recovery_attempts, lease.recoveries) == (0, 0)


def test_attempts_and_recoveries_are_counted(lease: Lease) -> None:
    registered(lease, at=100.0)
    lease.failed("no answer")
    lease.look(111.0)
    lease.ask()
    lease.failed("no answer")
    lease.ask()
    lease.granted(2, sent_at=112.0)
    assert (lease.heartbeat_failures, lease.recovery_attempts, lease.recoveries) == (2, 2, 1)


def test_what_was_given_back_stays_so(lease: Lease) -> None:
    registered(lease)
    lease.release()
    lease.release()
    assert not lease.valid(101.0)
    with pytest.raises(IllegalTransition):
        lease.ask()
