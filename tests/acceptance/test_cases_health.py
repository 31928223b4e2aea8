"""Cases 1 to 7: the health document and authentication."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from protocol.operations import Operation
from tests.support.client import Answer, Client
from tests.support.raw import RawConnection, head
from tests.support.server import TOKEN, Server, ServerFactory

REGISTRY = "tests.crews.stop_crews:CREWS"
ROUTES = (
    ("GET", "/health"),
    ("POST", "/jobs"),
    ("POST", "/runs"),
    ("POST", "/jobs/stream"),
    ("POST", "/runs/stream"),
    ("GET", "/jobs/act_1"),
    ("GET", "/runs/act_1"),
    ("GET", "/jobs/act_1/events"),
    ("POST", "/jobs/act_1/cancel"),
    ("POST", "/runs/act_1/cancel"),
    ("DELETE", "/jobs/act_1"),
)
CONTROL = {"status", "events", "cancel"}
MIB = 1 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server with every operation for the requests of this file."""
    with Server(tmp_path_factory.mktemp("server"), registry=REGISTRY) as server:
        yield server


# --- the health document -----------------------------------------------------------------------------------------


@pytest.mark.case(1)
def test_the_health_document_has_the_references_fields(start_server: ServerFactory) -> None:
    """Case 1 (=): an empty journal and only ``run`` allowed give the nine documented fields, with these values."""
    settings = {"allowed_operations": ["run"], "training_dir": None}
    answer = start_server(registry=REGISTRY, settings=settings).client().health()
    document = answer.expect(200)
    assert answer.headers["content-type"] == "application/json"
    crews = document.pop("crews")
    assert crews == sorted(crews)
    assert {"instant", "patient"} < set(crews)
    expected = {
        "status": "ready",
        "active_runs": 0,
        "retained_runs": 0,
        "max_retained_runs": 2000,
        "durable_journal": True,
        "stream_checkpoint_events": 128,
        "operations": ["cancel", "events", "run", "status"],
        "training_directory": False,
    }
    assert {name: document.get(name) for name in expected} == expected


@pytest.mark.case(2)
def test_the_references_client_takes_the_health_document(server: Server) -> None:
    """Case 2 (=): with every operation allowed the client's own check (wire contract, section 16.9) passes."""
    document = server.client().health().expect(200)
    operations = {operation.value for operation in Operation} | CONTROL
    assert client_accepts(document, crews={"instant", "sleeper"}, operations=operations)
    assert not client_accepts(document, crews={"nobody"}, operations=operations)


def client_accepts(document: Mapping[str, Any], *, crews: set[str], operations: set[str]) -> bool:
    """What the client looks at before it sends work to a server."""
    ready = document["status"] == "ready" and document["durable_journal"] is True
    return ready and set(document["crews"]) >= crews and set(document["operations"]) >= operations


# --- credentials -------------------------------------------------------------------------------------------------


def is_refused(answer: Answer) -> None:
    """Assert the answer to a wrong credential."""
    document = answer.expect(401)
    assert answer.headers["www-authenticate"] == "Bearer"
    assert isinstance(document["detail"], str)
    assert TOKEN not in answer.body.decode()


@pytest.mark.case(3)
@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_no_route_of_the_reference_answers_without_a_token(server: Server, method: str, path: str) -> None:
    """Case 3 (=): no header gives 401, the challenge, and a JSON document whose ``detail`` is a string."""
    is_refused(Client(server.host, server.port).request(method, path))


@pytest.mark.case(3)
@pytest.mark.parametrize(("path", "word"), [("/livez", "ok"), ("/readyz", "ready")])
def test_the_open_probes_tell_a_stranger_one_word(server: Server, path: str, word: str) -> None:
    """Case 3 (ours): the probes answer without a token, and with nothing but the status."""
    assert Client(server.host, server.port).request("GET", path).expect(200) == {"status": word}


@pytest.mark.case(3)
def test_the_readiness_probe_says_why_to_whoever_has_a_token(server: Server) -> None:
    """Case 3 (ours): the checks are for those who may read; a wrong token is no refusal and gets the one word."""
    known = server.client().request("GET", "/readyz").expect(200)
    assert list(known) == ["status", "readiness", "durability", "outcome"]
    assert known["readiness"]["journal"] == {"ok": True, "why": None}
    stranger = Client(server.host, server.port, token=f"{TOKEN}x")
    assert stranger.request("GET", "/readyz").expect(200) == {"status": "ready"}
    assert server.client().request("GET", "/livez").expect(200) == {"status": "ok"}


