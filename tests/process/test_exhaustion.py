"""Work that takes every process it can have: it stops at its limit, and the supervisor goes on without another thread.

Without the pids controller, which the machines of these tests do not delegate, limits are those of a user.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support import delegated, procs, world
from tests.support.client import Answer, Client
from tests.support.open_python import STRANGER, USER, OpenPython, for_user, open_directory
from tests.support.server import Server

REGISTRY = "tests.crews.confined_crews:CREWS"
#: Processes of a crew that takes all it can have.
MOST = 60
#: Processes of a crew whose limit is reached while another's is.
FEW = 20
WAIT_S = 30.0
CALLERS = 8
CREWS = {"fork_bomb": {"processes": MOST}, "thread_bomb": {"processes": MOST}, "counter": {"processes": FEW}}
BOMBS = pytest.mark.parametrize("bomb", ["fork_bomb", "thread_bomb"])

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can run processes as somebody else"),
    pytest.mark.skipif(procs.cgroup2_mount() is None, reason="no cgroup v2 hierarchy is mounted"),
]


def tasks_of(uid: int) -> int:
    """Live processes of a user, each thread counted, as RLIMIT_NPROC does (setrlimit(2))."""
    found = 0
    for pid in procs.pids():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if Path(f"/proc/{pid}").stat().st_uid == uid and procs.alive(pid):
                found += len(os.listdir(f"/proc/{pid}/task"))
    return found


@contextlib.contextmanager
def exploded(server: Server, bomb: str, shared: Path) -> Iterator[dict[str, Any]]:
    """Start a bomb and wait until it is refused; gives what the server says of its worker."""
    full = shared / f"full-{uuid.uuid4().hex}"
    client = server.client()
    with client.stream("the-bomb", bomb, input={"full": str(full)}, complete=False):
        procs.wait_until(full.exists, WAIT_S, f"{bomb} has reached its limit")
        yield client.get("the-bomb").expect(200)["worker"]


def defuse(client: Client, bomb: str, worker: dict[str, Any]) -> dict[str, Any]:
    """Cancel the bomb; returns the proof, which must be true."""
    stop: dict[str, Any] = client.cancel("the-bomb", bomb).expect(200)["stop"]
    assert (stop["confirmed"], stop["processes_left"], stop["worker"]["exit_signal"]) == (True, 0, "SIGKILL")
    assert not procs.alive(stop["worker"]["pid"])
    if worker["cgroup"] is not None:
        assert world.in_cgroup(worker["cgroup"]) == []
    return stop


# --- a supervisor that is root, workers of another user --------------------------------------------------------------


@pytest.fixture
def bombed(open_python: OpenPython) -> Iterator[Server]:
    """A server with a directory ``shared`` for its workers."""
    with open_directory() as directory:
        owner = pwd.getpwnam(USER)
        (directory / "shared").mkdir()
        os.chown(directory / "shared", owner.pw_uid, owner.pw_gid)
        with Server(
            directory,
            registry=REGISTRY,
            settings=for_user(directory, crews=CREWS),
            prefix=open_python.prefix,
            environment=open_python.environment,
        ) as server:
            yield server


@BOMBS
def test_a_bomb_stops_at_its_limit_and_harms_nobody(bombed: Server, bomb: str) -> None:
    client, uid = bombed.client(), pwd.getpwnam(USER).pw_uid
    idle = tasks_of(uid)
    with exploded(bombed, bomb, bombed.directory / "shared") as worker:
        # Whoever dies makes room for another; the bomb refills it at once, and can never have more.
        procs.wait_until(lambda: tasks_of(uid) == MOST, WAIT_S, "the bomb has all that it may have")
        assert client.health().expect(200)["status"] == "ready"
        # Crews without a limit of their own are not concerned: processes and threads are to be had.
        assert client.start("neighbour", "roomy_counter", input={"threads": 10}).expect(200)["started"] == 10
        stop = defuse(client, bomb, worker)
    assert tasks_of(uid) == idle
    assert stop["processes_killed"] >= (MOST - idle - 5 if bomb == "fork_bomb" else 1)
    assert client.health().expect(200)["status"] == "ready"


def test_a_limit_counts_what_the_other_jobs_of_the_user_have(bombed: Server) -> None:
    """As docs/stopping.md says of hosts without the pids controller."""
    client = bombed.client()
    with exploded(bombed, "fork_bomb", bombed.directory / "shared") as worker:
        refused = client.start("starved", "counter", input={"threads": 1})
        view = client.get("starved").expect(200)
        defuse(client, "fork_bomb", worker)
    assert (refused.status, view["status"], view["uncertain_outcome"]) == (502, "failed", False)
    last = client.events("starved").expect(200)["events"][-1]["data"]
    assert last["error_type"] == "LaunchError"
    assert last["stop"]["confirmed"] is True
    started = client.start("fed", "counter", input={"threads": 1000}).expect(200)["started"]
    # The template, the worker and the thread that reads its pipe are of that user too.
    assert FEW - 5 <= started <= FEW - 3


# --- a supervisor of the same user as its workers --------------------------------------------------------------------


@pytest.fixture(params=["cgroup", "keeper"])
def beset(request: pytest.FixtureRequest, open_python: OpenPython) -> Iterator[Server]:
    """A server of an unprivileged user that may have MOST processes, all in all."""
    with open_directory(STRANGER) as directory, _prefix(request.param, open_python) as (prefix, more):
        (directory / "shared").mkdir()
        os.chown(directory / "shared", STRANGER, STRANGER)
        with Server(
            directory,
            registry=REGISTRY,
            token=None,
            mutant=getattr(request.node, "callspec", None) and request.node.callspec.params.get("mutant"),
            settings={"allow_unauthenticated": True, "stop_method": request.param, **more},
            prefix=(*prefix, "prlimit", f"--nproc={MOST}:{MOST}", *open_python.prefix),
            environment=open_python.environment,
        ) as server:
            yield server


@contextlib.contextmanager
def _prefix(method: str, open_python: OpenPython) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """A command that becomes the stranger, and the settings of the method."""
    if method == "keeper":
        yield ("setpriv", f"--reuid={STRANGER}", f"--regid={STRANGER}", "--clear-groups"), {}
        return
    with delegated.cgroup(STRANGER) as cgroup:
        become = ("-m", "tests.support.delegated", str(STRANGER), str(cgroup / "supervisor"), "--")
        yield (str(open_python.python), *become), {"cgroup_root": str(cgroup)}


def threads_of(server: Server) -> int:
    """Threads of the supervisor."""
    return len(os.listdir(f"/proc/{server.pid}/task"))


def crowd(client: Client, number: int) -> list[Answer]:
    """As many callers at once as make a pool use all its threads."""
    with ThreadPoolExecutor(CALLERS) as pool:
        reads = [pool.submit(client.request, "GET", "/jobs") for _ in range(CALLERS)]
        starts = [pool.submit(client.start, f"crowd-{number}-{caller}", "instant") for caller in range(CALLERS)]
        return [future.result() for future in [*reads, *starts]]


@BOMBS
def test_a_supervisor_without_room_for_a_thread_still_answers_and_stops(beset: Server, bomb: str) -> None:
    client = beset.client()
    with exploded(beset, bomb, beset.directory / "shared") as worker:
        procs.wait_until(lambda: tasks_of(STRANGER) == MOST, WAIT_S, "the user has all that it may have")
        assert client.health().expect(200)["status"] == "ready"
        assert {job["action_id"] for job in client.request("GET", "/jobs").expect(200)["jobs"]} == {"the-bomb"}
        # No worker can be made; that is said, and that nothing ran.
        assert client.start("unlucky", "instant").status == 502
        unlucky = client.events("unlucky").expect(200)["events"][-1]["data"]
        assert (unlucky["error_type"], unlucky["uncertain_outcome"]) == ("LaunchError", False)
        assert unlucky["stop"]["confirmed"] is True
        defuse(client, bomb, worker)
    client.start("lucky", "instant").expect(200)
    assert beset.stop() == 0
    assert tasks_of(STRANGER) == 0


@pytest.mark.parametrize("mutant", [None, "lazy"])
def test_the_supervisor_starts_all_its_threads_before_it_listens(beset: Server, mutant: str | None) -> None:
    client = beset.client()
    listening = threads_of(beset)
    for number in range(3):
        assert {answer.status for answer in crowd(client, number)} == {200}
    assert (threads_of(beset) == listening) is (mutant is None)


@pytest.mark.parametrize("beset", ["keeper"], indirect=True)
def test_a_bomb_whose_keeper_is_killed_is_stopped_all_the_same(beset: Server) -> None:
    client = beset.client()
    with exploded(beset, "fork_bomb", beset.directory / "shared") as worker:
        procs.wait_until(lambda: tasks_of(STRANGER) == MOST, WAIT_S, "the user has all that it may have")
        (keeper,) = [pid for pid in procs.children(beset.pid) if worker["pid"] in procs.children(pid)]
        os.kill(keeper, signal.SIGKILL)
        stop = procs.wait_until(lambda: client.get("the-bomb").expect(200)["stop"], WAIT_S, "the bomb is gone")
    assert (stop["confirmed"], stop["method"]) == (True, "subreaper")
    procs.wait_until(lambda: client.start(f"next-{uuid.uuid4().hex}", "instant").status == 200, WAIT_S, "new work runs")
    assert beset.stop() == 0
    assert tasks_of(STRANGER) == 0
