"""The OpenAPI document: the route table as it is, and every answer of every row among those that it declares."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from protocol.api import StopEvidence
from supervisor.http import openapi
from supervisor.http.routes import API, DASHBOARD, Routes
from tests.support.client import Client
from tests.support.declared import Declared, DeclaredClient, Undeclared
from tests.support.effects import key_of
from tests.support.scripts import make_unknown, reconcile
from tests.support.server import Server, ServerFactory

REGISTRY = "tests.crews.effect_crews:CREWS"
READ_TOKEN = "a-token-that-may-read"
SETTINGS: dict[str, Any] = {
    "max_concurrency": 2,
    "max_queue": 1,
    "max_retained_runs": 60,
    "grace_s": 0.0,
    "allowed_operations": ["run", "batch_run", "knowledge_query"],
    "training_dir": None,
    "dashboard": True,
}
#: What a supervisor has that stands alone; tests/fleet checks the rest.
ALONE = (*API, *DASHBOARD)
STARTS = ("/jobs", "/runs", "/jobs/stream", "/runs/stream")


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    made: dict[str, Any] = json.loads(openapi.document(Routes.table(), version="0"))
    return made


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("server")
    read_token = directory / "read-token"
    read_token.touch(mode=0o600)
    read_token.write_text(READ_TOKEN, encoding="utf-8")
    settings = {**SETTINGS, "read_token_files": [str(read_token)]}
    with Server(directory, registry=REGISTRY, settings=settings) as server:
        yield server


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(METHOD, path, operation) of everything declared."""
    for path, item in document["paths"].items():
        for method, operation in item.items():
            yield method.upper(), path, operation


def references(value: Any) -> Iterator[str]:
    """Every ``$ref`` anywhere in ``value``."""
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for item in value.values():
            yield from references(item)
    elif isinstance(value, list):
        for item in value:
            yield from references(item)


# --- the document itself ---------------------------------------------------------------------------------------------


def test_it_has_the_rows_of_the_table_and_no_others(document: dict[str, Any]) -> None:
    declared = {(method, path) for method, path, _ in operations(document)}
    assert declared == {(route.method, route.path) for route in Routes.table()}
    assert document["openapi"].startswith("3.1.")


def test_every_operation_has_a_name_of_its_own(document: dict[str, Any]) -> None:
    names = [operation["operationId"] for _, _, operation in operations(document)]
    assert len(set(names)) == len(names)


def test_every_reference_leads_somewhere_and_every_schema_is_one(document: dict[str, Any]) -> None:
    components = document["components"]["schemas"]
    prefix = "#/components/schemas/"
    assert {reference.removeprefix(prefix) for reference in references(document)} <= components.keys()
    for schema in components.values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_every_error_of_a_row_is_declared_with_its_status_and_code(document: dict[str, Any]) -> None:
    for route in Routes.table():
        responses = document["paths"][route.path][route.method.lower()]["responses"]
        for error in route.all_errors:
            content = responses[str(error.status)]["content"]["application/problem+json"]
            assert error.code in content["schema"]["properties"]["code"]["enum"]


def test_path_parameters_are_those_of_the_path(document: dict[str, Any]) -> None:
    for _, path, operation in operations(document):
        declared = {item["name"] for item in operation.get("parameters", ()) if item["in"] == "path"}
        assert declared == {part[1:-1] for part in path.split("/") if part.startswith("{")}


def test_stop_evidence_and_raw_json_are_described_whole(document: dict[str, Any]) -> None:
    components = document["components"]["schemas"]
    assert components["StopEvidence"]["required"] == list(StopEvidence.__struct_fields__)
    assert components["JobView"]["properties"]["output"]["type"] == ["object", "null"]
    assert components["EventView"]["properties"]["data"]["type"] == "object"
    assert components["StartRequest"]["required"] == ["crew_id", "action_id"]
    assert components["StartRequest"]["additionalProperties"] is False


# --- the check that the tests use ------------------------------------------------------------------------------------

PROBLEM = {"type": "urn:x", "title": "t", "status": 404, "detail": "d", "code": "action_unknown", "retryable": False}
ARCHIVED = {"archived": True, "action_id": "a"}


@pytest.mark.parametrize(
    ("method", "status", "content_type", "body"),
    [
        ("GET", 418, "application/problem+json", PROBLEM),
        ("GET", 404, "application/json", PROBLEM),
        ("GET", 404, "application/problem+json", PROBLEM | {"code": "crew_unknown"}),
        ("GET", 404, "application/problem+json", PROBLEM | {"status": 409}),
        ("GET", 404, "application/problem+json", {"detail": "d"}),
        ("GET", 404, "application/problem+json", PROBLEM | {"more": 1}),
        ("GET", 200, "application/json", ARCHIVED),
        ("DELETE", 200, "application/json", ARCHIVED | {"archived": "yes"}),
        ("DELETE", 200, "application/json", ARCHIVED | {"more": 1}),
        ("DELETE", 200, "text/plain", ARCHIVED),
    ],
)
def test_an_undeclared_answer_is_caught(
    document: dict[str, Any], method: str, status: int, content_type: str, body: Any
) -> None:
    with pytest.raises(Undeclared):
        Declared(document).check(method, "/jobs/a", status, content_type, json.dumps(body).encode())


