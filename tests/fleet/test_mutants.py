"""The checks of this folder fail on a replica with one mechanism broken; a check that passes there checks nothing."""

from __future__ import annotations

import contextlib
from collections import Counter

import pytest

from supervisor.fleet import ownership
from supervisor.fleet.database import Line
from tests.fleet.checks import check_one_execution, host_ready, start
from tests.fleet.conftest import Expire
from tests.fleet.test_registration import check_older_epoch
from tests.support.fleet import Replicas, listens, registered, wait_for
from tests.support.server import Server


def fleet_of(replicas: Replicas, *mutants: str | None) -> list[Server]:
    """Replicas, each with its mutant or whole."""
    for mutant in mutants:
        replicas.add(mutant=mutant).launch()
    for server in replicas.servers:
        registered(listens(server))
    return replicas.servers


def check_nothing_is_guessed(replicas: Replicas) -> None:
    """What could not be asked is not begun, though the lease is valid; whoever can ask begins it, once."""
    cut, other = replicas.servers
    start(cut, "warm").expect(200)
    replicas.network.cut(0)
    refused = start(cut, "x")
    done = start(other, "x")
    replicas.network.heal(0)
    assert (refused.status, done.status) == (503, 200)
    assert Counter(replicas.executed()) == {"warm": 1, "x": 1}


def test_without_owners_an_action_is_executed_twice(replicas: Replicas) -> None:
    fleet_of(replicas, "unowned", "unowned")
    with pytest.raises(AssertionError):
        check_one_execution(replicas, prefix="round", clients=8, rounds=2)
    assert max(Counter(replicas.executed()).values()) > 1


def test_what_is_not_known_is_not_guessed(replicas: Replicas) -> None:
    fleet_of(replicas, None, None)
    check_nothing_is_guessed(replicas)


def test_a_guess_after_a_lost_answer_executes_twice(replicas: Replicas) -> None:
    fleet_of(replicas, "guessing", None)
    with pytest.raises(AssertionError):
        check_nothing_is_guessed(replicas)
    assert Counter(replicas.executed())["x"] == 2


def check_lease_ends(replicas: Replicas) -> None:
    """A replica that cannot reach the database says so within two leases."""
    replicas.network.cut(0)
    cut = replicas.servers[0]
    wait_for(lambda: not host_ready(cut).json()["lease_valid"], "the lease ends", deadline_s=2 * replicas.lease_s)


@pytest.mark.parametrize("mutant", [None, "ageless"])
def test_a_lease_that_never_ends_is_noticed(replicas: Replicas, mutant: str | None) -> None:
    replicas.lease_s = 1.5
    fleet_of(replicas, mutant)
    with pytest.raises(AssertionError, match="the lease ends") if mutant else contextlib.nullcontext():
        check_lease_ends(replicas)


@pytest.fixture
def unfenced(line: Line, monkeypatch: pytest.MonkeyPatch) -> Line:
    """A line to a database whose writers do not look at epochs and leases."""
    whole = "AND epoch = %(epoch)s AND retired_at IS NULL AND expires_at > clock_timestamp()"
    assert whole in ownership._TAKE
    broken = ownership._TAKE.replace(whole, "").replace("fence.epoch ", "%(epoch)s::bigint ")
    monkeypatch.setattr(ownership, "_TAKE", broken)
    return line


async def test_a_stale_epoch_that_is_not_fenced_is_noticed(unfenced: Line, expire: Expire) -> None:
    with pytest.raises(AssertionError):
        await check_older_epoch(unfenced, expire)
