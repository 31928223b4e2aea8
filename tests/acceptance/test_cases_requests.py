"""Cases 31, 32, 34 and 35: how large, how strict, how digested, and with which inputs a start request comes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.client import Answer, Client
from tests.support.raw import RawConnection, head
from tests.support.server import ROOT, TOKEN, Server

REGISTRY = "tests.crews.fake_crews:CREWS"
KEY = {"Idempotency-Key": "k"}
RESPOND_ASYNC = {"Prefer": "respond-async"}
#: Bound of the input in its canonical ASCII form, and of a whole body.
INPUT_BYTES = 1_048_576
BODY_BYTES = INPUT_BYTES + 65_536
MIB = 1 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server with every operation."""
    with Server(tmp_path_factory.mktemp("server"), registry=REGISTRY) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Client:
    return server.client()


def post(client: Client, body: str | bytes, path: str = "/jobs") -> Answer:
    """Send a body as it is, with a key, and wait for the admission only."""
    data = body.encode("utf-8") if isinstance(body, str) else body
    return client.request("POST", path, body=data, headers={**KEY, **RESPOND_ASYNC})


def is_refused(answer: Answer, status: int, code: str) -> None:
    """Assert a problem document."""
    assert answer.expect(status)["code"] == code
    assert isinstance(answer.json()["detail"], str)


# --- size --------------------------------------------------------------------------------------------------------


def input_of(size: int) -> dict[str, str]:
    """An input whose canonical form has that many bytes."""
    return {"pad": "x" * (size - len('{"pad":""}'))}


@pytest.mark.case(31)
def test_an_input_of_exactly_its_bound_is_admitted(client: Client) -> None:
    """Case 31 (=): 1 048 576 canonical bytes pass and reach the crew, one more is 413."""
    given = input_of(INPUT_BYTES)
    assert client.start("full", "echo", input=given).expect(200)["echo"] == given
    is_refused(client.start("fuller", "echo", input=input_of(INPUT_BYTES + 1)), 413, "input_too_large")
    assert client.get("fuller").status == 404


@pytest.mark.case(31)
def test_an_input_is_measured_in_canonical_ascii(client: Client) -> None:
    """Case 31 (=): blanks do not count, and each é counts as six bytes."""
    fits = json.dumps({"crew_id": "echo", "action_id": "spaced", "input": input_of(INPUT_BYTES)}, indent=4)
    assert post(client, fits).status == 202
    accents = "é" * 200_000
    body = json.dumps({"crew_id": "echo", "action_id": "accents", "input": {"pad": accents}}, ensure_ascii=False)
    assert len(body.encode()) < INPUT_BYTES / 2
    is_refused(post(client, body), 413, "input_too_large")
    assert client.get("accents").status == 404


@pytest.mark.case(31)
def test_the_size_comes_before_route_operation_and_key(client: Client) -> None:
    """Case 31 (=): too much input is 413 also on the wrong route, for a control operation and without a key."""
    body = {"crew_id": "nobody", "action_id": "act_1", "operation": "cancel", "input": input_of(INPUT_BYTES + 1)}
    assert client.request("POST", "/runs", body=body).expect(413)["code"] == "input_too_large"
    assert client.request("POST", "/runs", body={**body, "input": {}}).status == 400


@pytest.mark.case(31)
def test_a_whole_body_is_capped_while_it_is_read(server: Server) -> None:
    """Case 31 (B14): with a token too, more than 1 MiB + 64 KiB is 413 before it is all there, announced or not."""
    sent = {"Content-Type": "application/json", **KEY}
    announced = head("POST", b"/jobs", token=TOKEN, headers={**sent, "Content-Length": str(64 * MIB)})
    chunked = head("POST", b"/jobs", token=TOKEN, headers={**sent, "Transfer-Encoding": "chunked"})
    chunk = b"%x\r\n" % (BODY_BYTES + 1) + b" " * (BODY_BYTES + 1) + b"\r\n"
    for pieces in ([announced], [chunked, chunk]):
        with RawConnection(server.host, server.port) as connection:
            # The end of neither body is ever sent.
            answer = connection.send(*pieces).answer("POST")
            assert answer is not None
            assert answer.expect(413)["code"] == "input_too_large"


