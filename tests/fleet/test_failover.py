"""Links, processes, machines, clocks and the database fail, and no Action is executed twice or lost."""

from __future__ import annotations

import random
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from supervisor.fleet import VERSION
from tests.fleet.checks import begin, check_cut_replica, fleet, host_ready, runs, scraped, start
from tests.fleet.conftest import Lasting, Starts
from tests.support.client import Answer
from tests.support.fleet import LEASE_S, Relayed, Replicas, listens, registered, relayed, wait_for, wait_status
from tests.support.postgres import Postgres
from tests.support.server import Server

FAKETIME = next(iter(Path("/usr/lib").glob("*/faketime/libfaketime.so.1")), None)
ROW = "SELECT status, uncertain, said_by, epoch FROM crew_supervisor.actions WHERE action_id = %s"


# --- the link to the database ----------------------------------------------------------------------------------------


def test_a_replica_cut_from_the_database_admits_nothing_and_stops_its_work_with_proof(
    replicas: Replicas, three: list[Server], postgres: Postgres, database: str
) -> None:
    check_cut_replica(replicas)
    assert postgres.ask(database, ROW, "train") == [("cancelled", True, "owner", 1)]


def test_a_replica_starts_without_its_database_and_serves_what_it_has(replicas: Replicas) -> None:
    server = replicas.add()
    server.launch()
    registered(listens(server))
    start(server, "kept").expect(200)
    assert server.stop() == 0
    replicas.network.cut(0)
    server.launch()
    listens(server)
    assert host_ready(server).status == 503
    assert server.client().get("kept").expect(200)["status"] == "completed"
    assert start(server, "kept").headers["idempotency-replayed"] == "true"
    assert server.client().get("nobodys").expect(503)["code"] == "fleet_unavailable"
    replicas.network.heal(0)
    assert registered(server)["left_s"] > 0, "it was granted just now, however long ago it was asked for first"
    start(server, "new").expect(200)


# --- processes -------------------------------------------------------------------------------------------------------


def test_a_replica_that_was_killed_fences_its_work_and_tells_the_others(
    replicas: Replicas, starts: Starts, postgres: Postgres, database: str
) -> None:
    killed, other = starts(2)
    begin(killed, "x")
    runs(killed, "x")
    killed.kill()
    until = "UPDATE crew_supervisor.replicas SET expires_at = clock_timestamp() + %s WHERE replica_id = 'replica-0'"
    postgres.ask(database, until, timedelta(hours=1))
    killed.launch()
    listens(killed)
    assert "still valid" in killed.wait_log("registration_refused")["why"]
    assert host_ready(killed).json()["lease_valid"] is False, "the lease of its predecessor is"
    postgres.ask(database, until, timedelta(0))
    assert killed.client().get("x").expect(200)["status"] == "failed"
    assert registered(killed)["epoch"] == 2
    wait_for(lambda: postgres.ask(database, ROW, "x") == [("failed", True, "owner", 1)], "it is told")
    found = wait_status(other, "x", "failed")
    assert found["uncertain_outcome"] is True
    assert begin(other, "x").status == 502
    assert replicas.executed() == ["x"]
    assert fleet(killed)["lease_recoveries"] == 0, "a start is no recovery"


def test_a_replica_that_stops_in_order_gives_its_lease_back(starts: Starts) -> None:
    stopped, other = starts(2)
    begin(stopped, "x")
    runs(stopped, "x")
    assert stopped.stop() == 0
    roster = {one["replica_id"]: one for one in fleet(other)["replicas"]}
    assert (roster["replica-0"]["lease_valid"], roster["replica-0"]["draining"]) == (False, True)
    assert roster["replica-0"]["unfinished"] == 0, "its last endings were told"
    began = len(stopped.log_lines())
    stopped.launch()
    listens(stopped)
    assert registered(stopped)["epoch"] == 2
    assert "registration_refused" not in {line["event"] for line in stopped.log_lines()[began:]}
    assert wait_status(other, "x", "failed")["uncertain_outcome"] is True


