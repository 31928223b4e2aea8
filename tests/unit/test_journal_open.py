"""Opening a journal: modes, symlinks, the lock, copies, foreign and newer files, migration, quarantine."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from protocol.errors import ActionConflict, StartError
from supervisor.journal import RowQuarantined, open_journal
from supervisor.journal.schema import APPLICATION_ID, MIGRATIONS, ODD
from supervisor.processes import Identity, identify
from tests.support.journals import LIMIT, OWNER, admit, hear, new_job, opened, python, sample_ending, start


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "journal.db"


def close_one(path: Path) -> None:
    open_journal(path, reserve_bytes=0).close_sync()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.case(69)
async def test_every_file_of_the_journal_is_private_whatever_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "journal.db"
    before = os.umask(0)
    try:
        async with opened(path) as journal:
            await admit(journal)
            files = {name: mode(path.with_name(path.name + name)) for name in ("", "-wal", "-shm", ".lock", ".reserve")}
            assert set(files.values()) == {0o600}, files
            assert [mode(path.parent), mode(path.parent.parent)] == [0o700, 0o700]
    finally:
        os.umask(before)
    assert sorted(item.name for item in path.parent.iterdir()) == [
        "journal.db",
        "journal.db.lock",
        "journal.db.reserve",
    ]


def test_a_readable_directory_is_accepted_with_a_warning(path: Path) -> None:
    path.parent.mkdir()
    path.parent.chmod(0o755)
    journal = open_journal(path, reserve_bytes=0)
    journal.close_sync()
    assert len(journal.warnings) == 1
    assert "0755" in journal.warnings[0]


@pytest.mark.parametrize("bits", [0o770, 0o777, 0o1777])
def test_a_directory_that_others_may_write_is_refused(path: Path, bits: int) -> None:
    path.parent.mkdir()
    path.parent.chmod(bits)
    with pytest.raises(StartError, match="others may write"):
        open_journal(path)
    assert list(path.parent.iterdir()) == []


def test_a_symlinked_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(StartError, match="symlink"):
        open_journal(tmp_path / "link" / "journal.db")


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm", ".lock"])
def test_a_symlink_in_place_of_a_file_is_refused_and_not_followed(path: Path, suffix: str) -> None:
    close_one(path)
    target = path.with_name("elsewhere")
    target.write_bytes(b"")
    target.chmod(0o600)
    name = path.with_name(path.name + suffix)
    name.unlink(missing_ok=True)
    name.symlink_to(target)
    with pytest.raises(StartError, match="regular file"):
        open_journal(path)
    assert target.read_bytes() == b""


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
@pytest.mark.parametrize("suffix", ["", ".lock"])
def test_what_is_no_regular_file_is_refused_without_blocking(
    path: Path, make: Callable[[Path], None], suffix: str
) -> None:
    path.parent.mkdir(mode=0o700)
    make(path.with_name(path.name + suffix))
    with pytest.raises(StartError, match="regular file"):
        open_journal(path)


@pytest.mark.case(70)
@pytest.mark.parametrize("bits", [0o640, 0o604, 0o660])
def test_a_journal_that_others_could_read_is_refused(path: Path, bits: int) -> None:
    close_one(path)
    path.chmod(bits)
    with pytest.raises(StartError, match=f"{bits:04o}"):
        open_journal(path)


def test_a_journal_with_two_names_is_refused(path: Path) -> None:
    close_one(path)
    os.link(path, path.with_name("other.db"))
    with pytest.raises(StartError, match="hard links"):
        open_journal(path)


def test_a_second_owner_is_refused_and_told_the_pid_of_the_first(path: Path) -> None:
    with python(OWNER, path) as owner:
        assert hear(owner) == "open"
        with pytest.raises(StartError, match=rf"owned by pid {owner.pid}\b"):
            open_journal(path)


def test_the_lock_is_free_again_once_the_owner_is_killed(path: Path) -> None:
    with python(OWNER, path) as owner:
        hear(owner)
        seen = identify(owner.pid)
        owner.kill()
        owner.wait()
        journal = open_journal(path, reserve_bytes=0)
    assert seen is not None
    assert journal.previous_owner == seen
    assert journal.epoch == 2
    journal.close_sync()


def test_the_lock_is_not_inherited_by_what_the_owner_starts(path: Path) -> None:
    script = OWNER.replace(
        "sys.stdin.read()",
        "import subprocess; child = subprocess.Popen(['cat'], stdin=subprocess.PIPE, close_fds=False)\n"
        "print(child.pid, flush=True); sys.stdin.read()",
    )
    with python(script, path) as owner:
        hear(owner)
        child = int(hear(owner))
        pidfd = os.pidfd_open(child)
        held = [os.readlink(f"/proc/{child}/fd/{fd}") for fd in os.listdir(f"/proc/{child}/fd")]
        assert not [name for name in held if "journal.db" in name]
        # The child is stopped, so that the end of its pipe does not end it before we have looked.
        signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
        owner.kill()
        owner.wait()
        try:
            assert identify(child) is not None
            close_one(path)
        finally:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)


def test_a_copy_of_a_running_journal_is_refused_until_its_owner_is_gone(tmp_path: Path) -> None:
    original, copy = tmp_path / "one" / "journal.db", tmp_path / "two" / "journal.db"
    with python(OWNER, original) as owner:
        hear(owner)
        shutil.copytree(original.parent, copy.parent)
        with pytest.raises(StartError, match=f"copy of a running journal.*pid {owner.pid}"):
            open_journal(copy)
        owner.kill()
        owner.wait()
    close_one(copy)


def test_an_unreaped_owner_is_dead(path: Path) -> None:
    with python(OWNER, path) as owner:
        hear(owner)
        owner.kill()
        os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)
        close_one(path)


@pytest.mark.parametrize("change", [{"start_ticks": 1}, {"boot_id": "other"}, {"pid_ns": 1}])
def test_another_process_with_the_recorded_pid_is_no_owner(path: Path, change: dict[str, object]) -> None:
    close_one(path)
    parent = identify(os.getppid())
    assert parent is not None
    write_owner(path, msgspec.structs.replace(parent, **change))
    close_one(path)


def test_the_recorded_owner_itself_is_refused(path: Path) -> None:
    close_one(path)
    parent = identify(os.getppid())
    assert parent is not None
    write_owner(path, parent)
    with pytest.raises(StartError, match=f"pid {parent.pid}"):
        open_journal(path)


def write_owner(path: Path, owner: Identity) -> None:
    change(path, "INSERT OR REPLACE INTO meta VALUES('owner', ?)", msgspec.json.encode(owner).decode())


def change(path: Path, statement: str, *values: object) -> None:
    connection = sqlite3.connect(path)
    with connection:
        connection.execute(statement, values)
    connection.close()


def test_instance_stays_and_epoch_grows(path: Path) -> None:
    first = open_journal(path, reserve_bytes=0)
    first.close_sync()
    second = open_journal(path, reserve_bytes=0)
    second.close_sync()
    assert (first.epoch, second.epoch) == (1, 2)
    assert first.instance_id == second.instance_id
    assert len(first.instance_id) == 32
    assert second.previous_owner is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"not a database", "not a journal"),
        (b"{}", "not a journal"),
        (b'[{"action_id":"a"}]', "lacks crew_id, input_hash, status"),
        (b"\n [\n", "Expecting value at line 3"),
        (b"SQLite format 3\x00" + b"\xff" * 4096, "cannot be opened"),
        (b"SQLite format 3\x00", "cannot be opened"),
    ],
)
def test_a_file_that_is_no_journal_is_refused_and_left_as_it_is(path: Path, content: bytes, said: str) -> None:
    path.parent.mkdir(mode=0o700)
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(StartError, match=said):
        open_journal(path)
    assert path.read_bytes() == content


def test_a_database_of_another_program_is_refused_and_left_as_it_is(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    os.close(os.open(path, os.O_CREAT, 0o600))
    change(path, "CREATE TABLE theirs(x)")
    before = path.read_bytes()
    with pytest.raises(StartError, match="another program"):
        open_journal(path)
    assert path.read_bytes() == before


def test_a_damaged_journal_is_refused(path: Path) -> None:
    close_one(path)
    pages = path.stat().st_size // 4096
    with path.open("r+b") as file:
        for page in range(1, pages):
            file.seek(page * 4096)
            file.write(b"\x5a" * 64)
    before = path.read_bytes()
    with pytest.raises(StartError, match=r"damaged|cannot be opened"):
        open_journal(path)
    assert path.read_bytes() == before


async def test_a_journal_that_lost_its_file_or_content_is_not_begun_anew(path: Path) -> None:
    with python(OWNER, path) as owner:
        hear(owner)
    assert path.with_name("journal.db-wal").stat().st_size
    saved = path.read_bytes()
    path.unlink()
    with pytest.raises(StartError, match="holds records"):
        open_journal(path)
    path.write_bytes(saved)
    path.chmod(0o600)
    close_one(path)
    path.write_bytes(b"")
    with pytest.raises(StartError, match="empty but was not before"):
        open_journal(path)


def test_a_crash_before_the_first_schema_leaves_a_journal_that_opens(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    os.close(os.open(path, os.O_CREAT, 0o600))
    close_one(path)


def test_a_newer_schema_is_refused(path: Path) -> None:
    close_one(path)
    change(path, f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    with pytest.raises(StartError, match=f"schema version {len(MIGRATIONS) + 1}"):
        open_journal(path)


async def test_an_older_schema_moves_forward_and_a_copy_is_kept(path: Path) -> None:
    async with opened(path) as journal:
        row = await admit(journal)
    newer = (*MIGRATIONS, ("ALTER TABLE jobs ADD COLUMN colour TEXT", "UPDATE jobs SET colour = 'blue'"))
    async with opened(path, migrations=newer) as journal:
        found = await journal.read(lambda connection: connection.execute("SELECT row, colour FROM jobs").fetchall())
        assert found == [(row, "blue")]
        assert (await journal.get_row(row)).action_id == "a-1"
    copy = path.with_name(f"journal.db.v{len(MIGRATIONS)}.bak")
    assert mode(copy) == 0o600
    with pytest.raises(StartError, match=f"schema version {len(newer)}"):
        open_journal(path)
    async with opened(copy) as journal:
        assert (await journal.get_row(row)).action_id == "a-1"


async def test_a_migration_that_fails_changes_nothing(path: Path) -> None:
    async with opened(path) as journal:
        await admit(journal)
    broken = (*MIGRATIONS, ("ALTER TABLE jobs ADD COLUMN colour TEXT", "UPDATE no_such_table SET x = 1"))
    with pytest.raises(StartError, match="no_such_table"):
        open_journal(path, migrations=broken)
    async with opened(path) as journal:
        assert await journal.get("a-1")
        columns = await journal.read(lambda connection: connection.execute("PRAGMA table_info(jobs)").fetchall())
        assert "colour" not in [column[1] for column in columns]


def test_the_file_is_marked_as_ours(path: Path) -> None:
    close_one(path)
    header = path.read_bytes()[:100]
    assert int.from_bytes(header[68:72], "big") == APPLICATION_ID
    assert int.from_bytes(header[60:64], "big") == len(MIGRATIONS)


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("status = 'flying'", "flying"),
        ("phase = 'nowhere'", "nowhere"),
        ("stop = '{\"confirmed\":'", "truncated"),
        ("stop = x'ff00'", "malformed"),
        ("uncertain = 7", "7"),
        ("event_count = -1", "event_count"),
        ("phase = 'running'", "does not go with"),
    ],
)
async def test_a_row_that_cannot_be_read_is_reported_and_stays_a_fence(path: Path, assignment: str, said: str) -> None:
    async with opened(path) as journal:
        row = await start(journal)
        await journal.finish(row, sample_ending())
        await admit(journal, "good")
    change(path, f"UPDATE jobs SET {assignment} WHERE row = {row}")
    async with opened(path) as journal:
        assert [(item.row, item.action_id) for item in journal.quarantined] == [(row, "a-1")]
        assert said in journal.quarantined[0].why
        assert journal.quarantined[0].worker is not None
        assert journal.quarantined[0].worker.pid == 4242
        with pytest.raises(RowQuarantined, match=r"row .*a-1"):
            await journal.get("a-1")
        with pytest.raises(ActionConflict, match="quarantined"):
            await journal.admit(new_job("a-1"), retained_limit=LIMIT)
        with pytest.raises(RowQuarantined):
            await journal.archive("a-1", actor="tester")
        assert [record.action_id for record in (await journal.list_jobs()).records] == ["good"]
        assert [item.record.action_id for item in await journal.unfinished()] == ["good"]
        assert journal.retained == 2


async def test_a_running_job_whose_worker_cannot_be_read_is_quarantined(path: Path) -> None:
    async with opened(path) as journal:
        row = await start(journal)
    change(path, "UPDATE workers SET pid = 'many'")
    async with opened(path) as journal:
        assert [(item.row, item.worker) for item in journal.quarantined] == [(row, None)]
        assert await journal.unfinished() == []


async def test_odd_rows_are_found_by_their_index(path: Path) -> None:
    async with opened(path) as journal:
        plan = await journal.read(
            lambda connection: connection.execute(f"EXPLAIN QUERY PLAN SELECT * FROM jobs WHERE {ODD}").fetchall()
        )
    assert "jobs_odd" in str(plan)


def test_the_supervisor_s_journal_imports_neither_aiohttp_nor_click() -> None:
    script = (
        "import sys, supervisor.journal; print([m for m in ('aiohttp', 'click', 'rich', 'psutil') if m in sys.modules])"
    )
    with python(script) as process:
        assert hear(process) == "[]"


def test_a_refused_start_leaves_the_lock_free(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    path.write_bytes(b"nonsense")
    path.chmod(0o600)
    with pytest.raises(StartError):
        open_journal(path)
    # flock(1) would wait for the lock that a leaked descriptor of this process still holds.
    lock = path.with_name("journal.db.lock")
    script = "import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    subprocess.run([sys.executable, "-c", script, lock], check=True, timeout=30)
