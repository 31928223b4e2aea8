"""What operators ask for over HTTP: a job's log, a decision about its outcome, a drain."""

from __future__ import annotations

import contextlib
import http.client
import json
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from supervisor.http.operating import LOOK_S
from tests.support import procs
from tests.support.cases import RESPOND_ASYNC, wait_for_phase
from tests.support.client import Client
from tests.support.declared import Declared, DeclaredClient
from tests.support.gates import Gate
from tests.support.server import Server, ServerFactory

REGISTRY = "tests.crews.operated_crews:CREWS"
SETTINGS: dict[str, Any] = {"max_concurrency": 2, "grace_s": 0.1, "linger_s": 0.2}
DECISION = {"actor": "ops", "decision": "not_applied", "evidence": "statement 7"}
EVERYTHING = ["stdout first words", "stderr a complaint", "stdout last words"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("server")
    environment: dict[str, str | None] = {"WITNESS_FILE": str(directory / "witness")}
    with Server(directory, registry=REGISTRY, settings=SETTINGS, environment=environment) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Client:
    return DeclaredClient(server.client(), Declared.of(server.client()))


@contextlib.contextmanager
def following(server: Server, target: str) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=30)
    connection.request("GET", target, headers={"Authorization": f"Bearer {server.token}"})
    with contextlib.closing(connection):
        yield connection.getresponse()


# --- logs ------------------------------------------------------------------------------------------------------------


def test_a_log_is_read_whole_and_by_its_end(client: Client) -> None:
    client.start("read", "talker").expect(200)
    answer = client.request("GET", "/jobs/read/log")
    assert (answer.status, answer.headers["content-type"]) == (200, "text/plain; charset=utf-8")
    assert sorted(answer.body.decode().splitlines()) == sorted(EVERYTHING)
    for tail in (0, 1, 7, len(answer.body), 10_000):
        shown = client.request("GET", f"/jobs/read/log?tail={tail}").body
        assert shown == answer.body[len(answer.body) - min(tail, len(answer.body)) :]
    assert client.request("GET", "/jobs/read/log?follow=1").body == answer.body, "it has ended, so there is no more"


def test_a_job_that_never_ran_has_an_empty_log(client: Client) -> None:
    client.start("silent", "factory_raises")
    client.start("quiet", "instant").expect(200)
    assert client.request("GET", "/jobs/quiet/log").body == b""


def test_a_follower_sees_lines_as_they_come_and_ends_with_the_job(
    server: Server, client: Client, tmp_path: Path
) -> None:
    gate = Gate(tmp_path, "gate")
    client.start("followed", "talker", input=gate.input, headers=RESPOND_ASYNC).expect(202)
    with following(server, "/jobs/followed/log?follow=1") as response:
        early = {response.readline().decode().rstrip() for _ in range(2)}
        assert early == {"stdout first words", "stderr a complaint"}
        gate.wait("began")
        assert client.get("followed").expect(200)["status"] == "running"
        assert client.request("GET", "/jobs/followed/log").body.count(b"\n") == 2, "without follow it does not wait"
        gate.release()
        assert response.readline() == b"stdout last words\n"
        assert response.read() == b""
    assert client.get("followed").expect(200)["status"] == "completed"


def test_a_follower_of_a_queued_job_has_its_first_lines_at_once(
    server: Server, client: Client, tmp_path: Path
) -> None:
    gate, own = Gate(tmp_path, "gate"), Gate(tmp_path, "own")
    for number in range(2):
        client.start(f"ahead-{number}", "turnstile", input=gate.input, headers=RESPOND_ASYNC).expect(202)
    client.start("behind", "talker", input=own.input, headers=RESPOND_ASYNC).expect(202)
    wait_for_phase(client, "behind", "queued")
    with following(server, "/jobs/behind/log?follow=1") as response:
        gate.release()
        own.wait("began")
        began = time.monotonic()
        lines = [response.readline().decode().rstrip() for _ in range(2)]
        assert time.monotonic() - began < LOOK_S / 3, "told of them, and not by a look in passing"
        own.release()
        lines += response.read().decode().splitlines()
    assert sorted(lines) == sorted(EVERYTHING)


def test_a_follower_that_goes_away_and_one_that_stays_disturb_nothing(
    server: Server, client: Client, tmp_path: Path
) -> None:
    gate = Gate(tmp_path, "gate")
    client.start("left", "talker", input=gate.input, headers=RESPOND_ASYNC).expect(202)
    with following(server, "/jobs/left/log?follow=1") as response:
        response.readline()
    with following(server, "/jobs/left/log?follow=1&tail=0") as response:
        gate.wait("began")
        client.cancel("left", "talker").expect(200)
        assert b"last words" not in response.read()


