"""The checks of this directory fail on a client with one mechanism broken; a check that passes there checks nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from protocol import canonical
from supervisor.client import Client, InvalidStream, endings, failures, invocation, requests, results, sse
from supervisor.client.answers import Event
from supervisor.client.results import Cancelled
from tests.client import test_cancel, test_cancel_elsewhere, test_client, test_failures, test_streams
from tests.client.relay import Relay
from tests.client.rogue import Rogue
from tests.support.server import Server

Check = Callable[[Server, Relay, Client, Rogue, Client], Awaitable[None]]


def credulous(patch: pytest.MonkeyPatch) -> None:
    """A cancelled record is taken for a proof, as the reference's client takes any 2xx."""

    def cancelled(action: Any, *, data: Any, uncertain: bool, stop: Any) -> Cancelled:
        return Cancelled(action=action, remote_stop_confirmed=True, uncertain=uncertain, stop=stop, data=data)

    patch.setattr(results, "cancelled", cancelled)
    patch.setattr(endings, "cancelled", cancelled)


def uncounting(patch: pytest.MonkeyPatch) -> None:
    """Sequences are not compared."""

    def event(reader: sse.EventReader, name: bytes | None, document: Any) -> Event:
        return Event(event=document["event"], sequence=document["sequence"], data=document.get("data"))

    patch.setattr(sse.EventReader, "_event", event)


def incurious(patch: pytest.MonkeyPatch) -> None:
    """The terminal event is the end, whatever follows."""
    feed = sse.EventReader.feed

    def first_half(reader: sse.EventReader, piece: bytes) -> None:
        try:
            feed(reader, piece)
        except sse.Malformed:
            if not reader.ended:
                raise

    patch.setattr(sse.EventReader, "feed", first_half)
    patch.setattr(sse.EventReader, "finish", lambda reader: None)


def forgetful(patch: pytest.MonkeyPatch) -> None:
    """A stream that is taken up again begins at its beginning."""
    events = requests.events

    def from_the_start(action_id: str, cursor: int, **options: Any) -> Any:
        return events(action_id, 0, **options)

    patch.setattr(requests, "events", from_the_start)


def deaf(patch: pytest.MonkeyPatch) -> None:
    """A cancel that finds no job is not sent again when the start is answered."""
    of = invocation.Invocation._stop

    async def stop(one: invocation.Invocation, reason: str | None) -> Any:
        waiting, one._admission = one._admission, asyncio.get_running_loop().create_future()
        one._admission.set_result(True)
        try:
            return await of(one, reason)
        finally:
            one._admission = waiting

    patch.setattr(invocation.Invocation, "_stop", stop)


def anxious(patch: pytest.MonkeyPatch) -> None:
    """What the server says of its refusal is not read."""
    patch.setattr(failures, "NOT_ADMITTED", frozenset())


def careless(patch: pytest.MonkeyPatch) -> None:
    """After a fault the work is left to itself."""

    async def after_fault(one: invocation.Invocation, failure: Any) -> Any:
        raise failure

    patch.setattr(invocation.Invocation, "_after_fault", after_fault)


def sanguine(patch: pytest.MonkeyPatch) -> None:
    """A connection that broke has done nothing."""
    patch.setattr(failures.TransportFailed, "leaves_doubt", False)


def trusting(patch: pytest.MonkeyPatch) -> None:
    """An output that had to be read is not compared with what was announced."""
    patch.setattr(canonical, "digest", lambda data: SAME)


class _Same(str):
    __slots__ = ()

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = str.__hash__


SAME = _Same()
REFERENCE = test_cancel_elsewhere.ANSWERS["the reference: cancelled, no evidence"]
NO_PROOF = test_cancel_elsewhere.ANSWERS["evidence that does not"]
STATUSES = next(row for row in test_failures.STATUSES if row[1] == test_failures.NOT_ADMITTED[0])
BREAK = test_failures.ANSWERS["broken off"]

MUTANTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Check]] = {
    "credulous": (credulous, lambda s, r, t, rogue, misled:
        test_cancel_elsewhere.test_an_answer_confirms_no_more_than_its_evidence(rogue, misled, *REFERENCE)),
    "credulous of bad evidence": (credulous, lambda s, r, t, rogue, misled:
        test_cancel_elsewhere.test_an_answer_confirms_no_more_than_its_evidence(rogue, misled, *NO_PROOF)),
    "uncounting": (uncounting, lambda s, r, t, rogue, misled:
        test_streams.test_a_fault_stops_the_work_and_is_what_is_reported(
            rogue, misled, test_streams.BROKEN["gap"], InvalidStream)),
    "incurious": (incurious, lambda s, r, t, rogue, misled:
        test_streams.test_a_fault_stops_the_work_and_is_what_is_reported(
            rogue, misled, test_streams.BROKEN["a second terminal event"], InvalidStream)),
    "incurious of a half": (incurious, lambda s, r, t, rogue, misled:
        test_streams.test_a_fault_stops_the_work_and_is_what_is_reported(
            rogue, misled, test_streams.BROKEN["half an event after the terminal one"], InvalidStream)),
    "careless": (careless, lambda s, r, t, rogue, misled:
        test_streams.test_a_fault_stops_the_work_and_is_what_is_reported(
            rogue, misled, test_streams.BROKEN["gap"], InvalidStream)),
    "forgetful": (forgetful, lambda s, r, t, rogue, misled:
        test_streams.test_a_broken_stream_is_taken_up_behind_the_last_event(
            rogue, misled, test_streams.BREAKS["closed"])),
    "deaf": (deaf, lambda s, relay, through, r, m:
        test_cancel.test_before_the_headers_with_the_start_still_on_its_way(relay, through)),
    "anxious": (anxious, lambda s, r, t, rogue, misled:
        test_failures.test_what_a_status_means(rogue, misled, False, *STATUSES)),
    "sanguine": (sanguine, lambda s, r, t, rogue, misled:
        test_failures.test_what_an_answer_that_cannot_be_read_means(rogue, misled, *BREAK)),
    "trusting": (trusting, lambda s, relay, through, r, m:
        test_client.test_an_output_too_large_for_a_stream_is_read(through, relay, through)),
}  # fmt: skip


@pytest.mark.parametrize(("mutate", "check"), MUTANTS.values(), ids=MUTANTS)
async def test_a_broken_client_is_caught(
    monkeypatch: pytest.MonkeyPatch, mutate: Callable[[pytest.MonkeyPatch], None], check: Check,
    server: Server, relay: Relay, through: Client, rogue: Rogue, misled: Client,
) -> None:  # fmt: skip
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        await check(server, relay, through, rogue, misled)
