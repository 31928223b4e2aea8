"""The outbox of the journal: written with the terminal record or not at all, kept until it is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.states import Status
from supervisor.journal import Journal
from tests.support.journals import admit, opened, sample_ending, start


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "journal.db"


async def finish(journal: Journal, action_id: str, status: Status = Status.COMPLETED, **changes: object) -> None:
    row = await start(journal, action_id)
    await journal.finish(row, sample_ending(status=status, **changes))


async def waiting(journal: Journal) -> list[tuple[str, str, bool]]:
    page = await journal.outbox.page(100)
    assert len(page) == journal.outbox.waiting
    return [(fact.action_id, fact.status, fact.uncertain) for fact in page]


async def test_alone_nothing_is_put_in(path: Path) -> None:
    async with opened(path) as journal:
        await finish(journal, "a")
        assert await waiting(journal) == []


async def test_endings_wait_in_their_order_until_they_are_told(path: Path) -> None:
    async with opened(path) as journal:
        await journal.outbox.enable()
        await finish(journal, "b")
        await finish(journal, "a", Status.FAILED, uncertain=True)
        await finish(journal, "c", Status.CANCELLED, uncertain=False)
        assert journal.outbox.bell.is_set()
        found = [("b", "completed", False), ("a", "failed", True), ("c", "cancelled", False)]
        assert await waiting(journal) == found
        facts = await journal.outbox.page(2)
        await journal.outbox.remove([fact.id for fact in facts])
        assert await waiting(journal) == found[2:]


async def test_what_waits_outlives_the_process(path: Path) -> None:
    async with opened(path) as journal:
        await journal.outbox.enable()
        await finish(journal, "a")
    async with opened(path) as journal:
        await journal.outbox.enable()
        assert await waiting(journal) == [("a", "completed", False)]


async def test_what_is_not_known_to_be_certain_is_uncertain(path: Path) -> None:
    async with opened(path) as journal:
        await journal.outbox.enable()
        await finish(journal, "a", Status.FAILED, uncertain=None)
        assert await waiting(journal) == [("a", "failed", True)]


async def test_what_ended_while_nobody_was_to_be_told_is_put_in_later(path: Path) -> None:
    async with opened(path) as journal:
        await finish(journal, "a")
        await finish(journal, "b", Status.FAILED, uncertain=True)
        await journal.archive("a", actor="me")
        await admit(journal, "unfinished")
    async with opened(path) as journal:
        await journal.outbox.enable()
        assert sorted(await waiting(journal)) == [("a", "completed", False), ("b", "failed", True)]
        await journal.outbox.remove([fact.id for fact in await journal.outbox.page(10)])
    async with opened(path) as journal:
        await journal.outbox.enable()
        assert await waiting(journal) == [], "the last process told everything"
    async with opened(path) as journal:
        await finish(journal, "c")
    async with opened(path) as journal:
        await journal.outbox.enable()
        assert [action_id for action_id, _, _ in sorted(await waiting(journal))] == ["a", "b", "c"]


async def test_a_refused_ending_puts_nothing_in(path: Path) -> None:
    async with opened(path) as journal:
        await journal.outbox.enable()
        row = await start(journal, "a")
        with pytest.raises(Exception, match="events"):
            await journal.finish(row, sample_ending(first_seq=7))
        assert await waiting(journal) == []