@pytest.mark.case(31)
def test_a_whole_body_may_have_room_to_spare(client: Client) -> None:
    """Case 31 (=): a body of exactly the cap is read."""
    body = json.dumps({"crew_id": "echo", "action_id": "padded"})
    assert post(client, body + " " * (BODY_BYTES - len(body))).status == 202
    assert post(client, body + " " * (BODY_BYTES - len(body) + 1)).expect(413)["code"] == "input_too_large"


# --- strict JSON -------------------------------------------------------------------------------------------------


def start_text(**fields: str) -> str:
    """A start request's text; each field is JSON text as it is given."""
    texts = {"crew_id": '"echo"', "action_id": '"lax"', "input": "{}", **fields}
    return "{" + ",".join(f'"{name}":{text}' for name, text in texts.items()) + "}"


def nested(levels: int) -> str:
    """An input that makes the whole body ``levels`` deep."""
    return '{"a":' + "[" * (levels - 2) + "]" * (levels - 2) + "}"


LAX = {
    "duplicate in the body": ('{"crew_id":"echo","crew_id":"echo","action_id":"lax"}', '"crew_id"'),
    "duplicate in the input": (start_text(input='{"a":1,"b":{"c":1,"c":2}}'), '"c"'),
    "NaN": (start_text(input='{"a":NaN}'), "NaN"),
    "Infinity": (start_text(input='{"a":Infinity}'), "Infinity"),
    "-Infinity": (start_text(input='{"a":-Infinity}'), "-Infinity"),
    "1e400": (start_text(input='{"a":1e400}'), "1e400"),
    "lone surrogate": (start_text(input='{"a":["\\ud800"]}'), '$["input"]["a"][0]'),
    "lone surrogate in a key": (start_text(input='{"\\udc00":1}'), "key"),
    "lone surrogate in an id": (start_text(crew_id='"\\ud800"'), '$["crew_id"]'),
    "lone surrogate in a checked text": (
        start_text(operation='"replay"', input='{"task_id":"\\ud800"}'),
        '$["input"]["task_id"]',
    ),
    "101 levels": (start_text(input=nested(101)), "100"),
    "100 000 levels": (start_text(input=nested(100_000)), "100"),
    "cut off": ('{"crew_id":"echo"', "character 17"),
    "something behind": (start_text() + "x", "character"),
    "a comment": ("/**/" + start_text(), "character 0"),
    "an integer of 4301 digits": (start_text(input='{"a":' + "9" * 4301 + "}"), "digits"),
    "no JSON at all": ("crew_id=echo", "character 0"),
}


@pytest.mark.case(32)
@pytest.mark.parametrize("name", LAX)
def test_what_is_not_strict_json_is_refused_with_its_place(client: Client, name: str) -> None:
    """Case 32 (≠, B11, B12, B13): 422 at admission with what or where it is, and nothing is stored."""
    text, place = LAX[name]
    retained = client.health().expect(200)["retained_runs"]
    answer = post(client, text)
    is_refused(answer, 422, "json_invalid")
    assert place in answer.json()["detail"]
    assert client.get("lax").status == 404
    assert client.health().expect(200)["retained_runs"] == retained


@pytest.mark.case(32)
@pytest.mark.parametrize("body", [start_text().encode("utf-16"), b"\xef\xbb\xbf" + start_text().encode(), b"\xff", b""])
def test_a_body_is_plain_utf8(client: Client, body: bytes) -> None:
    """Case 32 (≠): UTF-16, a byte order mark, bytes that are no text, or nothing: 422."""
    is_refused(post(client, body), 422, "json_invalid")


@pytest.mark.case(32)
@pytest.mark.parametrize("text", ["true", "false"])
def test_a_boolean_is_no_timeout(client: Client, text: str) -> None:
    """Case 32 (≠, B12): the reference takes true for one millisecond."""
    answer = post(client, start_text(timeout_ms=text))
    is_refused(answer, 422, "input_invalid")
    assert "timeout_ms" in answer.json()["detail"]
    assert client.get("lax").status == 404


