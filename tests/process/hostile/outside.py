"""The look from outside: which processes belong to an attack, and whether they outlived what was said about them."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from tests.support import procs, world

#: A heartbeat that comes after the proof comes within this many seconds: the laziest process beats every 20 ms.
QUIET_S = 0.05
#: Parent of the kernel's own threads, where we can see them.
KTHREADD = 2


def belonging_to(heartbeats: Path) -> list[int]:
    """Live processes, as the machine counts them, that have the file in their command line or open.

    A process whose leader thread has exited shows neither there, but in another thread. A PID namespace hides nothing:
    we look from above it.
    """
    needle = os.fsencode(heartbeats)
    kernel = set(procs.children(KTHREADD))
    return [pid for pid in procs.pids() if pid not in kernel and pid != os.getpid() and _mentions(pid, needle)]


def _mentions(pid: int, needle: bytes) -> bool:
    with contextlib.suppress(OSError):  # it may end under our eyes
        for tid in sorted(os.listdir(f"/proc/{pid}/task"), key=int):
            task = f"/proc/{pid}/task/{tid}"
            command_line = Path(f"{task}/cmdline").read_bytes()
            if command_line:  # threads share it, and their descriptors
                return needle in command_line or needle in _open_files(task)
    return False


def _open_files(task: str) -> Iterator[bytes]:
    for descriptor in os.listdir(f"{task}/fd"):
        with contextlib.suppress(FileNotFoundError):
            yield os.fsencode(os.readlink(f"{task}/fd/{descriptor}"))


def kill_all(heartbeats: Path) -> None:
    """End what an attack has left, whoever should have done it."""

    def none_left() -> bool:
        for pid in belonging_to(heartbeats):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        return not belonging_to(heartbeats)

    procs.wait_until(none_left, 20, f"everything that writes {heartbeats} is gone")


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen once an end had been announced; ``late_ms``: the last heartbeat after ``confirmed_at``, or None."""

    survivors: tuple[int, ...]
    late_ms: float | None

    @property
    def clean(self) -> bool:
        """Whether nothing contradicts a proof."""
        return not self.survivors and self.late_ms is None


def look(heartbeats: Path, stop: dict[str, Any]) -> Look:
    """Look twice, QUIET_S apart: here the passing of time is what is measured."""
    alive = set(belonging_to(heartbeats))
    before = heartbeats.stat().st_size
    time.sleep(QUIET_S)
    alive |= set(belonging_to(heartbeats))
    beats = procs.read_beats(heartbeats)
    late_ms = None
    if stop["confirmed_at"] is not None:
        last_ns = max(beat.at_ns for beat in beats) + world.unix_offset_ns()
        late_ns = last_ns - stop["confirmed_at"] * 1e9
        late_ms = late_ns / 1e6 if late_ns > world.SLEWING_NS else None
    if not alive and heartbeats.stat().st_size != before:
        late_ms = late_ms or 0.0  # somebody beats whom no look has caught
    return Look(survivors=tuple(sorted(alive)), late_ms=late_ms)


@contextlib.contextmanager
def refuge() -> Iterator[Path | None]:
    """A cgroup outside of every supervisor's branch, to escape to; None where none can be made."""
    mount = procs.cgroup2_mount()
    directory = None if mount is None else mount / f"refuge-{uuid.uuid4().hex[:12]}"
    if directory is not None:
        try:
            directory.mkdir()
        except OSError:
            directory = None
    try:
        yield directory
    finally:
        if directory is not None:
            directory.rmdir()


class Freezer:
    """A cgroup of the v1 freezer: what is in it sleeps uninterruptibly (state D) and survives SIGKILL until the thaw.

    Source: Documentation/admin-guide/cgroup-v1/freezer-subsystem.rst.
    """

    ROOT = Path("/sys/fs/cgroup/freezer")

    def __init__(self) -> None:
        self._directory = self.ROOT / f"hostile-{uuid.uuid4().hex[:12]}"

    @classmethod
    def usable(cls) -> bool:
        """Whether there is one that we may use."""
        return (cls.ROOT / "cgroup.procs").exists() and os.access(cls.ROOT, os.W_OK)

    def freeze(self, pid: int) -> None:
        """Freeze one process."""
        self._directory.mkdir()
        (self._directory / "cgroup.procs").write_text(str(pid), encoding="ascii")
        state = self._directory / "freezer.state"
        state.write_text("FROZEN", encoding="ascii")
        procs.wait_until(lambda: state.read_text(encoding="ascii").strip() == "FROZEN", 10, f"{pid} is frozen")

    def thaw(self) -> None:
        """Let it go on, or die."""
        with contextlib.suppress(FileNotFoundError):
            (self._directory / "freezer.state").write_text("THAWED", encoding="ascii")

    def close(self) -> None:
        """Thaw and remove."""
        self.thaw()
        if self._directory.exists():
            empty = self._directory / "cgroup.procs"
            procs.wait_until(lambda: not empty.read_text(encoding="ascii"), 10, "the freezer is empty")
            self._directory.rmdir()
