"""Effects over HTTP: a real server, real workers that speak in frames, and what an operator does about them."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.effects import Policy, Scope, key_id_of
from tests.support import procs, scripts
from tests.support.client import Client
from tests.support.declared import Declared, DeclaredClient
from tests.support.effects import ARGS, OTHER_ARGS, RECEIPT, key_of
from tests.support.scripts import (
    SLEEP,
    at_once,
    begin,
    claim,
    effect,
    make_unknown,
    perform,
    reconcile,
    settle,
    touch,
    until_state,
    wait,
)
from tests.support.server import Server, ServerFactory

NONE = {"claimed": 0, "settled": 0, "not_applied": 0, "unknown": 0, "abandoned": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    settings = {"grace_s": 0.3, "linger_s": 0.2}
    with Server(tmp_path_factory.mktemp("server"), registry=scripts.REGISTRY, settings=settings) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Client:
    return DeclaredClient(server.client(), Declared.of(server.client()))


# --- what a job's effects look like ----------------------------------------------------------------------------------


@pytest.mark.effect_case(46)
def test_an_effect_is_granted_settled_delivered_and_replayed_in_a_new_action(client: Client) -> None:
    key = key_of("whole")
    answers = perform(client, "w-1", claim(key), settle(key), {"do": "deliver", "key_id": key.key_id}).expect(200)
    epoch = client.health().json()["epoch"]
    assert answers["answers"] == [{"type": "effect_granted", "epoch": epoch, "attempt": 1}, {"type": "effect_noted"}]
    [replay] = perform(client, "w-2", claim(key)).expect(200)["answers"]
    view = effect(client, key).expect(200)
    assert (replay["type"], replay["receipt"], replay["settled_at"]) == (
        "effect_replayed", RECEIPT.decode(), view["settled_at"]
    )  # fmt: skip
    assert key_id_of(view["preimage"].encode("utf-8")) == view["key_id"] == key.key_id
    assert json.loads(view["preimage"]) == ["effect/1", view["scope"], view["scope_id"], view["tool"], view["identity"]]
    assert (view["receipt"], view["receipt_stored"], view["replays"]) == (json.loads(RECEIPT), True, 1)
    assert (view["state"], view["attempt"], view["action_id"], view["crew_id"]) == ("settled", 1, "w-1", "scripted")
    assert view["delivered_at"] >= view["settled_at"] >= view["claimed_at"]
    assert (view["args_hash"], view["policy"], view["reconciliation"]) == (ARGS, "once", None)


def test_counts_are_in_every_view_of_a_job_live_and_ended(client: Client, tmp_path: Path) -> None:
    keys, go = [key_of(f"counted-{number}") for number in range(3)], tmp_path / "go"
    begin(client, "c-1", claim(keys[0]), settle(keys[0]), claim(keys[1]), touch(tmp_path / "there"), wait(go))
    until_state(client, "claimed", keys[1])
    live = NONE | {"claimed": 1, "settled": 1}
    assert client.get("c-1").expect(200)["effects"] == live
    listed = client.request("GET", "/jobs?crew_id=scripted&status=running").expect(200)["jobs"]
    assert [view["effects"] for view in listed if view["action_id"] == "c-1"] == [live]
    go.touch()
    until_state(client, "unknown", keys[1])
    perform(client, "c-1", crew_id="scripted").expect(409)  # other material
    ended = NONE | {"unknown": 1, "settled": 1}
    assert client.get("c-1").expect(200)["effects"] == ended
    listed = client.request("GET", "/jobs?crew_id=scripted").expect(200)["jobs"]
    assert [view["effects"] for view in listed if view["action_id"] == "c-1"] == [ended]
    assert client.start("c-2", "instant").status == 200
    assert client.get("c-2").expect(200)["effects"] == NONE
    of_job = client.request("GET", "/jobs/c-1/effects").expect(200)
    assert [one["key_id"] for one in of_job["effects"]] == [keys[1].key_id, keys[0].key_id]


def test_lists_are_filtered_and_come_in_pages(client: Client) -> None:
    keys = [key_of(f"listed-{number}") for number in range(5)]
    perform(client, "l-1", *(step for key in keys for step in (claim(key), settle(key))), crew_id="other").expect(200)
    seen: list[str] = []
    cursor = ""
    while True:
        page = client.request("GET", f"/effects?crew_id=other&state=settled&limit=2{cursor}").expect(200)
        seen += [one["key_id"] for one in page["effects"]]
        if page["next_cursor"] is None:
            break
        cursor = f"&cursor={page['next_cursor']}"
    assert seen == [key.key_id for key in reversed(keys)]
    of_job = client.request("GET", "/jobs/l-1/effects?limit=3").expect(200)
    rest = client.request("GET", f"/jobs/l-1/effects?limit=3&cursor={of_job['next_cursor']}").expect(200)
    assert [one["key_id"] for one in of_job["effects"] + rest["effects"]] == seen
    assert client.request("GET", "/effects?crew_id=other&state=unknown").expect(200)["effects"] == []


@pytest.mark.parametrize(
    "target",
    ["/effects?state=paid", "/effects?limit=0", "/effects?cursor=x", "/effects?cursor=cm93OjE", "/effects?job=1",
     "/jobs/known/effects?state=settled", "/jobs/known/effects?cursor=x"],
)  # fmt: skip
def test_a_query_that_makes_no_sense_is_refused(client: Client, target: str) -> None:
    client.start("known", "instant")
    assert client.request("GET", target).expect(422)["code"] == "input_invalid"


def test_what_is_not_there_is_not_found(client: Client) -> None:
    for target, code in (
        (f"/effects/{'0' * 64}", "effect_not_found"),
        ("/effects/nonsense", "effect_not_found"),
        ("/jobs/nobody/effects", "action_unknown"),
        ("/jobs/nobody/evidence", "action_unknown"),
    ):
        assert client.request("GET", target).expect(404)["code"] == code
    assert reconcile(client, key_of("nobody"), etag='"1"').expect(404)["code"] == "effect_not_found"


# --- deaths ----------------------------------------------------------------------------------------------------------


def test_a_worker_killed_in_a_call_leaves_an_unknown_outcome(client: Client) -> None:
    """How soon: tests/effects/supervised/test_deaths.py."""
    key = key_of("killed")
    begin(client, "k-1", claim(key), SLEEP)
    until_state(client, "claimed", key)
    os.kill(client.get("k-1").expect(200)["worker"]["pid"], signal.SIGKILL)
    assert until_state(client, "unknown", key)["reason"] == "worker_died"


def test_an_outcome_is_unknown_though_the_stop_is_not_proved_yet(start_server: ServerFactory) -> None:
    """A supervisor that kills nothing: what the dead worker has left keeps the job from ending."""
    client = start_server(registry=scripts.REGISTRY, mutant="toothless", settings={"drain_s": 0}).client()
    begin(client, "t-1", {"do": "spawn"}, claim(), SLEEP)
    until_state(client, "claimed")
    os.kill(client.get("t-1").expect(200)["worker"]["pid"], signal.SIGKILL)
    assert until_state(client, "unknown")["reason"] == "worker_died"
    view = client.get("t-1").expect(200)
    assert (view["phase"], view["effects"]) == ("stopping", NONE | {"unknown": 1})


def test_a_job_that_dies_says_how_many_outcomes_are_unknown(client: Client) -> None:
    keys = [key_of(f"dying-{number}") for number in range(3)]
    steps = [claim(keys[0]), settle(keys[0]), claim(keys[1]), claim(keys[2]), {"do": "die"}]
    perform(client, "d-1", *steps).expect(502)
    last = client.events("d-1").expect(200)["events"][-1]
    counts = NONE | {"settled": 1, "unknown": 2}
    assert (last["event"], last["data"]["effects"]) == ("failed", counts)
    with client.follow("d-1") as stream:
        assert stream.rest()[-1].data == last["data"]
    assert client.get("d-1").expect(200)["effects"] == counts
    refused = perform(client, "d-2", claim(keys[1])).expect(200)["answers"][0]
    assert (refused["type"], refused["code"], refused["version"]) == ("effect_refused", "effect_outcome_unknown", 2)


@pytest.mark.effect_case(30)
def test_a_cancel_in_the_middle_of_a_call_makes_its_outcome_unknown(client: Client, server: Server) -> None:
    key = key_of("cancelled")
    with client.stream("x-1", "scripted", input={"steps": [claim(key), SLEEP]}) as stream:
        until_state(client, "claimed", key)
        view = client.cancel("x-1", "scripted").expect(200)
        last = stream.rest()[-1]
    assert (view["status"], view["effects"]) == ("cancelled", NONE | {"unknown": 1})
    assert last.data["effects"] == view["effects"] == client.events("x-1").json()["events"][-1]["data"]["effects"]
    assert effect(client, key).json()["reason"] == "cancelled"
    # It had something open, so it got its grace.
    assert view["stop"]["elapsed_ms"] >= 300
    server.wait_log("effect_unknown", action_id="x-1", count=1, reason="cancelled")


@pytest.mark.effect_case(30)
def test_a_call_that_reports_within_the_grace_is_settled(start_server: ServerFactory, tmp_path: Path) -> None:
    client = start_server(registry=scripts.REGISTRY, settings={"grace_s": 10, "drain_s": 5}).client()
    key, go = key_of(), tmp_path / "go"
    begin(client, "g-1", claim(key), wait(go), settle(key), claim(key_of("late")), SLEEP)
    until_state(client, "claimed", key)
    began = time.monotonic()
    cancelled, _ = at_once(lambda: client.cancel("g-1", "scripted"), lambda: (_after_cancel(client), go.touch()))
    view = cancelled.expect(200)
    assert time.monotonic() - began < 8, "the grace goes on though nothing is open"
    assert (view["status"], view["effects"]) == ("cancelled", NONE | {"settled": 1})
    assert effect(client, key_of("late")).status == 404


def _after_cancel(client: Client) -> None:
    """Wait until the cancel is recorded; the decision is right behind it."""

    def recorded() -> bool:
        audit = client.request("GET", "/jobs/g-1/evidence").expect(200)["audit"]
        return "stop_requested" in [entry["act"] for entry in audit]

    procs.wait_until(recorded, 10, "the cancel is recorded")


@pytest.mark.effect_case(30)
def test_a_cancel_without_anything_open_does_not_wait_for_the_grace(start_server: ServerFactory) -> None:
    client = start_server(registry=scripts.REGISTRY, settings={"grace_s": 10, "drain_s": 5}).client()
    key = key_of()
    begin(client, "n-1", claim(key), settle(key), SLEEP)
    until_state(client, "settled", key)
    view = client.cancel("n-1", "scripted").expect(200)
    assert view["effects"] == NONE | {"settled": 1}
    assert view["stop"]["elapsed_ms"] < 5000


@pytest.mark.parametrize(
    ("ending", "reason"), [("timeout", "timeout"), ("fail", "worker_ended"), ("return", "worker_ended")]
)
def test_each_ending_says_why_an_outcome_is_unknown(client: Client, ending: str, reason: str) -> None:
    key = key_of(f"ended-{ending}")
    step = {"timeout": [SLEEP], "fail": [{"do": "fail"}], "return": []}[ending]
    perform(client, f"e-{ending}", claim(key), *step, timeout_ms=500 if ending == "timeout" else None)
    assert until_state(client, "unknown", key)["reason"] == reason
    assert client.get(f"e-{ending}").expect(200)["effects"] == NONE | {"unknown": 1}


# --- restarts --------------------------------------------------------------------------------------------------------


@pytest.mark.effect_case(10)
@pytest.mark.effect_case(34)
@pytest.mark.effect_case(35)
def test_a_killed_supervisor_leaves_what_was_settled_and_nothing_claimed(start_server: ServerFactory) -> None:
    server = start_server(registry=scripts.REGISTRY)
    client, settled, left = server.client(), key_of("settled"), key_of("left")
    begin(client, "r-1", claim(settled), settle(settled), claim(left), SLEEP)
    first = until_state(client, "claimed", left)["epoch"]
    server.kill()
    client = server.start().client()
    view = effect(client, left).expect(200)
    assert (view["state"], view["reason"], view["epoch"]) == ("unknown", "supervisor_restarted", first)
    last = client.events("r-1").expect(200)["events"][-1]
    assert last["data"]["effects"] == NONE | {"settled": 1, "unknown": 1}
    assert client.health().expect(200)["effects_unknown"] == 1
    answers = perform(client, "r-2", claim(settled), claim(left), settle(left, epoch=first)).expect(200)["answers"]
    assert [answer.get("code", answer["type"]) for answer in answers] == [
        "effect_replayed", "effect_outcome_unknown", "effect_stale"
    ]  # fmt: skip
    audit = client.request("GET", "/jobs/r-2/evidence").expect(200)["audit"]
    assert [entry["detail"] for entry in audit if entry["act"] == "effect_refused"] == [
        {"key_id": left.key_id, "code": "effect_stale"}
    ]
    server.wait_log("effect_unknown", count=1, reason="supervisor_restarted")


# --- reconciliation --------------------------------------------------------------------------------------------------


@pytest.mark.effect_case(37)
@pytest.mark.parametrize(
    ("decision", "then"),
    [("settled", "effect_replayed"), ("not_applied", "effect_granted"), ("abandoned", "effect_abandoned")],
)
def test_a_decision_is_recorded_and_answers_the_next_call(
    client: Client, server: Server, decision: str, then: str
) -> None:
    key = key_of(f"decided-{decision}")
    before = make_unknown(client, key, action_id=f"u-{decision}")
    unknown = client.health().expect(200)["effects_unknown"]
    receipt = {"receipt": {"charge": "ch_1"}} if decision == "settled" else {}
    answer = reconcile(client, key, decision=decision, **receipt)
    view = answer.expect(200)
    assert view == effect(client, key).expect(200)
    assert (view["state"], view["version"], answer.headers["etag"]) == (decision, before["version"] + 1, '"3"')
    assert view["reconciliation"] == {"decision": decision, "actor": "ops", "evidence": "nobody knows"}
    assert view["receipt"] == receipt.get("receipt")
    assert client.health().expect(200)["effects_unknown"] == unknown - 1
    [again] = perform(client, f"v-{decision}", claim(key)).expect(200)["answers"]
    assert again.get("code", again["type"]) == then
    audit = client.request("GET", f"/jobs/u-{decision}/evidence").expect(200)["audit"]
    [entry] = [entry for entry in audit if entry["act"] == "effect_reconciled"]
    assert (entry["actor"], entry["detail"]["key_id"], time.time() - entry["at"] < 60) == ("ops", key.key_id, True)
    server.wait_log("effect_reconciled", key_id=key.key_id, decision=decision)


@pytest.mark.effect_case(37)
def test_a_state_that_is_not_unknown_takes_no_decision(client: Client) -> None:
    key = key_of("closed")
    perform(client, "q-1", claim(key), settle(key)).expect(200)
    assert reconcile(client, key).expect(409)["code"] == "effect_not_open"
    for decision in ("settled", "not_applied"):
        receipt = {"receipt": 1} if decision == "settled" else {}
        assert reconcile(client, key, decision=decision, **receipt).expect(409)["code"] == "effect_not_open"


@pytest.mark.effect_case(38)
def test_a_decision_needs_the_version_that_there_is(client: Client) -> None:
    key = key_of("versions")
    make_unknown(client, key, action_id="i-1")
    assert reconcile(client, key, etag="").expect(428)["code"] == "if_match_missing"
    assert reconcile(client, key, etag="*").expect(428)["code"] == "if_match_missing"
    for stale in ('"1"', '"3"', 'W/"2"', "2", '"x"', '"1", "3"'):
        assert reconcile(client, key, etag=stale).expect(412)["code"] == "effect_changed"
    reconcile(client, key, etag='"1", "2"').expect(200)


@pytest.mark.effect_case(38)
def test_of_two_decisions_at_once_one_wins(client: Client) -> None:
    for number in range(5):
        key = key_of(f"race-{number}")
        make_unknown(client, key, action_id=f"race-{number}")
        answers = at_once(
            lambda key=key: reconcile(client, key, etag='"2"', decision="not_applied", actor="one"),
            lambda key=key: reconcile(client, key, etag='"2"', decision="abandoned", actor="two"),
        )
        assert sorted(answer.status for answer in answers) == [200, 412]
        winner = next(answer.json() for answer in answers if answer.status == 200)
        assert effect(client, key).expect(200) == winner


@pytest.mark.effect_case(39)
@pytest.mark.parametrize(
    "body",
    [
        {"actor": ...},
        {"actor": ""},
        {"actor": " \t"},
        {"actor": "x" * 513},
        {"evidence": ...},
        {"evidence": "\n"},
        {"evidence": "x" * 2049},
        {"decision": ...},
        {"decision": "repeat"},
        {"decision": "settled"},
        {"decision": "abandoned", "receipt": {}},
        {"decision": "not_applied", "receipt": None},
        {"decision": "settled", "receipt": "x" * 65_536},
        {"more": 1},
        {"actor": 7},
    ],
)
def test_a_decision_without_its_reasons_is_refused(client: Client, body: dict[str, Any]) -> None:
    key = key_of("reasons")
    if effect(client, key).status == 404:
        make_unknown(client, key, action_id="reasons")
    reconcile(client, key, **body).expect(422)
    assert effect(client, key).expect(200)["state"] == "unknown"


def test_null_is_a_receipt_too(client: Client) -> None:
    key = key_of("null")
    make_unknown(client, key, action_id="null")
    view = reconcile(client, key, decision="settled", receipt=None).expect(200)
    assert (view["receipt"], view["receipt_stored"]) == (None, True)


def test_a_worker_may_reconcile_what_its_provider_knows(client: Client) -> None:
    key = key_of("lookup")
    make_unknown(client, key, action_id="p-1")
    step = {"do": "reconcile", "key_id": key.key_id, "version": 2, "decision": "settled", "receipt": '{"found":1}'}
    answers = perform(client, "p-2", claim(key), step, claim(key)).expect(200)["answers"]
    assert [answer["type"] for answer in answers] == ["effect_refused", "effect_noted", "effect_replayed"]
    assert effect(client, key).json()["reconciliation"]["actor"] == "tests:lookup"


# --- archives and evidence -------------------------------------------------------------------------------------------


@pytest.mark.effect_case(32)
@pytest.mark.effect_case(33)
@pytest.mark.effect_case(42)
def test_a_job_is_archived_once_nothing_of_it_is_open_and_its_effects_stay(client: Client, server: Server) -> None:
    key = key_of("archived")
    make_unknown(client, key, action_id="z-1")
    refused = client.archive("z-1").expect(409)
    assert (refused["code"], key.key_id in refused["detail"]) == ("effects_open", True)
    reconcile(client, key, decision="settled", receipt=[1]).expect(200)
    client.archive("z-1").expect(200)
    line = json.loads(server.state_file.with_name("journal.db.archive.jsonl").read_text().splitlines()[-1])
    assert (line["record"]["action_id"], [one["key_id"] for one in line["effects"]]) == ("z-1", [key.key_id])
    assert effect(client, key).expect(200)["state"] == "settled"
    answers = perform(client, "z-2", claim(key), claim(key, args_hash=OTHER_ARGS)).expect(200)["answers"]
    assert [answer.get("code", answer["type"]) for answer in answers] == ["effect_replayed", "effect_conflict"]
    client.start("z-3", "instant").expect(200)
    client.archive("z-3").expect(200)


def test_evidence_is_what_is_known_of_a_job(client: Client) -> None:
    key = key_of("evident", scope=Scope.ACTION, scope_id="v-1")
    perform(client, "v-1", claim(key, policy=Policy.PROVIDER), settle(key), {"do": "fail"}).expect(502)
    found = client.request("GET", "/jobs/v-1/evidence").expect(200)
    health = client.health().json()
    assert (found["config_digest"], found["registry_digest"]) == (health["config_digest"], health["registry_digest"])
    assert len(found["request_hash"]) == 64
    assert found["record"] == client.get("v-1").json()
    assert found["stop"] == found["record"]["stop"]
    assert found["effects"] == [effect(client, key).json()]
    assert found["effects_omitted"] == 0
    assert "ValueError, its text is left out" in found["log_tail"]
    assert [entry["act"] for entry in found["audit"]] == ["admitted", "failed"]
    headers = {"X-AIP-Crew-ID": "other"}
    assert client.request("GET", "/jobs/v-1/evidence", headers=headers).status == 404
    assert client.request("GET", "/jobs/v-1/effects", headers=headers).status == 404
