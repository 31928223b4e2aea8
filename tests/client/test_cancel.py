"""The matrix of cancellation (wire contract, 16.6) against the real server: what is reported is what is true."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from supervisor.client import (
    Action,
    Cancelled,
    CancelUnconfirmed,
    Client,
    Completed,
    ExecutionFailed,
    Failed,
    InvalidRequest,
    InvalidStream,
    RemoteRejected,
    TransportFailed,
)
from tests.client.conftest import LONG, QUICK, SETTINGS, action
from tests.client.relay import Relay, Rule
from tests.support import procs, world
from tests.support.cases import REGISTRY, wait_for_phase
from tests.support.gates import Gate
from tests.support.server import TOKEN, Server

START = "POST /jobs/stream"
BEATING: dict[str, Any] = {
    "run": lambda beats: {"heartbeat": beats},
    "batch_run": lambda beats: {"inputs": [{"heartbeat": beats}]},
    "replay": lambda beats: {"task_id": "t", "inputs": {"heartbeat": beats}},
    "train": lambda beats: {"n_iterations": 1, "artifact_name": "x.pkl", "inputs": {"heartbeat": beats}},
    "test": lambda beats: {"n_iterations": 1, "eval_llm": "judge", "inputs": {"heartbeat": beats}},
    "knowledge_query": lambda beats: {"query": [beats]},
    "memory_reset": lambda beats: {"command_type": "all"},
}


async def working(server: Server, asked: Action, beats: Path) -> world.Work:
    """Wait until the Action's daemon beats."""
    return await asyncio.to_thread(world.observe, server.client(), asked.action_id, beats)


async def in_phase(server: Server, asked: Action, phase: str) -> None:
    await asyncio.to_thread(wait_for_phase, server.client(), asked.action_id, phase)


@pytest.mark.parametrize("operation", BEATING)
async def test_during_the_stream_the_work_is_gone_before_the_result(
    server: Server, client: Client, operation: str, tmp_path: Path
) -> None:
    """The reference's client stops two of the seven, and takes any 2xx for a proof."""
    beats = server.directory / "beats" if operation == "memory_reset" else tmp_path / "beats"
    beats.unlink(missing_ok=True)
    asked = action("beating", operation, BEATING[operation](str(beats)))
    async with client.invoke(asked) as invocation:
        work = await working(server, asked, beats)
        result = await invocation.cancel("enough")
        assert isinstance(result, Cancelled)
        assert result.stop is not None
        assert world.violations(work, {"confirmed": True, "confirmed_at": result.stop.confirmed_at}) == []
        assert await invocation.result() is result
    assert (result.remote_stop_confirmed, result.uncertain) == (True, operation != "knowledge_query")
    assert result.output["remote_stop_confirmed"] is True
    job = await client.status(asked.action_id)
    assert (job.status, job.stop) == ("cancelled", result.stop)


@pytest.mark.parametrize("operation", BEATING)
async def test_before_the_headers_with_the_start_admitted(
    server: Server, relay: Relay, through: Client, operation: str, tmp_path: Path
) -> None:
    """The reference's client calls nobody here, and the job runs on."""
    beats, never = server.directory / "beats" if operation == "memory_reset" else tmp_path / "beats", asyncio.Event()
    beats.unlink(missing_ok=True)
    relay.on(START, Rule(back=never))
    asked = action("beating", operation, BEATING[operation](str(beats)))
    async with through.invoke(asked) as invocation:
        work = await working(server, asked, beats)
        result = await invocation.cancel()
    assert isinstance(result, Cancelled)
    assert result.stop is not None
    assert result.remote_stop_confirmed
    assert world.violations(work, {"confirmed": True, "confirmed_at": result.stop.confirmed_at}) == []


async def test_before_the_headers_with_the_start_still_on_its_way(relay: Relay, through: Client) -> None:
    """The first cancel finds nothing; it counts from the start's answer on."""
    go = asyncio.Event()
    relay.on(START, Rule(go=go))
    asked = action("sleeper")
    cancel = f"POST /jobs/{asked.action_id}/cancel"
    async with through.invoke(asked) as invocation:
        await relay.asked(START)
        cancelling = asyncio.create_task(invocation.cancel())
        await relay.asked(cancel)
        go.set()
        result = await cancelling
    assert isinstance(result, Cancelled)
    assert result.remote_stop_confirmed
    assert (await through.status(asked.action_id)).status == "cancelled"
    assert [request.line for request in relay.requests].count(cancel) == 2