def test_a_stop_of_the_server_closes_followers(start_server: ServerFactory, tmp_path: Path) -> None:
    server = start_server(registry=REGISTRY, settings=SETTINGS | {"drain_s": 0.2})
    gate = Gate(tmp_path, "gate")
    server.client().start("followed", "talker", input=gate.input, headers=RESPOND_ASYNC).expect(202)
    gate.wait("began")
    with following(server, "/jobs/followed/log?follow=1") as response:
        response.readline()
        ended: list[bytes] = []
        reader = threading.Thread(target=lambda: ended.append(response.read()), daemon=True)
        reader.start()
        assert server.stop() == 0
        reader.join(10)
        assert ended, "the follower was cut or has ended"


@pytest.mark.parametrize("query", ["tail=-1", "tail=x", "tail=9999999999", "follow=2", "follow=yes", "lines=1"])
def test_a_query_that_makes_no_sense_is_refused(client: Client, query: str) -> None:
    client.start("asked", "instant").expect(200)
    assert client.request("GET", f"/jobs/asked/log?{query}").expect(422)["code"] == "input_invalid"


def test_a_log_is_that_of_the_crew_that_is_named(client: Client) -> None:
    client.start("mine", "talker").expect(200)
    client.request("GET", "/jobs/mine/log", headers={"X-AIP-Crew-ID": "talker"})
    assert client.request("GET", "/jobs/mine/log", headers={"X-AIP-Crew-ID": "other"}).status == 404
    assert client.request("GET", "/jobs/nobody/log").expect(404)["code"] == "action_unknown"


def test_an_archive_takes_the_log_along(server: Server, client: Client) -> None:
    client.start("kept", "talker").expect(200)
    text = client.request("GET", "/jobs/kept/log").body.decode()
    client.archive("kept").expect(200)
    assert client.request("GET", "/jobs/kept/log").status == 404
    [line] = [line for line in archived(server) if line["record"]["action_id"] == "kept"]
    assert (line["log"], line["log_omitted_bytes"], line["reconciliations"]) == (text, 0, [])


def archived(server: Server) -> list[dict[str, Any]]:
    path = server.state_file.with_name(f"{server.state_file.name}.archive.jsonl")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# --- decisions -------------------------------------------------------------------------------------------------------


def test_a_decision_stands_beside_a_record_that_stays_as_it_is(server: Server, client: Client) -> None:
    client.start("lost", "failing").expect(502)
    before = client.get("lost").expect(200)
    assert (before["uncertain_outcome"], before["reconciliation"]) == (True, None)
    shown = client.request("POST", "/jobs/lost/reconcile", body=DECISION).expect(200)
    decided = shown.pop("reconciliation")
    assert decided.pop("at") >= before["ended_at"]
    assert decided == DECISION
    assert shown == {name: value for name, value in before.items() if name != "reconciliation"}
    corrected = DECISION | {"decision": "applied", "evidence": "statement 8"}
    client.request("POST", "/jobs/lost/reconcile", body=corrected).expect(200)
    view = client.get("lost").expect(200)
    assert view["reconciliation"]["decision"] == "applied", "the newest counts"
    listed = client.request("GET", "/jobs?crew_id=failing").expect(200)["jobs"]
    assert [one["reconciliation"] for one in listed] == [view["reconciliation"]]
    evidence = client.request("GET", "/jobs/lost/evidence").expect(200)
    assert [one["evidence"] for one in evidence["reconciliations"]] == ["statement 7", "statement 8"]
    assert evidence["record"] == view
    entries = [(entry["actor"], entry["detail"]) for entry in evidence["audit"] if entry["act"] == "reconciled"]
    assert [(who, detail["decision"]) for who, detail in entries] == [("ops", "not_applied"), ("ops", "applied")]
    assert all(detail["by"].startswith("http:127.") for _, detail in entries)
    client.archive("lost").expect(200)
    [line] = [line for line in archived(server) if line["record"]["action_id"] == "lost"]
    assert [one["decision"] for one in line["reconciliations"]] == ["not_applied", "applied"]


def test_a_decision_survives_a_restart(start_server: ServerFactory) -> None:
    server = start_server(registry=REGISTRY, settings=SETTINGS)
    server.client().start("lost", "failing").expect(502)
    decided = server.client().request("POST", "/jobs/lost/reconcile", body=DECISION).expect(200)["reconciliation"]
    server.restart()
    assert server.client().get("lost").expect(200)["reconciliation"] == decided


