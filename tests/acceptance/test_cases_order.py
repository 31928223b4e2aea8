"""Cases 6, 18, 22 and 27 to 35 together: of two rules that a start request breaks, the earlier one answers.

The order is that of the wire contract, section 5, with the token before the body and the queue before the journal.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.acceptance.test_cases_admission import RESPOND_ASYNC, files_cannot_grow, make, run, stored
from tests.support.client import Answer, Client
from tests.support.gates import Gate
from tests.support.server import Server

CASES = pytest.mark.case(6, 18, 22, 28, 29, 30, 31, 32, 35)
INPUT_BYTES = 1_048_576
BODY_BYTES = INPUT_BYTES + 65_536
KNOWN = "known"


class Rule(NamedTuple):
    """One check, and what a request that fails it gets."""

    name: str
    status: int
    code: str


RULES = (
    Rule("token", 401, "unauthorized"),
    Rule("content type", 422, "input_invalid"),
    Rule("body size", 413, "input_too_large"),
    Rule("strict JSON", 422, "json_invalid"),
    Rule("schema", 422, "input_invalid"),
    Rule("input size", 413, "input_too_large"),
    Rule("legacy route", 400, "legacy_route"),
    Rule("operation allowed", 403, "operation_disabled"),
    Rule("key present", 428, "key_missing"),
    Rule("key valid", 400, "key_invalid"),
    Rule("operation input", 422, "input_invalid"),
    Rule("crew known", 404, "crew_unknown"),
    Rule("same material", 409, "action_conflict"),
)
NAMES = [rule.name for rule in RULES]
GOOD_INPUTS: dict[str, dict[str, object]] = {
    "run": {"some": "thing else"},
    "batch_run": {"inputs": [{}]},
    "memory_reset": {"command_type": "all"},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server on which ``memory_reset`` is not allowed and the Action ``known`` has run."""
    with make(tmp_path_factory.mktemp("server"), allowed_operations=["run", "batch_run"]) as server:
        assert run(server.client(), KNOWN).status == 200
        yield server


def ask(server: Server, broken: set[str]) -> Answer:
    """Send a start request that fails the checks in ``broken`` and no other."""
    assert broken <= set(NAMES)
    headers: dict[str, str | bytes] = {"Idempotency-Key": key(broken)}
    if "content type" in broken:
        headers["Content-Type"] = "text/plain"
    path = "/runs" if "legacy route" in broken else "/jobs"
    client = Client(server.host, server.port, token="wrong" if "token" in broken else server.token)
    return client.request("POST", path, body=body(broken), headers=headers)


def key(broken: set[str]) -> bytes:
    """An Idempotency-Key: too long, blank, or blank and too long."""
    size = 513 if "key valid" in broken else 1
    return b" " * size if "key present" in broken else b"k" * size


def body(broken: set[str]) -> bytes:
    """A body that fails exactly these checks."""
    operation = "run"
    if {"legacy route", "operation input"} & broken:
        operation = "batch_run"
    if "operation allowed" in broken:
        operation = "memory_reset"
    inputs: dict[str, object] = {"wrong": 1} if "operation input" in broken else GOOD_INPUTS[operation]
    if "input size" in broken:
        inputs = pad(inputs, operation, "operation input" in broken)
    document: dict[str, object] = {
        "crew_id": "nobody" if "crew known" in broken else "instant",
        "action_id": KNOWN if "same material" in broken else "fresh",
        "operation": operation,
        "input": inputs,
    }
    if "schema" in broken:
        document["more"] = 1
    text = json.dumps(document)
    if "strict JSON" in broken:
        text = text[:-1] + ', "crew_id": "instant"}'
    if "body size" in broken:
        text += " " * (BODY_BYTES + 1 - len(text))
    return text.encode("ascii")


def pad(inputs: dict[str, object], operation: str, invalid: bool) -> dict[str, object]:
    """The same input, too large; for ``batch_run`` inside of the first object, where anything may be."""
    padding = "x" * INPUT_BYTES
    if operation == "batch_run" and not invalid:
        return {"inputs": [{"pad": padding}]}
    return inputs | {"pad": padding}


