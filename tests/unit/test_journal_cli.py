"""``crew-supervisor journal`` as a process, on journals that are owned and on those that nobody owns."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import StartError
from supervisor.journal import open_journal
from supervisor.journal.checking import check_journal
from tests.support.journals import OWNER, admit, hear, make_older, opened, python, sample_ending, start
from tests.support.reference import encoded, parsed, record, running, write
from tests.unit.test_cli import run
from tests.unit.test_journal_open import change


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "journal.db"


def journal(*arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the group."""
    done: subprocess.CompletedProcess[str] = run("journal", *map(str, arguments), **environ)
    assert "Traceback" not in done.stderr
    return done


def configured(path: Path) -> Path:
    """A configuration whose state_file is ``path``."""
    file = path.parent.parent / "supervisor.toml"
    file.write_text(f'registry = "crews:registry"\nstate_file = "{path}"\nbearer_token = "a-token-of-a-test"\n')
    file.chmod(0o600)
    return file


@contextmanager
def owned(path: Path) -> Iterator[int]:
    """Another process owns the journal; its pid."""
    with python(OWNER, path) as owner:
        assert hear(owner) == "open"
        yield owner.pid


async def filled(path: Path) -> None:
    """A journal with a job that completed, one that runs and one that waits."""
    async with opened(path) as journal:
        await journal.finish(await start(journal, "done"), sample_ending(task_ids=("task-1",)))
        await start(journal, "live")
        await admit(journal, "waits")


def names(path: Path) -> list[str]:
    return sorted(os.listdir(path))


# --- export -----------------------------------------------------------------------------------------------------------


async def test_export_prints_one_object_a_job_with_everything_that_belongs_to_it(path: Path) -> None:
    await filled(path)
    done = journal("export", path)
    assert done.returncode == 0, done.stderr
    jobs = [json.loads(line) for line in done.stdout.splitlines()]
    assert [job["action_id"] for job in jobs] == ["done", "live", "waits"]
    first = jobs[0]
    assert (first["request_hash"], first["status"], first["phase"]) == ("1" * 64, "completed", "done")
    assert first["stop"]["confirmed"] is True
    assert first["output"] == {"raw": "done"}
    assert [(item["event"], item["sequence"]) for item in first["events"]] == [("started", 0), ("completed", 1)]
    assert [entry["act"] for entry in first["audit"]] == ["admitted", "completed"]
    assert first["tasks"] == ["task-1"]
    assert first["workers"][0]["pid"] == 4242
    assert "still running: live, waits" in done.stderr


async def test_export_of_a_live_journal_shows_what_is_committed(path: Path) -> None:
    async with opened(path) as live:
        await start(live, "a-1")
        done = journal("export", path, "--format", "reference")
        assert [item["status"] for item in json.loads(done.stdout)] == ["running"]
        await live.finish(1, sample_ending())
        done = journal("export", path, "--format", "reference")
        assert [item["status"] for item in json.loads(done.stdout)] == ["completed"]
        assert live.writable


async def test_an_exported_file_is_private_whole_and_replaces_an_older_one(path: Path) -> None:
    await filled(path)
    target = path.parent / "out" / "runs.json"
    write(target, b"an older export").chmod(0o644)
    done = journal("export", path, "--format", "reference", "--output", target)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert [item["action_id"] for item in parsed(target)] == ["done", "live", "waits"]
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert names(target.parent) == ["runs.json"]


async def test_an_export_that_fails_leaves_the_older_file_alone(path: Path) -> None:
    await filled(path)
    change(path, "UPDATE events SET data = x'7b' WHERE seq = 1")
    target = write(path.parent / "out" / "runs.json", b"an older export")
    done = journal("export", path, "--format", "reference", "--output", target)
    assert done.returncode == 1
    assert "Action done" in done.stderr
    assert target.read_bytes() == b"an older export"
    assert names(target.parent) == ["runs.json"]


@pytest.mark.parametrize("suffix", ["", "-wal", ".lock"])
async def test_an_export_never_replaces_the_journal_itself(path: Path, suffix: str) -> None:
    await filled(path)
    before = path.read_bytes()
    done = journal("export", path, "--output", f"{path}{suffix}")
    assert done.returncode == 1
    assert "belongs to the journal" in done.stderr
    assert path.read_bytes() == before


