"""Any replica answers for any Action: one execution, one answer, streams and refusals as the owner has them."""

from __future__ import annotations

import sqlite3
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from tests.fleet.checks import check_one_execution, runs, start
from tests.fleet.conftest import Lasting, Starts
from tests.support.fleet import Replicas, listens, registered, wait_for, wait_status
from tests.support.postgres import Postgres
from tests.support.raw import RawConnection, head
from tests.support.server import Server, ServerFactory

CLIENTS = 50
ROUNDS = 20
#: What ends a chunked body (RFC 9112, 7.1).
LAST_CHUNK = b"\r\n0\r\n\r\n"
OWNER = "SELECT replica_id FROM crew_supervisor.actions WHERE action_id = %s"


def test_fifty_clients_and_three_replicas_execute_an_action_once(lasting: Lasting, postgres: Postgres) -> None:
    replicas, three, database = lasting
    check_one_execution(replicas, prefix="round", clients=CLIENTS, rounds=ROUNDS)
    owners = "SELECT count(DISTINCT replica_id) FROM crew_supervisor.actions WHERE action_id LIKE 'round-%'"
    assert postgres.ask(database, owners)[0][0] > 1

    conflicts = [start(server, "round-0", other="material") for server in three for _ in range(3)]
    assert [(answer.status, answer.json()["code"]) for answer in conflicts] == [(409, "action_conflict")] * 9
    assert Counter(replicas.executed())["round-0"] == 1


def test_every_route_about_an_action_leads_to_its_owner(lasting: Lasting) -> None:
    owner, other, third = lasting.servers
    given = {"chunks": 3, "every_s": 0.01}
    ours = start(owner, "x", "ticking", **given)
    assert ours.status == 200
    repeat = start(third, "x", "ticking", **given)
    assert (repeat.body, repeat.headers["idempotency-replayed"]) == (ours.body, "true")
    assert repeat.headers["x-crew-fleet-replica"] == "replica-0"

    for path in ("/jobs/x", "/runs/x", "/jobs/x/events", "/jobs/x/events?cursor=2", "/jobs/x/evidence", "/jobs/x/log",
                 "/jobs/x/effects"):  # fmt: skip
        here, there = owner.client().request("GET", path), other.client().request("GET", path)
        assert (there.status, there.body) == (200, here.body), path
        assert there.headers["content-type"] == here.headers["content-type"]
        assert "x-crew-fleet-replica" not in here.headers
    crew = {"X-AIP-Crew-ID": "another"}
    assert other.client().request("GET", "/jobs/x", headers=crew).expect(404)["code"] == "action_unknown"
    assert other.client().request("GET", "/jobs/x/events?cursor=99").expect(416)["code"] == "cursor_invalid"
    assert other.client().cancel("x", "ticking").expect(200)["status"] == "completed"
    assert other.client().cancel("x", "another").expect(404)["code"] == "action_unknown"
    refused = {"actor": "me", "decision": "applied", "evidence": "seen"}
    answer = other.client().request("POST", "/jobs/x/reconcile", body=refused)
    assert answer.expect(409)["code"] == "outcome_certain"
    assert other.client().archive("x", confirmation="y").expect(428)["code"] == "confirmation_missing"
    assert third.client().archive("x").expect(200) == {"archived": True, "action_id": "x"}
    for server in lasting.servers:
        assert start(server, "x", "ticking", **given).expect(410)["code"] == "action_archived"
        assert server.client().get("x").expect(404)["code"] == "action_unknown"
    audit = [line["actor"] for line in _audit(owner) if line["act"] == "archived"]
    assert [" via replica-2" in actor for actor in audit] == [True]


def _audit(server: Server) -> list[Any]:
    with sqlite3.connect(server.state_file) as journal:
        return [{"actor": actor, "act": act} for actor, act in journal.execute("SELECT actor, act FROM audit")]


def test_an_action_that_nobody_has_is_unknown_everywhere(lasting: Lasting) -> None:
    for server in lasting.servers:
        assert server.client().get("nobodys").expect(404)["code"] == "action_unknown"