@CASES
@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_each_rule_answers_a_request_that_breaks_it_alone(server: Server, rule: Rule) -> None:
    """Section 5: without this the pairs below might pass for another reason."""
    expect(ask(server, {rule.name}), rule)


@CASES
def test_a_request_that_breaks_no_rule_is_admitted(server: Server) -> None:
    """Section 5: the request that all the broken ones differ from."""
    answer = ask(server, set())
    assert answer.status == 200, answer.body
    assert server.client().archive("fresh").status == 200


@CASES
@pytest.mark.parametrize(
    ("first", "second"), list(pairwise(RULES)), ids=[f"{first}, {second}" for first, second in pairwise(NAMES)]
)
def test_of_two_neighbouring_rules_the_first_answers(server: Server, first: Rule, second: Rule) -> None:
    """Section 5 (=, and ≠ for the token: B14): each adjacent pair of checks."""
    expect(ask(server, {first.name, second.name}), first)


@CASES
@pytest.mark.parametrize("index", range(len(RULES)), ids=NAMES)
def test_a_rule_answers_before_all_that_follow(server: Server, index: int) -> None:
    """Section 5: one request that breaks a rule and every later one."""
    expect(ask(server, set(NAMES[index:])), RULES[index])


def expect(answer: Answer, rule: Rule) -> None:
    """Assert that this rule has answered."""
    assert (answer.status, answer.json()["code"]) == (rule.status, rule.code), (rule, answer.body)


@pytest.mark.case(22, 27)
def test_known_material_comes_before_the_queue_and_the_queue_before_the_journal(tmp_path: Path) -> None:
    """Section 5, rules 11 to 13, and B9: 409 and repeats are answered with a full queue; the full queue's 503 comes
    before the full journal's 507, and that before the 507 of a journal that cannot be written.
    """
    with make(tmp_path, max_concurrency=1, max_queue=1, max_retained_runs=2) as server, ThreadPoolExecutor(1) as pool:
        client, gate = server.client(), Gate(tmp_path, "slow")
        given = {"action": "slow", **gate.input}
        slow = pool.submit(client.start, "slow", "turnstile", input=given)
        gate.wait("began")
        assert client.start("next", "instant", headers=RESPOND_ASYNC).expect(202)["phase"] == "queued"
        with files_cannot_grow(server):
            assert client.start("slow", "turnstile", input={}).expect(409)["code"] == "action_conflict"
            again = client.start("next", "instant", headers=RESPOND_ASYNC)
            assert (again.status, again.headers["idempotency-replayed"]) == (202, "true")
            refused = run(client, "third")
            problem = refused.expect(503)
            assert (problem["code"], problem["action_id"]) == ("not_accepting", "third")
            assert int(refused.headers["retry-after"]) > 0
        assert client.health().expect(200)["queued"] == 1
        assert client.cancel("next", "instant").expect(200)["status"] == "cancelled"
        with files_cannot_grow(server):
            assert run(client, "third").expect(507)["code"] == "journal_full"
        gate.release()
        assert slow.result().status == 200
        assert client.archive("next").status == 200
        with files_cannot_grow(server):
            assert run(client, "third").expect(507)["code"] == "journal_unavailable"
        assert not stored(client, "third")


@pytest.mark.case(27)
def test_an_archived_id_comes_before_a_full_journal(tmp_path: Path) -> None:
    """Section 5, rule 11, and B17: the tombstone answers 410 to the same material and 409 to other, and never runs."""
    with make(tmp_path, max_concurrency=1, max_retained_runs=1) as server:
        client = server.client()
        assert run(client, "gone").status == 200
        assert client.archive("gone").status == 200
        assert run(client, "other").status == 200
        assert run(client, "third").expect(507)["code"] == "journal_full"
        assert run(client, "gone").expect(410)["code"] == "action_archived"
        assert run(client, "gone", key="another").expect(409)["code"] == "action_conflict"
