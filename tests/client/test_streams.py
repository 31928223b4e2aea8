"""What a client makes of a stream that keeps the contract in odd ways, that breaks it, and that breaks off."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.client import (
    CancelUnconfirmed,
    Chunk,
    ChunkKind,
    Client,
    ClientFailure,
    Completed,
    Event,
    ExecutionFailed,
    Failed,
    InvalidStream,
    RemoteTemporary,
    ResponseTooLarge,
    Result,
    TransportFailed,
)
from supervisor.client.results import chunk_of
from supervisor.client.sse import MAX_EVENTS, MAX_FRAME_BYTES, AboveBound, EventReader, Malformed
from tests.client.conftest import action
from tests.client.rogue import (
    COMPLETED,
    DONE,
    GOOD,
    STARTED,
    Rogue,
    Script,
    Wire,
    answer,
    break_off,
    evidence,
    frame,
    open_stream,
    refuse,
    stream,
    view,
)

START = "POST /jobs/stream"
EVENTS = "GET /jobs/a/events"
CANCEL = "POST /jobs/a/cancel"
NAMES = ["started", "chunk", "completed"]


def run(**more: Any) -> Any:
    return action(action_id="a", **more)


async def outcome(client: Client, asked: Any) -> tuple[list[Chunk], Result]:
    async with client.invoke(asked) as invocation:
        chunks = [chunk async for chunk in invocation]
        return chunks, await invocation.result()


# --- pieces ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, len(GOOD)), max_size=20), st.booleans())
def test_a_stream_is_the_same_however_it_is_cut(cuts: list[int], crlf: bool) -> None:
    body = GOOD.replace(b"\n", b"\r\n") if crlf else GOOD
    at = [0, *sorted(cuts), len(body)]
    reader = EventReader(first=0, max_bytes=1 << 20)
    for start, end in itertools.pairwise(at):
        reader.feed(body[start:end])
    reader.finish()
    assert [event.event for event in reader.events] == NAMES
    assert reader.ended


async def test_one_byte_at_a_time(rogue: Rogue, misled: Client) -> None:
    rogue.on(START, stream(*(GOOD[at : at + 1] for at in range(len(GOOD)))))
    chunks, result = await outcome(misled, run())
    assert [(chunk.kind, chunk.text) for chunk in chunks] == [
        (ChunkKind.PROGRESS, None),
        (ChunkKind.DATA, "hello"),
        (ChunkKind.DONE, None),
    ]
    assert result == Completed(action=run(), output=DONE)
    assert rogue.lines() == [START]


async def test_comments_ids_retries_unknown_names_and_another_content_type_are_no_fault(
    rogue: Rogue, misled: Client
) -> None:
    noise = b": alive\n\nretry: 1000\n\nid: 7\n\nunknown: x\n\n"
    body = noise + STARTED + noise + b"id: 1\n" + frame(1, "thought") + COMPLETED + b": bye\n\n"
    rogue.on(START, stream(body, content_type="text/plain"))
    chunks, result = await outcome(misled, run())
    assert [chunk.event.event for chunk in chunks] == ["started", "thought", "completed"]
    assert isinstance(result, Completed)


@pytest.mark.parametrize(
    ("event", "data", "kind", "text"),
    [
        ("chunk", {"channel": "messages", "content": "hi"}, "data", "hi"),
        ("chunk", {"channel": "llm", "data": {"chunk": "hi"}}, "data", "hi"),
        ("chunk", {"channel": "tools", "content": ""}, "tool", None),
        ("chunk", {"content": 5}, "progress", None),
        ("chunk", None, "progress", None),
        ("thought", {"content": "hm"}, "progress", "hm"),
        ("completed", {}, "done", None),
        ("cancelled", {}, "done", None),
        ("failed", {}, "error", None),
    ],
)
def test_what_a_chunk_is(event: str, data: Any, kind: str, text: str | None) -> None:
    chunk = chunk_of(Event(event=event, sequence=1, data=data))
    assert (chunk.kind, chunk.text) == (kind, text)


# --- faults ----------------------------------------------------------------------------------------------------------

BROKEN: dict[str, bytes] = {
    "gap": STARTED + COMPLETED,
    "order": STARTED + frame(2) + frame(1) + frame(3, "completed"),
    "repeated event": STARTED + STARTED + COMPLETED,
    "not from 0": frame(1) + COMPLETED,
    "a second terminal event": GOOD + frame(3, "failed"),
    "a second terminal event with the same number": GOOD + frame(2, "completed"),
    "half an event after the terminal one": GOOD + b"event: failed\ndata: {",
    "bad UTF-8 in data": STARTED + b'event: chunk\ndata: {"sequence":1,"data":"\xff"}\n\n' + COMPLETED,
    "bad UTF-8 in a name": STARTED + b'event: ch\xffnk\ndata: {"sequence":1}\n\n' + COMPLETED,
    "no JSON": STARTED + b"event: chunk\ndata: {\n\n" + COMPLETED,
    "NaN": STARTED + b'event: chunk\ndata: {"sequence":1,"data":NaN}\n\n' + COMPLETED,
    "lone surrogate": STARTED + b'event: chunk\ndata: {"sequence":1,"data":"\\ud800"}\n\n' + COMPLETED,
    "too deep": STARTED + b'event: chunk\ndata: {"sequence":1,"data":%s1%s}\n\n' % (b"[" * 130, b"]" * 130),
    "no object": STARTED + b"event: chunk\ndata: [1]\n\n" + COMPLETED,
    "float sequence": STARTED + frame(1.0) + COMPLETED,
    "true sequence": STARTED + frame(True) + COMPLETED,
    "text sequence": STARTED + frame("1") + COMPLETED,
    "no sequence": STARTED + b"event: chunk\ndata: {}\n\n" + COMPLETED,
    "no name": STARTED + b'data: {"sequence":1}\n\n' + COMPLETED,
}
LARGE: dict[str, bytes] = {
    "a frame": STARTED + frame(1, data={"content": "x" * MAX_FRAME_BYTES}) + COMPLETED,
    "what is not terminated": STARTED + b"data: " + b"x" * (MAX_FRAME_BYTES + 1),
    "a comment": STARTED + b": " + b"x" * MAX_FRAME_BYTES + b"\n" + COMPLETED,
    "all of it": STARTED + (b": " + b"x" * 65_536 + b"\n\n") * 70 + COMPLETED,
}
FAULTS: list[tuple[str, bytes, type[ClientFailure]]] = [
    *((name, body, InvalidStream) for name, body in BROKEN.items()),
    *((name, body, ResponseTooLarge) for name, body in LARGE.items()),
]
each_fault = pytest.mark.parametrize(
    ("body", "kind"), [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS]
)


@each_fault
async def test_a_fault_stops_the_work_and_is_what_is_reported(
    rogue: Rogue, misled: Client, body: bytes, kind: type[ClientFailure]
) -> None:
    stopped = view("cancelled", uncertain_outcome=True, stop=evidence(confirmed=True))
    rogue.on(START, stream(body)).on(CANCEL, answer(stopped))
    _, result = await outcome(misled, run())
    assert isinstance(result, Failed)
    assert type(result.failure) is kind
    assert (result.failure.retryable, result.failure.uncertain, result.failure.action) == (False, True, run())
    assert result.failure.stop is not None
    assert result.failure.stop.confirmed
    assert rogue.lines() == [START, CANCEL]


@each_fault
async def test_a_fault_of_a_read_is_retryable_unless_it_is_size(
    rogue: Rogue, misled: Client, body: bytes, kind: type[ClientFailure]
) -> None:
    rogue.on(START, stream(body))
    _, result = await outcome(misled, run(operation="knowledge_query", given={"query": ["q"]}))
    assert isinstance(result, Failed)
    assert (type(result.failure), result.failure.uncertain) == (kind, False)
    assert result.failure.retryable == (kind is InvalidStream)
    assert rogue.lines() == [START], "nothing is cancelled"


@pytest.mark.parametrize(
    ("operation", "cancel", "expected"),
    [
        ("run", refuse(503), CancelUnconfirmed),
        ("run", refuse(404), CancelUnconfirmed),
        ("run", answer(view("running"), 202), CancelUnconfirmed),
        ("run", break_off, CancelUnconfirmed),
        ("run", stream(b"{"), CancelUnconfirmed),
        ("run", answer(view("cancelled")), InvalidStream),
        ("train", refuse(409), InvalidStream),
    ],
)
async def test_a_fault_whose_work_cannot_be_stopped(
    rogue: Rogue, misled: Client, operation: str, cancel: Script, expected: type[ClientFailure]
) -> None:
    rogue.on(START, stream(BROKEN["gap"])).on(CANCEL, cancel)
    _, result = await outcome(misled, run(operation=operation))
    assert isinstance(result, Failed)
    assert (type(result.failure), result.uncertain) == (expected, True)


async def test_a_fault_of_a_job_that_had_completed_is_a_completed_job(rogue: Rogue, misled: Client) -> None:
    rogue.on(START, stream(BROKEN["gap"])).on(CANCEL, answer(view("completed")))
    assert (await outcome(misled, run()))[1] == Completed(action=run(), output=DONE)


async def test_events_before_the_fault_are_handed_on(rogue: Rogue, misled: Client) -> None:
    rogue.on(START, stream(STARTED + frame(1) + frame(3)))
    events = misled.stream(run())
    assert [(await anext(events)).event for _ in range(2)] == ["started", "chunk"]
    with pytest.raises(InvalidStream):
        await anext(events)


def test_many_events_in_one_piece_are_more_than_a_frame_may_have() -> None:
    body = b"".join(frame(number, data={"content": "x" * 100_000}) for number in range(20))
    reader = EventReader(first=0, max_bytes=len(body))
    reader.feed(body)
    assert len(reader.events) == 20
    with pytest.raises(AboveBound):
        reader.feed(b":")


def test_a_frame_of_exactly_the_bound() -> None:
    envelope = len(frame(0, "completed", {"raw": ""})) - 2
    fits = frame(0, "completed", {"raw": "x" * (MAX_FRAME_BYTES - envelope)})
    EventReader(first=0, max_bytes=1 << 22).feed(fits)
    with pytest.raises(AboveBound):
        EventReader(first=0, max_bytes=1 << 22).feed(fits.replace(b"xx", b"xxx", 1))


def test_a_hundred_thousand_events_and_no_more() -> None:
    reader = EventReader(first=0, max_bytes=1 << 26)
    reader.feed(b"".join(frame(number) for number in range(MAX_EVENTS)))
    with pytest.raises(AboveBound, match="more than"):
        reader.feed(frame(MAX_EVENTS, "completed"))


def test_a_retry_that_is_no_number_is_ignored() -> None:
    reader = EventReader(first=0, max_bytes=1 << 20)
    reader.feed(b"retry: soon\n\nretry: 5\n\n")
    assert (reader.retry_ms, reader.kept_alive) == (5, True)
    with pytest.raises(Malformed):
        reader.feed(b"data: 1\n\n")


# --- taking up again -------------------------------------------------------------------------------------------------


async def reset_after(wire: Wire, body: bytes) -> None:
    await wire.head()
    await wire.send(body)
    wire.reset()


HEAD = b"retry: 1\n\n" + STARTED + frame(1)
BREAKS: dict[str, Script] = {
    "closed": stream(HEAD),
    "closed inside a frame": stream(HEAD + COMPLETED[:-20]),
    "reset": lambda wire: reset_after(wire, HEAD),
    "silent": open_stream(HEAD),
}


@pytest.mark.parametrize("broken", BREAKS.values(), ids=BREAKS)
async def test_a_broken_stream_is_taken_up_behind_the_last_event(rogue: Rogue, misled: Client, broken: Script) -> None:
    rogue.on(START, broken).on(EVENTS, break_off, refuse(503), stream(COMPLETED))
    chunks, result = await outcome(misled, run())
    assert [chunk.event.event for chunk in chunks] == NAMES
    assert isinstance(result, Completed)
    assert rogue.lines() == [START, EVENTS, EVENTS, EVENTS], "the start is sent once"
    for request in rogue.requests[1:]:
        assert (request.target, request.headers.get("last-event-id")) == ("/jobs/a/events?cursor=2", "1")


async def test_progress_gives_the_attempts_back(rogue: Rogue, misled: Client) -> None:
    count = 12
    rogue.on(START, stream(STARTED))
    rogue.on(EVENTS, *(stream(frame(number)) for number in range(1, count)), stream(frame(count, "completed")))
    chunks, _ = await outcome(misled, run())
    assert [chunk.event.sequence for chunk in chunks] == list(range(count + 1))


@pytest.mark.parametrize(
    ("again", "operation", "expected", "retryable", "uncertain"),
    [
        (stream(), "run", InvalidStream, False, True),
        (stream(), "knowledge_query", InvalidStream, True, False),
        (break_off, "run", TransportFailed, False, True),
        (break_off, "knowledge_query", TransportFailed, True, False),
        (refuse(503), "run", RemoteTemporary, False, True),
    ],
)
async def test_taking_up_again_has_an_end(
    rogue: Rogue, misled: Client, again: Script, operation: str, expected: type[ClientFailure], retryable: bool,
    uncertain: bool,
) -> None:  # fmt: skip
    rogue.on(START, stream(STARTED)).on(EVENTS, again).on(CANCEL, answer(view("cancelled")))
    _, result = await outcome(misled, run(operation=operation))
    assert isinstance(result, Failed)
    failure = result.failure
    assert (type(failure), failure.retryable, failure.uncertain) == (expected, retryable, uncertain)
    assert rogue.lines().count(EVENTS) == 3


async def test_a_job_that_vanished_leaves_its_action_uncertain(rogue: Rogue, misled: Client) -> None:
    rogue.on(START, stream(STARTED)).on(EVENTS, refuse(404))
    _, result = await outcome(misled, run())
    assert isinstance(result, Failed)
    assert (result.failure.category, result.failure.uncertain) == ("permanent", True)


async def test_a_stream_that_goes_back_is_refused_after_taking_up_again_too(rogue: Rogue, misled: Client) -> None:
    rogue.on(START, stream(STARTED + frame(1))).on(EVENTS, stream(GOOD)).on(CANCEL, answer(view("cancelled")))
    _, result = await outcome(misled, run())
    assert isinstance(result, Failed)
    assert isinstance(result.failure, InvalidStream)


async def test_a_start_without_an_answer_is_looked_for_and_not_sent_again(rogue: Rogue, misled: Client) -> None:
    rogue.on(START, break_off).on(EVENTS, stream(GOOD))
    _, result = await outcome(misled, run())
    assert isinstance(result, Completed)
    assert rogue.lines() == [START, EVENTS]
    assert rogue.requests[1].target == "/jobs/a/events"


@pytest.mark.parametrize(("operation", "uncertain"), [("run", True), ("knowledge_query", False)])
async def test_a_start_without_an_answer_and_without_a_job_is_uncertain(
    rogue: Rogue, misled: Client, operation: str, uncertain: bool
) -> None:
    rogue.on(START, break_off)
    _, result = await outcome(misled, run(operation=operation))
    assert isinstance(result, Failed)
    assert isinstance(result.failure, TransportFailed)
    assert (result.uncertain, result.failure.retryable) == (uncertain, not uncertain)


async def test_a_server_that_never_keeps_alive_may_be_silent(rogue: Rogue, misled: Client) -> None:
    """The reference sends no comments: silence, longer than the stall timeout, says nothing about its connection."""
    go = asyncio.Event()
    rogue.on(START, open_stream(STARTED, until=go, then=frame(1) + COMPLETED))
    async with misled.invoke(run()) as invocation:
        task = asyncio.create_task(invocation.result())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await asyncio.shield(task)
        go.set()
        assert isinstance(await task, Completed)
    assert rogue.lines() == [START]


async def test_a_server_that_does_not_close_after_the_terminal_event_is_not_waited_for(
    rogue: Rogue, misled: Client
) -> None:
    rogue.on(START, open_stream(GOOD))
    async with asyncio.timeout(10):
        assert isinstance((await outcome(misled, run()))[1], Completed)


# --- following -------------------------------------------------------------------------------------------------------


async def names(events: AsyncIterator[Event]) -> list[str]:
    return [event.event async for event in events]


async def test_following_from_a_cursor(rogue: Rogue, misled: Client) -> None:
    rogue.on(EVENTS, stream(frame(1)), stream(COMPLETED))
    assert await names(misled.follow("a", cursor=1)) == ["chunk", "completed"]
    assert [request.target for request in rogue.requests] == ["/jobs/a/events?cursor=1", "/jobs/a/events?cursor=2"]


async def test_behind_the_end_of_an_ended_job_there_is_nothing(rogue: Rogue, misled: Client) -> None:
    rogue.on(EVENTS, stream()).on("GET /jobs/a", answer(view("completed")))
    assert await names(misled.follow("a", cursor=3)) == []


async def test_an_empty_stream_of_a_running_job_is_taken_up_again(rogue: Rogue, misled: Client) -> None:
    rogue.on(EVENTS, stream(), stream(COMPLETED)).on("GET /jobs/a", answer(view("running", event_count=2)))
    assert await names(misled.follow("a", cursor=2)) == ["completed"]


@pytest.mark.parametrize(
    ("told", "uncertain"),
    [
        ({}, True),
        ({"uncertain_outcome": False}, False),
        ({"uncertain_outcome": True}, True),
        ({"uncertain_outcome": 1}, True),
    ],
)
async def test_a_failed_action_says_itself_whether_it_is_uncertain(
    rogue: Rogue, misled: Client, told: dict[str, Any], uncertain: bool
) -> None:
    details = {"status": "failed", "error_type": "ValueError", **told}
    rogue.on(START, stream(STARTED + frame(1, "failed", details)))
    chunks, result = await outcome(misled, run())
    assert chunks[-1].kind is ChunkKind.ERROR
    assert isinstance(result, Failed)
    assert isinstance(result.failure, ExecutionFailed)
    assert (result.failure.code, result.failure.category) == ("connector.crewai.execution_failed", "connector")
    assert (result.failure.details, result.failure.retryable, result.uncertain) == (details, False, uncertain)


async def test_chunks_wait_for_their_reader_and_are_dropped_without_one(rogue: Rogue, misled: Client) -> None:
    count = 2000
    body = b"".join(frame(number, data={"content": "x" * 500}) for number in range(count)) + frame(count, "completed")
    rogue.on(START, stream(body))
    async with misled.invoke(run()) as invocation:
        assert isinstance(await invocation.result(), Completed)
    async with misled.invoke(run()) as invocation:
        waiting = asyncio.create_task(invocation.result())
        seen = [chunk.event.sequence async for chunk in invocation]
        assert isinstance(await waiting, Completed)
    assert seen == sorted(seen)
    async with misled.invoke(run()) as invocation:
        assert [chunk.event.sequence async for chunk in invocation] == list(range(count + 1))
    async with misled.invoke(run()) as invocation:
        async for _ in invocation:
            break
        assert isinstance(await invocation.result(), Completed)
