"""No reader sees the end of a job while a daemon that it left behind still beats."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support import procs, world
from tests.support.client import Client
from tests.support.server import Server

JOBS = 200
MUTANT_JOBS = 8
CONCURRENCY = 8
#: Jobs that are under way or queued at once; each has a reader from its start on.
READERS = 12
#: The daemons must outlive their workers: as the init of a PID namespace one would take them along.
SETTINGS: dict[str, Any] = {"max_concurrency": CONCURRENCY, "linger_s": 0.05, "pid_namespace": "off"}


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """One job as its reader has seen it; ``seen_ns`` on CLOCK_MONOTONIC."""

    last: str
    seen_ns: int
    heartbeats: Path
    view: dict[str, Any]

    def daemon_gone(self) -> bool:
        """Whether nobody who ever wrote a heartbeat runs any more."""
        return not world.still_alive(procs.read_beats(self.heartbeats))

    def violations(self) -> list[str]:
        """Signs of life after the terminal event, or after the time that the evidence gives."""
        stop = self.view["stop"]
        broken = world.after(self.heartbeats, self.seen_ns)
        if beats := procs.read_beats(self.heartbeats):
            last_s = (beats[-1].at_ns + world.unix_offset_ns()) / 1e9
            if last_s > stop["confirmed_at"] + world.SLEWING_NS / 1e9:
                broken.append(f"{(last_s - stop['confirmed_at']) * 1e3:.3f} ms after confirmed_at")
        return broken


def run_job(client: Client, number: int, directory: Path) -> Ended:
    """Run one job whose tool leaves a daemon behind, with a reader from its start to its end."""
    action_id, heartbeats = f"leftover-{number}", directory / f"beats-{number}"
    with client.stream(action_id, "daemon", input={"heartbeat": str(heartbeats)}) as stream:
        last = stream.rest()[-1]
    view = client.get(action_id).expect(200)
    return Ended(last=last.event, seen_ns=last.received_ns, heartbeats=heartbeats, view=view)


def run_jobs(server: Server, count: int, directory: Path) -> list[Ended]:
    client = server.client()
    with ThreadPoolExecutor(READERS) as pool:
        return list(pool.map(lambda number: run_job(client, number, directory), range(count)))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """For heartbeat files."""
    path = tmp_path / "beats"
    path.mkdir()
    return path


@pytest.fixture
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """A server of fake crews; ``request.param`` is the mutant to start instead."""
    mutant = getattr(request, "param", None)
    registry = "tests.crews.fake_crews:CREWS"
    with Server(tmp_path / "server", registry=registry, settings=SETTINGS, mutant=mutant) as server:
        yield server


def test_the_last_heartbeat_of_every_daemon_precedes_the_end_that_its_reader_sees(
    server: Server, directory: Path
) -> None:
    ended = run_jobs(server, JOBS, directory)
    assert len(ended) == JOBS
    assert {job.last for job in ended} == {"completed"}
    assert [violation for job in ended for violation in job.violations()] == []
    for job in ended:
        stop = job.view["stop"]
        assert (stop["confirmed"], stop["method"], stop["reason"]) == (True, "cgroup", "completed")
        assert (stop["processes_left"], stop["strays"]) == (0, [])
        assert stop["processes_killed"] >= 1, "the daemon outlived the linger, so it was killed"
        assert stop["confirmed_at"] <= job.view["ended_at"]


@pytest.mark.parametrize("server", ["blind"], indirect=True)
def test_without_the_kill_every_reader_sees_the_end_before_the_last_heartbeat(server: Server, directory: Path) -> None:
    for job in run_jobs(server, MUTANT_JOBS, directory):
        assert (job.last, job.view["stop"]["confirmed"]) == ("completed", True), "the mutant must lie"
        assert "is still alive" in "; ".join(job.violations())


@pytest.mark.parametrize("server", ["late"], indirect=True)
def test_with_a_kill_after_the_claim_every_daemon_is_found_to_have_beaten_for_too_long(
    server: Server, directory: Path
) -> None:
    for job in run_jobs(server, MUTANT_JOBS, directory):
        procs.wait_until(job.daemon_gone, 10, f"the late kill of {job.heartbeats.name}")
        found = "; ".join(job.violations())
        assert "after the end was seen" in found
        assert "after confirmed_at" in found