@pytest.mark.case(32)
def test_strict_json_passes_whole(client: Client) -> None:
    """Case 32: what strictness leaves alone comes back from the crew as it was sent."""
    # One object more around it, so 100 levels in all.
    deep = nested(99)
    given = '{"astral":"\\ud83d\\ude00","small":5e-324,"minus":-0.0,"large":1' + "0" * 400 + f',"deep":{deep}}}'
    text = start_text(action_id='"strict"', input=given)
    answer = client.request("POST", "/jobs", body=text.encode(), headers=KEY)
    assert json.dumps(answer.expect(200)["echo"]) == json.dumps(json.loads(given))


@pytest.mark.case(32)
@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "application/jsonx"])
def test_another_content_type_is_refused(client: Client, content_type: str) -> None:
    """Case 32 (=): only ``application/json`` and ``application/…+json`` are read."""
    headers = {"Content-Type": content_type, **KEY, **RESPOND_ASYNC}
    body = start_text(action_id='"refused"').encode()
    assert client.request("POST", "/jobs", body=body, headers=headers).expect(422)["code"] == "input_invalid"
    for number, taken in enumerate(("application/json; charset=utf-8", "application/merge-patch+json")):
        body = start_text(action_id=json.dumps(f"{content_type.replace('/', '-')}-{number}")).encode()
        assert client.request("POST", "/jobs", body=body, headers={**headers, "Content-Type": taken}).status == 202


# --- digests -----------------------------------------------------------------------------------------------------

VECTORS: list[dict[str, Any]] = json.loads((ROOT / "tests" / "data" / "hash-vectors.json").read_bytes())["vectors"]
REFUSED = ("float-overflow", "nan-and-infinities", "lone-surrogate-value", "duplicate-keys", "unicode-ids")
#: All others; ``duplicate-keys-equivalent`` is among them, since its own body repeats no key.
ADMISSIBLE = [vector for vector in VECTORS if vector["name"] not in REFUSED]


def action_of(vector: dict[str, Any]) -> str:
    """The Action id of a vector's request."""
    return str(json.loads(vector["request_json"])["action_id"])


def journals(vectors: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The vectors for each journal: several have one Action id with different material, which no journal takes."""
    made: list[list[dict[str, Any]]] = []
    digests: list[dict[str, str]] = []
    for vector in vectors:
        action_id, digest = action_of(vector), vector["sha256"]
        place = next((n for n, known in enumerate(digests) if known.get(action_id, digest) == digest), len(made))
        if place == len(made):
            made.append([])
            digests.append({})
        made[place].append(vector)
        digests[place][action_id] = digest
    return made


def send(client: Client, vector: dict[str, Any]) -> Answer:
    """A vector's request, byte by byte."""
    headers: dict[str, str | bytes] = {
        "Idempotency-Key": bytes.fromhex(vector["idempotency_key_header_bytes_hex"]),
        **RESPOND_ASYNC,
    }
    return client.request("POST", "/jobs", body=vector["request_json"].encode("utf-8"), headers=headers)


def exported_digests(server: Server) -> dict[str, str]:
    """The digests by Action id, as ``crew-supervisor journal export`` has them."""
    command = [sys.executable, "-m", "supervisor", "journal", "export", str(server.state_file)]
    exported = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=60).stdout
    records = [json.loads(line) for line in exported.splitlines()]
    return {record["action_id"]: record["request_hash"] for record in records}


@pytest.mark.case(34)
def test_the_vectors_need_few_journals() -> None:
    """Case 34: no vector is lost on the way to the servers."""
    groups = journals(ADMISSIBLE)
    assert {vector["name"] for vector in VECTORS if vector["admissible"]} <= {vector["name"] for vector in ADMISSIBLE}
    assert sorted(v["name"] for group in groups for v in group) == sorted(v["name"] for v in ADMISSIBLE)
    assert (len(ADMISSIBLE), len(groups)) == (27, 3)


