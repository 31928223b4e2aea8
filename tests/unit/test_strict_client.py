"""The strict client refuses what the host's connector refuses, and takes what that takes."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.strict_client import Refused, StrictClient, cause_of_status, failure, result_of
from tests.support.strict_stream import (
    MAX_EVENTS,
    MAX_FRAME_BYTES,
    InvalidStream,
    StreamEvent,
    StreamReader,
    TooLarge,
    parse_json,
)


def frame(sequence: Any, name: str = "chunk", data: Any = None, *, newline: str = "\n") -> bytes:
    """One well-formed frame, whatever its sequence is."""
    document = json.dumps({"event": name, "sequence": sequence, "data": {} if data is None else data})
    return f"event: {name}{newline}data: {document}{newline}{newline}".encode()


def read(*pieces: bytes, first: int = 0, max_bytes: int = 1 << 24) -> list[StreamEvent]:
    reader = StreamReader(first=first, max_bytes=max_bytes)
    for piece in pieces:
        list(reader.feed(piece))
    list(reader.close())
    return reader.events


GOOD = frame(0, "started") + frame(1) + frame(2, "completed", {"raw": "x"})


def test_it_takes_a_stream_however_it_is_cut() -> None:
    for cut in range(len(GOOD)):
        assert [event.event for event in read(GOOD[:cut], GOOD[cut:])] == ["started", "chunk", "completed"]


def test_it_takes_comments_ids_retries_unknown_events_and_carriage_returns() -> None:
    noise = b": alive\n\nretry: 1000\n\nid: 7\n\n"
    body = noise + frame(3, "thought", newline="\r\n") + noise + b"id: 4\n" + frame(4, "failed")
    assert [(event.sequence, event.kind) for event in read(body, first=3)] == [(3, "progress"), (4, "error")]


def test_it_reads_no_further_than_the_terminal_event() -> None:
    assert len(read(GOOD + b"data: nonsense\n\n")) == 3


@pytest.mark.parametrize(
    "body",
    [
        frame(0) + frame(2, "completed"),
        frame(1, "completed"),
        frame(0) + frame(0, "completed"),
        frame(0.0, "completed"),
        frame(True, "completed"),
        frame("0", "completed"),
        frame(-1, "completed"),
        frame(None, "completed"),
        frame(0),
        b"",
        GOOD[:-1],
        b"data: [0]\n\n",
        b'data: {"sequence":0}\n\n',
        b"event: completed\ndata: {\n\n",
        b'event: completed\ndata: {"sequence":0,"data":NaN}\n\n',
        b'event: completed\ndata: {"sequence":0,"data":1e400}\n\n',
        b'event: completed\ndata: {"sequence":0,"data":"\\ud800"}\n\n',
        b'event: completed\ndata: {"sequence":0,"data":"\xff"}\n\n',
        b'event: completed\ndata: {"sequence":0,"data":%s1%s}\n\n' % (b"[" * 130, b"]" * 130),
    ],
)
def test_it_refuses_an_invalid_stream(body: bytes) -> None:
    with pytest.raises(InvalidStream):
        read(body)


def test_a_frame_may_have_one_mebibyte_and_no_more() -> None:
    envelope = len(frame(0, "completed", {"raw": ""})) - 2
    fits = frame(0, "completed", {"raw": "x" * (MAX_FRAME_BYTES - envelope)})
    assert read(fits)[0].event == "completed"
    for body in (fits.replace(b"xx", b"xxx", 1), b"data: " + b"x" * MAX_FRAME_BYTES):
        with pytest.raises(TooLarge):
            read(body)


def test_many_frames_in_one_piece_may_have_more_than_a_frame() -> None:
    body = b"".join(frame(number, data={"content": "x" * 100_000}) for number in range(20)) + frame(20, "completed")
    assert len(body) > MAX_FRAME_BYTES
    assert len(read(body)) == 21
    with pytest.raises(TooLarge):
        read(body, max_bytes=len(body) - 1)


def test_a_hundred_thousand_events_and_no_more() -> None:
    body = b"".join(frame(number) for number in range(MAX_EVENTS - 1))
    assert len(read(body, frame(MAX_EVENTS - 1, "completed"))) == MAX_EVENTS
    with pytest.raises(InvalidStream, match="more than"):
        read(body, frame(MAX_EVENTS - 1), frame(MAX_EVENTS, "completed"))


@pytest.mark.parametrize(
    ("data", "kind", "text"),
    [
        ({"channel": "messages", "content": "hi"}, "data", "hi"),
        ({"channel": "llm", "data": {"chunk": "hi"}}, "data", "hi"),
        ({"channel": "tools", "content": ""}, "tool", None),
        ({"content": 5}, "progress", None),
        (None, "progress", None),
    ],
)
def test_what_a_chunk_means(data: Any, kind: str, text: str | None) -> None:
    event = StreamEvent("chunk", 1, data)
    assert (event.kind, event.text) == (kind, text)


def test_what_the_ends_mean() -> None:
    assert result_of(StreamEvent("completed", 1, {"raw": 1})).output == {"raw": 1}
    cancelled = result_of(StreamEvent("cancelled", 1, {"status": "cancelled", "stop": {}}))
    assert (cancelled.kind, cancelled.output) == ("cancelled", {"status": "cancelled", "stop": {}})
    failed = result_of(StreamEvent("failed", 1, {"status": "failed"}))
    assert (failed.kind, failed.code, failed.category) == ("failed", "connector.crewai.execution_failed", "connector")
    assert (failed.retryable, failed.details) == (False, {"status": "failed"})


@pytest.mark.parametrize(
    ("status", "operation", "expected"),
    [
        (401, "run", ("authentication", "auth", False, False)),
        (403, "run", ("authentication", "auth", False, False)),
        (429, "run", ("remote_temporary", "temporary", False, True)),
        (503, "run", ("remote_temporary", "temporary", False, True)),
        (503, "knowledge_query", ("remote_temporary", "temporary", True, False)),
        (507, "memory_reset", ("remote_temporary", "temporary", False, True)),
        (307, "status", ("remote_rejected", "permanent", False, False)),
        (410, "run", ("remote_rejected", "permanent", False, False)),
        (422, "run", ("remote_rejected", "permanent", False, False)),
    ],
)
def test_what_a_status_means(status: int, operation: str, expected: tuple[str, str, bool, bool]) -> None:
    cause = cause_of_status(status)
    assert cause is not None
    made = failure(cause, operation=operation)
    assert (made.code, made.category, made.retryable, made.uncertain) == (f"connector.crewai.{cause}", *expected[1:])
    assert cause == expected[0]


def test_a_connection_that_was_refused_leaves_nothing_uncertain() -> None:
    made = StrictClient("127.0.0.1", 1, "t").invoke("memory_reset", "c", "a", {"command_type": "all"})
    assert (made.code, made.uncertain, made.retryable) == ("connector.crewai.transport", False, False)


def test_it_does_not_send_what_the_connector_would_not_send() -> None:
    client = StrictClient("127.0.0.1", 1, "t")
    for key in (" ", "k" * 513, "a\tb"):
        with pytest.raises(Refused):
            client.invoke("run", "c", "a", key=key)
    with pytest.raises(Refused):
        client.invoke("run", "c", "a", {"text": "x" * (1 << 20)})


def test_strict_json_is_utf8_with_whole_pairs() -> None:
    assert parse_json('{"é": "\\ud83d\\ude00"}'.encode()) == {"é": "😀"}


def complete(request: bytes) -> bool:
    """Whether the head and the announced body are there."""
    head, end, body = request.partition(b"\r\n\r\n")
    length = next((int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length:")), 0)
    return bool(end) and len(body) >= length


def sent(ask: Callable[[StrictClient], object], answer: bytes = b"{}") -> tuple[bytes, list[bytes], bytes]:
    """Request line, headers without Host and Content-Length, and body that ``ask`` makes the client send."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                while not complete(b"".join(heard)):
                    heard.append(connection.recv(65_536))
                connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + answer)

        server = threading.Thread(target=serve)
        server.start()
        ask(StrictClient("127.0.0.1", listener.getsockname()[1], "tok"))
        server.join()
    head, _, body = b"".join(heard).partition(b"\r\n\r\n")
    line, *headers = head.split(b"\r\n")
    return line, [header for header in headers if not header.startswith((b"Host:", b"Content-Length:"))], body


