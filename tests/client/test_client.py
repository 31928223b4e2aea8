"""Every method of the client against the real server, and what a server of the reference's kind makes of it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from supervisor.client import (
    Action,
    Cancelled,
    Client,
    Completed,
    Decision,
    Effect,
    ExecutionFailed,
    Failed,
    InvalidRequest,
    InvalidStream,
    JobDecision,
    RemoteRejected,
    RemoteTemporary,
    TransportFailed,
)
from tests.client.conftest import LONG, QUICK, action
from tests.client.relay import Relay, Rule
from tests.client.rogue import DONE, Rogue, Wire, answer, break_off, frame, refuse, stream, view
from tests.support.cases import REGISTRY
from tests.support.gates import Gate
from tests.support.server import TOKEN, Server

START = "POST /jobs/stream"
GIVEN: dict[str, dict[str, Any]] = {
    "run": {"text": "é 😀", "number": 1.5},
    "batch_run": {"inputs": [{}, {}]},
    "replay": {"task_id": "t"},
    "train": {"n_iterations": 1, "artifact_name": "client.pkl"},
    "test": {"n_iterations": 1, "eval_llm": "judge"},
    "knowledge_query": {"query": ["q"]},
    "memory_reset": {"command_type": "all"},
}


@pytest.mark.parametrize("operation", GIVEN)
async def test_every_operation_by_every_way_with_one_output(client: Client, operation: str) -> None:
    asked = action("witness", operation, GIVEN[operation], idempotency_key=f"Schlüssel {operation}")
    started = await client.start(asked)
    assert isinstance(started, Completed)
    async with client.invoke(asked) as invocation:
        names = [chunk.event.event async for chunk in invocation]
        assert await invocation.result() == started, "an exact repeat, by a stream"
    assert names == ["started", "completed"]
    job = await client.submit(asked)
    assert (job.status, job.ended, job.output, job.operation) == ("completed", True, started.output, operation)
    assert job == await client.status(asked.action_id) == await client.wait(asked.action_id)
    assert job.stop is not None
    assert job.stop.confirmed
    page = await client.events(asked.action_id, cursor=1)
    assert [(event.event, event.data) for event in page.events] == [("completed", started.output)]
    assert (page.cursor, page.next_cursor, page.status) == (1, 2, "completed")


async def test_a_failed_action_is_a_result_with_its_details(client: Client) -> None:
    asked = action("failing")
    for _ in range(2):
        result = await client.start(asked)
        assert isinstance(result, Failed)
        assert isinstance(result.failure, ExecutionFailed)
        assert result.failure.action == asked
        details = result.failure.details
        assert (details["status"], details["error_type"], result.uncertain) == ("failed", "ValueError", True)
    assert (await client.submit(asked)).status == "failed"
    never = await client.start(action("factory_raises"))
    assert isinstance(never, Failed)
    assert not never.uncertain, "nothing was dispatched"


async def test_an_action_that_timed_out_is_failed(client: Client) -> None:
    result = await client.start(action("sleeper", timeout_ms=200))
    assert isinstance(result, Failed)
    assert isinstance(result.failure, ExecutionFailed)
    assert result.failure.details["error_type"] == "TimeoutError"


async def test_a_waiting_start_of_a_job_that_another_cancels_is_cancelled(client: Client, tmp_path: Path) -> None:
    gate = Gate(tmp_path, "gate")
    asked = action("turnstile", given=gate.input)
    waiting = asyncio.create_task(client.start(asked))
    await asyncio.to_thread(gate.wait, "began")
    job = await client.cancel(asked.action_id, "turnstile", reason="enough")
    for result in (await waiting, await client.start(asked)):
        assert isinstance(result, Cancelled)
        assert (result.stop, result.remote_stop_confirmed, result.uncertain) == (job.stop, True, True)


async def test_an_asynchronous_start_returns_once_it_is_durable_and_wait_waits(client: Client, tmp_path: Path) -> None:
    gate = Gate(tmp_path, "gate")
    asked = action("turnstile", given=gate.input)
    job = await client.submit(asked)
    assert (job.status, job.output, job.ended) == ("running", None, False)
    await asyncio.to_thread(gate.wait, "began")
    running = await client.submit(asked)
    assert (running.phase, running.worker is not None) == ("running", True)
    waiting = asyncio.create_task(client.wait(asked.action_id, crew_id="turnstile"))
    await asyncio.sleep(0)
    gate.release()
    assert (await waiting).status == "completed"


async def test_a_stream_says_whether_it_repeats(client: Client) -> None:
    asked = action("streaming", given={"chunks": 3})
    for replayed in (False, True):
        async with client.stream(asked) as events:
            await events.open()
            assert (events.admitted, events.replayed) == (True, replayed)
            assert [event.sequence async for event in events] == list(range(5))
            assert events.last is not None
            assert events.last.event == "completed"


async def test_a_stream_that_is_cut_anywhere_is_whole(server: Server, relay: Relay, through: Client) -> None:
    """Cut inside the head, inside frames and between them, and taken up each time behind the last event."""
    asked = action("flood", given={"chunks": 40})
    whole = [event async for event in through.stream(asked)]
    relay.on(START, Rule(cut=600))
    relay.on(f"GET /jobs/{asked.action_id}/events", *(Rule(cut=cut) for cut in (0, 700, 1200, 100, 2000, 1999)))
    again = [event async for event in through.stream(asked)]
    assert again == whole
    assert len(whole) == 42
    resumed = [request for request in relay.requests if request.method == "GET"]
    assert len(resumed) >= 6
    assert all("last-event-id" in request.headers for request in resumed)


async def test_following_from_any_cursor(client: Client) -> None:
    asked = action("streaming", given={"chunks": 2})
    assert isinstance(await client.start(asked), Completed)
    for cursor in range(5):
        events = client.follow(asked.action_id, cursor=cursor, crew_id="streaming")
        assert [event.sequence async for event in events] == list(range(cursor, 4))
    with pytest.raises(RemoteRejected) as caught:
        await anext(client.follow(asked.action_id, cursor=5))
    assert caught.value.refusal is not None
    assert caught.value.refusal.code == "cursor_invalid"


BIG = 3 << 20


async def test_an_output_too_large_for_a_stream_is_read(client: Client, relay: Relay, through: Client) -> None:
    asked = action("big_output", given={"bytes": BIG})
    async with through.invoke(asked) as invocation:
        chunks = [chunk async for chunk in invocation]
        result = await invocation.result()
    assert chunks[-1].event.data["output_omitted"] is True
    assert isinstance(result, Completed)
    assert result.output["raw"] == "x" * BIG
    relay.on(f"GET /jobs/{asked.action_id}/events", Rule(spoil=lambda data: data.replace(b"xxxx", b"xxyx", 1)))
    async with through.invoke(asked) as invocation:
        spoiled = await invocation.result()
    assert isinstance(spoiled, Failed), "its digest is not the announced one"
    assert isinstance(spoiled.failure, InvalidStream)


async def test_an_output_that_looks_like_an_omitted_one_is_taken_as_it_is(client: Client) -> None:
    note = {"output_omitted": True, "sha256": "0" * 64, "bytes": 1}
    event = frame(0, "completed", note)
    page = {"action_id": "a", "cursor": 0, "next_cursor": 1, "status": "completed"}
    async with Rogue() as rogue, Client(rogue.url, retry=QUICK) as misled:
        rogue.on(START, stream(event))
        rogue.on("GET /jobs/a/events", answer(page | {"events": [{"event": "completed", "sequence": 0, "data": note}]}))
        async with misled.invoke(action(action_id="a")) as invocation:
            assert await invocation.result() == Completed(action=action(action_id="a"), output=note)


async def test_the_list_is_paged_and_filtered(client: Client) -> None:
    ids = [action("echo").action_id for _ in range(5)]
    for action_id in ids:
        await client.start(Action(action_id=action_id, crew_id="echo"))
    seen, cursor = [], None
    while True:
        page = await client.list_jobs(crew_id="echo", operation="run", cursor=cursor, limit=2)
        seen += [job.action_id for job in page.jobs]
        cursor = page.next_cursor
        if cursor is None:
            break
    assert seen[:5] == ids[::-1]
    assert (await client.list_jobs(crew_id="echo", limit=1)).jobs[0].status == "completed"
    with pytest.raises(RemoteRejected):
        await client.list_jobs(limit=0)


async def test_an_archived_action_stays_fenced(client: Client) -> None:
    asked = action("echo")
    assert isinstance(await client.start(asked), Completed)
    archived = await client.archive(asked.action_id)
    assert (archived.archived, archived.action_id) == (True, asked.action_id)
    result = await client.start(asked)
    assert isinstance(result, Failed)
    assert isinstance(result.failure, RemoteRejected)
    assert result.failure.refusal is not None
    assert (result.failure.refusal.status, result.failure.refusal.code) == (410, "action_archived")


async def test_records_of_another_crew_are_unknown(client: Client) -> None:
    asked = action("echo")
    await client.start(asked)
    for ask in (client.status, client.events, client.wait):
        with pytest.raises(RemoteRejected) as caught:
            await ask(asked.action_id, crew_id="instant")
        assert caught.value.action_id == asked.action_id
    with pytest.raises(RemoteRejected):
        await client.cancel(asked.action_id, "instant")


async def test_a_cancel_may_be_given_up_on(client: Client, tmp_path: Path) -> None:
    """``wait_s=0``: an answer at once, whose ``stop`` claims nothing yet unless it is there."""
    gate = Gate(tmp_path, "gate")
    asked = action("turnstile", given=gate.input)
    await client.submit(asked)
    await asyncio.to_thread(gate.wait, "began")
    early = await client.cancel(asked.action_id, "turnstile", wait_s=0)
    assert early.ended == (early.stop is not None)
    late = await client.wait(asked.action_id)
    assert late.stop is not None
    assert (late.status, late.stop.confirmed) == ("cancelled", True)


async def test_health(client: Client) -> None:
    health = await client.health()
    assert (health.status, health.durable_journal) == ("ready", True)
    assert {"echo", "witness"} <= set(health.crews)
    assert health.stop_method is not None


async def test_a_waiting_client_outlives_a_restart(tmp_path: Path) -> None:
    with Server(tmp_path / "server", registry=REGISTRY) as server:
        async with Relay(server.port) as relay, Client(relay.url, token=TOKEN, retry=LONG) as client:
            asked = action("sleeper")
            await client.submit(asked)
            waiting = asyncio.create_task(client.wait(asked.action_id))
            await relay.asked(f"GET /jobs/{asked.action_id}/events")
            server.kill()
            await asyncio.to_thread(server.restart)
            relay.port = server.port
            job = await waiting
    assert job.status == "failed"
    assert job.stop is not None


# --- a server of the reference's kind --------------------------------------------------------------------------------


async def test_a_record_of_six_fields(rogue: Rogue, misled: Client) -> None:
    rogue.on("GET /jobs/a", answer(view("completed")))
    job = await misled.status("a")
    assert (job.status, job.output, job.phase, job.stop, job.uncertain_outcome) == ("completed", DONE, None, None, None)


async def test_a_server_that_does_not_know_asynchronous_starts(rogue: Rogue, misled: Client) -> None:
    rogue.on("POST /jobs", answer(DONE)).on("GET /jobs/a", answer(view("completed")))
    assert (await misled.submit(action(action_id="a"))).status == "completed"
    assert rogue.requests[0].headers["prefer"] == "respond-async"


async def test_a_failed_start_of_the_reference_is_only_known_to_be_uncertain(rogue: Rogue, misled: Client) -> None:
    rogue.on("POST /jobs", refuse(502, {"detail": "crew failed"}))
    result = await misled.start(action(action_id="a"))
    assert isinstance(result, Failed)
    assert (type(result.failure), result.uncertain) == (RemoteTemporary, True)
    assert rogue.lines() == ["POST /jobs"]


@pytest.mark.parametrize("status", ["completed", "failed", "cancelled"])
async def test_wait_believes_an_empty_stream_only_with_the_record(rogue: Rogue, misled: Client, status: str) -> None:
    """A job that ends between the look and the stream, whose stream is empty then."""
    record = "GET /jobs/a"
    rogue.on(record, answer(view("running")), answer(view(status))).on("GET /jobs/a/events", stream())
    assert (await misled.wait("a")).status == status


async def test_what_is_sent(rogue: Rogue, misled: Client) -> None:
    rogue.on("POST /jobs", answer(DONE)).on(START, stream(frame(0, "completed", DONE)))
    asked = action("c", "train", {"t": "é"}, action_id="act_1", idempotency_key="ké", timeout_ms=5)
    await misled.start(asked)
    async with misled.invoke(asked) as invocation:
        await invocation.result()
    plain, streamed = rogue.requests
    body = {"crew_id": "c", "action_id": "act_1", "operation": "train", "input": {"t": "é"}, "timeout_ms": 5}
    for request in (plain, streamed):
        assert request.json() == body
        headers = request.headers
        assert (headers["authorization"], headers["idempotency-key"]) == (f"Bearer {TOKEN}", "ké")
        assert (headers["x-aip-action-id"], headers["content-type"]) == ("act_1", "application/json")
        assert headers["accept-encoding"] == "identity"


# --- effects: the shapes alone ---------------------------------------------------------------------------------------

KEY = "ab" * 32
EFFECT: dict[str, Any] = {"key_id": KEY, "state": "unknown", "tool": "pay", "version": 3, "something_new": [1]}


async def test_effects_are_read_leniently(rogue: Rogue, misled: Client) -> None:
    rogue.on("GET /effects", answer({"effects": [EFFECT], "next_cursor": "n"}))
    rogue.on("GET /jobs/a/effects", answer({"effects": [EFFECT]}))
    page = await misled.list_effects(crew_id="crew", cursor="c d")
    assert [(effect.key_id, effect.state, effect.version) for effect in page.effects] == [(KEY, "unknown", 3)]
    assert (page.next_cursor, (await misled.job_effects("a")).next_cursor) == ("n", None)
    assert rogue.requests[0].target == "/effects?crew_id=crew&cursor=c+d"


async def test_a_reconciliation_is_about_the_version_that_was_read(rogue: Rogue, misled: Client) -> None:
    async def show(wire: Wire) -> None:
        await wire.head(200, 'ETag: "3"', content_type="application/json")
        await wire.send(json.dumps(EFFECT).encode())

    rogue.on(f"GET /effects/{KEY}", show)
    rogue.on(f"POST /effects/{KEY}/reconcile", answer(EFFECT | {"state": "settled", "version": 4}), break_off)
    effect = await misled.effect(KEY)
    assert effect.etag == '"3"'
    settled = await misled.reconcile_effect(effect, Decision.SETTLED, actor="me", evidence="bank", receipt={"id": 1})
    assert settled.state == "settled"
    sent = rogue.requests[-1]
    assert sent.headers["if-match"] == '"3"'
    assert sent.json() == {"decision": "settled", "actor": "me", "evidence": "bank", "receipt": {"id": 1}}
    with pytest.raises(Exception, match="broke") as caught:
        await misled.reconcile_effect(effect, Decision.ABANDONED, actor="me", evidence="none")
    assert caught.value.uncertain  # type: ignore[attr-defined]
    unread = msgspec.structs.replace(effect, etag=None)
    assert isinstance(unread, Effect)
    with pytest.raises(InvalidRequest, match="etag"):
        await misled.reconcile_effect(unread, Decision.SETTLED, actor="me", evidence="bank")


async def test_a_log_is_read_and_followed(server: Server, client: Client, tmp_path: Path) -> None:
    gate = Gate(tmp_path, "gate")
    asked = action("turnstile", given=gate.input)
    await client.submit(asked)
    await asyncio.to_thread(gate.wait, "began")
    assert b"".join([piece async for piece in client.log(asked.action_id)]) == b""
    following = asyncio.create_task(collected(client, asked.action_id))
    gate.release()
    await client.wait(asked.action_id)
    assert await following == b""
    with pytest.raises(RemoteRejected) as refused:
        await collected(client, "nobody")
    assert refused.value.refusal is not None
    assert refused.value.refusal.code == "action_unknown"


async def collected(client: Client, action_id: str, seen: list[bytes] | None = None) -> bytes:
    pieces = [] if seen is None else seen
    async for piece in client.log(action_id, follow=True):
        pieces.append(piece)
    return b"".join(pieces)


async def test_a_log_that_breaks_off_is_no_whole_log(misled: Client, rogue: Rogue) -> None:
    async def half(wire: Wire) -> None:
        await wire.head(200, "Content-Length: 100", content_type="text/plain")
        await wire.send(b"stdout half")

    rogue.on("GET /jobs/a/log", half)
    seen: list[bytes] = []
    with pytest.raises(TransportFailed):
        await collected(misled, "a", seen)
    assert b"".join(seen) == b"stdout half"


async def test_a_decision_is_recorded_and_is_in_the_evidence(client: Client) -> None:
    asked = action("failing")
    await client.start(asked)
    decided = await client.reconcile(asked.action_id, JobDecision.APPLIED, actor="ops", evidence="statement")
    assert decided.reconciliation is not None
    assert (decided.reconciliation.decision, decided.uncertain_outcome) == (JobDecision.APPLIED, True)
    evidence = await client.evidence(asked.action_id)
    assert (evidence.record, evidence.reconciliations) == (decided, (decided.reconciliation,))
    assert [entry.act for entry in evidence.audit][-1] == "reconciled"
    done = action("instant")
    await client.start(done)
    with pytest.raises(RemoteRejected, match="outcome_certain"):
        await client.reconcile(done.action_id, JobDecision.APPLIED, actor="ops", evidence="statement")


async def test_a_drain_keeps_starts_out_without_doubt(client: Client) -> None:
    assert (await client.drain()).draining
    result = await client.start(action("instant"))
    assert isinstance(result, Failed)
    assert isinstance(result.failure, RemoteTemporary)
    assert not result.uncertain
    assert not (await client.undrain()).draining
    assert isinstance(await client.start(action("instant")), Completed)
