"""What of the supervisor's environment workers get: everything but its secrets and its service manager."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from pathlib import Path

#: Prefixes of variables that are the supervisor's own.
PRIVATE_PREFIXES = ("AIP_CREWAI_", "CREW_SUPERVISOR_", "WATCHDOG_", "LISTEN_", "MEMORY_PRESSURE_")
PRIVATE_NAMES = frozenset(
    {
        "CREDENTIALS_DIRECTORY",
        "NOTIFY_SOCKET",
        "JOURNAL_STREAM",
        "INVOCATION_ID",
        "MAINPID",
        "SYSTEMD_EXEC_PID",
        "RUNTIME_DIRECTORY",
        "STATE_DIRECTORY",
        "CACHE_DIRECTORY",
        "LOGS_DIRECTORY",
        "CONFIGURATION_DIRECTORY",
        "PYTHONSTARTUP",
    }
)
#: CrewAI's telemetry, tracing and prompts are off, and its import leaves no thread behind.
FORCED = {
    "CREWAI_DISABLE_TELEMETRY": "true",
    "OTEL_SDK_DISABLED": "true",
    "CREWAI_TESTING": "true",
    "CREWAI_DISABLE_VERSION_CHECK": "true",
    "OPENBLAS_NUM_THREADS": "1",
}
DEFAULTS = {"CREWAI_TRACING_ENABLED": "false"}
#: Descriptors that one running job takes in the supervisor, and what everything else may take.
DESCRIPTORS_PER_JOB = 8
DESCRIPTORS_ELSE = 256


def worker_environment(environ: Mapping[str, str], user: str | None = None, *, home: Path) -> dict[str, str]:
    """The environment of templates and workers; ``user``: whose it is, with ``home``, if not the supervisor's own."""
    kept = {
        name: value
        for name, value in environ.items()
        if name not in PRIVATE_NAMES and not name.startswith(PRIVATE_PREFIXES)
    }
    own = {} if user is None else {"USER": user, "LOGNAME": user, "HOME": str(home)}
    return {**DEFAULTS, **kept, **own, **FORCED}


def descriptors_needed(max_concurrency: int) -> int:
    """How many descriptors the supervisor may come to need."""
    return max_concurrency * DESCRIPTORS_PER_JOB + DESCRIPTORS_ELSE


def raise_descriptor_limit(max_concurrency: int) -> tuple[tuple[int, int], str | None]:
    """Raise our own soft limit to the hard one. Returns the original limits, for workers, and a warning if too few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    needed = descriptors_needed(max_concurrency)
    if hard != resource.RLIM_INFINITY and hard < needed:
        return (soft, hard), f"{hard} descriptors are too few for max_concurrency = {max_concurrency}; allow {needed}"
    return (soft, hard), None
