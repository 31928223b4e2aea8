"""What the service manager is told, and that the sign of life depends on the journal's answer."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.errors import JournalUnavailable
from supervisor.journal import Journal, open_journal
from supervisor.notify import Notifier
from supervisor.pulse import Pulse, status_line
from tests.support.manager import Manager, listening

LIMIT_S = 0.3


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    with listening(tmp_path) as manager:
        yield manager


def notifier(manager: Manager, watchdog_s: float = LIMIT_S) -> Notifier:
    return Notifier({"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": str(int(watchdog_s * 1e6))})


def test_a_message_is_one_datagram_of_lines(manager: Manager) -> None:
    notifier(manager).send(READY=1, STATUS="2 running")
    assert manager.next() == {"READY": "1", "STATUS": "2 running"}


def test_an_abstract_address_begins_with_an_at_sign() -> None:
    manager = Manager(f"@crew-tests-{uuid.uuid4().hex}")
    notifier(manager).send(READY=1)
    assert manager.next() == {"READY": "1"}
    manager.close()


@pytest.mark.parametrize("address", ["", "@nobody-listens-here", "/no/such/directory/notify"])
def test_nobody_who_listens_is_no_error(address: str) -> None:
    Notifier({"NOTIFY_SOCKET": address}).send(READY=1)


def test_a_manager_that_does_not_read_blocks_nobody(manager: Manager) -> None:
    told = notifier(manager)
    began = time.monotonic()
    for _ in range(5000):
        told.send(STATUS="x" * 1000)
    assert time.monotonic() - began < 10


def test_a_reload_says_when_it_began(manager: Manager) -> None:
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    notifier(manager).reloading()
    message = manager.next()
    assert message["RELOADING"] == "1"
    assert before <= int(message["MONOTONIC_USEC"]) <= time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000


def test_more_time_is_asked_for_in_microseconds(manager: Manager) -> None:
    notifier(manager).extend(2.5)
    assert manager.next() == {"EXTEND_TIMEOUT_USEC": "2500000"}


@pytest.mark.parametrize(
    ("environ", "limit_s"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_the_watchdog_is_for_the_process_that_it_names(environ: dict[str, str], limit_s: float | None) -> None:
    assert Notifier(environ).watchdog_s == limit_s


def test_the_status_line_counts_and_names_faults() -> None:
    assert status_line(running=2, queued=1, unknown_effects=0) == "2 running, 1 queued, 0 effects unknown"
    assert status_line(running=0, queued=0, unknown_effects=3, faults=("a fault",)) == (
        "0 running, 0 queued, 3 effects unknown; a fault"
    )


class Disk:
    """A fault hook of the journal: full, stuck, or as it should be."""

    def __init__(self) -> None:
        self.full = False
        self.broken = False
        self.stuck = threading.Event()
        self.stuck.set()

    def __call__(self, point: str) -> None:
        self.stuck.wait(30)
        if self.broken:
            raise SystemExit("the thread dies")
        if self.full and point == "begin":
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def journal(tmp_path: Path, disk: Disk) -> Iterator[Journal]:
    journal = open_journal(tmp_path / "state" / "journal.db", faults=disk, reserve_bytes=4096)
    yield journal
    disk.stuck.set()
    journal.close_sync()


async def signs(manager: Manager, count: int, limit_s: float = 20.0) -> None:
    """Wait for so many signs of life."""
    for _ in range(count):
        await asyncio.to_thread(manager.until, "WATCHDOG", "1", limit_s)


async def test_it_beats_while_the_journal_answers_and_a_full_disk_is_an_answer(
    manager: Manager, journal: Journal, disk: Disk
) -> None:
    beating = asyncio.create_task(Pulse(notifier(manager), journal, lambda: "fine").run())
    await signs(manager, 3)
    disk.full = True
    with pytest.raises(JournalUnavailable):
        await journal.probe()
    assert not journal.writable
    manager.forget()
    await signs(manager, 10)
    assert not journal.writable, "it was full all the time"
    disk.full = False
    await signs(manager, 10)
    assert journal.writable, "the beat must not keep an idle writer from getting well"
    beating.cancel()


async def test_a_writer_that_hangs_gives_no_sign(manager: Manager, journal: Journal, disk: Disk) -> None:
    beating = asyncio.create_task(Pulse(notifier(manager), journal, lambda: "fine").run())
    await signs(manager, 2)
    disk.stuck.clear()
    await asyncio.sleep(LIMIT_S)
    manager.forget()
    with pytest.raises(TimeoutError):
        await signs(manager, 1, limit_s=3 * LIMIT_S)
    disk.stuck.set()
    await signs(manager, 1)
    beating.cancel()


async def test_a_writer_that_has_died_gives_none_ever(manager: Manager, journal: Journal, disk: Disk) -> None:
    beating = asyncio.create_task(Pulse(notifier(manager), journal, lambda: "fine").run())
    await signs(manager, 2)
    disk.broken = True
    await asyncio.wait_for(beating, 20)
    assert not await journal.answers()


async def test_a_drain_asks_for_time_with_every_beat(manager: Manager, journal: Journal) -> None:
    pulse = Pulse(notifier(manager), journal, lambda: "fine")
    pulse.draining = True
    beating = asyncio.create_task(pulse.run())
    for _ in range(2):
        await asyncio.to_thread(manager.until, "EXTEND_TIMEOUT_USEC", "10000000")
    beating.cancel()


async def test_the_status_is_sent_when_it_changes(manager: Manager, journal: Journal) -> None:
    said = ["one"]
    beating = asyncio.create_task(Pulse(notifier(manager), journal, lambda: said[0]).run())
    await asyncio.to_thread(manager.until, "STATUS", "one")
    said[0] = "two"
    while (message := await asyncio.to_thread(manager.next)).get("STATUS") != "two":
        assert "STATUS" not in message, "it has not changed"
    beating.cancel()