@pytest.mark.case(4)
@pytest.mark.parametrize(
    "value", [f"bearer {TOKEN}", f"BEARER {TOKEN}", f"Bearer  {TOKEN}", f"Bearer {TOKEN}x", TOKEN, "Bearer", "Bearer "]
)
def test_only_the_exact_header_is_a_credential(server: Server, value: str) -> None:
    """Case 4 (=): another case of the scheme, another blank or another token gives 401."""
    stranger = Client(server.host, server.port)
    is_refused(stranger.request("GET", "/health", headers={"Authorization": value}))
    assert stranger.request("GET", "/health", headers={"Authorization": f"Bearer {TOKEN}"}).status == 200


@pytest.mark.case(5)
@pytest.mark.parametrize("value", [b"\xe9", b"Bearer \xe9", b"Bearer " + TOKEN.encode() + b"\xe9"])
def test_a_credential_that_is_not_ascii_is_a_wrong_one(server: Server, value: bytes) -> None:
    """Case 5 (≠, B13): a byte 0xE9 in the header gives 401, where the reference answers 500."""
    is_refused(Client(server.host, server.port).request("GET", "/health", headers={"Authorization": value}))


@pytest.mark.case(6)
@pytest.mark.parametrize("body", [b"{", b'{"crew_id": 1}', b"\xff"])
def test_a_body_is_not_looked_at_without_a_token(server: Server, body: bytes) -> None:
    """Case 6 (≠, B14): malformed JSON gives 401 without a token (the reference: 422), and 422 with one."""
    is_refused(Client(server.host, server.port).request("POST", "/jobs", body=body))
    assert server.client().request("POST", "/jobs", body=body).status == 422


@pytest.mark.case(6)
def test_a_large_body_is_not_kept_without_a_token(server: Server) -> None:
    """Case 6 (≠, B14): eight bodies of 5 MiB get their 401 before they are sent, and take no memory once they are."""
    lengths = {"Content-Type": "application/json", "Content-Length": str(5 * MIB)}
    now, highest = memory_bytes(server.pid)
    with ExitStack() as stack:
        connections = [stack.enter_context(RawConnection(server.host, server.port, timeout_s=10)) for _ in range(8)]
        for connection in connections:
            # The answer is here before the first byte of the body has left.
            answer = connection.send(head("POST", b"/jobs", headers=lengths)).answer("POST")
            assert answer is not None
            is_refused(answer)
        for connection in connections:
            connection.send(*[b"0" * (MIB // 4)] * 20)
        # Later requests are answered after what has come earlier was taken from the sockets.
        assert server.client().health().status == 200
        assert memory_bytes(server.pid)[0] - now < 10 * MIB
    assert memory_bytes(server.pid)[1] - highest < 10 * MIB


@pytest.mark.case(6)
def test_a_body_is_not_asked_for_without_a_token(server: Server) -> None:
    """Case 6 (≠, B14): ``Expect: 100-continue`` gets its 100 with a token, and a bare 401 without one."""
    expecting = {"Content-Type": "application/json", "Content-Length": "2", "Expect": "100-continue"}
    with RawConnection(server.host, server.port) as connection:
        connection.send(head("POST", b"/jobs", headers=expecting))
        # Whatever else came before would be read first.
        assert connection.socket.recv(4096).startswith(b"HTTP/1.1 401 ")
    with RawConnection(server.host, server.port) as connection:
        connection.send(head("POST", b"/jobs", token=TOKEN, headers=expecting))
        # The server waits for the body now, so there is nothing behind the 100 yet.
        assert connection.socket.recv(4096) == b"HTTP/1.1 100 Continue\r\n\r\n"
        answer = connection.send(b"{}").answer("POST")
        assert answer is not None
        assert answer.status == 422


def memory_bytes(pid: int) -> tuple[int, int]:
    """Resident memory of a process, now and at its highest (VmRSS and VmHWM of proc_pid_status(5))."""
    text = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    found = dict(re.findall(r"^(VmRSS|VmHWM):\s+(\d+) kB$", text, re.MULTILINE))
    return int(found["VmRSS"]) * 1024, int(found["VmHWM"]) * 1024


@pytest.mark.case(7)
@pytest.mark.parametrize("path", ["/docs", "/redoc", "/openapi.json", "/docs/oauth2-redirect"])
def test_no_documentation_is_given_to_strangers(server: Server, path: str) -> None:
    """Case 7 (≠, B14): the pages that the reference serves to everybody are absent or need the token."""
    answer = Client(server.host, server.port).request("GET", path)
    assert answer.status in (401, 404)
    assert b"openapi" not in answer.body.lower()
    assert server.client().request("GET", path).status == (200 if path == "/openapi.json" else 404)
