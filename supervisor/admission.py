"""Who runs next: a queue that is fair between crews, with a slot count and a limit per crew. Pure: no IO, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class FairQueue(Generic[Item]):
    """Slots go round the crews that wait, first come first served within a crew.

    A slot is taken by ``grant`` and given back by ``release``; one that is never given back is out of service.
    """

    def __init__(self, slots: int, crew_limit: Callable[[str], int | None] = lambda crew: None) -> None:
        self._slots = slots
        self._crew_limit = crew_limit
        self._waiting: dict[str, deque[Item]] = {}
        self._running: dict[str, int] = {}

    @property
    def waiting(self) -> int:
        """Items without a slot."""
        return sum(len(items) for items in self._waiting.values())

    @property
    def running(self) -> int:
        """Slots taken."""
        return sum(self._running.values())

    def first_in_line(self) -> list[Item]:
        """Of each crew that waits, the item that waits longest."""
        return [items[0] for items in self._waiting.values()]

    def add(self, crew: str, item: Item) -> None:
        """Let ``item`` wait for a slot."""
        self._waiting.setdefault(crew, deque()).append(item)

    def withdraw(self, crew: str, item: Item) -> bool:
        """Take a waiting item out. Returns whether it was waiting."""
        items = self._waiting.get(crew)
        if items is None or item not in items:
            return False
        items.remove(item)
        if not items:
            del self._waiting[crew]
        return True

    def grant(self) -> Item | None:
        """Give a free slot to the next item, None if there is no slot or nobody may have it."""
        if self.running >= self._slots:
            return None
        for crew in list(self._waiting):
            limit = self._crew_limit(crew)
            if limit is not None and self._running.get(crew, 0) >= limit:
                continue
            items = self._waiting.pop(crew)
            item = items.popleft()
            if items:
                self._waiting[crew] = items  # to the end of the round
            self.occupy(crew)
            return item
        return None

    def occupy(self, crew: str) -> None:
        """Take a slot for work that was not granted one here."""
        self._running[crew] = self._running.get(crew, 0) + 1

    def release(self, crew: str) -> None:
        """Give a slot back."""
        self._running[crew] -= 1
        if not self._running[crew]:
            del self._running[crew]