END = frame(0, "completed")
TOKEN = b"Authorization: Bearer tok"
JSON = b"Content-Type: application/json"
KEYED = ["Idempotency-Key: ké".encode(), b"X-AIP-Action-ID: act_1"]
START = '{"crew_id":"c","action_id":"act_1","operation":"%s","input":{"t":"é"}%s}'


@pytest.mark.parametrize(
    ("ask", "answer", "line", "headers", "body"),
    [
        (
            lambda client: client.invoke("train", "c", "act_1", {"t": "é"}, key="ké", timeout_ms=5),
            END,
            b"POST /jobs/stream HTTP/1.1",
            [TOKEN, *KEYED, JSON],
            (START % ("train", ',"timeout_ms":5')).encode(),
        ),
        (
            lambda client: client.invoke("memory_reset", "c", "act_1", {"t": "é"}, key="ké"),
            b"{}",
            b"POST /jobs HTTP/1.1",
            [TOKEN, *KEYED, JSON],
            (START % ("memory_reset", "")).encode(),
        ),
        (lambda client: client.status("a"), b"{}", b"GET /jobs/a HTTP/1.1", [TOKEN], b""),
        (
            lambda client: client.follow("a", 0).result(),
            END,
            b"GET /jobs/a/events?cursor=0 HTTP/1.1",
            [TOKEN, b"Accept: text/event-stream"],
            b"",
        ),
        (
            lambda client: client.cancel("c", "a", action_id="act_1", key="ké", reason="why"),
            b"{}",
            b"POST /jobs/a/cancel HTTP/1.1",
            [TOKEN, *KEYED, JSON],
            b'{"crew_id":"c","action_id":"a","reason":"why"}',
        ),
        (
            lambda client: client.runtime_cancel("run", "c", "a"),
            b"{}",
            b"POST /jobs/a/cancel HTTP/1.1",
            [TOKEN, JSON],
            b'{"crew_id":"c","action_id":"a","reason":"cancelled by AIP runtime"}',
        ),
    ],
)
def test_it_sends_just_the_headers_and_bodies_of_the_connector(
    ask: Callable[[StrictClient], object], answer: bytes, line: bytes, headers: list[bytes], body: bytes
) -> None:
    assert sent(ask, answer) == (line, headers, body)
