"""``kill -9`` while a runs.json is imported: whatever the instant, the next start ends with the same journal.

Nothing of the original is lost, nothing is imported twice, and no unfinished file stays.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from supervisor.journal import open_journal
from supervisor.journal.checking import check_journal
from supervisor.journal.exporting import Format, export_to
from tests.support.journals import hear, python
from tests.support.reference import encoded, event, parsed, record, running, write

SEED = int(os.environ.get("CRASH_SEED", "20250117"))
INSTANTS = 12
JOBS = 400
#: About as long as an import of so many takes, seconds.
LONGEST_S = 0.06

#: Opens the journal in argv[1] and kills itself when the point argv[2] is reached for the argv[3]rd time.
DIES_AT = """
import os, signal, sys
from pathlib import Path
from supervisor.journal import open_journal
left = int(sys.argv[3])
def reach(point):
    global left
    if point == sys.argv[2]:
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
open_journal(Path(sys.argv[1]), reserve_bytes=0, faults=reach).close_sync()
"""
#: Says so, then opens the journal in argv[1].
OPENS = """
import sys
from pathlib import Path
from supervisor.journal import open_journal
print("opening", flush=True)
open_journal(Path(sys.argv[1]), reserve_bytes=0).close_sync()
"""
POINTS = [
    ("import_record", 1),
    ("import_record", JOBS // 2),
    ("import_record", JOBS),
    ("import_built", 1),
    ("import_synced", 1),
    ("import_kept", 1),
    ("import_placed", 1),
    ("import_done", 1),
]


def sample() -> list[dict[str, Any]]:
    """Records of every kind, a hand-made one and running ones among them."""
    made = [record(f"a-{number}") for number in range(JOBS - 3)]
    seed = record("seed", input_hash="qualification-seed", events=[event("completed", 0, status="completed")])
    return [*made, running("r-1"), seed, running("r-2", operation="train")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "state" / "runs.json", sample())


def look(path: Path) -> str:
    """What stands at the journal's path after a crash; anything but the whole original or a whole journal fails."""
    content = path.read_bytes()
    if content.startswith(b"["):
        assert content == encoded(sample())
        return "original"
    # In a copy, since the first reader after a crash completes or takes back what SQLite was about to do.
    with tempfile.TemporaryDirectory() as scratch:
        copied = shutil.copytree(path.parent, Path(scratch) / "copy")
        with contextlib.closing(sqlite3.connect(copied / path.name)) as connection:
            assert connection.execute("SELECT count(*) FROM jobs").fetchone() == (JOBS,)
    assert path.with_name("runs.json.reference").read_bytes() == encoded(sample())
    return "journal"


def finish_and_check(path: Path) -> None:
    """Start once more and compare the journal with the original."""
    open_journal(path, reserve_bytes=0).close_sync()
    assert path.with_name("runs.json.reference").read_bytes() == encoded(sample())
    assert path.with_name("runs.json.reference").stat().st_nlink == 1
    assert sorted(os.listdir(path.parent)) == ["runs.json", "runs.json.lock", "runs.json.reference"]
    report = check_journal(path)
    assert (report.jobs, report.findings) == (JOBS, ())
    back = path.parent.parent / "back.json"
    export_to(path, Format.REFERENCE, back)
    for before, after in zip(sample(), parsed(back), strict=True):
        if before["status"] == "running":
            *events, fence = after["events"]
            assert (after["status"], fence["event"], events) == ("failed", "failed", before["events"])
            assert fence["data"]["uncertain_outcome"] is True
        else:
            assert after == before


def dies_at(path: Path, point: str, times: int) -> None:
    with python(DIES_AT, path, point, times) as child:
        _, said = child.communicate(timeout=60)
        assert child.returncode == -signal.SIGKILL, said


@pytest.mark.case(67, 70, 73)
@pytest.mark.parametrize(("point", "times"), POINTS)
def test_killed_at_a_named_point(path: Path, point: str, times: int) -> None:
    dies_at(path, point, times)
    assert look(path) == ("journal" if point in ("import_placed", "import_done") else "original")
    finish_and_check(path)


@pytest.mark.case(67, 70, 73)
def test_killed_again_at_every_point_in_turn(path: Path) -> None:
    for point, times in POINTS[:-1]:
        dies_at(path, point, times)
        look(path)
    finish_and_check(path)


@pytest.mark.case(67, 70, 73)
@pytest.mark.timeout(120)
def test_killed_at_random_instants(path: Path) -> None:
    rng = random.Random(SEED)
    seen = []
    for number in range(INSTANTS):
        trial = write(path.parent.parent / f"trial{number}" / path.name, path.read_bytes())
        with python(OPENS, trial) as child:
            assert hear(child) == "opening"
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(rng.uniform(0.0, LONGEST_S))
            child.kill()
        seen.append(look(trial))
        finish_and_check(trial)
    # Or every kill came after the import.
    assert "original" in seen, f"seed {SEED}: {seen}"
