"""Effects that replicas share: one effect for one key, whoever asks, and whatever fails between them."""

from __future__ import annotations

import contextlib
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from demo.payments.provider import Provider
from tests.effects.supervised.conftest import SETTINGS
from tests.fleet.checks import fleet, lease_ends
from tests.support import procs, scripts
from tests.support.fleet import LEASE_S, Relayed, Replicas, listens, registered, relayed, wait_for
from tests.support.payers import IN_FLIGHT, NONE, REGISTRY, UNKNOWN, WAIT_S, Payers
from tests.support.postgres import Postgres
from tests.support.scripts import at_once

CROWD = 50
UNAVAILABLE = "effect_ledger_unavailable"


class Paying:
    """Replicas on this machine, each behind a relay to the database, whose workers pay one provider."""

    def __init__(self, replicas: Replicas, network: Relayed, provider: Provider, database: str) -> None:
        self.replicas, self.network, self.provider, self.database = replicas, network, provider, database
        self.payers: list[Payers] = []

    def add(self, count: int, **options: Any) -> list[Payers]:
        """So many more, started together and registered."""
        first = len(self.payers)
        for number in range(first, first + count):
            settings = SETTINGS | {"fleet": fleet_settings(self.network, number, self.replicas.lease_s)}
            server = self.replicas.add(registry=REGISTRY, settings=settings | options.pop("settings", {}), **options)
            self.payers.append(Payers(server, self.provider, self.replicas.directory / "gates"))
            server.launch()
        for payers in self.payers[first:]:
            registered(listens(payers.server))
        return self.payers

    def charges(self, invoice: str) -> int:
        """How often the provider was charged for an invoice."""
        return self.payers[0].charges(invoice)


def fleet_settings(network: Relayed, number: int, lease_s: float) -> dict[str, Any]:
    machine = network.machine(number)
    return {"replica": f"replica-{number}", "url": f"http://{machine.host}:{machine.port}", "lease_s": lease_s}


@contextlib.contextmanager
def paying(directory: Path, postgres: Postgres, *, lease_s: float = LEASE_S) -> Iterator[Paying]:
    """A fleet on an empty database, none of it started."""
    database = postgres.create()
    provider = Provider(directory / "provider.db").start()
    with relayed(postgres, database, 3) as network:
        replicas = Replicas(directory, network, lease_s=lease_s)
        try:
            yield Paying(replicas, network, provider, database)
        finally:
            replicas.close()
            provider.kill()


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory, postgres: Postgres) -> Iterator[Paying]:
    """Three replicas for the module, whose leases are long: nothing of these tests is about them."""
    with paying(tmp_path_factory.mktemp("paying"), postgres, lease_s=60) as made:
        made.add(3)
        yield made


@pytest.fixture
def fresh(tmp_path: Path, postgres: Postgres) -> Iterator[Paying]:
    """A fleet for one test, none of it started."""
    with paying(tmp_path, postgres) as made:
        yield made


# --- races -----------------------------------------------------------------------------------------------------------


def check_one_charge(paying: Paying, invoice: str, *, crowd: int = CROWD) -> None:
    """As many jobs, spread over the replicas, want one key at one moment; afterwards everybody has its receipt."""
    names = [f"{invoice}-{number}" for number in range(crowd)]
    whose = [paying.payers[number % len(paying.payers)] for number in range(crowd)]

    def let_go() -> None:
        for payers, name in zip(whose, names, strict=True):
            payers.wait(name, "start")
        for payers, name in zip(whose, names, strict=True):
            payers.release(name, "start")

    calls = [partial(one.pay, name, invoice, holds=("start",)) for one, name in zip(whose, names, strict=True)]
    outcomes = [outcome for found in at_once(*calls, let_go)[:-1] for outcome in found]
    assert paying.charges(invoice) == 1, Counter(str(outcome) for outcome in outcomes)
    (charge,) = [charge for charge in paying.provider.charges() if charge["invoice"] == invoice]
    receipt = {"result": f"charge {charge['id']}"}
    assert receipt in outcomes
    assert all(outcome in (receipt, {"code": IN_FLIGHT}) for outcome in outcomes), outcomes
    for number, payers in enumerate(paying.payers):
        assert payers.pay(f"{invoice}-after-{number}", invoice) == [receipt]
    assert paying.charges(invoice) == 1