async def test_archived_actions_are_counted_since_no_export_has_them(path: Path) -> None:
    async with opened(path) as live:
        await live.finish(await start(live), sample_ending())
        await live.archive("a-1", actor="tester")
    done = journal("export", path, "--format", "reference")
    assert json.loads(done.stdout) == []
    assert "1 archived Action ids are not in it" in done.stderr


# --- import -----------------------------------------------------------------------------------------------------------


def test_import_makes_a_journal_and_says_what_it_had_to_change(path: Path) -> None:
    text = encoded([record("a-1", output={"n": 0.5}), running("r-1")]).replace(b"0.5", b"NaN")
    source = write(path.parent.parent / "old" / "runs.json", text)
    done = journal("import", source, "--into", path)
    assert done.returncode == 0, done.stderr
    assert "2 jobs and 6 events imported" in done.stdout
    assert "uncertain outcome: r-1" in done.stdout
    assert "non_finite_number_became_null: a-1" in done.stdout
    assert source.read_bytes() == text
    assert names(path.parent) == ["journal.db", "journal.db.lock"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert check_journal(path).findings == ()
    live = open_journal(path, reserve_bytes=0)
    assert live.retained == 2
    live.close_sync()


def test_import_in_place_keeps_the_original_beside_it(path: Path) -> None:
    content = write(path, [record()]).read_bytes()
    done = journal("import", path, "--config", configured(path), "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["ok"], report["jobs"], report["kept_as"]) == (True, 1, f"{path}.reference")
    assert path.with_name("journal.db.reference").read_bytes() == content
    again = journal("import", path, "--into", path)
    assert again.returncode == 1
    assert "nothing to import" in again.stderr


def test_import_adds_to_no_journal_that_is_there(path: Path) -> None:
    open_journal(path, reserve_bytes=0).close_sync()
    before = path.read_bytes()
    done = journal("import", write(path.with_name("runs.json"), [record()]), "--into", path)
    assert done.returncode == 1
    assert "exists already" in done.stderr
    assert path.read_bytes() == before


def test_import_into_an_owned_journal_is_a_conflict_that_names_the_pid(path: Path) -> None:
    source = write(path.with_name("runs.json"), [record()])
    with owned(path) as pid:
        done = journal("import", source, "--into", path)
    assert done.returncode == 4
    assert f"owned by pid {pid}" in done.stderr


def test_import_while_the_reference_itself_runs_is_a_conflict(path: Path) -> None:
    source = write(path.with_name("runs.json"), [running()])
    script = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print('locked', flush=True); input()"
    with python(script, path.with_name("runs.json.lock")) as reference:
        assert hear(reference) == "locked"
        done = journal("import", source, "--into", path, "--json")
    assert done.returncode == 4
    assert json.loads(done.stdout)["ok"] is False
    assert not path.exists()


def test_a_refused_import_says_which_record_and_leaves_nothing_behind(path: Path) -> None:
    source = write(path.with_name("runs.json"), [record("good"), record("bad", status="flying")])
    done = journal("import", source, "--into", path)
    assert done.returncode == 1
    assert "'bad'" in done.stderr
    assert names(path.parent) == ["journal.db.lock", "runs.json", "runs.json.lock"]


def test_import_takes_a_bound_for_the_file(path: Path) -> None:
    source = write(path.with_name("runs.json"), [record()])
    assert journal("import", source, "--into", path, "--max-bytes", "10").returncode == 1
    assert journal("import", source, "--into", path, "--max-bytes", source.stat().st_size).returncode == 0


# --- check ------------------------------------------------------------------------------------------------------------


async def test_a_sound_journal_has_no_findings(path: Path) -> None:
    await filled(path)
    done = journal("check", path, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["ok"], document["jobs"], document["events"], document["findings"]) == (True, 3, 3, [])


async def test_a_live_journal_is_checked_without_a_word_to_its_owner(path: Path) -> None:
    async with opened(path) as live:
        await live.finish(await start(live), sample_ending())
        done = journal("check", path)
        assert (done.returncode, "sound" in done.stdout) == (0, True)
        await admit(live, "after")
        assert live.writable


@pytest.mark.parametrize(
    ("statement", "code", "who"),
    [
        ("UPDATE jobs SET event_count = 5 WHERE action_id = 'done'", "event_count_wrong", "done"),
        ("UPDATE events SET seq = 7 WHERE job = 1 AND seq = 1", "sequence_gap", "done"),
        ("UPDATE events SET name = 'chunk' WHERE job = 1 AND seq = 1", "ending_missing", "done"),
        ("UPDATE jobs SET status = 'failed' WHERE action_id = 'done'", "ending_missing", "done"),
        ("UPDATE events SET name = 'failed' WHERE job = 1 AND seq = 0", "ending_early", "done"),
        ("UPDATE events SET name = 'completed' WHERE job = 2", "ending_early", "live"),
        ("UPDATE jobs SET phase = 'stopping' WHERE action_id = 'done'", "row_quarantined", "done"),
        ("UPDATE jobs SET stop = x'ff' WHERE action_id = 'done'", "row_quarantined", "done"),
        ("UPDATE workers SET pid = 'many' WHERE job = 2", "row_quarantined", "live"),
        ("UPDATE events SET data = x'7b' WHERE job = 1 AND seq = 0", "event_unreadable", None),
        ("INSERT INTO events VALUES(99, 0, 'started', 1.0, x'7b7d')", "events_orphaned", None),
        ("UPDATE workers SET job = 99 WHERE job = 2", "workers_orphaned", None),
        ("UPDATE tasks SET job = 99", "tasks_orphaned", None),
        ("INSERT INTO tombstones VALUES('done', 'h', 'c', 'run', 'failed', 1.0)", "archived_and_retained", "done"),
    ],
)
async def test_each_contradiction_is_found(path: Path, statement: str, code: str, who: str | None) -> None:
    await filled(path)
    assert check_journal(path).findings == ()
    change(path, statement)
    findings = check_journal(path).findings
    assert (code, who) in [(finding.code, finding.action_id) for finding in findings]


def test_a_journal_whose_owner_was_killed_is_read_with_what_its_log_holds(path: Path) -> None:
    script = OWNER.replace(
        'print("open"',
        'import asyncio; from tests.support.journals import admit; asyncio.run(admit(journal)); print("open"',
    )
    with python(script, path) as owner:
        assert hear(owner) == "open"
        owner.kill()
        owner.wait()
    before = path.read_bytes(), path.with_name("journal.db-wal").read_bytes()
    done = journal("check", path, "--json")
    assert (done.returncode, json.loads(done.stdout)["jobs"]) == (0, 1)
    assert (path.read_bytes(), path.with_name("journal.db-wal").read_bytes()) == before


def test_what_a_crash_cut_in_the_first_opening_is_left_to_the_next_start(path: Path) -> None:
    open_journal(path, reserve_bytes=0).close_sync()
    script = (
        "import os, sqlite3, sys; c = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "c.execute('PRAGMA journal_mode = DELETE'); c.execute('PRAGMA cache_size = 1'); c.execute('BEGIN IMMEDIATE')\n"
        "c.execute('CREATE TABLE big(x)')\n"
        "for _ in range(200): c.execute('INSERT INTO big VALUES(zeroblob(4000))')\n"
        "os.kill(os.getpid(), 9)"
    )
    with python(script, path) as crashing:
        crashing.wait()
    assert path.with_name("journal.db-journal").stat().st_size
    done = journal("check", path)
    assert done.returncode == 1
    assert "the next start completes" in done.stderr
    open_journal(path, reserve_bytes=0).close_sync()
    assert check_journal(path).findings == ()


async def test_findings_are_listed_with_exit_status_1(path: Path) -> None:
    await filled(path)
    change(path, "UPDATE jobs SET event_count = 5 WHERE action_id = 'done'")
    done = journal("check", path)
    assert done.returncode == 1
    assert "event_count_wrong row 1 (Action done): event_count is 5, there are 2 events" in done.stdout
    document = json.loads(journal("check", path, "--json").stdout)
    assert document["ok"] is False
    assert document["findings"][0]["code"] == "event_count_wrong"


async def test_a_damaged_file_is_a_finding(path: Path) -> None:
    await filled(path)
    with path.open("r+b") as file:
        for page in range(2, path.stat().st_size // 4096):
            file.seek(page * 4096)
            file.write(b"\x5a" * 64)
    done = journal("check", path)
    assert done.returncode == 1
    assert "file_damaged" in done.stdout or "check failed" in done.stderr


def test_an_imported_record_that_was_odd_before_is_no_finding(path: Path) -> None:
    write(path, [record("seed", events=[]), record("odd", events=["text"])])
    open_journal(path, reserve_bytes=0).close_sync()
    assert check_journal(path).findings == ()


# --- backup -----------------------------------------------------------------------------------------------------------


async def test_a_backup_of_a_live_journal_is_one_private_file_that_opens_once_its_owner_is_gone(path: Path) -> None:
    copy = path.parent / "copies" / "copy.db"
    copy.parent.mkdir(mode=0o700, parents=True)
    async with opened(path) as live:
        await live.finish(await start(live), sample_ending())
        done = journal("backup", path, copy)
        assert done.returncode == 0, done.stderr
        await admit(live, "after")
        assert names(copy.parent) == ["copy.db"]
        assert stat.S_IMODE(copy.stat().st_mode) == 0o600
        assert journal("check", copy).returncode == 0
        assert names(copy.parent) == ["copy.db"]
        exported = [json.loads(line)["action_id"] for line in journal("export", copy).stdout.splitlines()]
        assert exported == ["a-1"]
    restored = open_journal(copy, reserve_bytes=0)
    assert restored.retained == 1
    restored.close_sync()


def test_a_backup_is_not_opened_while_the_owner_of_the_original_lives(path: Path) -> None:
    copy = path.parent / "copies" / "copy.db"
    with owned(path) as pid:
        copy.parent.mkdir(mode=0o700, parents=True)
        assert journal("backup", path, copy).returncode == 0
        with pytest.raises(StartError, match=f"pid {pid}"):
            open_journal(copy)


async def test_a_backup_replaces_nothing(path: Path) -> None:
    await filled(path)
    copy = write(path.parent / "copies" / "copy.db", b"precious")
    done = journal("backup", path, copy)
    assert done.returncode == 1
    assert "exists already" in done.stderr
    assert copy.read_bytes() == b"precious"
    assert journal("backup", path, path).returncode == 1


async def test_a_backup_that_fails_leaves_nothing_behind(path: Path) -> None:
    source = write(path, b"no journal")
    copies = path.parent / "copies"
    copies.mkdir(mode=0o700)
    done = journal("backup", source, copies / "copy.db")
    assert done.returncode == 1
    assert "not a journal" in done.stderr
    assert names(copies) == []


# --- which journal ----------------------------------------------------------------------------------------------------


async def test_the_configuration_names_the_journal_where_no_argument_does(path: Path) -> None:
    await filled(path)
    file = configured(path)
    for command in (("check", "--config", file), ("export", "--config", file)):
        assert journal(*command).returncode == 0
    assert journal("check", CREW_SUPERVISOR_CONFIG=str(file)).returncode == 0
    assert journal("backup", "--config", file, path.with_name("copy.db")).returncode == 0
    assert check_journal(path.with_name("copy.db")).jobs == 3


@pytest.mark.parametrize(
    "arguments",
    [
        ("check",),
        ("export", "x", "--format", "xml"),
        ("backup",),
        ("backup", "a", "b", "c"),
        ("import",),
        ("import", "runs.json"),
        ("check", "--config", "missing.toml"),
    ],
)
def test_wrong_usage_exits_with_2(arguments: tuple[Any, ...]) -> None:
    assert journal(*arguments).returncode == 2


@pytest.mark.parametrize("command", ["check", "export"])
def test_what_is_no_journal_is_said_and_not_touched(path: Path, command: str) -> None:
    write(path, [record()])
    done = journal(command, path)
    assert done.returncode == 1
    assert "journal import" in done.stderr
    assert names(path.parent) == ["journal.db"]
    assert journal(command, path.with_name("missing")).returncode == 1
    assert names(path.parent) == ["journal.db"]


async def test_a_journal_of_an_older_schema_is_read_without_changing_it(path: Path) -> None:
    async with opened(path) as live:
        await live.finish(await start(live), sample_ending())
    make_older(path, 1)
    before = path.read_bytes()
    assert json.loads(journal("export", path).stdout)["output"] == {"raw": "done"}
    assert journal("check", path).returncode == 0
    assert path.read_bytes() == before