async def test_before_the_headers_of_a_start_that_is_refused(relay: Relay, through: Client) -> None:
    """What was refused needs no stop, and leaves no doubt."""
    go = asyncio.Event()
    relay.on(START, Rule(go=go))
    asked = action("nobody")
    async with through.invoke(asked) as invocation:
        await relay.asked(START)
        cancelling = asyncio.create_task(invocation.cancel())
        await relay.asked(f"POST /jobs/{asked.action_id}/cancel")
        go.set()
        result = await cancelling
    assert isinstance(result, Failed)
    assert isinstance(result.failure, RemoteRejected)
    assert (result.uncertain, result.failure.action) == (False, asked)


async def test_a_job_that_completed_first_is_completed(server: Server, relay: Relay, through: Client) -> None:
    """The reference's client reports it as stopped."""
    relay.on(START, Rule(back=asyncio.Event()))
    asked = action("echo", given={"n": 1})
    async with through.invoke(asked) as invocation:
        await in_phase(server, asked, "done")
        result = await invocation.cancel()
    assert isinstance(result, Completed)
    assert result.output["echo"] == {"n": 1}


async def test_a_job_that_failed_first_is_failed_with_its_details(
    server: Server, relay: Relay, through: Client
) -> None:
    relay.on(START, Rule(back=asyncio.Event()))
    asked = action("failing")
    async with through.invoke(asked) as invocation:
        await in_phase(server, asked, "done")
        result = await invocation.cancel()
    assert isinstance(result, Failed)
    assert isinstance(result.failure, ExecutionFailed)
    assert (result.failure.details["error_type"], result.uncertain) == ("ValueError", True)


async def test_a_result_inside_the_grace_wins(server: Server, client: Client, tmp_path: Path) -> None:
    gate = Gate(tmp_path, "gate")
    asked = action("closer", given=gate.input | {"answers": True})
    gate.release()
    async with client.invoke(asked) as invocation:
        await asyncio.to_thread(gate.wait, "began")
        result = await invocation.cancel()
    job = await client.status(asked.action_id)
    assert isinstance(result, Completed if job.status == "completed" else Cancelled)
    assert job.status == "completed"


async def test_a_queued_job_never_started(server: Server, tmp_path: Path) -> None:
    gate = Gate(tmp_path, "gate")
    with Server(tmp_path / "server", registry=REGISTRY, settings={"max_concurrency": 1}) as narrow:
        async with Client(narrow.url, token=TOKEN, retry=QUICK) as client:
            await client.submit(action("turnstile", given=gate.input))
            await asyncio.to_thread(gate.wait, "began")
            asked = action("echo")
            async with client.invoke(asked) as invocation:
                await in_phase(narrow, asked, "queued")
                result = await invocation.cancel()
            gate.release()
    assert isinstance(result, Cancelled)
    assert result.stop is not None
    assert (result.stop.method, result.remote_stop_confirmed, result.uncertain) == ("never_started", True, False)


async def test_everybody_who_cancels_gets_the_same_result(server: Server, client: Client, tmp_path: Path) -> None:
    asked = action("beating", given={"heartbeat": str(tmp_path / "beats")})
    async with client.invoke(asked) as invocation:
        await working(server, asked, tmp_path / "beats")
        results = await asyncio.gather(*(invocation.cancel() for _ in range(3)), invocation.result())
        assert all(result is results[0] for result in results)
        assert await invocation.cancel() is results[0]
    assert isinstance(results[0], Cancelled)


async def test_a_job_that_another_cancels_says_so_in_its_stream(server: Server, client: Client, tmp_path: Path) -> None:
    asked = action("beating", given={"heartbeat": str(tmp_path / "beats")})
    async with client.invoke(asked) as invocation:
        await working(server, asked, tmp_path / "beats")
        job = await client.cancel(asked.action_id, "beating", reason="mine now")
        result = await invocation.result()
    assert isinstance(result, Cancelled)
    assert result.stop == job.stop
    assert result.remote_stop_confirmed


