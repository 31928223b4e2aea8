"""Thousands of short jobs through one supervisor, eight at a time, many of them cancelled or killed: nothing is left.

CI runs a bounded number; ``make stress`` runs 10,000 fakes and 200 real crews. What is left over is counted exactly in
both. The bound of growth is the same too, and says less in CI: after 300 jobs SQLite's page cache and the heap are not
full yet and take 3.7 MB more, so that of 1,200 further jobs each would have to leak a kilobyte to be caught. After the
first 1,500 there is nothing left that grows: 0.1 MB over 2,500 jobs.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import os
import random
import signal
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from supervisor.journal.readers import READERS
from tests.support import procs
from tests.support.client import Client, Stream
from tests.support.server import MARK, Server, ServerFactory, cgroup_branches

AT_ONCE = 8
#: Of the supervisor, from the end of the warm-up to the end.
GROWTH_BYTES = 5 << 20
#: Of the template, which only forks: its own memory must not depend on how often.
TEMPLATE_GROWTH_BYTES = 2 << 20
#: Main thread, journal's writer and readers, and asyncio's pool, which makes its threads by and by.
THREADS = 2 + READERS + min(32, (os.cpu_count() or 1) + 4)
IDLE_S = 30.0
SEED = 20250117


class Dose(NamedTuple):
    """How many jobs, and after how many of them memory is looked at for the first time."""

    jobs: int
    warm_up: int


CI_FAKES, FAKES = Dose(1_500, 300), Dose(10_000, 1_000)
CI_REAL, REAL = Dose(30, 10), Dose(200, 50)


class Holdings(NamedTuple):
    """What a supervisor holds when no job is live. ``fds`` and ``threads``: its own; ``below``: processes."""

    rss: int
    fds: int
    threads: int
    template_rss: int
    template_fds: int
    below: int

    def __str__(self) -> str:
        return (
            f"supervisor {self.rss / 1e6:.1f} MB, {self.fds} descriptors, {self.threads} threads; "
            f"template {self.template_rss / 1e6:.1f} MB, {self.template_fds} descriptors; {self.below} processes below"
        )


class Churn:
    """Client threads that run jobs one after the other; ``crews``: (crew that ends by itself, crew that blocks)."""

    def __init__(self, server: Server, crews: tuple[str, str]) -> None:
        self._server = server
        self._client = server.client()
        self._quick, self._blocking = crews
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self.faults: list[str] = []
        #: How often each kind of job ran.
        self.kinds: Counter[str] = Counter()

    def run(self, jobs: int) -> None:
        """Run ``jobs`` more jobs, AT_ONCE at a time."""
        tickets = iter(range(jobs))
        threads = [threading.Thread(target=self._work, args=(tickets,)) for _ in range(AT_ONCE)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _work(self, tickets: Iterator[int]) -> None:
        try:
            while True:
                with self._lock:
                    if next(tickets, None) is None:
                        return
                    number = next(self._numbers)
                self._one(number)
        except (AssertionError, OSError, http.client.HTTPException) as error:
            self.faults.append(repr(error))

    def _one(self, number: int) -> None:
        kinds: dict[Callable[[str], str], int] = {
            self._complete: 12,
            self._cancel_at_any_moment: 4,
            self._cancel_at_work: 2,
            self._kill: 2,
        }
        chosen = random.Random(f"{SEED}/{number}").choices(list(kinds), list(kinds.values()))[0]
        kind = chosen(f"churn-{number}")
        with self._lock:
            self.kinds[kind] += 1

    def _complete(self, action_id: str) -> str:
        self._client.start(action_id, self._quick).expect(200)
        return "completed"

    def _cancel_at_any_moment(self, action_id: str) -> str:
        with self._client.stream(action_id, self._quick) as stream:
            self._client.cancel(action_id, self._quick).expect(200)
            stream.rest()
        return "cancelled early"

    def _cancel_at_work(self, action_id: str) -> str:
        with self._client.stream(action_id, self._blocking) as stream:
            stream.until("started")
            assert self._client.cancel(action_id, self._blocking).expect(200)["status"] == "cancelled"
            self._end(stream, "cancelled")
        return "cancelled at work"

    def _kill(self, action_id: str) -> str:
        with self._client.stream(action_id, self._blocking) as stream:
            stream.until("started")
            worker = self._client.get(action_id).expect(200)["worker"]
            kill_member(worker["pid"], worker["cgroup"])
            self._end(stream, "failed")
        return "killed"

    def _end(self, stream: Stream, expected: str) -> None:
        last = stream.rest()[-1]
        assert last.event == expected, last


def kill_member(pid: int, cgroup: str) -> None:
    """SIGKILL the process that is in that cgroup, and no later one of its pid."""
    fd = os.pidfd_open(pid)
    try:
        assert cgroup in Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8"), f"{pid} is not in {cgroup}"
        signal.pidfd_send_signal(fd, signal.SIGKILL)
    finally:
        os.close(fd)


# --- what is held --------------------------------------------------------------------------------------------------


def holdings(server: Server, client: Client) -> Holdings:
    """What the server holds, once it is idle."""
    procs.wait_until(lambda: client.health().expect(200)["active_runs"] == 0, IDLE_S, "no job is live")
    procs.wait_until(lambda: not os.listdir(work_dir(server) / "jobs"), IDLE_S, "no job has a directory")
    procs.wait_until(lambda: len(procs.children(server.pid)) == 1, IDLE_S, "the template is the only child")
    (template,) = procs.children(server.pid)
    # Connections of clients that have gone are closed by and by.
    fds = settled(lambda: count(f"/proc/{server.pid}/fd"))
    return Holdings(
        rss=resident(server.pid),
        fds=fds,
        threads=count(f"/proc/{server.pid}/task"),
        template_rss=resident(template),
        template_fds=count(f"/proc/{template}/fd"),
        below=len(procs.descendants(server.pid)),
    )


def settled(value: Callable[[], int]) -> int:
    """A value that has stopped to fall: the same ten times."""
    last, same = value(), 0
    while same < 10:
        time.sleep(procs.POLL_S)
        now = value()
        last, same = now, same + 1 if now == last else 0
    return last


def count(directory: str) -> int:
    """Entries of a directory."""
    return len(os.listdir(directory))


def resident(pid: int) -> int:
    """Resident memory of a process, bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def work_dir(server: Server) -> Path:
    """Where jobs have their directories."""
    return server.state_file.parent / "work"


