"""The mapping of failures (wire contract, 16.7), and what is refused before anything is sent (16.1, 16.2)."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any
from urllib.parse import unquote

import pytest

from supervisor.client import (
    Action,
    AuthenticationFailed,
    Client,
    ClientFailure,
    Completed,
    Failed,
    InvalidCredential,
    InvalidRequest,
    InvalidStream,
    RemoteRejected,
    RemoteTemporary,
    ResponseTooLarge,
    TransportFailed,
)
from tests.client.conftest import QUICK, action
from tests.client.rogue import DONE, Rogue, Script, answer, break_off, refuse, stream
from tests.support.server import TOKEN, Server

PROBLEM = {"type": "urn:x", "title": "t", "status": 0, "code": "some_code", "detail": "what happened"}
NOT_ADMITTED = [PROBLEM | {"code": code} for code in ("not_accepting", "journal_full")]
#: status, body, class, category, retryable for a read, uncertain for a mutation
BODIES: tuple[Any, ...] = (None, PROBLEM)
STATUSES: list[tuple[int, Any, type[ClientFailure], str, bool, bool]] = [
    *((status, body, AuthenticationFailed, "auth", False, False) for status in (401, 403) for body in BODIES),
    *(
        (status, body, RemoteTemporary, "temporary", True, True)
        for status in (429, 500, 502, 503, 504, 507, 599)
        for body in (*BODIES, "text", {"detail": [{"loc": []}]})
    ),
    *((503, body, RemoteTemporary, "temporary", True, False) for body in NOT_ADMITTED),
    *(
        (status, PROBLEM, RemoteRejected, "permanent", False, False)
        for status in (301, 307, 400, 404, 405, 409, 410, 413, 416, 422, 428)
    ),
]
READ: dict[str, Any] = {"operation": "knowledge_query", "given": {"query": ["q"]}}


async def failed(client: Client, asked: Action, *, streamed: bool) -> ClientFailure:
    """Do it, by a stream or by a waiting start; it must fail."""
    if streamed:
        async with client.invoke(asked) as invocation:
            result = await invocation.result()
    else:
        result = await client.start(asked)
    assert isinstance(result, Failed)
    assert result.failure.action == asked
    return result.failure


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize(("status", "body", "kind", "category", "retryable", "uncertain"), STATUSES)
async def test_what_a_status_means(
    rogue: Rogue, misled: Client, streamed: bool, status: int, body: Any, kind: type[ClientFailure], category: str,
    retryable: bool, uncertain: bool,
) -> None:  # fmt: skip
    for line in ("POST /jobs", "POST /jobs/stream"):
        rogue.on(line, refuse(status, body, "Retry-After: 7"))
    mutation = await failed(misled, action("crew"), streamed=streamed)
    read = await failed(misled, action("crew", **READ), streamed=streamed)
    assert (type(mutation), type(read), mutation.category, read.category) == (kind, kind, category, category)
    assert (mutation.retryable, read.retryable) == (False, retryable)
    assert (mutation.uncertain, read.uncertain) == (uncertain, False)
    assert mutation.refusal is not None
    assert (mutation.refusal.status, mutation.retry_after_s) == (status, 7)
    assert mutation.refusal.code == (body["code"] if isinstance(body, dict) and "code" in body else None)
    assert len(rogue.requests) == 2, "a start is sent once, and no redirect is followed"


LARGE = b'"' + b"x" * (5 << 20) + b'"'
ANSWERS: dict[str, tuple[Script, type[ClientFailure], str, bool]] = {
    "broken off": (break_off, TransportFailed, "transport", True),
    "not JSON": (stream(b"{"), InvalidStream, "connector", True),
    "not UTF-8": (stream(b'"\xff"'), InvalidStream, "connector", True),
    "NaN": (stream(b'{"raw":NaN}'), InvalidStream, "connector", True),
    "too large": (stream(LARGE), ResponseTooLarge, "connector", False),
}


@pytest.mark.parametrize(("script", "kind", "category", "retryable"), ANSWERS.values(), ids=ANSWERS)
async def test_what_an_answer_that_cannot_be_read_means(
    rogue: Rogue, misled: Client, script: Script, kind: type[ClientFailure], category: str, retryable: bool
) -> None:
    rogue.on("POST /jobs", script)
    mutation = await failed(misled, action("crew"), streamed=False)
    read = await failed(misled, action("crew", **READ), streamed=False)
    assert (type(mutation), mutation.category, mutation.retryable, mutation.uncertain) == (kind, category, False, True)
    assert (type(read), read.retryable, read.uncertain) == (kind, retryable, False)
    rogue.on("GET /jobs/a", script)
    with pytest.raises(kind) as caught:
        await misled.status("a")
    assert (caught.value.action_id, caught.value.action) == ("a", None)


async def test_an_answer_shorter_than_it_says_is_a_broken_connection(rogue: Rogue, misled: Client) -> None:
    async def short(wire: Any) -> None:
        await wire.head(200, "Content-Length: 100", content_type="application/json")
        await wire.send(b"{")

    rogue.on("POST /jobs", short)
    failure = await failed(misled, action("crew"), streamed=False)
    assert (type(failure), failure.uncertain) == (TransportFailed, True)


async def test_the_content_type_of_an_answer_and_an_empty_one_are_no_fault(rogue: Rogue, misled: Client) -> None:
    rogue.on("POST /jobs", stream(b'{"raw":"done"}', content_type="text/html"), stream())
    assert await misled.start(asked := action("crew")) == Completed(action=asked, output=DONE)
    assert await misled.start(asked) == Completed(action=asked, output=None)


async def test_a_page_of_a_proxy_is_no_stream(rogue: Rogue, misled: Client) -> None:
    page = stream(b"<html><body>\n\nSign in\n\n</body></html>\n", content_type="text/html")
    rogue.on("POST /jobs/stream", page).on("POST /jobs/a/cancel", page)
    async with misled.invoke(action(action_id="a")) as invocation:
        result = await invocation.result()
    assert isinstance(result, Failed)
    assert result.uncertain


@contextlib.contextmanager
def nobody() -> Any:
    """A port that refuses connections."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_connection_that_was_never_made_leaves_no_doubt(streamed: bool) -> None:
    with nobody() as port:
        async with Client(f"http://127.0.0.1:{port}", token=TOKEN, retry=QUICK) as client:
            for asked, retryable in ((action("crew"), False), (action("crew", **READ), True)):
                failure = await failed(client, asked, streamed=streamed)
                assert isinstance(failure, TransportFailed)
                assert (failure.sent, failure.uncertain, failure.retryable) == (False, False, retryable)