def test_a_crash_between_the_owner_and_the_admission_loses_nothing(
    replicas: Replicas, postgres: Postgres, database: str
) -> None:
    """The row is there and no job: the first repeat anywhere is led to the owner and executed there, once."""
    owner = replicas.add(environment={"CREW_TESTS_MORTAL": "1"}, mutant="mortal")
    other = replicas.add()
    for server in (owner, other):
        server.launch()
        registered(listens(server))
    with pytest.raises(OSError):
        begin(owner, "x")
    owner.wait_exit()
    assert postgres.ask(database, ROW, "x") == [(None, None, None, 1)]
    owner.environment["CREW_TESTS_MORTAL"] = None
    owner.launch()
    registered(listens(owner))
    start(other, "y").expect(200)
    answer = begin(other, "x")
    assert (answer.status, answer.headers["x-crew-fleet-replica"]) == (202, "replica-0")
    assert "idempotency-replayed" not in answer.headers, "this is its admission"
    runs(other, "x")
    assert Counter(replicas.executed()) == {"x": 1, "y": 1}


def test_draining_replicas_answer_for_others_and_admit_nothing(lasting: Lasting) -> None:
    owner, drained, _ = lasting.servers
    start(owner, "drained-x").expect(200)
    drained.client().request("POST", "/drain").expect(200)
    said = host_ready(drained)
    assert (said.status, said.json()["draining"], said.json()["lease_valid"]) == (503, True, True)
    assert start(drained, "drained-x").headers["idempotency-replayed"] == "true"
    assert start(drained, "drained-new").expect(503)["code"] == "not_accepting"
    roster = lambda: {one["replica_id"]: one["draining"] for one in fleet(owner)["replicas"]}  # noqa: E731
    wait_for(lambda: roster()["replica-1"], "the others see it")
    drained.client().request("DELETE", "/drain").expect(200)
    wait_for(lambda: not roster()["replica-1"], "and its end")
    start(drained, "drained-new").expect(200)


# --- a machine that is gone ------------------------------------------------------------------------------------------


def retire(server: Server, replica_id: str) -> Answer:
    body = {"actor": "me", "evidence": "the rack burnt down"}
    return server.client().request("POST", f"/fleet/{replica_id}/retire", body=body)


def test_a_machine_that_is_gone_is_retired_and_one_that_lives_is_not(
    replicas: Replicas, three: list[Server], postgres: Postgres, database: str
) -> None:
    gone, other, third = three
    begin(gone, "x")
    runs(gone, "x")
    start(gone, "done").expect(200)
    wait_for(lambda: postgres.ask(database, ROW, "done")[0][0] == "completed", "its ending is told")
    assert retire(other, "replica-0").expect(409)["code"] == "replica_live"
    assert retire(other, "replica-9").expect(404)["code"] == "replica_unknown"
    gone.kill()
    assert retire(other, "replica-0").expect(409)["code"] == "replica_live", "nobody heard that it is gone"
    wait_for(lambda: not fleet(other)["replicas"][0]["lease_valid"], "its lease ends")
    assert begin(third, "x").expect(503)["code"] == "owner_unavailable"

    found = retire(other, "replica-0").expect(200)
    assert (found["replica_id"], found["actions"], found["evidence"]) == ("replica-0", 1, "the rack burnt down")
    assert retire(third, "replica-0").expect(200) == found, "done twice, the first time counts"
    assert postgres.ask(database, ROW, "x") == [("failed", True, "retirement", 1)]
    for server in (other, third):
        view = server.client().get("x").expect(200)
        assert (view["status"], view["uncertain_outcome"], view["stop"]) == ("failed", True, None)
        assert begin(server, "x").expect(502)["code"] == "action_failed"
        assert server.client().cancel("x", "sleeper").expect(410)["code"] == "owner_retired"
        assert server.client().events("x").expect(410)["code"] == "owner_retired"
    assert replicas.executed() == ["x", "done"]

    gone.launch()
    listens(gone)
    assert gone.wait_log("registration_refused", retired=True)
    gone.wait_log("replica_out")
    assert start(gone, "new").expect(503)["code"] == "lease_invalid"
    assert gone.client().get("x").expect(200)["status"] == "failed", "what it has on its disk stays readable"
    assert postgres.ask(database, ROW, "x") == [("failed", True, "retirement", 1)]