@pytest.mark.effect_case(2)
def test_of_fifty_jobs_on_three_replicas_that_want_one_key_one_acts(lasting: Paying) -> None:
    check_one_charge(lasting, "race")


@pytest.mark.effect_case(4)
def test_three_replicas_that_begin_on_an_empty_database_decide_together_at_once(fresh: Paying) -> None:
    fresh.add(3)
    check_one_charge(fresh, "cold", crowd=12)


def test_the_check_fails_where_replicas_decide_by_themselves(fresh: Paying) -> None:
    fresh.add(3, mutant="lonely")
    with pytest.raises(AssertionError):
        check_one_charge(fresh, "lonely", crowd=12)
    assert fresh.charges("lonely") > 1


# --- the database away -----------------------------------------------------------------------------------------------


def check_cut_replica(paying: Paying) -> None:
    """Nothing is granted without the database; what was granted before is reported, kept and told later."""
    cut, other, third = paying.payers
    cut.begin("settles", "settles", until="charged")
    cut.begin("dies", "dies", until="body")
    cut.begin("asks", "asks", until="start")
    paying.network.cut(0)
    cut.release("asks", "start")
    cut.wait("asks", "paid")
    assert cut.ended("asks")["effects"] == NONE
    assert cut.last_event("asks")["data"]["outcomes"] == [{"code": UNAVAILABLE}]
    assert not cut.reached("asks", "body")

    cut.release("settles", "charged")
    assert cut.ended("settles")["effects"] == NONE | {"settled": 1}
    (receipt,) = cut.last_event("settles")["data"]["outcomes"]
    cut.kill_worker("dies")
    assert cut.ended("dies")["effects"] == NONE | {"unknown": 1}
    for number, invoice in enumerate(("settles", "dies")):
        assert other.pay_one(f"meanwhile-{number}", invoice) == IN_FLIGHT
    assert [other.pay_one("asked", "asks"), third.pay_one("asked-too", "asks")] == ["charge 2", "charge 2"]
    answer = scripts.effect(cut.client, cut.key("settles"))
    assert (answer.json()["state"], answer.headers["x-crew-fleet-effects"]) == ("settled", "replica")
    assert other.effect("settles")["state"] == "claimed"  # type: ignore[index]
    listed = cut.client.request("GET", "/effects?scope=global")
    assert listed.headers["x-crew-fleet-effects"] == "replica"
    assert {view["state"] for view in listed.expect(200)["effects"]} == {"settled", "unknown"}

    lease_ends(cut.server)
    seen = len(cut.server.log_lines())
    paying.network.heal(0)
    registered(cut.server, skip=seen)
    other.until("settled", "settles")
    assert other.pay_one("later", "settles") == receipt["result"]
    assert other.until("unknown", "dies")["reason"] == "worker_died"
    assert third.pay_one("later-too", "dies") == UNKNOWN
    assert {invoice: paying.charges(invoice) for invoice in ("settles", "dies", "asks")} == {
        "settles": 1, "dies": 0, "asks": 1
    }  # fmt: skip


def test_a_replica_without_the_database_grants_nothing_and_loses_no_report(fresh: Paying) -> None:
    fresh.add(3)
    check_cut_replica(fresh)


def test_the_check_fails_where_an_answer_that_is_lost_is_guessed(fresh: Paying) -> None:
    fresh.add(3, mutant="credulous")
    with pytest.raises(AssertionError):
        check_cut_replica(fresh)
    assert fresh.charges("asks") == 1, "it was charged without anybody having decided that"
    assert scripts.effect(fresh.payers[1].client, fresh.payers[1].key("asks")).status == 404


