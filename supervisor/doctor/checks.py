"""Every check, in one list and in the order of the report; docs/doctor.md is made of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from protocol.errors import ConfigError
from supervisor import config
from supervisor.config import Settings
from supervisor.doctor import kernel, limits, packages, places
from supervisor.doctor.finding import Finding, Said, failure, ok
from supervisor.doctor.registry import registry


class Check(NamedTuple):
    """One row: either ``alone`` looks, or ``look`` does where the configuration can be read."""

    name: str
    what: str
    alone: Callable[[], Said] | None = None
    look: Callable[[Settings], Said] | None = None


CONFIGURATION = "configuration"

CHECKS: tuple[Check, ...] = (
    Check("python", "the interpreter is of a supported version", packages.python),
    Check("packages", "every package is there, in the range that this version was made for", packages.packages),
    Check(
        "names",
        "`supervisor`, `worker` and `protocol` are ours, here and in a worker, and belong to no other distribution"
        " (such as supervisord)",
        packages.names,
    ),
    Check(CONFIGURATION, "a server would accept the settings; no token file is open to others"),
    Check(
        "tokens", "callers need a token that cannot be guessed; no file with secrets is open to others",
        look=limits.tokens,
    ),
    Check(
        "state_directory", "modes and owners of the state directory and of the journal's files",
        look=places.state_directory,
    ),
    Check(
        "filesystem", "the state directory is on a local disk; a start refuses NFS and its like",
        look=places.filesystem,
    ),
    Check("sync", "how long an fsync takes there", look=places.sync),
    Check("space", "there is room for the journal's reserve and for growth", look=places.space),
    Check("journal", "whether a supervisor runs on it; the journal is not touched", look=places.journal),
    Check("port", "the port is free, or the running supervisor has it", look=limits.port),
    Check("worker_user", "the user exists and can be become", look=limits.worker_user),
    Check("stop_method", "how stops are proved: a probe in a cgroup that is made and removed", look=kernel.stop_method),
    Check("pidfd", "processes can be held by descriptors", kernel.pidfd),
    Check("namespaces", "workers of a root supervisor get PID namespaces", look=kernel.namespaces),
    Check("clone3", "how workers get into their cgroups", kernel.clone3),
    Check("clock", "the clock is plausible, steady and kept right", kernel.clock),
    Check("descriptors", "the limit on open files is enough for max_concurrency", look=limits.descriptors),
    Check("processes", "the limits on processes and threads are enough for max_concurrency", look=limits.processes),
    Check(
        "registry", "it can be imported and leaves no thread or socket behind; tried in a process that is killed",
        look=registry,
    ),
)  # fmt: skip


def examine(config_path: Path | None, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Run every check that can be run, in order, each when it is asked for. None of them raises."""
    settings: Settings | None = None
    for check in CHECKS:
        if check.name == CONFIGURATION:
            settings, said = _read(config_path, environ)
            yield _finding(check, said)
        elif check.alone is not None:
            yield _finding(check, _guarded(check.alone))
        elif check.look is not None and settings is not None:
            yield _finding(check, _guarded(partial(check.look, settings)))


def _read(config_path: Path | None, environ: Mapping[str, str]) -> tuple[Settings | None, Said]:
    try:
        settings = config.load(config_path, environ)
    except ConfigError as error:
        detail, _, advice = error.detail.rpartition("; ")
        return None, failure(detail or error.detail, f"{advice}; the checks that need the settings come after that")
    origin = settings.config_file or "the environment"
    return settings, ok(f"accepted, from {origin}, digest {settings.digest[:12]}")


def _guarded(look: Callable[[], Said]) -> Said:
    try:
        return look()
    except Exception as error:  # noqa: BLE001 - one check that breaks must not hide the others
        return failure(f"the check broke: {type(error).__name__}: {error}", "report it with this line")


def _finding(check: Check, said: Said) -> Finding:
    return Finding(name=check.name, verdict=said.verdict, detail=said.detail, advice=said.advice)