def test_a_declared_answer_passes(document: dict[str, Any]) -> None:
    declared = Declared(document)
    declared.check("GET", "/jobs/a", 404, "application/problem+json", json.dumps(PROBLEM).encode())
    declared.check("DELETE", "/jobs/a", 200, "application/json", json.dumps(ARCHIVED).encode())
    assert declared.seen == {("GET", "/jobs/{action_id}", 404): 1, ("DELETE", "/jobs/{action_id}", 200): 1}


def test_a_missing_header_is_caught(document: dict[str, Any]) -> None:
    problem = PROBLEM | {"status": 401, "code": "unauthorized"}
    body, kind = json.dumps(problem).encode(), "application/problem+json"
    Declared(document).check("GET", "/health", 401, kind, body, {"www-authenticate": "Bearer"})
    with pytest.raises(Undeclared, match="WWW-Authenticate"):
        Declared(document).check("GET", "/health", 401, kind, body, {})


# --- the server ------------------------------------------------------------------------------------------------------


@pytest.mark.case(7)
def test_it_is_served_to_whoever_has_a_token(server: Server) -> None:
    for token, status in ((None, 401), ("wrong", 401), (READ_TOKEN, 200), (server.token, 200)):
        answer = Client(server.host, server.port, token=token).request("GET", "/openapi.json")
        assert answer.status == status
    served = answer.json()
    made = json.loads(openapi.document(ALONE, version=served["info"]["version"]))
    assert served == made


def test_every_answer_is_declared_and_every_declared_answer_can_be_had(server: Server) -> None:
    declared = Declared.of(server.client())
    client = DeclaredClient(server.client(), declared)
    for token in (None, READ_TOKEN):
        _provoke_at_the_edge(DeclaredClient(Client(server.host, server.port, token=token), declared))
    _provoke_at_the_edge(client)
    for number, path in enumerate(STARTS):
        _provoke_refusals(client, path, f"r{number}")
        _provoke_endings(client, path, f"e{number}")
    _provoke_about_jobs(client)
    _provoke_about_effects(client)
    _provoke_operating(client)
    _provoke_waiting(client)
    _provoke_full(client)
    everything = {
        (method, path, int(status))
        for method, path, operation in operations(dict(declared.document))
        for status in operation["responses"]
    }
    assert everything - declared.seen.keys() == {one for one in everything if _beyond_provocation(*one)}


def _beyond_provocation(method: str, path: str, status: int) -> bool:
    """Answers that need a broken disk, work that no kill ends, a damaged row, a drain, 30 s of patience, a fleet."""
    start = method == "POST" and path in STARTS
    return (
        status == 408
        or (status == 410 and not start)
        or (status in {503, 507} and not start)
        or (status == 409 and not start and method != "DELETE")
    )


def _provoke_at_the_edge(client: DeclaredClient) -> None:
    for route in ALONE:
        path = route.path.replace("{action_id}", "nobody").replace("{key_id}", "0" * 64).replace("{file}", "app.js")
        client.request(route.method, path)
        client.request(route.method, path, headers={"Expect": "the impossible"})
    client.request("GET", "/dashboard/nothing.js").expect(404)


def _provoke_refusals(client: DeclaredClient, path: str, name: str) -> None:
    for number, (body, headers) in enumerate(
        [
            (b"{", {}),
            (b"\x1f\x8b no gzip", {"Content-Encoding": "gzip"}),
            ({"crew_id": "echo"}, {}),
            ({"crew_id": "nobody", "action_id": "x"}, {}),
            ({"crew_id": "echo", "action_id": "x", "operation": "train"}, {}),
            ({"crew_id": "echo", "action_id": "x", "operation": "batch_run", "input": {}}, {}),
            ({"crew_id": "echo", "action_id": "x", "input": {"x": "y" * 1_048_576}}, {}),
            ({"crew_id": "echo", "action_id": "x"}, {"Idempotency-Key": ""}),
            ({"crew_id": "echo", "action_id": "x"}, {"Idempotency-Key": "k" * 513}),
        ]
    ):
        sent = {"Idempotency-Key": f"{name}-{number}", **headers}
        assert client.request("POST", path, body=body, headers=sent).status >= 400


def _provoke_endings(client: DeclaredClient, path: str, name: str) -> None:
    done, failed, late, killed = (f"{name}-{ending}" for ending in ("done", "failed", "late", "killed"))
    for _ in range(2):
        assert client.start(done, "instant", path=path).status == 200
    assert client.start(done, "instant", path=path, key="other").status == 409
    client.start(failed, "failing", path=path)
    client.start(late, "sleeper", path=path, timeout_ms=50)
    asked = client.start(killed, "sleeper", path=path.removesuffix("/stream"), headers={"Prefer": "respond-async"})
    assert asked.status == 202
    assert client.cancel(killed, "sleeper").status == 200
    client.start(killed, "sleeper", path=path)
    assert client.archive(done).status == 200
    assert client.start(done, "instant", path=path).status == 410


