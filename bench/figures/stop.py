"""How long a stop takes until it is proved, what survives it, and what survives killing the process alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from bench.measure import Scale, Series, Step, Values
from tests.support import procs
from tests.support.server import ROOT, Server

JOBS = (5, 10)
#: What runs beside the supervisor for the baseline: the same crew in a plain process.
PLAIN = """
import sys
from bench.registry import CREWS
CREWS["daemon"]().kickoff(inputs={"heartbeat": sys.argv[1], "seconds": 60})
"""
READY_S = 60.0


class Stop:
    """Cancels of real crews, beside kill -9 of the pid of the same crew without a supervisor."""

    name = "stop"
    title = "Stop: from the cancel sent until the answer with the proof, grace_s = 0"
    notes = (
        "thread: a model call blocks in a thread; daemon: besides, a tool has left a daemon (setsid, double fork)",
        "answer: as the client measures it; evidence: elapsed_ms of the record, from the request to the proof",
        "survivors: workers and daemons that were alive when the answer came; n is how many were looked at",
        "kill the pid: SIGKILL of the same crew's plain process, until its wait status is in hand; then the same look",
    )
    series = (
        Series("thread, answer", "ms"),
        Series("thread, evidence", "ms"),
        Series("thread, survivors", "count"),
        Series("daemon, answer", "ms"),
        Series("daemon, evidence", "ms"),
        Series("daemon, survivors", "count"),
        Series("kill the pid, until waited for", "ms"),
        Series("kill the pid, survivors", "count"),
    )
    rounds = (4, 10)

    @contextmanager
    def open(self, directory: Path, scale: Scale) -> Iterator[Sequence[Step]]:
        """One server; the baseline needs none."""
        jobs = JOBS[0] if scale.quick else JOBS[1]
        numbers = count()
        server = Server(
            directory / "server",
            registry="bench.registry:CREWS",
            settings={"grace_s": 0.0, "template": {"preload": ["crewai"]}},
        )
        with server:
            yield [
                Step("thread", lambda: _cancels(server, "blocking", "thread", jobs, numbers)),
                Step("daemon", lambda: _cancels(server, "daemon", "daemon", jobs, numbers)),
                Step("kill the pid", lambda: _kill_plain(directory, numbers)),
            ]


def _cancels(server: Server, crew: str, label: str, jobs: int, numbers: Iterator[int]) -> Values:
    found: dict[str, list[float]] = {f"{label}, {what}": [] for what in ("answer", "evidence", "survivors")}
    for _ in range(jobs):
        for what, values in _cancel(server, crew, f"stop-{next(numbers)}").items():
            found[f"{label}, {what}"] += values
    return found


def _cancel(server: Server, crew: str, action_id: str) -> dict[str, list[float]]:
    """Start one job, cancel it when its last model call blocks, and look at what lives when the answer comes."""
    beats = server.directory / f"{action_id}.beats"
    client = server.client()
    with client.stream(action_id, crew, input={"heartbeat": str(beats), "seconds": 60}) as stream:
        calls = 2 if crew == "daemon" else 1
        while calls:
            calls -= stream.next().data.get("type") == "llm_call_started"
        worker_pid = client.get(action_id).expect(200)["worker"]["pid"]
        worker_ticks = procs.start_ticks(worker_pid)
        began = time.monotonic()
        answer = client.cancel(action_id, crew)
        answered_ms = (time.monotonic() - began) * 1000
        lives = [procs.alive(worker_pid, worker_ticks), *_daemons_alive(beats)]
        evidence: dict[str, Any] = answer.expect(200)["stop"]
        stream.rest()
    beats.unlink(missing_ok=True)
    return {
        "answer": [answered_ms],
        "evidence": [] if evidence["elapsed_ms"] is None else [evidence["elapsed_ms"]],
        "survivors": [float(life) for life in lives],
    }


def _daemons_alive(beats: Path) -> list[bool]:
    return [procs.alive(*daemon) for daemon in {(beat.pid, beat.start_ticks) for beat in procs.read_beats(beats)}]


def _kill_plain(directory: Path, numbers: Iterator[int]) -> Values:
    """The same crew in a plain process of its own; only that process is killed."""
    beats = directory / f"plain-{next(numbers)}.beats"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CREWAI_DISABLE_TELEMETRY": "true", "HOME": str(directory)}
    process = subprocess.Popen(
        [sys.executable, "-c", PLAIN, str(beats)],
        cwd=directory,
        env={**environment, "CREWAI_TRACING_ENABLED": "false", "CREWAI_TESTING": "true", "OTEL_SDK_DISABLED": "true"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        procs.wait_until(lambda: procs.read_beats(beats), READY_S, "the plain process has left its daemon")
        ticks = procs.start_ticks(process.pid)
        began = time.monotonic()
        process.kill()
        process.wait()
        took_ms = (time.monotonic() - began) * 1000
        lives = [procs.alive(process.pid, ticks), *_daemons_alive(beats)]
    finally:
        process.kill()
        process.wait()
        for pid, ticks in {(beat.pid, beat.start_ticks) for beat in procs.read_beats(beats)}:
            if procs.alive(pid, ticks):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    return {"kill the pid, until waited for": [took_ms], "kill the pid, survivors": [float(life) for life in lives]}