def insist(payers: Payers, name: str, invoice: str) -> str:
    """Ask again until the payment has its receipt."""
    attempts = iter(range(10_000))

    def paid() -> str | None:
        action_id = f"{name}-{next(attempts)}"
        answer = payers.client.start(action_id, "payer", input=payers.input(action_id, invoice))
        assert answer.status in (200, 503), answer.body
        outcome = answer.json()["outcomes"][0] if answer.status == 200 else {}
        assert outcome.get("code") in (None, UNAVAILABLE, IN_FLIGHT), outcome
        return outcome.get("result")

    found: str = wait_for(paid, f"{invoice} is paid", deadline_s=60)
    return found


def test_answers_that_are_lost_are_found_out_and_every_payment_is_made_once(fresh: Paying) -> None:
    fresh.add(2)
    for number in range(2):
        fresh.network.relays[number].lose(0.1)
    invoices = [f"lossy-{number}" for number in range(12)]
    with ThreadPoolExecutor(8) as pool:
        asked = [
            (invoice, pool.submit(insist, payers, f"{invoice}-{where}", invoice))
            for invoice in invoices
            for where, payers in enumerate(fresh.payers)
        ]
        receipts = {(invoice, one.result()) for invoice, one in asked}
    assert sum(relay.lost_answers + relay.lost_requests for relay in fresh.network.relays) > 0
    assert {invoice: fresh.charges(invoice) for invoice in invoices} == dict.fromkeys(invoices, 1)
    assert len(receipts) == len(invoices)


# --- machines --------------------------------------------------------------------------------------------------------


def test_what_a_retired_replica_had_claimed_is_unknown_until_somebody_knows(fresh: Paying) -> None:
    fresh.add(3)
    gone, other, third = fresh.payers
    gone.begin("gone", "gone", until="charged")
    pid = gone.worker("gone")
    gone.server.kill()
    procs.wait_until(lambda: not procs.alive(pid), WAIT_S, "its worker is gone with it")
    assert other.pay_one("before", "gone") == IN_FLIGHT, "nobody knows that it is gone"
    wait_for(lambda: not fleet(other.server)["replicas"][0]["lease_valid"], "its lease ends")
    assert other.pay_one("after", "gone") == IN_FLIGHT, "time alone says nothing"
    body = {"actor": "me", "evidence": "the rack burnt down"}
    other.client.request("POST", "/fleet/replica-0/retire", body=body).expect(200)
    assert third.until("unknown", "gone")["reason"] == "replica_retired"
    assert third.pay_one("retired", "gone") == UNKNOWN
    found = {"decision": "not_applied", "evidence": "no charge at the bank"}
    scripts.reconcile(third.client, third.key("gone"), **found).expect(200)
    assert other.pay_one("again", "gone") == "charge 2"
    assert third.until("settled", "gone")["attempt"] == 2


def test_a_frozen_replica_grants_nothing_when_it_wakes_with_an_old_lease(fresh: Paying) -> None:
    """SIGSTOP with a call before its claim: it wakes, claims in its old epoch, and the database refuses that."""
    fresh.add(2)
    frozen, other = fresh.payers
    frozen.begin("frozen", "frozen", until="start")
    frozen.server.process.send_signal(signal.SIGSTOP)
    frozen.release("frozen", "start")
    wait_for(lambda: not fleet(other.server)["replicas"][0]["lease_valid"], "its lease ends")
    assert other.pay_one("other", "frozen") == "charge 1"
    frozen.server.process.send_signal(signal.SIGCONT)
    frozen.wait("frozen", "paid")
    frozen.ended("frozen")
    assert frozen.last_event("frozen")["data"]["outcomes"] in ([{"code": UNAVAILABLE}], [{"result": "charge 1"}])
    assert fresh.charges("frozen") == 1


