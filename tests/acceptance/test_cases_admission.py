"""Cases 17 to 30 and 33: who is admitted, once, and what a repeat gets."""

from __future__ import annotations

import resource
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from protocol import canonical
from tests.crews import witnessed_crews
from tests.support import procs
from tests.support.client import Answer, Client
from tests.support.gates import Gate
from tests.support.server import Server

REGISTRY = "tests.crews.witnessed_crews:CREWS"
RESPOND_ASYNC = {"Prefer": "respond-async"}
REPLAYED = "idempotency-replayed"
#: How long nothing must happen while a journal's write is held up, seconds: an admission takes a hundredth of it.
HELD_S = 0.5


def make(directory: Path, **settings: Any) -> Server:
    """A server whose crews note what is asked of them; not started."""
    environment = {"WITNESS_FILE": str(directory / "witness")}
    return Server(directory, registry=REGISTRY, settings=settings, environment=environment)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server with every operation for the cases that leave it as it is."""
    with make(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Client:
    return server.client()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    """A server of the test's own."""
    with make(tmp_path) as server:
        yield server


def lines(server: Server, what: str) -> Counter[str]:
    """How often each crew's factory was called, or each Action executed."""
    return Counter(line.whose for line in witnessed_crews.read(server.directory / "witness") if line.what == what)


def run(client: Client, action_id: str, **changes: Any) -> Answer:
    """Run the instant crew; its input names the Action, so that the witness can say which one was executed."""
    return client.start(action_id, "instant", **{"input": {"action": action_id}, **changes})


def stored(client: Client, action_id: str) -> bool:
    """Whether there is a record."""
    return client.get(action_id).status != 404


# --- first starts and their keys ---------------------------------------------------------------------------------


@pytest.mark.case(17)
@pytest.mark.parametrize("path", ["/runs", "/jobs"])
def test_a_first_start_answers_with_the_bare_output(server: Server, client: Client, path: str) -> None:
    """Case 17 (=): 200, and the body is the output object itself with raw, token_usage and tasks_output."""
    action_id = f"first-{path[1:]}"
    answer = run(client, action_id, path=path)
    output = answer.expect(200)
    assert answer.headers["content-type"] == "application/json"
    assert (output["raw"], output["token_usage"], output["tasks_output"]) == ("done", {}, [])
    assert not {"action_id", "status", "output"} & output.keys()
    assert REPLAYED not in answer.headers
    assert lines(server, "execution")[action_id] == 1
    assert client.get(action_id).expect(200)["output"] == output


@pytest.mark.case(18)
@pytest.mark.parametrize("key", [b"", b" ", b" \t  "])
def test_a_start_without_a_key_is_refused(server: Server, client: Client, key: bytes) -> None:
    """Case 18 (=): no key or a blank one gives 428, and the crew's factory was never called."""
    before = lines(server, "factory")
    headers = {"Idempotency-Key": key} if key else {}
    body = {"crew_id": "instant", "action_id": "keyless", "input": {}}
    assert client.request("POST", "/runs", body=body, headers=headers).expect(428)["code"] == "key_missing"
    assert not stored(client, "keyless")
    # A later job has been through the template, so an earlier one would have been noticed.
    assert run(client, f"keyed-{len(key)}").status == 200
    assert lines(server, "factory") - before == {"instant": 1}


@pytest.mark.case(19)
def test_a_key_has_bounds(client: Client) -> None:
    """Case 19 (=): 512 bytes are a key; 513, or a tab inside, give 400."""
    assert run(client, "long-key", key=b"k" * 512).status == 200
    for key in (b"k" * 513, b"a\tb"):
        assert run(client, "odd-key", key=key).expect(400)["code"] == "key_invalid"
    assert not stored(client, "odd-key")


@pytest.mark.case(20)
def test_a_key_is_counted_as_it_came(client: Client) -> None:
    """Case 20 (≠, B27): 200 two-byte characters are 400 bytes (the reference counts 800); 512 bytes are the bound."""
    for characters in (200, 256):
        assert run(client, f"utf8-{characters}", key="é" * characters).status == 200
        assert run(client, f"utf8-{characters}", key="é" * characters).headers[REPLAYED] == "true"
    assert run(client, "utf8-257", key="é" * 256 + "x").expect(400)["code"] == "key_invalid"