def test_an_asynchronous_start_and_its_cancel_go_through_another_replica(lasting: Lasting) -> None:
    owner, other, third = lasting.servers
    body = {"crew_id": "sleeper", "action_id": "s", "operation": "run", "input": {"action": "s"}}
    headers = {"Idempotency-Key": "k", "Prefer": "respond-async"}
    admitted = owner.client().request("POST", "/jobs", body=body, headers=headers)
    again = other.client().request("POST", "/jobs", body=body, headers=headers)
    assert (admitted.status, again.status) == (202, 202)
    for answer in (admitted, again):
        assert answer.headers["location"] == "/jobs/s"
        assert answer.headers["preference-applied"] == "respond-async"
    assert again.headers["idempotency-replayed"] == "true"
    runs(owner, "s")
    cancelled = third.client().cancel("s", "sleeper", reason="enough").expect(200)
    assert (cancelled["status"], cancelled["stop"]["confirmed"]) == ("cancelled", True)
    assert other.client().get("s").json() == cancelled


def test_a_key_of_any_bytes_is_the_same_key_at_the_owner(lasting: Lasting) -> None:
    owner, other, _ = lasting.servers
    for number, key in enumerate((b"caf\xe9", "schlüssel".encode(), b"plain", b"\xff\xfe-")):
        given = {"action": f"k{number}"}
        first = owner.client().start(f"k{number}", "instant", input=given, key=key)
        again = other.client().start(f"k{number}", "instant", input=given, key=key)
        assert (first.status, again.status, again.body) == (200, 200, first.body)
        wrong = other.client().start(f"k{number}", "instant", input=given, key=key + b"x")
        assert wrong.expect(409)["code"] == "action_conflict"


def test_a_stream_read_through_others_is_the_owners_byte_for_byte(lasting: Lasting) -> None:
    owner, other, third = lasting.servers
    given = {"action": "t", "chunks": 60, "every_s": 0.03}
    with owner.client().stream("t", "ticking", input=given) as first:
        first.until("started")
        with other.client().follow("t") as reader:
            seen = [reader.next() for _ in range(12)]
        with third.client().stream("t", "ticking", input=given) as repeated:
            assert repeated.headers["idempotency-replayed"] == "true"
            # The reader comes back at yet another replica, behind the last event it saw.
            headers = {"Last-Event-ID": str(seen[-1].sequence), "Accept": "text/event-stream"}
            with third.client()._stream("GET", "/jobs/t/events", body=None, headers=headers, complete=True,
                                        first=seen[-1].sequence + 1) as resumed:  # fmt: skip
                rest = resumed.rest()
            whole = repeated.rest()
        owners = first.rest()
    assert [event.sequence for event in [*seen, *rest]] == list(range(len(owners)))
    assert [(event.event, event.data) for event in [*seen, *rest]] == [(event.event, event.data) for event in owners]
    assert [(event.event, event.data) for event in whole] == [(event.event, event.data) for event in owners]
    accept = {"Accept": "text/event-stream"}
    here, there = (server.client().request("GET", "/jobs/t/events", headers=accept) for server in (owner, third))
    assert there.body == here.body
    assert there.headers["cache-control"] == here.headers["cache-control"] == "no-cache"


def test_a_stream_whose_owner_dies_does_not_end_in_order(starts: Starts) -> None:
    """An orderly end without a terminal event would say that this was all."""
    owner, other = starts(2)
    given = {"action": "d", "chunks": 1000, "every_s": 0.05}
    with owner.client().stream("d", "ticking", input=given, complete=False) as first:
        first.until("chunk")
        with RawConnection(other.host, other.port) as reader:
            accept = {"Accept": "text/event-stream"}
            reader.send(head("GET", b"/jobs/d/events", token=other.token, headers=accept))
            while b"event: chunk" not in reader.socket.recv(65_536):
                pass
            owner.kill()
            assert not reader.rest().endswith(LAST_CHUNK)
    with RawConnection(other.host, other.port) as reader:
        other.client().start("e", "instant", input={"action": "e"}).expect(200)
        reader.send(head("GET", b"/jobs/e/events", token=other.token, headers={**accept, "Connection": "close"}))
        assert reader.rest().endswith(LAST_CHUNK), "this is how an orderly end looks"