def test_a_journal_that_joins_brings_what_it_has_settled_and_what_it_does_not_know(fresh: Paying) -> None:
    alone = fresh.replicas.add(registry=REGISTRY, settings=SETTINGS | {"fleet": None}, environment={})
    joining = Payers(alone, fresh.provider, fresh.replicas.directory / "gates")
    alone.settings["fleet"] = None
    alone.environment["CREW_SUPERVISOR_FLEET_DATABASE"] = None
    alone.start()
    receipt = joining.pay_one("paid", "paid")
    joining.begin("lost", "lost", until="body")
    alone.kill()
    alone.settings["fleet"] = fleet_settings(fresh.network, 0, LEASE_S)
    alone.environment["CREW_SUPERVISOR_FLEET_DATABASE"] = fresh.network.machine(0).dsn
    fresh.payers.append(joining)
    alone.launch()
    registered(listens(alone))
    (_, other) = fresh.add(1)
    other.until("unknown", "lost")
    other.until("settled", "paid")
    assert (other.pay_one("paid-2", "paid"), other.pay_one("lost-2", "lost")) == (receipt, UNKNOWN)
    assert (fresh.charges("paid"), fresh.charges("lost")) == (1, 0)


# --- operators -------------------------------------------------------------------------------------------------------


def test_a_decision_made_through_another_replica_reaches_the_job_it_is_about(lasting: Paying) -> None:
    holder, other, third = lasting.payers
    holder.begin("decided", "decided", until="body")
    holder.kill_worker("decided")
    holder.ended("decided")
    view = other.until("unknown", "decided")
    etag = f'"{view["version"]}"'
    assert holder.client.archive("decided").expect(409)["code"] == "effects_open"
    answers = at_once(
        *(
            partial(scripts.reconcile, one.client, one.key("decided"), etag=etag, decision="settled", receipt="by hand")
            for one in (other, third)
        )
    )
    assert sorted(answer.status for answer in answers) == [200, 412], "the two of them decided on one version"
    wait_for(
        lambda: holder.client.get("decided").json()["effects"] == NONE | {"settled": 1}, "its own replica knows it"
    )
    holder.client.archive("decided").expect(200)
    assert [one.pay_one(f"decided-{number}", "decided") for number, one in enumerate(lasting.payers)] == ["by hand"] * 3
    assert lasting.charges("decided") == 0


def test_a_job_elsewhere_may_find_out_what_an_unknown_call_did(lasting: Paying) -> None:
    holder, other, _ = lasting.payers
    lasting.provider.fault("lose_ack")
    assert holder.pay_one("asking", "asking", tool="pay_asking") == "RemoteDisconnected"
    receipt = other.pay_one("asking-2", "asking", tool="pay_asking")
    assert receipt.startswith("charge ")
    assert lasting.charges("asking") == 1
    wait_for(lambda: holder.client.get("asking").json()["effects"] == NONE | {"settled": 1}, "its own replica knows it")


def test_every_replica_lists_what_all_share_and_says_so(lasting: Paying) -> None:
    for number, payers in enumerate(lasting.payers):
        payers.pay_one(f"listed-{number}", f"listed-{number}")
    payers.pay_one("here", "here", tool="pay_here")
    pages = []
    for one in lasting.payers:
        views, cursor = [], ""
        while cursor is not None:
            answer = one.client.request("GET", f"/effects?scope=global&limit=2{cursor and f'&cursor={cursor}'}")
            assert answer.headers["x-crew-fleet-effects"] == "fleet"
            page = answer.expect(200)
            assert len(page["effects"]) <= 2
            views += page["effects"]
            cursor = page["next_cursor"]
        pages.append(views)
    assert pages[0] == pages[1] == pages[2]
    keys = [view["key_id"] for view in pages[0]]
    assert len(set(keys)) == len(keys)
    assert [lasting.payers[0].key(f"listed-{number}").key_id for number in (2, 1, 0)] == keys[:3]
    own = lasting.payers[2].client.request("GET", "/effects?scope=action")
    assert own.headers["x-crew-fleet-effects"] == "replica"
    assert [view["action_id"] for view in own.expect(200)["effects"]] == ["here"]
    assert lasting.payers[0].client.request("GET", "/effects?scope=action").expect(200)["effects"] == []
    settled = lasting.payers[1].client.request("GET", "/effects?scope=global&state=settled&crew_id=nobody")
    assert settled.expect(200) == {"effects": [], "next_cursor": None}
