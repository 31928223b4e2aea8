"""Where in a job a call is made, so that the same call of a repeated task, batch or process gets the same key.

A place has an index, a list of names and numbers that goes into the keys of calls without a business key, and counts
what begins in it. What raised is not counted: its repeat is the same call.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

Index = list[str | int]


class Ordinals:
    """Numbers from 0 for each tag; those of attempts that raised are given again, lowest first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun: Counter[Hashable] = Counter()
        self._raised: dict[Hashable, list[int]] = {}

    def begin(self, tag: Hashable) -> int:
        """The number of the next one."""
        with self._lock:
            if again := self._raised.get(tag):
                return again.pop(0)
            self._begun[tag] += 1
            return self._begun[tag] - 1

    def raised(self, tag: Hashable, number: int) -> None:
        """Give ``number`` to the next one that begins."""
        with self._lock:
            again = self._raised.setdefault(tag, [])
            again.append(number)
            again.sort()


class Place:
    """One run of a crew, one attempt at a task, or one call of a tool, seen from what begins inside it."""

    def __init__(self, index: Callable[[], Index] | Index) -> None:
        self.ordinals = Ordinals()
        self._index = index
        self._lock = threading.Lock()

    @property
    def index(self) -> Index:
        """Names and numbers from the root down; a place of which nobody asks it takes no number above."""
        with self._lock:
            if callable(self._index):
                self._index = self._index()
            return list(self._index)


_place: contextvars.ContextVar[Place | None] = contextvars.ContextVar("effect_place", default=None)


def current(root: Place) -> Place:
    """The innermost place of this context, ``root`` outside of any."""
    return _place.get() or root


@contextlib.contextmanager
def inside(place: Place) -> Iterator[Place]:
    """Be in ``place``, with what is started from here."""
    token = _place.set(place)
    try:
        yield place
    finally:
        _place.reset(token)


class ToolCall:
    """A call of a tool as the place of what its body does: delegated work, crews, calls of other tools.

    It takes a number of its own above only when something inside asks where it is.
    """

    def __init__(self, above: Place, tool: str, tag: Callable[[], str]) -> None:
        self.place = Place(self._index)
        self._above, self._tool, self._tag = above, tool, tag
        self._taken: tuple[Hashable, int] | None = None

    def _index(self) -> Index:
        tag = self._tag()
        number = self._above.ordinals.begin(("inside", self._tool, tag))
        self._taken = ("inside", self._tool, tag), number
        return [*self._above.index, "tool", self._tool, tag, number]

    def raised(self) -> None:
        """The call raised; its repeat is the same one. Only the first time counts."""
        taken, self._taken = self._taken, None
        if taken is not None:
            self._above.ordinals.raised(*taken)


class Seat(NamedTuple):
    """The place of one object, and the number that it took above."""

    owner: weakref.ref[Any]
    place: Place
    above: Place
    tag: Hashable
    number: int


class Seats:
    """The crews of one session: which one it is, whose copy, and how often it ran."""

    def __init__(self, root: Place) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._seats: dict[int, Seat] = {}
        #: Copies that take their number when they run.
        self._waiting: dict[int, tuple[weakref.ref[Any], Place]] = {}

    def of(self, thing: Any, *kind: str) -> Place:
        """The seat of ``thing``, a crew or an executor; a new one is numbered among those of its ``kind``."""
        with self._lock:
            found = self._seats.get(id(thing))
            if found is not None and found.owner() is thing:
                return found.place
            waiting = self._waiting.pop(id(thing), None)
            if waiting is not None and waiting[0]() is thing:
                return self._take(thing, waiting[1], "copy", "copy")
            return self._take(thing, current(self._root), kind, *kind)

    def _take(self, thing: Any, above: Place, tag: Hashable, *names: str) -> Place:
        number = above.ordinals.begin(tag)
        place = Place([*above.index, *names, number])
        seat = id(thing)
        owner = weakref.ref(thing, lambda _: self._seats.pop(seat, None))
        self._seats[seat] = Seat(owner, place, above, tag, number)
        return place

    def leave(self, thing: Any) -> None:
        """``thing`` did nothing to its end: what comes instead of it gets its number."""
        with self._lock:
            found = self._seats.get(id(thing))
            if found is not None and found.owner() is thing:
                del self._seats[id(thing)]
                found.above.ordinals.raised(found.tag, found.number)

    def copied(self, crew: Any, copy: Any, *kind: str) -> None:
        """``copy`` is the next copy of ``crew``: the n-th one of a batch is that of its n-th item."""
        batch = _batch.get()
        if batch is not None and batch.crew is crew and not batch.ordered:
            with self._lock:
                self._waiting[id(copy)] = weakref.ref(copy), batch.place
            return
        above = batch.place if batch is not None and batch.crew is crew else self.of(crew, *kind)
        with self._lock:
            self._take(copy, above, "copy", "copy")

    @contextlib.contextmanager
    def batch(self, crew: Any, name: str, *kind: str, ordered: bool) -> Iterator[None]:
        """Be in the next work of ``crew`` that is done by copies of it; one that raises is repeated by the next.

        ``ordered``: each copy is an item's, in their order. Otherwise there may be copies that never run.
        """
        seat = self.of(crew, *kind)
        number = seat.ordinals.begin(name)
        token = _batch.set(Batch(crew, Place([*seat.index, name, number]), ordered))
        try:
            yield
        except BaseException:
            seat.ordinals.raised(name, number)
            raise
        finally:
            _batch.reset(token)

    @contextlib.contextmanager
    def run(self, crew: Any, *kind: str) -> Iterator[None]:
        """Be in the next run of ``crew``; one that raises is repeated by the next, of this crew or of one like it."""
        seat = self.of(crew, *kind)
        number = seat.ordinals.begin("run")
        try:
            with inside(Place([*seat.index, "run", number])):
                yield
        except BaseException:
            seat.ordinals.raised("run", number)
            if number == 0:
                self.leave(crew)
            raise


class Batch(NamedTuple):
    """The crew whose copies are being made, and the place of what they do together."""

    crew: Any
    place: Place
    ordered: bool


_batch: contextvars.ContextVar[Batch | None] = contextvars.ContextVar("effect_batch", default=None)