def _provoke_about_jobs(client: DeclaredClient) -> None:
    client.start("known", "instant").expect(200)
    for path in ("/jobs", "/runs"):
        client.request("GET", f"{path}/known").expect(200)
        for body, status in (
            ({"crew_id": "instant", "action_id": "known"}, 200),
            ({"crew_id": "instant", "action_id": "other"}, 400),
            ({"crew_id": "echo", "action_id": "known"}, 404),
            ({"crew_id": "echo"}, 422),
            ({"crew_id": "echo", "action_id": "known", "reason": "x" * 1_200_000}, 413),
        ):
            client.request("POST", f"{path}/known/cancel", body=body).expect(status)
    for query, status in (("", 200), ("?cursor=9", 416), ("?cursor=x", 422)):
        client.request("GET", f"/jobs/known/events{query}").expect(status)
    with client.follow("known") as stream:
        stream.rest()
        client.declared.check("GET", "/jobs/known/events", 200, stream.headers["content-type"], None, stream.headers)
    client.request("GET", "/jobs?limit=2").expect(200)
    client.request("GET", "/jobs?limit=x").expect(422)
    client.archive("known", confirmation="other").expect(428)
    client.archive("nobody").expect(404)


def _provoke_about_effects(client: DeclaredClient) -> None:
    key = key_of()
    make_unknown(client, key, action_id="paid")
    path = f"/effects/{key.key_id}/reconcile"
    for query, status in (("", 200), ("?limit=x", 422)):
        client.request("GET", f"/effects{query}").expect(status)
        client.request("GET", f"/jobs/paid/effects{query}").expect(status)
    client.request("GET", "/jobs/paid/evidence").expect(200)
    client.archive("paid").expect(409)
    tag = {"If-Match": '"2"'}
    client.request("POST", path, body=b"\x1f\x8b no gzip", headers={**tag, "Content-Encoding": "gzip"}).expect(400)
    client.request("POST", path, body={"actor": "x" * 1_200_000}, headers=tag).expect(413)
    client.request("POST", path, body={"actor": "x"}, headers=tag).expect(422)
    reconcile(client, key, etag="").expect(428)
    reconcile(client, key, etag='"1"').expect(412)
    reconcile(client, key_of("nobody"), etag='"1"').expect(404)
    reconcile(client, key).expect(200)


def _provoke_operating(client: DeclaredClient) -> None:
    client.start("broken", "failing").expect(502)
    assert client.request("GET", "/jobs/broken/log?tail=10").status == 200
    client.request("GET", "/jobs/broken/log?follow=x").expect(422)
    path = "/jobs/broken/reconcile"
    body = {"actor": "ops", "decision": "not_applied", "evidence": "statement 7"}
    client.request("POST", path, body=b"\x1f\x8b no gzip", headers={"Content-Encoding": "gzip"}).expect(400)
    client.request("POST", path, body={"actor": "x" * 1_200_000}).expect(413)
    client.request("POST", path, body={"actor": "x"}).expect(422)
    client.request("POST", "/jobs/nobody/reconcile", body=body).expect(404)
    client.request("POST", path, body=body).expect(200)
    client.request("POST", "/drain").expect(200)
    client.request("DELETE", "/drain").expect(200)


def _provoke_waiting(client: DeclaredClient) -> None:
    """Both slots taken and the queue full: refusals, a 202 of a cancel, an archive that must wait."""
    asynchronous = {"Prefer": "respond-async"}
    for number in range(3):
        client.start(f"busy-{number}", "async_sleeper", headers=asynchronous).expect(202)
    for path in STARTS:
        client.start("too-many", "instant", path=path).expect(503)
    client.archive("busy-0").expect(409)
    for number, path in ((0, "/jobs"), (1, "/runs")):
        body = {"crew_id": "async_sleeper", "action_id": f"busy-{number}"}
        hurry = {"Prefer": "wait=0"}
        client.request("POST", f"{path}/busy-{number}/cancel", body=body, headers=hurry).expect(202)
    for number in range(3):
        client.cancel(f"busy-{number}", "async_sleeper").expect(200)


def _provoke_full(client: DeclaredClient) -> None:
    status, number = 200, 0
    while status == 200:
        status, number = client.start(f"fill-{number}", "instant").status, number + 1
        assert number <= SETTINGS["max_retained_runs"], "the journal takes more than it may"
    for path in STARTS:
        client.start("one-more", "instant", path=path).expect(507)


@pytest.mark.case(59)
def test_a_cancel_with_a_short_wait_is_carried_out_all_the_same(start_server: ServerFactory) -> None:
    server = start_server(registry=REGISTRY, settings={"max_concurrency": 2})
    client = server.client()
    for number, patience in enumerate(("0", "1", "0")):
        action_id = f"hurried-{number}"
        with client.stream(action_id, "async_sleeper") as stream:
            stream.until("chunk")
            client.cancel(action_id, "async_sleeper", headers={"Prefer": f"wait={patience}"})
            assert stream.rest()[-1].event == "cancelled"
