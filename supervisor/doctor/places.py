"""The state directory: who may enter it, what it is on, how fast and how large that is, and who owns the journal."""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from protocol.errors import StartError
from supervisor.config import Settings
from supervisor.doctor.finding import Said, failure, ok, warning
from supervisor.filesystems import file_system_of, nearest
from supervisor.journal import RESERVE_BYTES
from supervisor.journal.files import beside, check_directory, check_files, last_owner, owner_of
from supervisor.processes import boot_id, pid_namespace

EPHEMERAL = "allow_ephemeral: nothing is kept"
#: An admission waits for one or two syncs. Above this, milliseconds, that is what a caller notices.
SLOW_SYNC_MS = 10.0
SYNCS = 32
SYNC_DEADLINE_S = 2.0
SYNC_BYTES = 4096
#: Below this much room a warning, bytes: events, logs and crews' stores grow.
LITTLE_ROOM_BYTES = 1 << 30


def state_directory(settings: Settings) -> Said:
    """Owner and modes of the directory and of the journal's files."""
    if settings.state_file is None:
        return ok(EPHEMERAL)
    directory = settings.state_file.parent
    if not os.path.lexists(directory):
        above = nearest(directory)
        if not os.access(above, os.W_OK | os.X_OK):
            detail = f"{directory} does not exist and cannot be made in {above}"
            return failure(detail, f"create {directory}, mode 0700")
        return ok(f"{directory} will be made, mode 0700")
    try:
        warnings = check_directory(directory)
        if not os.access(directory, os.W_OK | os.X_OK):
            detail = f"{directory} cannot be written by uid {os.geteuid()}"
            return failure(detail, "run the doctor as the supervisor's user, or chown it to them")
        check_files(settings.state_file)
    except StartError as error:
        return failure(*_parted(error.detail))
    return warning(*_parted(warnings[0])) if warnings else ok(f"{directory} is closed to others")


def _parted(text: str) -> tuple[str, str]:
    """Fault and remedy of a message of the form ``fault; remedy``."""
    detail, _, advice = text.rpartition("; ")
    return (detail, advice) if detail else (text, "see docs/journal.md")


def filesystem(settings: Settings) -> Said:
    """What the state directory is on."""
    if settings.state_file is None:
        return ok(EPHEMERAL)
    directory = settings.state_file.parent
    kind = file_system_of(directory)
    local = "put state_file on a local disk (in a container: on a volume)"
    if kind.network:
        return failure(f"{directory} is on {kind.name}, a network file system: locks and log are not safe there", local)
    if kind.served:
        return warning(f"{directory} is on {kind.name}: locks and syncs are what another program makes of them", local)
    if kind.volatile:
        gone = "the container" if kind.name == "overlay" else "a reboot"
        return warning(f"{directory} is on {kind.name}, which {gone} takes away, and every fence with it", local)
    return ok(f"{directory} is on a local file system ({kind.name})")


def sync(settings: Settings) -> Said:
    """How long an fsync takes where the journal is; a file is written for it and removed."""
    if settings.state_file is None:
        return ok(EPHEMERAL)
    directory = nearest(settings.state_file.parent)
    try:
        took_ms = list(_syncs(directory))
    except OSError as error:
        detail = f"cannot write and sync in {directory}: {error.strerror}"
        return failure(detail, "let the supervisor's user write there")
    return judge_sync(took_ms)


def judge_sync(took_ms: list[float]) -> Said:
    """What the durations of some syncs come to."""
    median, longest = statistics.median(took_ms), max(took_ms)
    detail = f"fsync takes {median:.2f} ms (median of {len(took_ms)}, longest {longest:.1f} ms)"
    if median > SLOW_SYNC_MS:
        return warning(f"{detail}; every admission waits for it", "put state_file on a faster disk")
    return ok(detail)


def _syncs(directory: Path) -> Iterator[float]:
    give_up = time.monotonic() + SYNC_DEADLINE_S
    # Nameless where the file system can, so that not even SIGKILL leaves it behind.
    with tempfile.TemporaryFile(dir=directory, prefix=".doctor-", buffering=0) as file:
        for _ in range(SYNCS):
            began = time.monotonic()
            file.write(bytes(SYNC_BYTES))
            os.fsync(file.fileno())
            yield (time.monotonic() - began) * 1000
            if time.monotonic() > give_up:
                return


def space(settings: Settings) -> Said:
    """Room for the journal, its reserve, and what crews write."""
    if settings.state_file is None:
        return ok(EPHEMERAL)
    kept = 0
    with contextlib.suppress(OSError):
        kept = beside(settings.state_file, ".reserve").stat().st_size
    places = {nearest(settings.state_file.parent): RESERVE_BYTES - kept}
    if settings.work_dir is not None:
        places.setdefault(nearest(settings.work_dir), 0)
    told = [judge_space(place, os.statvfs(place), needed_bytes=needed) for place, needed in places.items()]
    return max(told, key=lambda said: _WEIGHT.index(said.verdict))


_WEIGHT = ("ok", "warning", "failure")


def judge_space(place: Path, found: os.statvfs_result, *, needed_bytes: int) -> Said:
    """Whether that is enough; ``needed_bytes``: without them nothing is admitted."""
    free = found.f_bavail * found.f_frsize
    detail = f"{place} has {free / (1 << 20):,.0f} MiB left"
    if free < max(needed_bytes, 1):
        return failure(f"{detail}, too few for the reserve: nothing would be admitted", "free some space")
    if found.f_files and not found.f_favail:
        return failure(f"{place} has no inode left", "remove files")
    if free < LITTLE_ROOM_BYTES:
        return warning(detail, "free some space, or archive jobs")
    return ok(detail)


def journal(settings: Settings) -> Said:
    """Whether a supervisor has the journal open; looked up without touching it."""
    if settings.state_file is None:
        return ok(EPHEMERAL)
    try:
        owner, last = owner_of(settings.state_file), last_owner(settings.state_file)
    except OSError as error:
        detail = f"whether a supervisor runs on it cannot be told: {error.strerror}"
        return warning(detail, "run the doctor as the supervisor's user")
    if owner is not None:
        return ok(f"a supervisor runs on it, pid {owner.pid}; a second one would be refused")
    if last is not None and last.boot_id == boot_id() and last.pid_ns != pid_namespace():
        detail = "it was opened in another PID namespace: whether that supervisor still runs cannot be seen from here"
        return warning(detail, "run the doctor in the supervisor's container")
    if not os.path.lexists(settings.state_file):
        return ok(f"{settings.state_file} will be made")
    return ok(f"nobody here has {settings.state_file} open; `crew-supervisor journal check` looks into it")