def leftovers(server: Server, temporary: Path) -> list[str]:
    """Processes, zombies, cgroups and files that no job of an idle server may have left."""
    found = []
    (template,) = procs.children(server.pid)
    strangers = set(procs.with_environment(f"{MARK}={server.mark}")) - {server.pid, template}
    found += [f"process {pid}" for pid in sorted(strangers)]
    found += [f"cgroup {leaf}" for leaf in leaves(server) if leaf.startswith("job-")]
    found += [f"temporary file {path}" for path in sorted(temporary.rglob("*"))]
    extra = {entry.name for entry in work_dir(server).iterdir()} - {"crews", "jobs", "logs", "replays", "template.log"}
    found += [f"file {name} in the work directory" for name in sorted(extra - {"template"})]
    return found


def leaves(server: Server) -> list[str]:
    """Leaf cgroups of the server."""
    found: list[str] = []
    for branch in cgroup_branches(server.log_lines()):
        with contextlib.suppress(FileNotFoundError):
            found += [leaf.name for leaf in branch.iterdir() if leaf.is_dir()]
    return found


def ends(server: Server) -> Counter[tuple[str, int]]:
    """How many jobs have which status and which number of terminal events, straight from the file."""
    with contextlib.closing(sqlite3.connect(f"{server.state_file.as_uri()}?mode=ro", uri=True)) as connection:
        rows = connection.execute(
            """SELECT status, (SELECT count(*) FROM events WHERE job = row
                   AND name IN ('completed', 'failed', 'cancelled')) FROM jobs"""
        )
        return Counter((status, number) for status, number in rows)


# --- the runs ------------------------------------------------------------------------------------------------------


def run(server: Server, dose: Dose, crews: tuple[str, str], temporary: Path) -> None:
    """Run a dose and check that nothing is left of it."""
    churn = Churn(server, crews)
    client = server.client()
    churn.run(dose.warm_up)
    before = holdings(server, client)
    began = time.monotonic()
    churn.run(dose.jobs - dose.warm_up)
    rate = (dose.jobs - dose.warm_up) / (time.monotonic() - began)
    after = holdings(server, client)
    print(f"\nafter {dose.warm_up} jobs: {before}\nafter {dose.jobs} jobs: {after}")  # noqa: T201
    print(f"{rate:.0f} jobs/s, growth {(after.rss - before.rss) / 1e6:+.2f} MB; {dict(churn.kinds)}")  # noqa: T201
    assert not churn.faults, "\n".join(churn.faults[:10])
    assert not leftovers(server, temporary)
    found = ends(server)
    assert {number for _, number in found} == {1}, found
    assert sum(found.values()) == dose.jobs, found
    assert {status for status, _ in found} == {"completed", "failed", "cancelled"}, found
    assert (after.below, after.fds, after.template_fds) == (before.below, before.fds, before.template_fds)
    assert after.threads <= THREADS
    assert after.rss - before.rss <= GROWTH_BYTES
    assert after.template_rss - before.template_rss <= TEMPLATE_GROWTH_BYTES


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    """TMPDIR of the server: a file that stays in it is a leak."""
    directory = tmp_path / "temporary"
    directory.mkdir()
    return directory


def make(make_server: ServerFactory, temporary: Path, registry: str, preload: list[str]) -> Server:
    """A server for one dose."""
    settings = {
        "max_concurrency": AT_ONCE,
        "max_retained_runs": 100_000,
        "grace_s": 0,
        "linger_s": 0.2,
        "template": {"preload": preload},
    }
    server: Server = make_server(registry=registry, settings=settings, environment={"TMPDIR": str(temporary)})
    return server.start()


FAKE_CREWS, REAL_CREWS = ("instant", "sleeper"), ("support", "blocking")


def test_fakes(make_server: ServerFactory, temporary: Path) -> None:
    run(make(make_server, temporary, "tests.crews.fake_crews:CREWS", []), CI_FAKES, FAKE_CREWS, temporary)


@pytest.mark.timeout(300)
def test_real_crews(make_server: ServerFactory, temporary: Path) -> None:
    run(make(make_server, temporary, "tests.crews.real_crews:CREWS", ["crewai"]), CI_REAL, REAL_CREWS, temporary)


@pytest.mark.stress
@pytest.mark.timeout(1800)
def test_many_fakes(make_server: ServerFactory, temporary: Path) -> None:
    run(make(make_server, temporary, "tests.crews.fake_crews:CREWS", []), FAKES, FAKE_CREWS, temporary)


@pytest.mark.stress
@pytest.mark.timeout(1800)
def test_many_real_crews(make_server: ServerFactory, temporary: Path) -> None:
    run(make(make_server, temporary, "tests.crews.real_crews:CREWS", ["crewai"]), REAL, REAL_CREWS, temporary)