@pytest.mark.case(20)
def test_a_utf8_key_is_hashed_over_its_latin_1_view(own_server: Server) -> None:
    """Case 20 (≠, B27): what is stored is the digest that the reference would have stored for the same bytes."""
    key = "é" * 200
    assert run(own_server.client(), "utf8", key=key).status == 200
    with closing(sqlite3.connect(f"{own_server.state_file.as_uri()}?mode=ro", uri=True)) as journal:
        ((found,),) = journal.execute("SELECT request_hash FROM jobs").fetchall()
    assert found == canonical.request_hash(
        action_id="utf8",
        crew_id="instant",
        operation="run",
        input={"action": "utf8"},
        timeout_ms=None,
        idempotency_key=key.encode().decode("latin-1"),
    )


# --- repeats -----------------------------------------------------------------------------------------------------


@pytest.mark.case(21)
def test_an_exact_repeat_gets_the_same_answer(server: Server, client: Client) -> None:
    """Case 21 (=): the same body again, nothing executed, nothing more retained; ours says that it is a repeat."""
    first = run(client, "repeat")
    retained = client.health().expect(200)["retained_runs"]
    again = run(client, "repeat")
    assert (again.status, again.body) == (200, first.body)
    assert again.headers[REPLAYED] == "true"
    assert client.health().expect(200)["retained_runs"] == retained
    assert lines(server, "execution")["repeat"] == 1


@pytest.mark.case(22)
@pytest.mark.parametrize(
    "changed",
    [{"input": {"action": "same", "more": 1}}, {"key": "another"}, {"timeout_ms": 600_000}, {"crew_id": "support"}],
    ids=lambda changed: next(iter(changed)),
)
def test_other_material_under_the_same_id_is_a_conflict(
    server: Server, client: Client, changed: dict[str, Any]
) -> None:
    """Case 22 (=): another input, key, timeout or crew gives 409 and leaves the original as it was.

    The timeout is the default's value: defaults are not part of what is hashed.
    """
    first = run(client, "same")
    view = client.get("same").expect(200)
    start = {"crew_id": "instant", "input": {"action": "same"}, **changed}
    problem = client.start("same", **start).expect(409)
    assert (problem["code"], problem["action_id"]) == ("action_conflict", "same")
    assert isinstance(problem["detail"], str)
    assert client.get("same").expect(200) == view
    assert run(client, "same").body == first.body
    assert lines(server, "execution")["same"] == 1


@pytest.mark.case(22)
def test_one_key_with_two_action_ids_is_two_actions(server: Server, client: Client) -> None:
    """Case 22 (=, B28): the key is part of what is hashed, but only the Action id makes an Action unique."""
    for action_id in ("key-of-one", "key-of-other"):
        answer = run(client, action_id, key="one key for both")
        assert answer.status == 200
        assert REPLAYED not in answer.headers
    assert [lines(server, "execution")[name] for name in ("key-of-one", "key-of-other")] == [1, 1]


@pytest.mark.case(23)
def test_repeats_of_a_running_job_join_it(server: Server, client: Client, tmp_path: Path) -> None:
    """Case 23 (=): whoever asks again while the job runs waits with the first, for the same result of one execution."""
    gate = Gate(tmp_path, "joined")
    given = {"action": "joined", **gate.input}
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(client.start, "joined", "turnstile", input=given)]
        gate.wait("began")
        waiting += [pool.submit(client.start, "joined", "turnstile", input=given) for _ in range(3)]
        # A repeat that does not wait shows that the server takes repeats while the job runs.
        asked = client.start("joined", "turnstile", input=given, headers=RESPOND_ASYNC)
        assert asked.expect(202)["status"] == "running"
        assert asked.headers[REPLAYED] == "true"
        with client.stream("joined", "turnstile", input=given) as stream:
            assert stream.next().event == "started"
            assert not any(answer.done() for answer in waiting)
            gate.release()
            assert stream.rest()[-1].event == "completed"
        answers = [answer.result() for answer in waiting]
    assert {answer.status for answer in answers} == {200}
    assert len({answer.body for answer in answers}) == 1
    assert [answer.headers.get(REPLAYED) for answer in answers] == [None, "true", "true", "true"]
    assert lines(server, "execution")["joined"] == 1


@pytest.mark.case(24)
def test_a_repeat_after_a_restart_gets_the_stored_output(own_server: Server) -> None:
    """Case 24 (=): 200 with the output of before, whether the old process was told to end or was killed."""
    first = run(own_server.client(), "act_1")
    assert first.status == 200
    for end in (own_server.stop, own_server.kill):
        end()
        own_server.start()
        again = run(own_server.client(), "act_1")
        assert (again.status, again.body, again.headers[REPLAYED]) == (200, first.body, "true")
        assert own_server.client().start("act_1", "instant").status == 409
    assert lines(own_server, "execution") == {"act_1": 1}