def test_the_command_line_shows_the_fleet_and_retires(unreliable: tuple[Replicas, Relayed]) -> None:
    replicas, _ = unreliable
    one, two, _ = replicas.servers
    table = one.run_command("fleet", "init")
    assert (table.returncode, table.stdout) == (0, f"version {VERSION}\n")
    two.kill()
    lease_ends_for_others(one, "replica-1")
    shown = replicas.command(one, "fleet", "status")
    rows = [line.split()[:2] for line in shown.stdout.splitlines()[1:]]
    assert rows == [["replica-0", "ready"], ["replica-1", "away"], ["replica-2", "ready"]]
    document = replicas.command(one, "fleet", "status", "--json")
    assert '"replica_id": "replica-0"' in document.stdout
    live = replicas.command(one, "fleet", "retire", "replica-0", "--actor", "me", "--evidence", "none")
    assert (live.returncode, "is alive" in live.stderr) == (4, True)
    done = replicas.command(one, "fleet", "retire", "replica-1", "--actor", "me", "--evidence", "sold")
    assert (done.returncode, "sold" in done.stdout) == (0, True)
    assert "retired" in replicas.command(one, "fleet", "status").stdout


def lease_ends_for_others(server: Server, replica_id: str) -> None:
    """Wait until the fleet has no lease of that replica."""
    wait_for(
        lambda: not {one["replica_id"]: one["lease_valid"] for one in fleet(server)["replicas"]}[replica_id],
        f"the lease of {replica_id} ends",
    )


# --- the database ----------------------------------------------------------------------------------------------------


class Load:
    """Clients that start Actions at two replicas each, again and again until they are answered with 200."""

    def __init__(self, servers: list[Server], *, clients: int, seed: int) -> None:
        self._servers = servers
        self._random = random.Random(seed)
        self._over = threading.Event()
        self._number = 0
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(clients)
        self._clients = clients
        self.bodies: dict[str, set[bytes]] = {}
        self.statuses: Counter[int] = Counter()

    def __enter__(self) -> Load:
        self._running = [self._pool.submit(self._run) for _ in range(self._clients)]
        return self

    def __exit__(self, *failure: object) -> None:
        self._over.set()
        for one in self._running:
            one.result()
        self._pool.shutdown()

    def _run(self) -> None:
        while not self._over.is_set():
            with self._lock:
                self._number += 1
                action_id = f"load-{self._number}"
                pair = self._random.sample(self._servers, 2)
            with ThreadPoolExecutor(2) as both:
                bodies = list(both.map(lambda server, name=action_id: self._insist(server, name), pair))
            with self._lock:
                self.bodies[action_id] = set(bodies)

    def _insist(self, server: Server, action_id: str) -> bytes:
        def answered() -> bytes | None:
            try:
                answer = start(server, action_id)
            except OSError:
                return None
            with self._lock:
                self.statuses[answer.status] += 1
            assert answer.status in (200, 503), answer.body
            return answer.body if answer.status == 200 else None

        found: bytes = wait_for(answered, f"{action_id} is done", deadline_s=60)
        return found

    @property
    def done(self) -> int:
        """Actions that both replicas have answered."""
        with self._lock:
            return len(self.bodies)


def check_load(replicas: Replicas, load: Load) -> None:
    """Every Action was executed once, and both replicas said the same."""
    assert load.bodies
    assert {name: len(bodies) for name, bodies in load.bodies.items()} == dict.fromkeys(load.bodies, 1)
    assert Counter(replicas.executed()) == dict.fromkeys(load.bodies, 1)


def test_a_database_that_is_killed_under_load_loses_and_doubles_nothing(
    replicas: Replicas, three: list[Server], postgres: Postgres
) -> None:
    with Load(three, clients=6, seed=1) as load:
        for goal in (20, 40):
            wait_for(lambda goal=goal: load.done >= goal, f"{goal} Actions are done")
            refused = load.statuses[503]
            postgres.stop(signal.SIGQUIT)
            wait_for(lambda refused=refused: load.statuses[503] > refused, "somebody is told that it is away")
            postgres.start()
        wait_for(lambda: load.done >= 60, "the load goes on")
    check_load(replicas, load)


