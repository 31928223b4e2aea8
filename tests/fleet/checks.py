"""What the tests of a fleet check, as functions that a mutant of the program must fail."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.support.client import Answer
from tests.support.fleet import Replicas, registered, wait_for
from tests.support.server import Server


def start(server: Server, action_id: str, crew_id: str = "instant", **given: Any) -> Answer:
    """Start or repeat an Action that notes its execution."""
    return server.client().start(action_id, crew_id, input={"action": action_id, **given})


def begin(server: Server, action_id: str, crew_id: str = "sleeper", **body: Any) -> Answer:
    """Start one and wait for no more than its admission."""
    given = {"crew_id": crew_id, "action_id": action_id, "operation": "run", "input": {"action": action_id}, **body}
    headers = {"Idempotency-Key": f"key-{action_id}", "Prefer": "respond-async"}
    return server.client().request("POST", "/jobs", body=given, headers=headers)


def runs(server: Server, action_id: str) -> None:
    """Wait until its crew has been called."""
    witness = Path(str(server.environment["EXECUTIONS_FILE"]))
    wait_for(lambda: witness.exists() and action_id in witness.read_text("ascii").split(), f"{action_id} runs")
    assert server.client().get(action_id).expect(200)["phase"] == "running"


def at_once(servers: list[Server], action_id: str, clients: int) -> list[Answer]:
    """So many clients, spread over the replicas, that send the same request together."""
    gate = threading.Barrier(clients)

    def send(number: int) -> Answer:
        gate.wait()
        return start(servers[number % len(servers)], action_id)

    with ThreadPoolExecutor(clients) as pool:
        return list(pool.map(send, range(clients)))


def check_one_execution(replicas: Replicas, *, prefix: str, clients: int, rounds: int) -> list[Answer]:
    """Whoever asks, each Action is executed once and everybody gets the same. Returns the last round's answers."""
    answers: list[Answer] = []
    for number in range(rounds):
        answers = at_once(replicas.servers, f"{prefix}-{number}", clients)
        assert {answer.status for answer in answers} == {200}, Counter(answer.status for answer in answers)
        assert len({answer.body for answer in answers}) == 1
        fresh = [answer for answer in answers if "idempotency-replayed" not in answer.headers]
        assert len(fresh) == 1, "one admission, and everybody else repeats it"
    executed = [name for name in replicas.executed() if name.startswith(f"{prefix}-")]
    assert Counter(executed) == {f"{prefix}-{number}": 1 for number in range(rounds)}
    return answers


def host_ready(server: Server) -> Answer:
    """The host's readiness."""
    return server.client().request("GET", "/ready")


def lease_ends(server: Server) -> None:
    """Wait until a replica says that its lease is not valid."""
    wait_for(lambda: host_ready(server).json()["lease_valid"] is False, "the lease ends")


def fleet(server: Server) -> Any:
    """What a replica says of the fleet. After a cut it may take a moment until it asks the database again."""

    def view() -> Any:
        answer = server.client().request("GET", "/fleet")
        return answer.json() if answer.status == 200 else None

    return wait_for(view, "the database answers", deadline_s=10)


def scraped(server: Server, name: str) -> float:
    """A metric without labels."""
    text = server.client().request("GET", "/metrics").body.decode()
    lines = [line for line in text.splitlines() if line.startswith(f"{name} ")]
    assert len(lines) == 1, f"{name} is not there once"
    return float(lines[0].split()[1])


def check_cut_replica(replicas: Replicas) -> None:
    """Cut the first of three replicas from the database while it trains, until all is as it was before."""
    cut, other, third = replicas.servers
    material = {"n_iterations": 1, "artifact_name": "a.pkl", "inputs": {"action": "train"}}
    training = {"operation": "train", "input": material}
    assert begin(cut, "train", **training).status == 202
    runs(cut, "train")
    replicas.network.cut(0)
    refused = start(cut, "meanwhile")
    assert refused.expect(503)["code"] in ("fleet_unavailable", "lease_invalid")
    assert int(refused.headers["retry-after"]) > 0
    lease_ends(cut)
    said = host_ready(cut)
    assert (said.status, said.json()["status"], said.json()["connector"]["ready"]) == (503, "not_ready", True)
    assert cut.client().request("GET", "/readyz").status == 503
    assert start(cut, "later").expect(503)["code"] in ("fleet_unavailable", "lease_invalid")

    assert cut.client().get("train").expect(200)["status"] == "running"
    for server in (other, third):
        wait_for(lambda server=server: server.client().get("train").status == 503, "nobody answers for it")
        assert begin(server, "train", **training).expect(503)["code"] == "owner_unavailable"
        assert begin(server, "train").expect(409)["code"] == "action_conflict"
    assert start(other, "elsewhere").status == 200
    with cut.client().follow("train") as reader:
        reader.until("started")
        stopped = cut.client().cancel("train", "sleeper").expect(200)
        assert reader.rest()[-1].event == "cancelled"
    assert (stopped["status"], stopped["stop"]["confirmed"]) == ("cancelled", True)
    assert fleet_of_the_cut(cut)["code"] == "fleet_unavailable"

    seen = len(cut.log_lines())
    replicas.network.heal(0)
    assert registered(cut, skip=seen)["epoch"] == 2
    assert host_ready(cut).status == 200
    wait_for(lambda: other.client().get("train").status == 200, "its owner answers again")
    assert other.client().get("train").json()["status"] == "cancelled"
    wait_for(lambda: fleet(cut)["outbox"] == 0, "the ending is told")
    found = fleet(cut)
    assert (found["epoch"], found["lease_recoveries"]) == (2, 1)
    assert found["heartbeat_failures"] > 0
    assert scraped(cut, "crew_supervisor_host_lease_recoveries_total") == 1
    assert scraped(cut, "crew_supervisor_host_heartbeat_failures_total") == found["heartbeat_failures"]
    for action_id in ("meanwhile", "later"):
        assert start(other, action_id).status == 200
    assert Counter(replicas.executed()) == {"train": 1, "elsewhere": 1, "meanwhile": 1, "later": 1}


def fleet_of_the_cut(server: Server) -> Any:
    """What a replica without the database says when it is asked for the fleet."""
    return server.client().request("GET", "/fleet").expect(503)