def test_a_request_that_was_passed_on_is_never_passed_on_again(lasting: Lasting) -> None:
    owner, other, _ = lasting.servers
    assert start(owner, "loop").status == 200
    told = {"X-Crew-Fleet-Via": "replica-2", "X-Crew-Fleet-To": "replica-1"}
    body = {"crew_id": "instant", "action_id": "loop", "operation": "run", "input": {"action": "loop"}}
    answer = other.client().request("POST", "/jobs", body=body, headers={**told, "Idempotency-Key": "key-loop"})
    assert answer.expect(503)["code"] == "owner_unavailable"
    assert other.client().request("GET", "/jobs/loop", headers=told).expect(404)["code"] == "action_unknown"
    wrong = {**told, "X-Crew-Fleet-To": "replica-7"}
    assert "is not replica-1" in other.client().request("GET", "/jobs/loop", headers=wrong).expect(503)["detail"]


def test_a_token_that_only_the_first_replica_takes_is_no_answer_of_the_owner(replicas: Replicas) -> None:
    first = replicas.add()
    second = replicas.add()
    second.token = "another-token"
    for server in (first, second):
        server.start()
        server.wait_log("replica_registered")
    assert start(first, "mine").status == 200
    answer = second.client().get("mine")
    assert answer.expect(503)["code"] == "owner_unavailable"
    assert "tokens in common" in answer.json()["detail"]


def test_an_owner_that_is_gone_is_named_and_nobody_executes_its_action(
    replicas: Replicas, three: list[Server], postgres: Postgres, database: str
) -> None:
    owner, other, third = three
    assert start(owner, "mine").status == 200
    owner.kill()
    wait_for(
        lambda: other.client().get("mine").json().get("detail", "").find("has no valid lease") > 0, "its lease ends"
    )
    for server in (other, third):
        for answer in (start(server, "mine"), server.client().get("mine"), server.client().cancel("mine", "instant")):
            assert answer.expect(503)["code"] == "owner_unavailable"
            assert "replica-0" in answer.json()["detail"]
            assert int(answer.headers["retry-after"]) > 0
        conflict = start(server, "mine", other="material")
        assert conflict.expect(409)["code"] == "action_conflict"
    assert replicas.executed() == ["mine"]
    assert postgres.ask(database, OWNER, "mine") == [("replica-0",)]


def test_endings_are_told_to_the_fleet(lasting: Lasting, postgres: Postgres) -> None:
    owner, other, _ = lasting.servers
    start(owner, "good")
    start(owner, "bad", "failing")
    asked = "SELECT status, uncertain, said_by FROM crew_supervisor.actions WHERE action_id = %s"
    for action_id, wanted in {"good": ("completed", False, "owner"), "bad": ("failed", True, "owner")}.items():
        told = partial(postgres.ask, lasting.database, asked, action_id)
        wait_for(lambda told=told, wanted=wanted: told() == [wanted], f"the ending of {action_id} is told")
    wait_status(other, "bad", "failed")


def test_a_supervisor_alone_does_not_import_the_database(start_server: ServerFactory, lasting: Lasting) -> None:
    alone = start_server(registry="tests.crews.fake_crews:CREWS")
    loaded = {server.pid: "psycopg" in _maps(server) for server in (alone, lasting.servers[0])}
    assert list(loaded.values()) == [False, True]
    assert "lease" not in alone.client().health().json()["checks"]


def test_a_supervisor_that_joins_brings_what_it_has_done(replicas: Replicas, postgres: Postgres, database: str) -> None:
    """Its Actions were executed before there was a fleet, and are not executed again in it."""
    veteran = replicas.add(settings={"fleet": None})
    with veteran:
        for action_id in ("kept", "archived"):
            start(veteran, action_id).expect(200)
        veteran.client().archive("archived").expect(200)
        veteran.stop()
    machine = replicas.network.machine(0)
    veteran.settings["fleet"] = {"replica": "veteran", "url": veteran.url, "lease_s": replicas.lease_s}
    veteran.environment["CREW_SUPERVISOR_FLEET_DATABASE"] = machine.dsn
    other = replicas.add()
    for server in (veteran, other):
        registered(listens(server.launch()))
    known = "SELECT action_id, status FROM crew_supervisor.actions ORDER BY 1"
    told = [("archived", "completed"), ("kept", "completed")]
    wait_for(lambda: postgres.ask(database, known) == told, "it is told")
    assert start(other, "kept").headers["x-crew-fleet-replica"] == "veteran"
    assert start(other, "archived").expect(410)["code"] == "action_archived"
    assert Counter(replicas.executed()) == {"kept": 1, "archived": 1}


def _maps(server: Server) -> str:
    return Path(f"/proc/{server.pid}/maps").read_text(encoding="ascii")
