"""What must be true outside of the supervisor once it says that a job's work is gone."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from tests.support import procs
from tests.support.client import Client
from tests.support.procs import Beat

#: How long a heartbeat file is watched for a line that comes too late: a daemon writes one every 2 ms.
QUIET_S = 0.2
#: How far two clocks that are 5 s apart can have drifted while the wall clock is slewed (at most 500 ppm), ns.
SLEWING_NS = 2_500_000
FIRST_BEAT_S = 30.0


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """A job's processes, as they were seen while they lived."""

    pid: int
    start_ticks: int
    cgroup: str
    heartbeats: Path


#: In the place of start ticks: the worker had ended, and been reaped, before it was looked at.
ENDED = -1


def observe(client: Client, action_id: str, heartbeats: Path, *, may_have_ended: bool = False) -> Work:
    """Wait for the first heartbeat of a running job and note who works for it."""
    procs.wait_until(lambda: procs.read_beats(heartbeats), FIRST_BEAT_S, f"a first heartbeat of {action_id}")
    worker = client.get(action_id).expect(200)["worker"]
    assert worker is not None, f"{action_id} ended before it was looked at: {client.events(action_id).body[-2000:]!r}"
    ticks = procs.start_ticks(worker["pid"])
    if may_have_ended:
        ticks = ENDED if ticks is None else ticks
    assert ticks is not None, f"the worker {worker['pid']} of {action_id} was gone before it was looked at"
    return Work(pid=worker["pid"], start_ticks=ticks, cgroup=worker["cgroup"], heartbeats=heartbeats)


def violations(work: Work, stop: Mapping[str, Any]) -> list[str]:
    """What contradicts the evidence ``stop``. Empty: the work was killed, and all of it before ``confirmed_at``."""
    broken = still_beating(work.heartbeats)
    to_unix_ns = unix_offset_ns()
    beats = procs.read_beats(work.heartbeats)
    broken += still_alive(beats)
    if procs.alive(work.pid, work.start_ticks):
        broken.append(f"worker {work.pid} is still alive")
    broken += [f"process {pid} is still in {work.cgroup}" for pid in in_cgroup(work.cgroup)]
    if stop["confirmed"] is not True or stop["confirmed_at"] is None:
        broken.append("the evidence confirms nothing")
    elif beats and beats[-1].at_ns + to_unix_ns > stop["confirmed_at"] * 1e9 + SLEWING_NS:
        late_ms = (beats[-1].at_ns + to_unix_ns) / 1e6 - stop["confirmed_at"] * 1e3
        broken.append(f"the last heartbeat came {late_ms:.3f} ms after confirmed_at")
    return broken


def still_alive(beats: Iterable[Beat]) -> list[str]:
    """Writers of heartbeats that still run; that nobody ever wrote one proves nothing and counts too."""
    writers = {(beat.pid, beat.start_ticks) for beat in beats}
    if not writers:
        return ["nothing has ever beaten"]
    return [f"daemon {pid} is still alive" for pid, ticks in sorted(writers) if procs.alive(pid, ticks)]


def still_beating(heartbeats: Path) -> list[str]:
    """Watch the file for QUIET_S: here the passing of time is what is measured."""
    size = heartbeats.stat().st_size
    time.sleep(QUIET_S)
    return ["heartbeats go on"] if heartbeats.stat().st_size != size else []


def after(heartbeats: Path, seen_ns: int) -> list[str]:
    """Heartbeats that are not older than ``seen_ns`` (CLOCK_MONOTONIC), and daemons that still live."""
    beats = procs.read_beats(heartbeats)
    broken = still_alive(beats)
    late = [beat for beat in beats if beat.at_ns >= seen_ns]
    if late:
        broken.append(f"{len(late)} heartbeats after the end was seen, {(late[-1].at_ns - seen_ns) / 1e6:.3f} ms late")
    return broken


def in_cgroup(proc_path: str) -> list[int]:
    """Live processes whose cgroup v2 path is ``proc_path`` or below it."""
    found = []
    for pid in procs.pids():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            lines = Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8").splitlines()
            where = next((line[3:].removesuffix(" (deleted)") for line in lines if line.startswith("0::")), "")
            if f"{where}/".startswith(f"{proc_path}/") and procs.alive(pid):
                found.append(pid)
    return found


def unix_offset_ns() -> int:
    """CLOCK_REALTIME minus CLOCK_MONOTONIC: the reading that was least disturbed between its two clocks, of several."""
    readings = []
    for _ in range(16):
        before = time.monotonic_ns()
        wall = time.time_ns()
        between = time.monotonic_ns() - before
        readings.append((between, wall - before - between // 2))
    return min(readings)[1]
