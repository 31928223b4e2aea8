"""The writer: group commit, order of commit and visibility, full disks, I/O errors, its own death."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.errors import ActionConflict, IllegalTransition, JournalFull, JournalUnavailable
from protocol.states import Status
from supervisor.journal import Journal, open_journal, transactions
from supervisor.journal.writer import RECHECK_S
from tests.support.journals import (
    LIMIT,
    admit,
    new_job,
    opened,
    sample_ending,
    start,
)

FULL = "database or disk is full"
BROKEN = "disk I/O error"


class Gate:
    """A fault hook: counts the points reached, can hold the writer at one and raise at any."""

    def __init__(self) -> None:
        self.reached: Counter[str] = Counter()
        self.errors: dict[str, Iterator[BaseException | None]] = {}
        self.hold_at: str | None = None
        self.held = threading.Event()
        self.go = threading.Event()

    def __call__(self, point: str) -> None:
        self.reached[point] += 1
        if point == self.hold_at:
            self.held.set()
            assert self.go.wait(30)
        error = next(self.errors.get(point, iter(())), None)
        if error is not None:
            raise error

    def fail(self, point: str, text: str, times: int = 1) -> None:
        self.errors[point] = iter([sqlite3.OperationalError(text) for _ in range(times)])

    async def hold(self, journal: Journal, point: str = "begin") -> asyncio.Task[None]:
        """Hold the writer at ``point`` of a batch of its own; the caller sets ``go``."""
        self.hold_at = point
        task = asyncio.create_task(journal.probe())
        await asyncio.to_thread(self.held.wait, 30)
        self.hold_at = None
        return task


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


async def until_writable(journal: Journal) -> None:
    """Wait until the writer got well on its own; nothing announces it."""
    async with asyncio.timeout(20 * RECHECK_S):
        while not journal.writable:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_what_waits_is_committed_together(path: Path, gate: Gate) -> None:
    async with opened(path, faults=gate) as journal:
        blocker = await gate.hold(journal)
        admissions = [asyncio.create_task(admit(journal, f"a-{n}")) for n in range(200)]
        await asyncio.sleep(0)
        gate.go.set()
        rows = await asyncio.gather(*admissions)
        await blocker
        assert sorted(rows) == list(range(1, 201))
        assert (gate.reached["commit"], gate.reached["op"]) == (2, 201)
        assert journal.retained == 200


async def test_nothing_is_seen_or_answered_before_its_commit(path: Path, gate: Gate) -> None:
    async with opened(path, faults=gate) as journal:
        row = await start(journal, "running")
        gate.hold_at = "commit"
        admission = asyncio.create_task(admit(journal))
        await asyncio.to_thread(gate.held.wait, 30)
        gate.hold_at = None
        events = asyncio.create_task(journal.append_events(row, 1, [("chunk", b"{}")], 3.0))
        # The row is written and not committed: readers must see the state before it.
        assert await journal.get("a-1") is None
        assert len(await journal.events(row, 0)) == 1
        assert journal.retained == 1
        assert not admission.done()
        assert not events.done()
        gate.go.set()
        await asyncio.gather(admission, events)
        assert await journal.get("a-1")
        assert len(await journal.events(row, 0)) == 2


async def test_a_refusal_fails_only_its_own_operation(path: Path, gate: Gate) -> None:
    def broken_constraint(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO tasks VALUES('half', 1)")
        connection.execute("INSERT INTO tasks VALUES('half', 1)")

    def half_done(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO tasks VALUES('half', 2)")
        raise RuntimeError("a defect")

    def admitted_and_lost(connection: sqlite3.Connection) -> None:
        transactions.admit(connection, new_job("lost"), tally=journal._tally, retained_limit=LIMIT)
        raise RuntimeError("after its admission")

    async with opened(path, faults=gate) as journal:
        row = await start(journal, "known")
        blocker = await gate.hold(journal)
        waiting = [
            journal.admit(new_job("one"), retained_limit=LIMIT),
            journal.admit(new_job("known", request_hash="2" * 64), retained_limit=LIMIT),
            journal.append_events(row, 7, [("chunk", b"{}")], 3.0),
            journal.write(broken_constraint),
            journal.write(half_done),
            journal.write(lambda connection: connection.execute("no such statement")),
            journal.write(lambda connection: connection.execute("SELECT ?", (2**70,))),
            journal.write(lambda connection: next(iter(()))),
            journal.write(admitted_and_lost),
            journal.admit(new_job("two"), retained_limit=3),
            journal.admit(new_job("three"), retained_limit=3),
        ]
        tasks = [asyncio.create_task(item) for item in waiting]
        await asyncio.sleep(0)
        commits = gate.reached["commit"]
        gate.go.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await blocker
        assert gate.reached["commit"] == commits + 2
        kinds = [type(result) for result in results[1:9]]
        assert kinds == [
            ActionConflict,
            IllegalTransition,
            sqlite3.IntegrityError,
            RuntimeError,
            sqlite3.OperationalError,
            OverflowError,
            RuntimeError,
            RuntimeError,
        ]
        assert isinstance(results[10], JournalFull), "refused operations do not count, admitted ones do"
        assert (journal.writable, journal.retained) == (True, 3)
        assert await journal.get("one")
        assert await journal.get("two")
        half = await journal.read(lambda connection: connection.execute("SELECT * FROM tasks").fetchall())
        assert half == []


@pytest.mark.case(26)
@pytest.mark.parametrize("text", [FULL, BROKEN, "attempt to write a readonly database"])
@pytest.mark.parametrize("point", ["begin", "op", "commit"])
async def test_a_journal_failure_fails_the_whole_batch_and_leaves_nothing(
    path: Path, gate: Gate, point: str, text: str
) -> None:
    async with opened(path, faults=gate) as journal:
        row = await start(journal, "running")
        blocker = await gate.hold(journal)
        admissions = [asyncio.create_task(admit(journal, f"a-{n}")) for n in range(3)]
        events = asyncio.create_task(journal.append_events(row, 1, [("chunk", b"{}")], 3.0))
        await asyncio.sleep(0)
        # The probe that holds the writer passes each point first.
        gate.errors[point] = iter([None, sqlite3.OperationalError(text)])
        gate.go.set()
        results = await asyncio.gather(*admissions, events, blocker, return_exceptions=True)
        failed = [result for result in results if isinstance(result, JournalUnavailable)]
        assert (len(failed), results[-1]) == (4, None)
        assert all(text in error.detail for error in failed)
        assert not journal.writable
        assert (journal.retained, await journal.get("a-0")) == (1, None)
        assert (await journal.get_row(row)).event_count == 1
        assert await admit(journal, "a-0") == row + 1, "a rolled back batch leaves no gap and no ghost"
        assert journal.writable


async def test_an_idle_writer_gets_well_by_itself(path: Path, gate: Gate) -> None:
    async with opened(path, faults=gate) as journal:
        gate.fail("commit", BROKEN, times=2)
        with pytest.raises(JournalUnavailable):
            await journal.probe()
        assert not journal.writable
        await until_writable(journal)
        assert gate.reached["commit"] >= 3
        await journal.probe()


async def test_repeats_are_answered_while_the_journal_cannot_be_written(path: Path, gate: Gate) -> None:
    async with opened(path, faults=gate) as journal:
        row = await admit(journal)
        gate.fail("commit", BROKEN, times=3)
        again = await journal.admit(new_job(), retained_limit=LIMIT)
        assert (again.fresh, again.record.row) == (False, row)
        with pytest.raises(ActionConflict):
            await journal.admit(new_job(request_hash="2" * 64), retained_limit=LIMIT)
        with pytest.raises(JournalUnavailable):
            await journal.admit(new_job("new"), retained_limit=LIMIT)


async def test_a_full_disk_costs_the_reserve_and_only_endings_are_written(path: Path, gate: Gate) -> None:
    reserve = path.with_name("journal.db.reserve")
    async with opened(path, faults=gate, reserve_bytes=65_536) as journal:
        row = await start(journal, "running")
        assert (reserve.stat().st_size, reserve.stat().st_blocks * 512 >= 65_536) == (65_536, True)
        blocker = await gate.hold(journal)
        admission = asyncio.create_task(admit(journal))
        ending = asyncio.create_task(journal.finish(row, sample_ending()))
        await asyncio.sleep(0)
        gate.errors["op"] = iter([None, None, sqlite3.OperationalError(FULL)])
        gate.go.set()
        with pytest.raises(JournalUnavailable, match="full"):
            await admission
        assert (await ending).record.status is Status.COMPLETED
        await blocker
        assert (await journal.get_row(row)).status is Status.COMPLETED
        assert await journal.get("a-1") is None
        assert not reserve.exists()
        assert not journal.writable
        # What the reserve left is for endings, even where an admission would fit.
        with pytest.raises(JournalUnavailable):
            await admit(journal)
        await journal.archive("running", actor="alice")
        assert not journal.writable
        await until_writable(journal)
        assert reserve.stat().st_size == 65_536
        await admit(journal)


async def test_a_full_disk_without_endings_keeps_the_reserve(path: Path, gate: Gate) -> None:
    async with opened(path, faults=gate) as journal:
        gate.fail("commit", FULL)
        with pytest.raises(JournalUnavailable):
            await admit(journal)
        assert path.with_name("journal.db.reserve").exists()


async def test_an_ending_that_fits_nowhere_is_refused_and_can_be_tried_again(path: Path, gate: Gate) -> None:
    async with opened(path, faults=gate) as journal:
        row = await start(journal)
        gate.fail("commit", FULL, times=2)
        with pytest.raises(JournalUnavailable):
            await journal.finish(row, sample_ending())
        assert (await journal.get_row(row)).status is Status.RUNNING
        assert (await journal.finish(row, sample_ending())).record.status is Status.COMPLETED


async def test_the_writer_s_death_is_a_journal_failure(path: Path, gate: Gate) -> None:
    async with opened(path, faults=gate) as journal:
        await admit(journal, "before")
        blocker = await gate.hold(journal)
        waiting = [asyncio.create_task(admit(journal, f"a-{n}")) for n in range(3)]
        await asyncio.sleep(0)
        gate.errors["begin"] = iter([None, MemoryError("no memory")])
        gate.go.set()
        results = await asyncio.gather(*waiting, blocker, return_exceptions=True)
        assert [type(result) for result in results] == [JournalUnavailable] * 3 + [type(None)]
        assert not journal.writable
        with pytest.raises(JournalUnavailable):
            await journal.probe()
        assert await journal.get("before"), "reading goes on"
    async with opened(path) as journal:
        assert journal.retained == 1


async def test_a_closed_journal_answers_that_it_is_closed(path: Path) -> None:
    journal = open_journal(path, reserve_bytes=0)
    await admit(journal)
    await journal.close()
    with pytest.raises(JournalUnavailable, match="closed"):
        await journal.probe()
    with pytest.raises(JournalUnavailable, match="closed"):
        await journal.get("a-1")
    await journal.close()


async def test_closing_writes_what_waits(path: Path, gate: Gate) -> None:
    journal = open_journal(path, reserve_bytes=0, faults=gate)
    blocker = await gate.hold(journal)
    waiting = [asyncio.create_task(admit(journal, f"a-{n}")) for n in range(20)]
    await asyncio.sleep(0)
    closing = asyncio.create_task(journal.close())
    gate.go.set()
    await asyncio.gather(*waiting, blocker, closing)
    assert path.stat().st_size
    assert not path.with_name("journal.db-wal").exists()
    async with opened(path) as journal:
        assert journal.retained == 20


async def test_a_caller_that_gives_up_takes_nothing_back(path: Path, gate: Gate) -> None:
    async with opened(path, faults=gate) as journal:
        blocker = await gate.hold(journal)
        waiting = asyncio.create_task(admit(journal))
        await asyncio.sleep(0)
        waiting.cancel()
        gate.go.set()
        await blocker
        await journal.probe()
        assert waiting.cancelled()
        assert await journal.get("a-1")


async def test_readers_cannot_write(path: Path) -> None:
    async with opened(path) as journal:
        with pytest.raises(JournalUnavailable, match="readonly"):
            await journal.read(lambda connection: connection.execute("DELETE FROM jobs"))


async def test_another_file_under_the_journal_s_name_is_never_written(path: Path, gate: Gate) -> None:
    async with opened(path, faults=gate) as journal:
        await admit(journal)
        path.rename(path.with_name("moved.db"))
        path.write_bytes(b"")
        gate.fail("commit", BROKEN)
        for _ in range(2):
            with pytest.raises(JournalUnavailable):
                await journal.probe()
        assert path.read_bytes() == b""
