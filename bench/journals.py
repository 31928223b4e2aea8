"""Journals with many retained jobs: some are written through the journal's own transactions, the rest are their copies.

A copy differs in its row, its Action id (of 128 random-looking bits, as real ones are) and nothing else.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from protocol.api import StopEvidence, WorkerExit
from protocol.states import Method, Status
from supervisor.journal import Ending, NewJob, WorkerIdentity, schema, transactions
from supervisor.journal.opening import open_journal
from supervisor.journal.writer import Tally

#: Jobs that are written one by one.
ORIGINALS = 1000
#: A record of this size in the reference's file: what a run of a crew with two tasks and some events takes.
LARGE_BYTES = 43_000
_CACHE = "PRAGMA cache_size = -1048576"


def build_journal(path: Path, retained: int, *, record_bytes: int = 0) -> None:
    """A closed journal with ``retained`` completed jobs, each with ``record_bytes`` of events besides its own."""
    path.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
    open_journal(path).close_sync()
    if not retained:
        return
    with closing(schema.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = OFF").fetchall()
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute(_CACHE)
        connection.execute("BEGIN IMMEDIATE")
        originals = min(retained, ORIGINALS)
        for number in range(originals):
            _write_job(connection, number, record_bytes)
        _multiply(connection, originals, retained)
        connection.execute("COMMIT")
        connection.execute("PRAGMA journal_mode = WAL").fetchall()


def copy_journal(source: Path, target: Path) -> None:
    """The same journal at another place."""
    target.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
    shutil.copy(source, target)
    target.chmod(0o600)


def _write_job(connection: sqlite3.Connection, number: int, record_bytes: int) -> None:
    tally, now = Tally(), time.time()
    job = NewJob(
        action_id=_action_id(number),
        crew_id="instant",
        operation="run",
        request_hash=f"{number:064x}",
        timeout_ms=600_000,
        admitted_at=now,
        registry_digest="d" * 64,
        config_digest="c" * 64,
        client="token",
    )
    row = transactions.admit(connection, job, tally=tally, retained_limit=1 << 40).record.row
    worker = WorkerIdentity(
        pid=4000 + number,
        start_ticks=number,
        started_at=now,
        boot_id="b" * 36,
        pid_ns=7,
        leaf=f"/sys/fs/cgroup/crew-supervisor-1-abcdef/job-{row}.1.{job.action_id}",
        method="clone3",
        launched_at=now,
    )
    transactions.record_start(connection, row, worker=worker, started=b'{"status":"running","operation":"run"}', at=now)
    chunks = record_bytes // 1000
    if chunks:
        data = json.dumps({"content": "x" * 960, "channel": "messages"}).encode("ascii")
        transactions.append_events(connection, row, 1, items=[("chunk", data)] * chunks, at=now)
    transactions.finish(connection, row, ending=_ending(1 + chunks, now), tally=tally)


def _ending(first_seq: int, now: float) -> Ending:
    stop = StopEvidence(
        confirmed=True,
        method=Method.CGROUP,
        reason="completed",
        requested_at=now,
        confirmed_at=now,
        elapsed_ms=5.0,
        worker=WorkerExit(pid=4000, started_at=now, exit_code=0, exit_signal=None, oom=False),
        processes_killed=0,
        processes_left=0,
        boot_id="b" * 36,
    )
    return Ending(
        status=Status.COMPLETED,
        first_seq=first_seq,
        event_data=b'{"raw":"done","token_usage":{},"tasks_output":[]}',
        ended_at=now,
        uncertain=False,
        stop=stop,
        detail="completed",
    )


def _action_id(number: int) -> str:
    return f"{number * 0x9E3779B97F4A7C15 % 2**64:016x}{number:016x}"


def _multiply(connection: sqlite3.Connection, originals: int, retained: int) -> None:
    """Copy all there is until there are ``retained`` jobs; indexes are made anew at the end, which is much quicker."""
    connection.create_function("action_id_of", 1, lambda row: _action_id(row - 1), deterministic=True)
    indexes = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'index' AND sql NOTNULL").fetchall()
    for name, _ in indexes:
        connection.execute(f"DROP INDEX {name}")
    audits = connection.execute("SELECT count(*) FROM audit").fetchone()[0] // originals
    done = originals
    while done < retained:
        last = min(done, retained - done)
        renamed = {"row": f"row + {done}", "action_id": f"action_id_of(row + {done})"}
        _copy_rows(connection, "jobs", renamed, "row", last)
        for table in ("events", "workers"):
            _copy_rows(connection, table, {"job": f"job + {done}"}, "job", last)
        # The entries of a job stand together, as many for each.
        renamed = {"id": f"id + {done * audits}", "action_id": f"action_id_of((id - 1) / {audits} + 1 + {done})"}
        _copy_rows(connection, "audit", renamed, "id", last * audits)
        done += last
    for _, sql in indexes:
        connection.execute(sql)


def _copy_rows(connection: sqlite3.Connection, table: str, changed: dict[str, str], key: str, last: int) -> None:
    columns = [name for _, name, *_ in connection.execute(f"PRAGMA table_info({table})")]
    chosen = ", ".join(changed.get(name, name) for name in columns)
    connection.execute(
        f"INSERT INTO {table}({', '.join(columns)}) SELECT {chosen} FROM {table} WHERE {key} <= {last} ORDER BY {key}"
    )


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Every job of a closed journal as the document that a whole-file journal keeps of it."""
    with closing(sqlite3.connect(path)) as connection:
        events: dict[int, list[dict[str, Any]]] = {}
        for job, seq, name, data in connection.execute("SELECT job, seq, name, data FROM events ORDER BY job, seq"):
            events.setdefault(job, []).append({"event": name, "sequence": seq, "data": json.loads(data)})
        fields = ("action_id", "crew_id", "operation", "request_hash", "status", "timeout_ms")
        for row, *values in connection.execute(f"SELECT row, {', '.join(fields)} FROM jobs"):
            found = events.get(row, [])
            output = found[-1]["data"] if found else None
            yield {**dict(zip(fields, values, strict=True)), "events": found, "output": output}


def encoded_bytes(record: dict[str, Any]) -> int:
    """Size of a record in a whole-file journal."""
    return len(msgspec.json.encode(record))