@pytest.mark.case(34)
@pytest.mark.parametrize("vectors", journals(ADMISSIBLE), ids=lambda vectors: f"{len(vectors)} vectors")
def test_an_admitted_request_has_the_references_digest(tmp_path: Path, vectors: list[dict[str, Any]]) -> None:
    """Case 34 (=): each admissible vector, sent over HTTP, is exported with its digest; the same digest is a repeat."""
    expected: dict[str, str] = {}
    environment = {"WITNESS_FILE": str(tmp_path / "witness")}
    with Server(tmp_path, registry="tests.crews.witnessed_crews:CREWS", environment=environment) as server:
        for vector in vectors:
            answer = send(server.client(), vector)
            repeat = action_of(vector) in expected
            assert answer.status in ((200, 202) if repeat else (202,)), (vector["name"], answer.body)
            assert answer.headers.get("idempotency-replayed") == ("true" if repeat else None), vector["name"]
            expected[action_of(vector)] = vector["sha256"]
        assert exported_digests(server) == expected, "while the server runs"
        server.stop()
        assert exported_digests(server) == expected, "after it has ended"


@pytest.mark.case(34)
@pytest.mark.parametrize("name", REFUSED)
def test_a_vector_that_is_not_admissible_is_refused(client: Client, name: str) -> None:
    """Case 34 (≠): what strict JSON and the rule for ids refuse gets no digest at all."""
    vector = next(vector for vector in VECTORS if vector["name"] == name)
    retained = client.health().expect(200)["retained_runs"]
    assert send(client, vector).status == 422
    assert client.health().expect(200)["retained_runs"] == retained


# --- inputs of the operations ------------------------------------------------------------------------------------

_TRAIN = {"n_iterations": 1, "artifact_name": "a"}
_TEST = {"n_iterations": 1, "eval_llm": "judge"}
_QUERY = {"query": ["q"]}

ACCEPTED: list[tuple[str, dict[str, Any]]] = [
    ("run", {}),
    ("run", {f"property {n}": n for n in range(600)}),
    *[("batch_run", {"inputs": [{}] * n}) for n in (1, 100)],
    *[("replay", {"task_id": text}) for text in ("t", "x" * 256, "é" * 128, "\x7f\x85")],
    ("replay", {"task_id": "t", "inputs": {"a": 1}}),
    *[("train", _TRAIN | {"n_iterations": n}) for n in (1, 100)],
    *[("train", _TRAIN | {"artifact_name": name}) for name in ("Z", "9", "a" * 128, "a._-Z")],
    ("train", _TRAIN | {"inputs": {}}),
    *[("test", _TEST | {"n_iterations": n}) for n in (1, 100)],
    ("test", _TEST | {"eval_llm": "x" * 256, "inputs": {}}),
    *[("knowledge_query", {"query": ["q"] * n}) for n in (1, 100)],
    ("knowledge_query", {"query": ["é" * 2048]}),
    *[("knowledge_query", _QUERY | {"results_limit": n}) for n in (1, 100)],
    *[("knowledge_query", _QUERY | {"score_threshold": n}) for n in (0, 1, 0.0, 1.0, 0.35)],
    *[
        ("memory_reset", {"command_type": kind})
        for kind in ("memory", "knowledge", "agent_knowledge", "kickoff_outputs", "all")
    ],
]
#: Operation, an input that would do, the field that is wrong, and the values that it must not have.
_WRONG: list[tuple[str, dict[str, Any], str, list[Any]]] = [
    ("batch_run", {}, "inputs", [[], [{}] * 101, {}, None, [1], [{}, None]]),
    ("replay", {}, "task_id", ["", "x" * 257, "é" * 129, "a\x1f", "a\n", None, 1, ["t"]]),
    ("replay", {"task_id": "t"}, "inputs", [None, [], "x"]),
    ("train", _TRAIN, "n_iterations", [0, 101, -1, True, 1.0, "1", None]),
    (
        "train", _TRAIN, "artifact_name",
        ["", "a" * 129, ".a", "-a", "_a", "a/b", "a b", "a\n", "é", "..", None, 1, ["a"]],
    ),
    ("train", _TRAIN, "inputs", [None, [], 1]),
    ("test", _TEST, "n_iterations", [0, 101, True, 1.0]),
    ("test", _TEST, "eval_llm", ["", "x" * 257, "a\x00", None, 1]),
    ("test", _TEST, "inputs", [None, [], 1]),
    (
        "knowledge_query", {}, "query",
        [[], ["q"] * 101, [""], ["x" * 4097], ["é" * 2049], ["a\x1f"], [None], [1], "q", None, {}],
    ),
    ("knowledge_query", _QUERY, "results_limit", [0, 101, True, 1.0, "1", None]),
    ("knowledge_query", _QUERY, "score_threshold", [-0.01, 1.01, -1, 2, "0.5", None, True]),
    ("memory_reset", {}, "command_type", ["", "All", "long", None, 1]),
]  # fmt: skip
_REQUIRED: list[tuple[str, dict[str, Any]]] = [
    ("batch_run", {"inputs": [{}]}),
    ("replay", {"task_id": "t"}),
    ("train", _TRAIN),
    ("test", _TEST),
    ("knowledge_query", _QUERY),
    ("memory_reset", {"command_type": "all"}),
]
#: Operation, input, and what the detail must name.
INVALID: list[tuple[str, dict[str, Any], str]] = [
    *[(operation, given | {name: value}, name) for operation, given, name, values in _WRONG for value in values],
    *[(operation, given | {"more": 1}, "more") for operation, given in _REQUIRED],
    *[
        (operation, {name: value for name, value in given.items() if name != missing}, missing)
        for operation, given in _REQUIRED
        for missing in given
    ],
]


