"""Decides what waits about shared effects, everything at once: the pure steps on rows as they are, one statement for
all that changes, and again for those whose row had changed meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from psycopg import AsyncConnection

from protocol.errors import CrewError, FleetUnavailable
from supervisor.fleet import effect_rows
from supervisor.fleet.database import RETRY_AFTER_S
from supervisor.fleet.effect_rows import Row

#: Rounds of one decision; each lets at least one of all who want the same row through.
ROUNDS = 100


class Made(NamedTuple):
    """What a step makes of a row: what is to be stored, None for nothing, and the answer to whoever asked."""

    row: Row | None
    answer: object


#: What a request makes of the row of its key, in the replica's epoch. Raises CrewError to refuse; nothing changes then.
Step = Callable[[Row | None, int], Made]


class Unread:
    """Nothing is believed of the row: it is read first."""


UNREAD = Unread()


class Request:
    """A step on one key. ``guess``: what its row is believed to be, None for a key without one; a wrong guess costs a
    round and changes nothing.
    """

    __slots__ = ("guess", "key_id", "step")

    def __init__(self, key_id: str, step: Step, *, guess: Row | Unread | None = UNREAD) -> None:
        self.key_id = key_id
        self.step = step
        self.guess = guess


class _Round:
    """One pass over the requests that are left, in their order."""

    def __init__(self, known: dict[str, Row | None], epoch: int) -> None:
        self._known = known
        self._epoch = epoch
        self._now: dict[str, Row | None] = {}
        self._moved: set[str] = set()
        #: Rows to be stored, with the version that each is made from.
        self.changes: dict[str, tuple[Row, int]] = {}
        #: Answers that hold if the change of their key does, or without one if its row was read.
        self.answers: dict[str, list[tuple[int, object]]] = {}
        self.postponed: list[int] = []

    def take(self, number: int, request: Request) -> None:
        """Apply a request. A key's state moves once in a round, so that every move of it is stored."""
        key_id = request.key_id
        base = self._known[key_id]
        now = self._now.get(key_id, base)
        try:
            made = request.step(now, self._epoch)
        except CrewError as error:
            self._answer(key_id, number, error)
            return
        if made.row is not None:
            moves = now is None or made.row.record.state is not now.record.state
            if moves and key_id in self._moved:
                self.postponed.append(number)
                return
            if moves:
                self._moved.add(key_id)
            self._now[key_id] = made.row
            self.changes[key_id] = (made.row, 0 if base is None else base.record.version)
        self._answer(key_id, number, made.answer)

    def _answer(self, key_id: str, number: int, answer: object) -> None:
        self.answers.setdefault(key_id, []).append((number, answer))


async def decide(
    connection: AsyncConnection, requests: Sequence[Request], *, replica_id: str, epoch: int
) -> list[object]:
    """Answer every request, a refusal by its error. Raises Fenced, FleetUnavailable: some of it may be done.

    A claim that was decided and whose answer was lost is recognized by its step; so is every other one.
    """
    answers: dict[int, object] = {}
    known: dict[str, Row | None] = {}
    for request in requests:
        if not isinstance(request.guess, Unread):
            known.setdefault(request.key_id, request.guess)
    read: set[str] = set()
    left = list(range(len(requests)))
    for _ in range(ROUNDS):
        unread = {requests[number].key_id for number in left} - known.keys()
        if unread:
            rows = await effect_rows.load(connection, sorted(unread))
            known |= {key_id: rows.get(key_id) for key_id in unread}
            read |= unread
        turn = _Round(known, epoch)
        for number in left:
            turn.take(number, requests[number])
        written: set[str] = set()
        if turn.changes:
            written = await effect_rows.store(connection, turn.changes, replica_id=replica_id, epoch=epoch)
        left = list(turn.postponed)
        for key_id, found in turn.answers.items():
            if key_id in written or (key_id not in turn.changes and key_id in read):
                answers |= dict(found)
            else:
                left += [number for number, _ in found]
                known.pop(key_id, None)
        for key_id in written:
            known[key_id] = turn.changes[key_id][0]
            read.add(key_id)
        if not left:
            return [answers[number] for number in range(len(requests))]
        left.sort()
    raise FleetUnavailable("shared effects are changed too fast to decide; ask again", retry_after_s=RETRY_AFTER_S)