async def test_a_stop_that_the_server_cannot_prove_is_not_confirmed(tmp_path: Path) -> None:
    """On a server that has lost its teeth; once the work is gone all the same, the stop is confirmed."""
    settings, beats = SETTINGS | {"stop_timeout_s": 0.3}, tmp_path / "beats"
    with Server(tmp_path / "server", registry=REGISTRY, settings=settings, mutant="toothless") as server:
        async with (
            Client(server.url, token=TOKEN, retry=QUICK, cancel_timeout_s=1.5) as hasty,
            Client(server.url, token=TOKEN, retry=QUICK) as patient,
        ):
            asked = action("beating", given={"heartbeat": str(beats)})
            async with hasty.invoke(asked) as first, patient.invoke(asked) as second:
                work = await working(server, asked, beats)
                cancelling = asyncio.create_task(second.cancel())
                result = await first.cancel()
                assert isinstance(result, Failed)
                assert isinstance(result.failure, CancelUnconfirmed)
                assert (result.failure.retryable, result.uncertain, result.failure.action) == (False, True, asked)
                assert not cancelling.done()
                procs.kill(work.pid, work.start_ticks)
                beating = procs.read_beats(beats)[-1]
                procs.kill(beating.pid, beating.start_ticks)
                late = await cancelling
    assert isinstance(late, Cancelled)
    assert late.remote_stop_confirmed


async def test_a_server_that_is_gone_confirms_nothing(tmp_path: Path) -> None:
    beats = tmp_path / "beats"
    with Server(tmp_path / "server", registry=REGISTRY, settings=SETTINGS) as server:
        async with Client(server.url, token=TOKEN, retry=QUICK) as client:
            asked = action("beating", given={"heartbeat": str(beats)})
            async with client.invoke(asked) as invocation:
                await working(server, asked, beats)
                server.kill()
                result = await invocation.cancel()
    assert isinstance(result, Failed)
    assert isinstance(result.failure, CancelUnconfirmed | TransportFailed)
    assert result.uncertain


async def test_a_supervisor_that_was_killed_and_restarted_says_what_became_of_the_job(tmp_path: Path) -> None:
    beats = tmp_path / "beats"
    with Server(tmp_path / "server", registry=REGISTRY, settings=SETTINGS) as server:
        async with Relay(server.port) as relay, Client(relay.url, token=TOKEN, retry=LONG) as client:
            asked = action("beating", given={"heartbeat": str(beats)})
            async with client.invoke(asked) as invocation:
                await working(server, asked, beats)
                server.kill()
                await asyncio.to_thread(server.restart)
                relay.port = server.port
                result = await invocation.result()
    assert isinstance(result, Failed)
    assert isinstance(result.failure, ExecutionFailed)
    assert result.uncertain


def spoil(data: bytes) -> bytes:
    return data.replace(b'"sequence":1,', b'"sequence":7,')


async def test_a_spoiled_stream_stops_the_work_for_certain(
    server: Server, relay: Relay, through: Client, tmp_path: Path
) -> None:
    relay.on(START, Rule(spoil=spoil))
    asked = action("beating_stream", given={"heartbeat": str(tmp_path / "beats")})
    async with through.invoke(asked) as invocation:
        result = await invocation.result()
    assert isinstance(result, Failed)
    assert isinstance(result.failure, InvalidStream)
    assert result.failure.stop is not None
    assert result.failure.stop.confirmed
    assert (await through.status(asked.action_id)).status == "cancelled"


# --- operations about another job ------------------------------------------------------------------------------------


@pytest.fixture
async def running(server: Server, client: Client, tmp_path: Path) -> AsyncIterator[Action]:
    """A job that runs until the end of the test."""
    gate = Gate(tmp_path, "gate")
    asked = action("turnstile", given=gate.input)
    await client.submit(asked)
    await asyncio.to_thread(gate.wait, "began")
    yield asked
    gate.release()
    assert (await client.wait(asked.action_id)).status == "completed", "nothing has touched it"


LEFT = {"remote_stop_confirmed": False, "provider_effect": "read_only"}


async def test_a_status_is_left(relay: Relay, through: Client, running: Action) -> None:
    line = f"GET /jobs/{running.action_id}"
    relay.on(line, Rule(back=asyncio.Event()))
    async with through.invoke(action("turnstile", "status", {"run_action_id": running.action_id})) as invocation:
        await relay.asked(line)
        result = await invocation.cancel()
    assert isinstance(result, Cancelled)
    assert result.output == LEFT | {"completion_unobserved": True}
    assert [request.method for request in relay.requests] == ["GET"]


async def test_events_are_left_before_their_headers(relay: Relay, through: Client, running: Action) -> None:
    line = f"GET /jobs/{running.action_id}/events"
    relay.on(line, Rule(back=asyncio.Event()))
    async with through.invoke(action("turnstile", "events", {"run_action_id": running.action_id})) as invocation:
        await relay.asked(line)
        result = await invocation.cancel()
    assert isinstance(result, Cancelled)
    assert result.output == LEFT | {"completion_unobserved": True}


