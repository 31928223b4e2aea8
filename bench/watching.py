"""What the kernel says about a process: memory, processor time; and servers for the measurements."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.server import TOKEN, Server

MB = 1e6
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def memory_mb(pid: int) -> dict[str, float]:
    """``resident``, ``proportional`` (PSS) and ``unique`` (USS) of a process, MB (proc_pid_smaps(5))."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]
    kb = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
    found = {
        "resident": kb["Rss"],
        "proportional": kb["Pss"],
        "unique": kb["Private_Clean"] + kb["Private_Dirty"],
    }
    return {name: value * 1024 / MB for name, value in found.items()}


def processor_s(pid: int) -> float:
    """Seconds of processor time that all threads of a process have had (``/proc/PID/task/*/schedstat``)."""
    total_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total_ns += int((task / "schedstat").read_text(encoding="ascii").split()[0])
    return total_ns / 1e9


def fake_server(directory: Path, settings: Mapping[str, Any] | None = None) -> Server:
    """A server of fakes that imports no CrewAI and refuses nothing for its number."""
    chosen = {
        "max_retained_runs": 10_000_000,
        "max_queue": 1_000_000,
        "max_events_per_run": 100_000,
        "grace_s": 0.0,
        **(settings or {}),
    }
    return Server(directory, registry="bench.fakes:CREWS", settings=chosen)


def address(server: Server) -> dict[str, Any]:
    """Where a load finds the server."""
    return {"host": server.host, "port": server.port, "token": TOKEN}