async def test_a_server_without_tls_leaves_no_doubt(server: Server, client: Client) -> None:
    async with Client(f"https://127.0.0.1:{server.port}", token=TOKEN) as secure:
        failure = await failed(secure, asked := action("echo"), streamed=False)
    assert isinstance(failure, TransportFailed)
    assert (failure.sent, failure.uncertain) == (False, False)
    with pytest.raises(RemoteRejected):
        await client.status(asked.action_id)


async def test_one_request_is_bounded_in_time(rogue: Rogue) -> None:
    async def silent(wire: Any) -> None:
        await wire.gone()

    rogue.on("POST /jobs", silent)
    async with Client(rogue.url, timeout_s=0.3) as client:
        failure = await failed(client, action("crew"), streamed=False)
    assert (type(failure), failure.uncertain) == (TransportFailed, True)


# --- nothing is sent -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "http://example.org", "http://10.0.0.1:80", "ftp://localhost", "localhost:80", "http://", "https://",
        "http://localhost/path", "http://localhost?x=1", "http://localhost?", "http://localhost#", "http://localhost#f",
        "http://user@localhost", "http://user:pw@localhost", "http://localhost:x", "http://[::1", "http://127.0.0.1.evil",
        "",
    ],
)  # fmt: skip
def test_a_base_url_is_an_origin_that_may_carry_a_token(url: str) -> None:
    with pytest.raises(InvalidRequest):
        Client(url)


@pytest.mark.parametrize(
    "url",
    ["http://localhost", "http://LOCALHOST:1/", "http://127.0.0.2:8090", "http://[::1]:8090", "https://example.org:8443/"],
)  # fmt: skip
def test_origins_that_are_taken(url: str) -> None:
    Client(url)


@pytest.mark.parametrize("token", ["", " ", "a b", "a\n", "a\tb", "\x7f", "x" * 16_385])
def test_a_token_without_white_space(token: str) -> None:
    with pytest.raises(InvalidCredential) as caught:
        Client("http://localhost", token=token)
    assert (caught.value.category, caught.value.code) == ("auth", "connector.crewai.invalid_credential")


@pytest.mark.parametrize("size", [0, (1 << 20) - 1, (256 << 20) + 1])
def test_the_bound_of_a_response_is_bounded(size: int) -> None:
    with pytest.raises(InvalidRequest):
        Client("http://localhost", max_response_bytes=size)