# --- the journal comes first -------------------------------------------------------------------------------------


@contextmanager
def write_lock(server: Server) -> Iterator[None]:
    """Hold SQLite's write lock on the server's journal, so that its writer waits."""
    holder = sqlite3.connect(server.state_file, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        holder.execute("ROLLBACK")
        holder.close()


@contextmanager
def files_cannot_grow(server: Server) -> Iterator[None]:
    """Let every write of the supervisor to a file fail with EFBIG (setrlimit(2), RLIMIT_FSIZE); pipes go on."""
    _, hard = resource.prlimit(server.pid, resource.RLIMIT_FSIZE)
    soft, _ = resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.case(25)
def test_no_factory_is_called_before_the_admission_is_durable(own_server: Server) -> None:
    """Case 25 (=): while the journal's write is held up there is no answer, no record and no call of the factory."""
    client = own_server.client()
    witness = own_server.directory / "witness"
    with ThreadPoolExecutor(1) as pool:
        with write_lock(own_server):
            waiting = pool.submit(run, client, "held")
            time.sleep(HELD_S)
            assert not waiting.done()
            assert not stored(client, "held")
            assert witnessed_crews.read(witness) == []
            released_ns = time.monotonic_ns()
        assert waiting.result().status == 200
    assert [line.what for line in witnessed_crews.read(witness)] == ["factory", "execution"]
    assert all(line.at_ns > released_ns for line in witnessed_crews.read(witness))


@pytest.mark.case(26)
def test_an_admission_that_cannot_be_written_never_was(own_server: Server) -> None:
    """Case 26 (=): 507, no record, no execution; repeats of old Actions are answered, and later the retry works."""
    client = own_server.client()
    first = run(client, "before")
    with files_cannot_grow(own_server):
        problem = run(client, "unlucky").expect(507)
        assert (problem["code"], problem["retryable"]) == ("journal_unavailable", True)
        assert not stored(client, "unlucky")
        assert client.health().expect(200)["checks"]["journal"] is False
        assert run(client, "before").body == first.body
        assert run(client, "before", key="another").status == 409
    procs.wait_until(lambda: client.request("GET", "/readyz").status == 200, 30, "the journal recovers by itself")
    assert lines(own_server, "execution") == {"before": 1}
    assert run(client, "unlucky").status == 200
    assert lines(own_server, "factory") == {"instant": 2}
    assert lines(own_server, "execution") == {"before": 1, "unlucky": 1}


@pytest.mark.case(27)
def test_a_full_journal_admits_nothing_new(tmp_path: Path) -> None:
    """Case 27 (=): a new id gets 507 and leaves nothing; old ones are answered as always; archiving makes room."""
    with make(tmp_path, max_retained_runs=2, max_concurrency=1) as server:
        client = server.client()
        first = run(client, "one")
        assert run(client, "two").status == 200
        problem = run(client, "three").expect(507)
        assert (problem["code"], problem["action_id"]) == ("journal_full", "three")
        assert not stored(client, "three")
        assert run(client, "one").body == first.body
        assert run(client, "one", key="another").status == 409
        assert client.archive("two").status == 200
        assert run(client, "three").status == 200
        assert run(client, "four").status == 507
        assert lines(server, "execution") == {"one": 1, "two": 1, "three": 1}


# --- routes, fields and ids --------------------------------------------------------------------------------------


@pytest.mark.case(28)
def test_an_operation_that_is_not_allowed_is_refused_first(tmp_path: Path) -> None:
    """Case 28 (=): 403 for what is not enabled and for control operations, before key and input are looked at."""
    with make(tmp_path, allowed_operations=["run"], training_dir=None) as server:
        client = server.client()
        for operation in ("memory_reset", "train", "status", "events", "cancel"):
            answer = client.start("act_1", "instant", operation=operation, input={"wrong": 1}, key=b"")
            assert answer.expect(403)["code"] == "operation_disabled", operation
        assert not stored(client, "act_1")
        assert run(client, "act_1").status == 200


@pytest.mark.case(29)
def test_an_unknown_crew_is_not_found(client: Client) -> None:
    """Case 29 (=): 404; crew ids are 1 to 256 characters of any kind."""
    assert client.start("crewless", "nobody").expect(404)["code"] == "crew_unknown"
    assert client.start("crewless", "é" * 256).status == 404
    for crew_id in ("", "é" * 257):
        assert client.start("crewless", crew_id).status == 422
    assert not stored(client, "crewless")


@pytest.mark.case(29)
@pytest.mark.parametrize(
    "changed",
    [
        {"more": 1}, {"input": None}, {"input": []}, {"operation": None}, {"operation": "dance"}, {"crew_id": 1},
        {"action_id": None}, {"timeout_ms": 0}, {"timeout_ms": 3_600_001}, {"timeout_ms": -1}, {"timeout_ms": 1000.5},
        {"timeout_ms": "soon"}, {"timeout_ms": [1]},
    ],
    ids=str,
)  # fmt: skip
def test_a_field_that_breaks_its_rule_is_refused(client: Client, changed: dict[str, Any]) -> None:
    """Case 29 (=): an unknown field, null for the input, a timeout outside 1 to 3 600 000 ms and so on give 422."""
    body = {"crew_id": "instant", "action_id": "invalid", "operation": "run", "input": {}} | changed
    answer = client.request("POST", "/jobs", body=body, headers={"Idempotency-Key": "k"})
    assert answer.expect(422)["code"] == "input_invalid"
    assert isinstance(answer.json()["detail"], str)
    assert not stored(client, "invalid")


@pytest.mark.case(29)
@pytest.mark.parametrize("missing", ["crew_id", "action_id"])
def test_a_required_field_is_required(client: Client, missing: str) -> None:
    """Case 29 (=): the two ids have no default; operation, input and timeout have."""
    body = {"crew_id": "instant", "action_id": f"without-{missing}"}
    answer = client.request("POST", "/jobs", body=body, headers={"Idempotency-Key": "k"})
    assert answer.status == 200
    del body[missing]
    assert client.request("POST", "/jobs", body=body, headers={"Idempotency-Key": "k"}).status == 422


@pytest.mark.case(29)
@pytest.mark.parametrize("timeout_ms", [1, 3_600_000, "600000", 600_000.0, None])
def test_a_timeout_may_be_written_in_some_ways(client: Client, timeout_ms: Any) -> None:
    """Case 29 (=): both bounds are inside, and an integer may come as text or as a whole float."""
    body = {"crew_id": "instant", "action_id": f"timeout-{timeout_ms!r}".replace("'", "~"), "timeout_ms": timeout_ms}
    headers = {"Idempotency-Key": "k", **RESPOND_ASYNC}
    expected = None if timeout_ms is None else int(timeout_ms)
    assert client.request("POST", "/jobs", body=body, headers=headers).expect(202)["timeout_ms"] == expected


@pytest.mark.case(30)
@pytest.mark.parametrize("path", ["/runs", "/runs/stream"])
def test_the_legacy_routes_take_run_alone(client: Client, path: str) -> None:
    """Case 30 (=): another operation gives 400 there, and is not stored."""
    answer = client.start("legacy", "instant", operation="batch_run", input={"inputs": [{}]}, path=path)
    assert answer.expect(400)["code"] == "legacy_route"
    assert not stored(client, "legacy")
    body = {"crew_id": "instant", "action_id": f"legacy{path.count('/')}"}
    assert client.request("POST", path, body=body, headers={"Idempotency-Key": "k"}).status == 200


@pytest.mark.case(33)
@pytest.mark.parametrize(
    "action_id",
    ["a/b", "a b", "a\n", "\na", ".", "..", "a?b", "a#b", "a\\b", "a%2fb", "é", "a\x00b", "", "a" * 257],
    ids=ascii,
)
def test_an_id_that_no_path_can_carry_is_refused(client: Client, action_id: str) -> None:
    """Case 33 (≠, B16): 422 at admission, where the reference admits what nobody can then read, cancel or archive."""
    retained = client.health().expect(200)["retained_runs"]
    body = {"crew_id": "instant", "action_id": action_id}
    answer = client.request("POST", "/jobs", body=body, headers={"Idempotency-Key": "k"})
    assert answer.expect(422)["code"] == "input_invalid"
    assert client.health().expect(200)["retained_runs"] == retained


@pytest.mark.case(33)
@pytest.mark.parametrize("action_id", ["act_0192f3a1-7c4e", "a" * 256, "A.b:c~d-e_0", "...", "stream"])
def test_an_id_of_the_client_passes_and_can_be_reached(client: Client, action_id: str) -> None:
    """Case 33 (=): an admitted id can be read, followed, cancelled and archived."""
    assert run(client, action_id).status == 200
    assert client.get(action_id).expect(200)["action_id"] == action_id
    assert client.events(action_id).expect(200)["action_id"] == action_id
    assert client.cancel(action_id, "instant").expect(200)["status"] == "completed"
    assert client.archive(action_id).expect(200) == {"archived": True, "action_id": action_id}
