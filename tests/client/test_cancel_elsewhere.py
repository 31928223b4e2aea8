"""The matrix of cancellation against servers that prove nothing, as the reference does not, or that answer nonsense."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from supervisor.client import Cancelled, CancelUnconfirmed, Client, Completed, ExecutionFailed, Failed, Result
from tests.client.conftest import action
from tests.client.rogue import (
    COMPLETED,
    DONE,
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
    say_nothing,
    stream,
    view,
)

START = "POST /jobs/stream"
CANCEL = "POST /jobs/a/cancel"
EVENTS = "GET /jobs/a/events"
UNAVAILABLE = {"code": "stop_unconfirmed", "detail": "it goes on", "status": 503}


async def cancelled(client: Client, rogue: Rogue, operation: str = "run") -> Result:
    """Start, see the first event, cancel."""
    async with client.invoke(action(action_id="a", operation=operation)) as invocation:
        async for _ in invocation:
            break
        return await invocation.cancel()


def said(result: Result) -> tuple[str, Any]:
    """The kind of a result and what it claims."""
    match result:
        case Cancelled():
            return "cancelled", result.remote_stop_confirmed
        case Completed():
            return "completed", result.output
        case Failed():
            return type(result.failure).__name__, result.uncertain


UNCONFIRMED = ("CancelUnconfirmed", True)
ANSWERS: dict[str, tuple[str, Script, tuple[str, Any]]] = {
    "the reference: cancelled, no evidence": ("run", answer(view("cancelled")), ("cancelled", False)),
    "evidence that confirms": (
        "run", answer(view("cancelled", stop=evidence(confirmed=True))), ("cancelled", True),
    ),
    "evidence that does not": (
        "run", answer(view("cancelled", stop=evidence(confirmed=False))), ("cancelled", False),
    ),
    "completed first": ("run", answer(view("completed")), ("completed", DONE)),
    "still running": ("run", answer(view("running"), 202), UNCONFIRMED),
    "running, as 200": ("run", answer(view("running")), UNCONFIRMED),
    "the record of another job": (
        "run", answer(view("cancelled", action_id="b", stop=evidence(confirmed=True))), UNCONFIRMED,
    ),
    "not a record": ("run", answer({"ok": True}), UNCONFIRMED),
    "an empty 200": ("run", refuse(200), UNCONFIRMED),
    "another 2xx without a body": ("run", refuse(204), UNCONFIRMED),
    "not JSON": ("run", stream(b"<html>"), UNCONFIRMED),
    "no bool": ("run", answer(view("cancelled", stop=evidence(confirmed=True) | {"confirmed": "yes"})), UNCONFIRMED),
    "stop_unconfirmed": ("run", refuse(503, UNAVAILABLE), UNCONFIRMED),
    "5xx with a body": ("run", refuse(500, {"detail": "x"}), UNCONFIRMED),
    "5xx without a body": ("run", refuse(502), UNCONFIRMED),
    "401": ("run", refuse(401), UNCONFIRMED),
    "404": ("run", refuse(404), UNCONFIRMED),
    "redirect": ("run", refuse(307, None, "Location: /elsewhere"), UNCONFIRMED),
    "broken off": ("run", break_off, UNCONFIRMED),
    "no answer": ("run", say_nothing, UNCONFIRMED),
    "the reference: train is not cancelled": ("train", refuse(409, {"detail": "no"}), UNCONFIRMED),
    "the reference: a query is not cancelled": ("knowledge_query", refuse(409, {"detail": "no"}), ("cancelled", False)),
    "a query whose cancel is broken off": ("knowledge_query", break_off, ("cancelled", False)),
}  # fmt: skip


@pytest.mark.parametrize(("operation", "script", "expected"), ANSWERS.values(), ids=ANSWERS)
async def test_an_answer_confirms_no_more_than_its_evidence(
    rogue: Rogue, misled: Client, operation: str, script: Script, expected: tuple[str, Any]
) -> None:
    rogue.on(START, open_stream(STARTED)).on(CANCEL, script)
    async with asyncio.timeout(20):
        result = await cancelled(misled, rogue, operation)
    assert said(result) == expected
    assert result.action == action(action_id="a", operation=operation)
    if isinstance(result, Cancelled):
        assert result.uncertain == (operation == "run")
        left = operation == "knowledge_query"
        assert (result.provider_effect, result.completion_unobserved) == ("read_only" if left else None, left)
    body = next(request for request in rogue.requests if request.line == CANCEL).json()
    assert body == {"crew_id": "crew", "action_id": "a", "reason": "cancelled by the caller"}


async def test_passing_trouble_is_tried_again(rogue: Rogue, misled: Client) -> None:
    """A cancel may be repeated: it joins the stop under way."""
    stopped = answer(view("cancelled", stop=evidence(confirmed=True)))
    rogue.on(START, open_stream(STARTED)).on(CANCEL, break_off, refuse(503), stopped)
    assert said(await cancelled(misled, rogue)) == ("cancelled", True)


async def test_a_failed_record_is_asked_for_its_last_event(rogue: Rogue, misled: Client) -> None:
    details = {"status": "failed", "error_type": "Boom", "uncertain_outcome": True}
    event = {"event": "failed", "sequence": 2, "data": details}
    page = {"action_id": "a", "cursor": 2, "next_cursor": 3, "status": "failed", "events": [event]}
    rogue.on(START, open_stream(STARTED)).on(CANCEL, answer(view("failed"))).on(EVENTS, answer(page))
    result = await cancelled(misled, rogue)
    assert isinstance(result, Failed)
    assert isinstance(result.failure, ExecutionFailed)
    assert result.failure.details == details
    rogue.on(EVENTS, refuse(500))
    result = await cancelled(misled, rogue)
    assert isinstance(result, Failed)
    assert isinstance(result.failure, ExecutionFailed)
    assert (result.failure.details, result.uncertain) == ({"status": "failed"}, True)


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (COMPLETED, ("completed", DONE)),
        (frame(2, "cancelled", {"status": "cancelled"}), ("cancelled", False)),
        (frame(2, "cancelled", {"status": "cancelled", "stop": evidence(confirmed=True)}), ("cancelled", True)),
        (frame(2, "cancelled", {"status": "cancelled", "stop": "yes"}), ("cancelled", False)),
        (frame(2, "failed", {}), ("ExecutionFailed", True)),
    ],
)
@pytest.mark.parametrize("asked", [say_nothing, refuse(503, UNAVAILABLE), answer(view("running"), 202)])
async def test_a_terminal_event_decides_while_the_cancel_waits(
    rogue: Rogue, misled: Client, last: bytes, expected: tuple[str, Any], asked: Script
) -> None:
    go = asyncio.Event()
    rogue.on(START, open_stream(STARTED, frame(1), until=go, then=last)).on(CANCEL, asked)
    async with misled.invoke(action(action_id="a")) as invocation:
        async for _ in invocation:
            break
        cancelling = asyncio.create_task(invocation.cancel())
        await rogue.asked(CANCEL)
        go.set()
        assert said(await cancelling) == expected


async def test_a_spoiled_stream_does_not_end_a_cancel(rogue: Rogue, misled: Client) -> None:
    go, dropped, stopped = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def spoiled(wire: Wire) -> None:
        await wire.head()
        await wire.send(STARTED)
        await go.wait()
        await wire.send(frame(7))
        await wire.gone()
        dropped.set()

    async def stop(wire: Wire) -> None:
        await stopped.wait()
        await wire.json(view("cancelled", stop=evidence(confirmed=True)))

    rogue.on(START, spoiled).on(CANCEL, stop)
    async with misled.invoke(action(action_id="a")) as invocation:
        async for _ in invocation:
            break
        cancelling = asyncio.create_task(invocation.cancel())
        await rogue.asked(CANCEL)
        go.set()
        await dropped.wait()
        stopped.set()
        assert said(await cancelling) == ("cancelled", True)


async def test_a_start_that_broke_off_is_still_asked_about(rogue: Rogue, misled: Client) -> None:
    """It may have been admitted: the cancel is sent once more after it broke, and then nothing is known."""
    go = asyncio.Event()

    async def start(wire: Wire) -> None:
        await go.wait()
        wire.reset()

    rogue.on(START, start)
    async with misled.invoke(action(action_id="a")) as invocation:
        cancelling = asyncio.create_task(invocation.cancel())
        await rogue.asked(START)
        await rogue.asked(CANCEL)
        go.set()
        result = await cancelling
    assert said(result) == UNCONFIRMED
    assert rogue.lines().count(CANCEL) == 2
    assert isinstance(result, Failed)
    assert isinstance(result.failure, CancelUnconfirmed)
    assert (result.failure.category, result.failure.retryable) == ("temporary", False)


# --- operations about another job ------------------------------------------------------------------------------------

ABOUT = {"run_action_id": "a"}


@pytest.mark.parametrize(("operation", "line"), [("status", "GET /jobs/a"), ("events", EVENTS)])
async def test_a_read_that_is_never_answered_is_left(rogue: Rogue, misled: Client, operation: str, line: str) -> None:
    rogue.on(line, say_nothing)
    async with misled.invoke(action(operation=operation, given=ABOUT)) as invocation:
        await rogue.asked(line)
        result = await invocation.cancel()
    assert (said(result), result.uncertain) == (("cancelled", False), False)
    assert isinstance(result, Cancelled)
    assert (result.provider_effect, result.completion_unobserved) == ("read_only", True)
    assert set(rogue.lines()) == {line}


async def test_events_that_never_end_are_left(rogue: Rogue, misled: Client) -> None:
    rogue.on(EVENTS, open_stream(STARTED))
    async with misled.invoke(action(operation="events", given=ABOUT)) as invocation:
        async for _ in invocation:
            break
        result = await invocation.cancel()
    assert isinstance(result, Cancelled)
    assert (result.remote_stop_confirmed, result.stream_detached) == (False, True)
    assert set(rogue.lines()) == {EVENTS}


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (answer(view("cancelled")), ("completed", view("cancelled"))),
        (refuse(503, UNAVAILABLE), ("RemoteTemporary", True)),
        (refuse(404), ("RemoteRejected", False)),
        (refuse(401), ("AuthenticationFailed", False)),
        (stream(b"<html>"), ("InvalidStream", True)),
        (break_off, ("TransportFailed", True)),
    ],
)
async def test_an_explicit_cancel_is_an_action_with_a_result_of_its_own(
    rogue: Rogue, misled: Client, script: Script, expected: tuple[str, Any]
) -> None:
    """Its output is the record, whatever that says; a failure is one of the mapping's."""
    rogue.on(CANCEL, script)
    async with misled.invoke(action(operation="cancel", given=ABOUT)) as invocation:
        result = await invocation.result()
    assert said(result) == expected
    assert rogue.lines() == [CANCEL], "sent once"