@pytest.fixture
def unreliable(postgres: Postgres, database: str, tmp_path: Path) -> Iterator[tuple[Replicas, Relayed]]:
    """Three replicas whose connections to the database can lose what was said."""
    with relayed(postgres, database, 3) as network:
        replicas = Replicas(tmp_path, network)
        try:
            replicas.start(3)
            yield replicas, network
        finally:
            replicas.close()


def test_answers_of_the_database_that_are_lost_are_found_out_and_never_guessed(
    unreliable: tuple[Replicas, Relayed],
) -> None:
    replicas, network = unreliable
    with Load(replicas.servers, clients=6, seed=2) as load:
        wait_for(lambda: load.done >= 5, "the load begins")
        for relay in network.relays:
            relay.lose(0.1)
        wait_for(lambda: load.done >= 60, "the load goes on", deadline_s=90)
        for relay in network.relays:
            relay.lose(0)
    assert sum(relay.lost_requests for relay in network.relays) > 0
    assert sum(relay.lost_answers for relay in network.relays) > 0
    check_load(replicas, load)


# --- clocks ----------------------------------------------------------------------------------------------------------


def test_a_clock_that_is_an_hour_off_changes_no_lease(replicas: Replicas) -> None:
    assert FAKETIME is not None, "libfaketime is not installed"
    for jump in ("+1h", "-1h", None):
        environment: dict[str, Any] = {}
        if jump is not None:
            environment = {"LD_PRELOAD": str(FAKETIME), "FAKETIME": jump, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
        replicas.add(environment=environment).launch()
    for server in replicas.servers:
        registered(listens(server))
    ahead, behind, right = replicas.servers
    offsets = []
    for number, server in enumerate(replicas.servers):
        # It sleeps in epoll_wait(2): with another clock time.sleep would come back at once, or an hour late.
        given = {"action": f"clock-{number}", "closes": str(replicas.directory / "closes")}
        offsets.append(begin(server, f"clock-{number}", "closing", input=given).json()["admitted_at"])
        runs(server, f"clock-{number}")
    assert offsets[0] - offsets[2] > 3000
    assert offsets[2] - offsets[1] > 3000
    expiries = {one["replica_id"]: one["lease_left_s"] for one in fleet(right)["replicas"]}
    assert all(0 < left <= LEASE_S for left in expiries.values())
    threading.Event().wait(1.5 * LEASE_S)  # time is the matter here: every lease must have been extended
    for server in replicas.servers:
        assert fleet(server)["epoch"] == 1
        assert scraped(server, "crew_supervisor_host_lease_recoveries_total") == 0
        assert host_ready(server).status == 200
    for number, server in enumerate((behind, right, ahead)):
        found = server.client().cancel(f"clock-{number}", "closing").expect(200)
        assert (found["status"], found["stop"]["confirmed"]) == ("cancelled", True)
    assert Counter(replicas.executed()) == {f"clock-{number}": 1 for number in range(3)}


def test_a_replica_that_stands_still_for_longer_than_its_lease_admits_nothing_with_it(
    replicas: Replicas, starts: Starts
) -> None:
    """SIGSTOP: its own view of the lease may be old when it wakes up, the database's is not."""
    frozen, other = starts(2)
    start(frozen, "x").expect(200)
    frozen.process.send_signal(signal.SIGSTOP)
    lease_ends_for_others(other, "replica-0")
    seen = len(frozen.log_lines())
    frozen.process.send_signal(signal.SIGCONT)
    start(other, "y").expect(200)
    assert registered(frozen, skip=seen)["epoch"] == 2
    said = host_ready(frozen).json()
    assert said["lease_valid"] is True
    assert said["runtime"]["recovery"]["recovered_at"] is not None
    start(frozen, "z").expect(200)
    assert Counter(replicas.executed()) == {"x": 1, "y": 1, "z": 1}