@pytest.mark.case(35)
def test_an_input_inside_its_bounds_is_admitted(client: Client) -> None:
    """Case 35 (=): both ends of every range."""
    for number, (operation, given) in enumerate(ACCEPTED):
        headers = RESPOND_ASYNC
        answer = client.start(f"inside-{number}", "instant", operation=operation, input=given, headers=headers)
        assert answer.status == 202, (operation, given, answer.body)


@pytest.mark.case(35)
def test_an_input_outside_its_bounds_is_refused(client: Client) -> None:
    """Case 35 (=): 422 with a string that names the field; nothing is stored."""
    retained = client.health().expect(200)["retained_runs"]
    for operation, given, field in INVALID:
        answer = client.start("outside", "instant", operation=operation, input=given)
        assert answer.status == 422, (operation, given, answer.body)
        problem = answer.json()
        assert problem["code"] == "input_invalid"
        assert re.search(rf"\b{field}\b", problem["detail"]), (operation, given, problem)
    assert client.get("outside").status == 404
    assert client.health().expect(200)["retained_runs"] == retained


@pytest.mark.case(35)
def test_missing_fields_come_before_unknown_ones_and_both_are_sorted(client: Client) -> None:
    """Case 35 (=): the order in which the reference reports what is wrong with the fields."""
    missing = client.start("outside", "instant", operation="train", input={"zzz": 1}).expect(422)["detail"]
    assert re.search(r"artifact_name\W+n_iterations", missing)
    assert "zzz" not in missing
    given = _TRAIN | {"z": 1, "b": 1}
    unknown = client.start("outside", "instant", operation="train", input=given).expect(422)["detail"]
    assert re.search(r"\bb\W+z\b", unknown)


@pytest.mark.case(35)
@pytest.mark.parametrize("value", [["all"], {"all": 1}, [], {}])
def test_a_command_type_that_is_no_text_is_refused(client: Client, value: object) -> None:
    """Case 35 (≠, B13): an array or object gives 422, where the reference answers 500."""
    answer = client.start("outside", "instant", operation="memory_reset", input={"command_type": value})
    is_refused(answer, 422, "input_invalid")
    assert "command_type" in answer.json()["detail"]
