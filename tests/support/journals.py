"""Journals for tests: samples of what is stored, an open journal as a context, and processes that own one."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from protocol.api import StopEvidence
from protocol.states import Method, Status
from supervisor.journal import Ending, Journal, NewJob, WorkerIdentity, open_journal

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 1_000_000

#: Opens the journal in argv[1], says so on stdout, then waits for its stdin to end.
OWNER = """
import sys
from pathlib import Path
from supervisor.journal import open_journal
journal = open_journal(Path(sys.argv[1]))
print("open", flush=True)
sys.stdin.read()
"""


def new_job(action_id: str = "a-1", **changes: Any) -> NewJob:
    """A job to admit."""
    job = NewJob(
        action_id=action_id,
        crew_id="crew",
        operation="run",
        request_hash="1" * 64,
        timeout_ms=600_000,
        admitted_at=time.time(),
        client="tester",
    )
    return msgspec.structs.replace(job, **changes)


def sample_worker(**changes: Any) -> WorkerIdentity:
    """A worker that never lived."""
    worker = WorkerIdentity(
        pid=4242, start_ticks=99, started_at=1.0, boot_id="b", pid_ns=7, leaf="job-1", method="clone", launched_at=2.0
    )
    return msgspec.structs.replace(worker, **changes)


def sample_stop(**changes: Any) -> StopEvidence:
    """Evidence of a proved stop."""
    stop = StopEvidence(
        confirmed=True, method=Method.CGROUP, reason="completed", requested_at=3.0, confirmed_at=3.5, elapsed_ms=500.0
    )
    return msgspec.structs.replace(stop, **changes)


def sample_ending(**changes: Any) -> Ending:
    """The ending of a job that completed after its ``started`` event."""
    ending = Ending(
        status=Status.COMPLETED,
        first_seq=1,
        event_data=b'{"raw":"done"}',
        ended_at=4.0,
        uncertain=False,
        stop=sample_stop(),
    )
    return msgspec.structs.replace(ending, **changes)


@asynccontextmanager
async def opened(path: Path, **options: Any) -> AsyncIterator[Journal]:
    """An open journal, closed at the end. The reserve is small unless said otherwise."""
    options.setdefault("reserve_bytes", 4096)
    journal = open_journal(path, **options)
    try:
        yield journal
    finally:
        await journal.close()


async def admit(journal: Journal, action_id: str = "a-1", **changes: Any) -> int:
    """Admit a fresh job and return its row."""
    admission = await journal.admit(new_job(action_id, **changes), retained_limit=LIMIT)
    assert admission.fresh
    return admission.record.row


async def start(journal: Journal, action_id: str = "a-1", **changes: Any) -> int:
    """Admit and start a job and return its row."""
    row = await admit(journal, action_id, **changes)
    await journal.record_start(row, sample_worker(), b'{"status":"running"}', 2.5)
    return row


#: What takes a journal back from a version to the one before.
BACKWARDS = {
    6: ("DROP INDEX effects_news", "ALTER TABLE effects DROP COLUMN told"),
    5: ("DROP TABLE outbox",),
    4: ("DROP TABLE reconciliations",),
    3: ("DROP TABLE effects",),
    2: ("ALTER TABLE jobs DROP COLUMN output",),
}


def make_older(path: Path, version: int) -> None:
    """Bring a closed journal back to an older schema, as a program of that time left it."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        found = connection.execute("PRAGMA user_version").fetchone()[0]
        for step in range(found, version, -1):
            for statement in BACKWARDS[step]:
                connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {version}")


@contextmanager
def python(script: str, *arguments: object, prefix: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    """Run a script that can import the project; it is killed and reaped at the end."""
    process = subprocess.Popen(
        [*prefix, sys.executable, "-c", script, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def hear(process: subprocess.Popen[str]) -> str:
    """The next line that the process says. Raises AssertionError with its stderr when it says nothing."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        assert process.stderr is not None
        raise AssertionError(process.stderr.read())
    return line.strip()