async def test_events_are_left_during_the_stream(relay: Relay, through: Client, running: Action) -> None:
    async with through.invoke(action("turnstile", "events", {"run_action_id": running.action_id})) as invocation:
        async for chunk in invocation:
            assert chunk.event.event == "started"
            break
        result = await invocation.cancel()
    assert isinstance(result, Cancelled)
    assert result.output == LEFT | {"stream_detached": True}
    assert [request.method for request in relay.requests] == ["GET"]


async def test_a_cancel_of_a_cancel_is_unconfirmed(server: Server, relay: Relay, through: Client) -> None:
    """And the job that it was about is cancelled all the same: that is why it is uncertain."""
    target = action("sleeper")
    await through.submit(target)
    line = f"POST /jobs/{target.action_id}/cancel"
    relay.on(line, Rule(back=asyncio.Event()))
    asked = action("sleeper", "cancel", {"run_action_id": target.action_id, "reason": "why"})
    async with through.invoke(asked) as invocation:
        await relay.asked(line)
        result = await invocation.cancel()
    assert isinstance(result, Failed)
    assert isinstance(result.failure, CancelUnconfirmed)
    assert (result.uncertain, result.failure.action) == (True, asked)
    assert (await through.wait(target.action_id)).status == "cancelled"


async def test_operations_about_another_job_have_their_results(
    server: Server, client: Client, relay: Relay, through: Client
) -> None:
    target = action("sleeper")
    await client.submit(target)
    await in_phase(server, target, "running")
    about = {"run_action_id": target.action_id}
    asked = action("sleeper", "cancel", about | {"reason": "why"}, idempotency_key="Schlüssel")
    async with through.invoke(asked) as invocation:
        cancelled = await invocation.result()
    assert isinstance(cancelled, Completed)
    assert (cancelled.output["status"], cancelled.output["stop"]["confirmed"]) == ("cancelled", True)
    headers = relay.requests[0].headers
    assert (headers["idempotency-key"], headers["x-aip-action-id"]) == ("Schlüssel", asked.action_id)
    async with client.invoke(action("sleeper", "status", about)) as invocation:
        assert await invocation.result() == Completed(action=invocation.action, output=cancelled.output)
    for cursor in (0, 1, 2):
        async with client.invoke(action("sleeper", "events", about | {"cursor": cursor})) as invocation:
            names = [chunk.event.event async for chunk in invocation]
            result = await invocation.result()
        assert names == ["started", "cancelled"][cursor:]
        assert isinstance(result, Cancelled)
        assert (result.remote_stop_confirmed, result.uncertain) == (True, True)
    async with client.invoke(action("echo", "status", about)) as invocation:
        other = await invocation.result()
    assert isinstance(other, Failed), "the record is another crew's"
    assert isinstance(other.failure, RemoteRejected)


# --- leaving ---------------------------------------------------------------------------------------------------------


async def test_leaving_stops_nothing(server: Server, client: Client, tmp_path: Path) -> None:
    gate = Gate(tmp_path, "gate")
    asked = action("turnstile", given=gate.input)
    async with client.invoke(asked) as invocation:
        async for _ in invocation:
            break
        waiting = asyncio.create_task(invocation.result())
        await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="left before its end"):
        await waiting
    gate.release()
    assert (await client.wait(asked.action_id)).status == "completed"


async def test_a_wait_that_is_cut_short_can_be_followed_by_a_cancel(
    server: Server, client: Client, tmp_path: Path
) -> None:
    asked = action("beating", given={"heartbeat": str(tmp_path / "beats")})
    async with client.invoke(asked) as invocation:
        await working(server, asked, tmp_path / "beats")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await invocation.result()
        result = await invocation.cancel("took too long")
    assert isinstance(result, Cancelled)
    assert result.remote_stop_confirmed


async def test_a_cancel_with_an_impossible_reason_is_refused_and_nothing_stops(
    server: Server, client: Client, tmp_path: Path
) -> None:
    gate = Gate(tmp_path, "gate")
    asked = action("turnstile", given=gate.input)
    async with client.invoke(asked) as invocation:
        await asyncio.to_thread(gate.wait, "began")
        for reason in ("x" * 2049, "a\nb"):
            with pytest.raises(InvalidRequest):
                await invocation.cancel(reason)
        gate.release()
        assert isinstance(await invocation.result(), Completed)


async def test_an_invocation_is_used_in_a_block(client: Client) -> None:
    for ask in (client.invoke(action("echo")).result, client.invoke(action("echo")).cancel):
        with pytest.raises(RuntimeError, match="async with"):
            await ask()