DEEP: Any = 1
for _ in range(101):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    "fields",
    [
        {"action_id": ""}, {"action_id": ".."}, {"action_id": "a/b"}, {"action_id": "a?b"}, {"action_id": "x" * 257},
        {"action_id": "a\n"}, {"crew_id": ""}, {"crew_id": "x" * 257}, {"crew_id": "a\nb"}, {"operation": "status2"},
        {"idempotency_key": " "}, {"idempotency_key": "x" * 513}, {"idempotency_key": "a\tb"},
        {"timeout_ms": 0}, {"timeout_ms": 3_600_001}, {"timeout_ms": True}, {"timeout_ms": 1.5},
        {"input": {"n": float("nan")}}, {"input": {"n": float("inf")}}, {"input": {"n": object()}},
        {"input": {"n": "\ud800"}}, {"input": {"n": DEEP}}, {"input": {"t": "x" * (1 << 20)}},
        {"input": {"t": "é" * 200_000}}, {"input": [1]},
        {"operation": "status"}, {"operation": "events", "input": {"run_action_id": "a", "cursor": -1}},
        {"operation": "cancel", "input": {"run_action_id": "a", "reason": "a\nb"}},
        {"operation": "status", "input": {"run_action_id": "a", "other": 1}},
        {"operation": "status", "input": {"run_action_id": ".."}},
        {"operation": "status", "input": {"run_action_id": "a", "reason": "x"}},
        {"operation": "cancel", "input": {"run_action_id": "a", "reason": 1}},
    ],
    ids="-".join,
)  # fmt: skip
async def test_what_no_server_would_take_is_not_sent(rogue: Rogue, misled: Client, fields: dict[str, Any]) -> None:
    asked = Action(**{"action_id": "a", "crew_id": "crew", **fields})
    async with misled.invoke(asked) as invocation:
        result = await invocation.result()
    assert isinstance(result, Failed)
    assert isinstance(result.failure, InvalidRequest)
    assert (result.failure.category, result.failure.retryable, result.uncertain) == ("permanent", False, False)
    assert result.failure.action is asked
    assert rogue.requests == []


@pytest.mark.parametrize(
    "text", ["a/b", "a?b", "a#b", "a%b", "%2e%2e", "a b", "a\\b", "é", "a+b", "a&b", "😀", "...", "a:b~c"]
)
async def test_an_id_is_one_segment_of_the_path_whatever_it_is(rogue: Rogue, misled: Client, text: str) -> None:
    for ask in (misled.status(text), misled.cancel(text, "crew"), misled.archive(text), misled.events(text)):
        with contextlib.suppress(ClientFailure):
            await ask
    targets = [request.target for request in rogue.requests]
    assert [unquote(target.split("/")[2]) for target in targets] == [text] * len(targets)
    assert [len(target.split("/")) for target in targets] == [3, 4, 3, 4][-len(targets) :]
    assert not any(char in target for target in targets for char in "?#\\ ")


async def test_an_archive_is_sent_once(rogue: Rogue, misled: Client) -> None:
    """The HTTP library would repeat a DELETE by itself, and the second answer would say that there is no such job."""
    rogue.on("DELETE /jobs/a", break_off, refuse(404))
    with pytest.raises(TransportFailed) as caught:
        await misled.archive("a")
    assert caught.value.uncertain
    assert rogue.lines() == ["DELETE /jobs/a"]


async def test_a_client_that_is_not_open_says_so() -> None:
    with pytest.raises(RuntimeError, match="async with"):
        await Client("http://localhost").health()


async def test_the_real_server_refuses_by_class(server: Server, client: Client) -> None:
    completed = action("echo", given={"n": 1})
    assert isinstance(await client.start(completed), Completed)
    changed = Action(action_id=completed.action_id, crew_id="echo", input={"n": 2})
    for asked in (changed, action("nobody"), action("echo", "memory_reset", {"command_type": "everything"})):
        for streamed in (True, False):
            failure = await failed(client, asked, streamed=streamed)
            assert isinstance(failure, RemoteRejected)
            assert failure.refusal is not None
            assert failure.refusal.code is not None
    async with Client(server.url, token="another") as stranger:
        assert isinstance(await failed(stranger, action("echo"), streamed=True), AuthenticationFailed)


async def test_a_full_queue_leaves_no_doubt_though_its_status_would(server: Server, rogue: Rogue) -> None:
    """503 not_accepting says that nothing was admitted; 503 alone does not."""
    async with Client(rogue.url) as client:
        rogue.on("POST /jobs", refuse(503, NOT_ADMITTED[0]))
        assert not (await failed(client, action("crew"), streamed=False)).uncertain
        rogue.on("POST /jobs", answer({"detail": "not_accepting"}, 503))
        assert (await failed(client, action("crew"), streamed=False)).uncertain


async def test_cancelling_the_caller_does_not_disturb_others(client: Client) -> None:
    task = asyncio.create_task(client.start(action("sleeper", given={"seconds": 1})))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await client.health()).status == "ready"