def test_only_an_uncertain_outcome_can_be_decided(client: Client, tmp_path: Path) -> None:
    gate = Gate(tmp_path, "gate")
    client.start("sure", "instant").expect(200)
    client.start("never", "factory_raises")
    client.start("busy", "turnstile", input=gate.input, headers=RESPOND_ASYNC).expect(202)
    for action_id, status, code in (
        ("sure", 409, "outcome_certain"),
        ("never", 409, "outcome_certain"),
        ("busy", 409, "action_running"),
        ("nobody", 404, "action_unknown"),
    ):
        answer = client.request("POST", f"/jobs/{action_id}/reconcile", body=DECISION)
        assert answer.expect(status)["code"] == code
    gate.release()
    assert client.get("sure").expect(200)["reconciliation"] is None


@pytest.mark.parametrize(
    "change", [{"decision": "settled"}, {"actor": " "}, {"evidence": ""}, {"actor": None}, {"receipt": 1}]
)
def test_a_decision_without_sense_is_refused(client: Client, change: dict[str, Any]) -> None:
    client.start("odd", "failing")
    answer = client.request("POST", "/jobs/odd/reconcile", body=DECISION | change)
    assert answer.expect(422)["code"] == "input_invalid"
    assert client.get("odd").expect(200)["reconciliation"] is None


# --- drain -----------------------------------------------------------------------------------------------------------


def test_a_drain_refuses_starts_and_nothing_else_until_it_is_undone(
    server: Server, client: Client, tmp_path: Path
) -> None:
    gate = Gate(tmp_path, "gate")
    client.start("before", "instant").expect(200)
    for number in range(3):
        client.start(f"on-{number}", "turnstile", input=gate.input, headers=RESPOND_ASYNC).expect(202)
    wait_for_phase(client, "on-1", "running")
    assert client.request("POST", "/drain").expect(200) == {"draining": True, "running": 2, "queued": 1}
    assert client.request("POST", "/drain").expect(200)["draining"] is True, "twice is once"
    assert client.request("GET", "/readyz").status == 503
    health = client.health().expect(200)
    assert (health["status"], health["checks"]["accepting"]) == ("not_ready", False)
    refused = client.start("during", "instant")
    assert (refused.expect(503)["code"], refused.headers["retry-after"]) == ("not_accepting", "5")
    client.start("before", "instant").expect(200)
    client.get("before").expect(200)
    gate.release()
    procs.wait_until(lambda: all(ended(client, f"on-{number}") for number in range(3)), 30, "what was admitted ends")
    assert {client.get(f"on-{number}").json()["status"] for number in range(3)} == {"completed"}
    assert client.get("during").status == 404
    assert client.request("DELETE", "/drain").expect(200) == {"draining": False, "running": 0, "queued": 0}
    assert client.request("GET", "/readyz").status == 200
    client.start("during", "instant").expect(200)
    audited = server.run_command("journal", "check")
    assert audited.returncode == 0
    assert [line["event"] for line in server.log_lines() if line["event"].startswith("drain_")] == [
        "drain_begun", "drain_begun", "drain_ended"
    ]  # fmt: skip


def ended(client: Client, action_id: str) -> bool:
    return bool(client.get(action_id).json()["phase"] == "done")


def test_a_drain_is_audited_and_ends_with_the_process(start_server: ServerFactory) -> None:
    server = start_server(registry=REGISTRY, settings=SETTINGS)
    server.client().request("POST", "/drain").expect(200)
    assert server.stop() == 0
    with contextlib.closing(sqlite3.connect(f"{server.state_file.as_uri()}?mode=ro", uri=True)) as journal:
        found = journal.execute("SELECT act, actor FROM audit WHERE action_id IS NULL").fetchall()
    assert [act for act, _ in found] == ["drain_begun"]
    assert found[0][1].startswith("http:")
    server.start()
    server.client().start("after", "instant").expect(200)


def test_a_read_only_token_may_not_change_anything(start_server: ServerFactory, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("may-read")
    server = start_server(registry=REGISTRY, settings=SETTINGS | {"read_token_files": [str(token)]})
    reader = Client(server.host, server.port, token="may-read")
    server.client().start("lost", "failing").expect(502)
    assert reader.request("GET", "/jobs/lost/log").status == 200
    for method, path, body in (
        ("POST", "/drain", None), ("DELETE", "/drain", None), ("POST", "/jobs/lost/reconcile", DECISION)
    ):  # fmt: skip
        assert reader.request(method, path, body=body).expect(403)["code"] == "read_only_token"
