"""The journal under real failures: a file size limit, a full file system, kill -9."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from protocol.states import Status
from tests.support.journals import admit, hear, opened, python, sample_worker


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


#: Meets a real write error: the log may not grow beyond its size of the moment (EFBIG, setrlimit(2)).
LIMITED = """
import asyncio, resource, sys
from pathlib import Path
from protocol.errors import JournalUnavailable
from tests.support.journals import admit, opened, sample_ending, start

async def main():
    path = Path(sys.argv[1])
    async with opened(path) as journal:
        row = await start(journal, "running")
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        wal = path.with_name(path.name + "-wal")
        resource.setrlimit(resource.RLIMIT_FSIZE, (wal.stat().st_size, hard))
        for attempt in (admit(journal, "new"), journal.finish(row, sample_ending()), admit(journal, "new")):
            try:
                await attempt
            except JournalUnavailable as error:
                print(error.detail)
        print(journal.writable, journal.retained, await journal.get("new"), (await journal.get_row(row)).status.value)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        while not journal.writable:
            await asyncio.sleep(0.02)
        print((await journal.finish(row, sample_ending())).record.status.value, await admit(journal, "new") == row + 1)
asyncio.run(main())
"""


def test_a_real_write_error_leaves_nothing_and_passes(path: Path) -> None:
    with python(LIMITED, path) as process:
        assert ["disk I/O error" in hear(process) for _ in range(2)] == [True, True]
        hear(process)
        assert hear(process) == "False 1 None running"
        assert hear(process) == "completed True"
        assert process.wait(30) == 0


#: Fills a small file system of its own, in a mount namespace of its own.
FULL_DISK = """
import asyncio, os, subprocess, sys
from pathlib import Path
from protocol.errors import JournalUnavailable
from tests.support.journals import admit, opened, sample_ending, start

async def main():
    where = Path(sys.argv[1])
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m,mode=700", "none", where]).returncode:
        print("no mount", flush=True)
        return
    path = where / "journal.db"
    async with opened(path, reserve_bytes=512 * 1024) as journal:
        row = await start(journal, "running")
        ballast = where / "ballast"
        with ballast.open("wb", buffering=0) as file:
            try:
                while file.write(b"x" * 4096):
                    pass
            except OSError:
                pass
        refused = 0
        while not refused:
            count = (await journal.get_row(row)).event_count
            try:
                await journal.append_events(row, count, [("chunk", b"x" * 8192)], 3.0)
            except JournalUnavailable:
                refused += 1
        count = (await journal.get_row(row)).event_count
        reserve = path.with_name("journal.db.reserve")
        print(reserve.exists(), len(await journal.events(row, 0)) == count)
        ended = (await journal.finish(row, sample_ending(first_seq=count, event_data=b"y" * 65536))).record
        print(ended.status.value, reserve.exists(), journal.writable)
        try:
            await admit(journal, "new")
        except JournalUnavailable:
            print("refused")
        ballast.unlink()
        while not journal.writable:
            await asyncio.sleep(0.02)
        print(reserve.exists(), await admit(journal, "new") > row)
    async with opened(path) as journal:
        print((await journal.get_row(row)).status.value, journal.retained)
asyncio.run(main())
"""


def test_a_really_full_disk_still_takes_the_terminal_record(tmp_path: Path) -> None:
    if os.geteuid() != 0 or not Path("/usr/bin/unshare").exists():
        pytest.skip("needs root for a small file system")
    with python(FULL_DISK, tmp_path, prefix=("/usr/bin/unshare", "--mount")) as process:
        first = hear(process)
        if first == "no mount":
            pytest.skip("mounting is not allowed here")
        assert first == "True True"
        assert hear(process) == "completed False False"
        assert hear(process) == "refused"
        assert hear(process) == "True True"
        assert hear(process) == "completed 2"
        assert process.wait(30) == 0


#: Says on stdout what has been acknowledged, one Action and its step a line, until it is killed.
LOOP = """
import asyncio, itertools, os, sys
from pathlib import Path
from tests.support.journals import opened, sample_ending, start

async def client(journal, name):
    for number in itertools.count():
        action = f"{name}-{number}"
        row = await start(journal, action)
        os.write(1, f"{action} started {row}\\n".encode())
        await journal.append_events(row, 1, [("chunk", b"{}")] * 3, 3.0)
        os.write(1, f"{action} events {row}\\n".encode())
        await journal.finish(row, sample_ending(first_seq=4))
        os.write(1, f"{action} finished {row}\\n".encode())

async def main():
    async with opened(Path(sys.argv[1])) as journal:
        await asyncio.gather(*(client(journal, name) for name in "abcdefgh"))
asyncio.run(main())
"""


@pytest.mark.parametrize("lines", [1, 40, 333, 1500])
async def test_kill_minus_nine_leaves_everything_that_was_acknowledged(path: Path, lines: int) -> None:
    with python(LOOP, path) as process:
        heard = [hear(process) for _ in range(lines)]
        process.kill()
        assert process.stdout is not None
        rest, _, _ = process.stdout.read().rpartition("\n")
        process.wait()
    acknowledged = [line.split() for line in heard + rest.split("\n") if line]
    async with opened(path) as journal:
        assert journal.quarantined == []
        for action, step, row in acknowledged:
            record = await journal.get(action)
            assert record is not None
            assert record.row == int(row)
            assert record.event_count >= {"started": 1, "events": 4, "finished": 5}[step]
            assert step != "finished" or record.status is Status.COMPLETED
        for record in (await journal.list_jobs(limit=100_000)).records:
            names = [event.name for event in await journal.events(record.row, 0)]
            whole = ["started", "chunk", "chunk", "chunk", "completed"]
            assert names == whole[: record.event_count], "whole transactions only"
            assert record.event_count in (0, 1, 4, 5)
            assert (record.status is Status.COMPLETED) == (record.event_count == 5)
        assert await journal.read(lambda connection: connection.execute("PRAGMA integrity_check").fetchone()) == ("ok",)
        assert len(await journal.unfinished()) <= 8


async def test_ids_of_workers_survive_as_they_were(path: Path) -> None:
    worker = sample_worker(pid=2**31 - 1, start_ticks=2**62, pid_ns=2**32 + 5, leaf=None)
    async with opened(path) as journal:
        await journal.record_worker(await admit(journal), worker)
    async with opened(path) as journal:
        assert [item.worker for item in await journal.unfinished()] == [worker]
        assert worker.identity.start_ticks == 2**62
