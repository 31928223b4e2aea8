"""What the numbers were measured on, in one line."""

from __future__ import annotations

import os
import platform
import sqlite3
import subprocess
from contextlib import suppress
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def describe() -> dict[str, str]:
    """Facts of this machine and of what runs on it."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": f"{len(os.sched_getaffinity(0))}x {_cpu()}",
        "memory": f"{memory_gib:.0f} GiB",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "crewai": metadata.version("crewai"),
        "sqlite": sqlite3.sqlite_version,
        "commit": _commit(),
        "load": load(),
    }


def load() -> str:
    """The one-minute load average now."""
    return f"{os.getloadavg()[0]:.1f}"


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    with suppress(OSError, subprocess.CalledProcessError):
        changed = "+" if git("status", "--porcelain") else ""
        return git("rev-parse", "--short", "HEAD") + changed
    return "unknown"
