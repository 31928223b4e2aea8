"""From a terminal event or record to the Action's result, reading what is missing in it."""

from __future__ import annotations

from typing import Any

import msgspec

from protocol import api, canonical
from protocol.states import Status
from supervisor.client import requests, sse
from supervisor.client.action import Action
from supervisor.client.answers import Event, EventPage, Job
from supervisor.client.connection import Connection, decode, decode_job
from supervisor.client.failures import ClientFailure, InvalidStream
from supervisor.client.requests import Call
from supervisor.client.results import Completed, Result, cancelled, result_of


def _about(action: Action, call: Call) -> Call:
    """The same request, whose failures concern an Action that is known to be admitted."""
    return msgspec.structs.replace(call, action=action, mutation=action.mutates, admitted=True)


async def of_record(connection: Connection, action: Action, *, target: str) -> Result:
    """The result of a job that has ended. Raises ClientFailure."""
    call = _about(action, requests.show(target))
    job = decode_job(call, (await connection.exchange(call)).document, target)
    if not job.ended:
        raise call.failed(InvalidStream, "the Action was said to have ended, and its record is running")
    return await of_job(connection, action, job)


async def of_job(connection: Connection, action: Action, job: Job) -> Result:
    """The result that a terminal record stands for."""
    if job.status is Status.COMPLETED:
        return Completed(action=action, output=job.output)
    watched = job.action_id != action.action_id
    uncertain = action.mutates or watched if job.uncertain_outcome is None else job.uncertain_outcome
    data: dict[str, Any] = {"status": job.status.value}
    if job.uncertain_outcome is not None:
        data["uncertain_outcome"] = job.uncertain_outcome
    if job.stop is not None:
        data["stop"] = msgspec.to_builtins(job.stop)
    if job.status is Status.CANCELLED:
        return cancelled(action, data=data, uncertain=uncertain, stop=job.stop)
    event = await _last_event(connection, action, job)
    return result_of(action, event or Event(event=job.status.value, sequence=0, data=data), watched=watched)


async def _last_event(connection: Connection, action: Action, job: Job) -> Event | None:
    """The terminal event, which alone says why a job failed; None if it cannot be had."""
    if job.event_count < 1:
        return None
    call = _about(action, requests.events(job.action_id, job.event_count - 1, stream=False))
    try:
        page = decode(call, (await connection.exchange(call)).document, EventPage)
    except ClientFailure:
        return None
    last = page.events[-1] if page.events else None
    return last if last is not None and last.event == job.status else None


async def of_event(connection: Connection, action: Action, event: Event, *, target: str) -> Result:
    """The result of ``target``'s terminal event, with an output that was too large for it. Raises ClientFailure."""
    data = event.data
    if event.event == Status.COMPLETED and isinstance(data, dict) and data.get("output_omitted") is True:
        event = msgspec.structs.replace(event, data=await _whole_output(connection, action, event, target))
    return result_of(action, event, watched=target != action.action_id)


async def _whole_output(connection: Connection, action: Action, event: Event, target: str) -> Any:
    call = _about(action, requests.events(target, event.sequence, stream=False))
    reply = await connection.exchange(call)
    try:
        page = msgspec.json.decode(reply.body, type=api.EventSlice)
        stored = next(bytes(found.data) for found in page.events if found.sequence == event.sequence)
        output = sse.parse(stored)
    except (msgspec.DecodeError, StopIteration, sse.Malformed) as error:
        raise call.failed(InvalidStream, f"the output cannot be read: {error}") from None
    # A crew may return something that looks like the note; then it is the output itself.
    if output != event.data and canonical.digest(stored) != event.data.get("sha256"):
        raise call.failed(InvalidStream, "the output is not the one that the stream announced")
    return output
