"""The worker's end of the ledger: questions of many threads on one pipe."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from protocol import errors, frames
from protocol.errors import EffectConflict, EffectLedgerUnavailable, EffectOutcomeUnknown, ProtocolViolation
from protocol.states import EffectState
from tests.effects.conftest import Counted
from tests.support.memory_ledger import MemoryLedger
from worker.channel import Channel, PipeClosed
from worker.effect import effect, settled
from worker.guarding import session
from worker.guarding.session import Session
from worker.pipe_ledger import PipeLedger, _by_code

THREADS = 32


class Pipe:
    """A worker's end with its reading thread, and the supervisor's end, where ``serve`` is what it does."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._channel: Channel[frames.ToWorker] = Channel(ours, frames.ToWorker)
        self.far: Channel[frames.FromWorker] = Channel(theirs, frames.FromWorker)
        self.memory = MemoryLedger(action_id="a", crew_id="c")
        self.ledger = PipeLedger(self._channel.send)
        self.session = Session(ledger=self.ledger, action_id="a", crew_id="c")
        self._threads = [threading.Thread(target=self._listen)]
        self._threads[0].start()

    def _listen(self) -> None:
        try:
            while True:
                frame, _ = self._channel.receive()
                assert isinstance(frame, frames.EffectAnswer)
                self.ledger.answered(frame)
        except PipeClosed:
            self.ledger.close()

    def serve(self, serve: Callable[[], None] | None = None) -> None:
        """Answer in a thread of its own, with the reducer unless something else is wanted."""
        self._threads.append(threading.Thread(target=serve or self.answer_all))
        self._threads[-1].start()

    def answer_all(self) -> None:
        try:
            while True:
                self.answer(self.next())
        except PipeClosed:
            pass

    def next(self) -> Any:
        frame, _ = self.far.receive()
        return frame

    def answer(self, frame: Any) -> None:
        if (answer := self.memory.answer(frame)) is not None:
            self.far.send(answer)

    def hang_up(self) -> None:
        self.far.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.hang_up()
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()
        self._channel.sock.close()
        self.far.sock.close()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    session.begin(made.session)
    yield made
    session.begin(None)
    made.close()


def test_every_thread_gets_the_answer_to_its_own_question_in_whatever_order_they_come(pipe: Pipe) -> None:
    def answer_backwards() -> None:
        try:
            waiting = [pipe.next() for _ in range(THREADS)]
            for frame in reversed(waiting):
                pipe.answer(frame)
            pipe.answer_all()
        except PipeClosed:
            pass

    pipe.serve(answer_backwards)
    act = effect(key=lambda number: number, tool="act")(lambda number: f"done {number}")
    results: dict[int, Any] = {}

    def run(number: int) -> None:
        results[number] = act(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == {number: f"done {number}" for number in range(THREADS)}
    assert [record.state for record in pipe.memory.records.values()] == [EffectState.SETTLED] * THREADS
    receipts = {record.receipt for record in pipe.memory.records.values()}
    assert receipts == {f'"done {number}"'.encode() for number in range(THREADS)}


@pytest.mark.effect_case(12)
def test_when_the_pipe_breaks_every_question_in_flight_fails_and_no_body_runs(pipe: Pipe, acted: Counted) -> None:
    asked = threading.Barrier(2)

    def break_after_all_asked() -> None:
        for _ in range(8):
            pipe.next()
        asked.wait(30)
        pipe.hang_up()

    pipe.serve(break_after_all_asked)
    outcomes: list[str] = []

    def run(number: int) -> None:
        try:
            effect(tool="act")(acted)(number)
        except EffectLedgerUnavailable as error:
            outcomes.append(error.code)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    asked.wait(30)
    for thread in threads:
        thread.join(30)
    run(9)
    assert outcomes == ["effect_ledger_unavailable"] * 9
    assert len(acted) == 0


def test_when_the_pipe_breaks_before_the_outcome_is_recorded_the_caller_gets_no_result(
    pipe: Pipe, acted: Counted
) -> None:
    def grant_and_break() -> None:
        pipe.answer(pipe.next())
        pipe.next()
        pipe.hang_up()

    pipe.serve(grant_and_break)
    with pytest.raises(EffectOutcomeUnknown, match="could not be recorded"):
        effect(tool="act")(acted)(1)
    assert len(acted) == 1


def test_refusals_come_back_as_the_errors_they_are(pipe: Pipe) -> None:
    pipe.serve()
    act = effect(key=lambda amount: "k", tool="act")(lambda amount: amount)
    assert act(1) == 1
    with pytest.raises(EffectConflict):
        act(2)
    assert _by_code().keys() >= {
        kind.code for kind in vars(errors).values() if isinstance(kind, type) and kind.__name__.startswith("Effect")
    }


def test_a_reconciliation_is_recorded_with_the_version_that_was_seen(pipe: Pipe, acted: Counted) -> None:
    pipe.serve()

    @effect(key="invoice", reconcile=lambda *_: settled("found"))
    def act(invoice: str) -> str:
        acted()
        raise TimeoutError

    with pytest.raises(TimeoutError):
        act("17")
    assert act("17") == "found"
    (record,) = pipe.memory.records.values()
    assert (record.state, record.decision, record.replays) == (EffectState.SETTLED, "settled", 1)
    assert len(acted) == 1


def test_an_answer_that_nobody_waits_for_breaks_the_protocol(pipe: Pipe) -> None:
    with pytest.raises(ProtocolViolation):
        pipe.ledger.answered(frames.EffectNoted(call=7))


def test_a_forked_process_asks_nothing_on_its_parents_pipe(pipe: Pipe) -> None:
    """An answer to it would be taken for one to its parent."""
    act = effect(tool="act", key=lambda number: number)(lambda number: f"done {number}")
    child = os.fork()
    if child == 0:
        try:
            act(1)
        except EffectLedgerUnavailable:
            os._exit(0)
        finally:
            os._exit(1)
    pipe.serve()
    assert act(1) == "done 1"
    assert os.waitpid(child, 0)[1] == 0
    assert len(pipe.memory.records) == 1
