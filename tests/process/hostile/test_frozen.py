"""A process in uninterruptible sleep cannot be killed: the stop is never claimed before it dies, and always after."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from tests.process.hostile import outside
from tests.process.hostile.field import CREW, RUNS, Field, Siege, make_server
from tests.process.hostile.matrix import ENDINGS, FROZEN, METHODS, Matrix, Run
from tests.process.hostile.outside import Freezer
from tests.support import procs
from tests.support.client import Answer

SETTINGS = {"stop_timeout_s": 0.5}
WAIT_S = 20.0
#: For a job that must be frozen before its timeout; more where the machine is slower than that.
TIMEOUTS_MS = (1_500, 6_000, 24_000)

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="the freezer and two of the methods need root"),
    pytest.mark.skipif(not Freezer.usable(), reason="no v1 freezer is mounted, which makes uninterruptible sleep"),
]


@pytest.fixture(scope="module")
def stuck_fields(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Field]]:
    """Servers that soon say that a stop is not proved."""
    made: dict[str, Field] = {}
    try:
        for method in METHODS:
            made[method] = Field(make_server(tmp_path_factory.mktemp(method), method, settings=SETTINGS), method, None)
            made[method].server.start()
        yield made
    finally:
        for field in made.values():
            field.server.close()


@pytest.fixture
def freezer() -> Iterator[Freezer]:
    """Thawed at the end, whatever happens."""
    freezer = Freezer()
    yield freezer
    freezer.close()


class Stuck(msgspec.Struct, frozen=True):
    """A job one of whose processes is frozen, and its waiting caller."""

    siege: Siege
    pid: int
    caller: Future[Answer]


def freeze_one(
    field: Field, freezer: Freezer, pool: ThreadPoolExecutor, *, then: str, timeout_ms: int | None = None
) -> Stuck:
    """Start a job and freeze the child of its worker."""
    siege = field.siege("plain_child")
    caller = pool.submit(siege.call, then=then, timeout_ms=timeout_ms)
    procs.wait_until(lambda: siege.stands, WAIT_S, "the attack stands")
    (pid,) = set(outside.belonging_to(siege.heartbeats)) - {siege.view()["worker"]["pid"]}
    freezer.freeze(pid)
    return Stuck(siege, pid, caller)


def state(pid: int) -> str:
    """State of a process (proc_pid_stat(5))."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]


def assert_unproved(stuck: Stuck) -> None:
    """The job is said to be stopping, whoever asks, while the process lives."""
    siege = stuck.siege
    view = siege.view()
    assert (view["status"], view["phase"], view["stop"]) == ("running", "stopping", None)
    refusal = siege.client.cancel(siege.action_id, CREW)
    assert (refusal.status, refusal.json()["code"]) == (503, "stop_unconfirmed")
    assert state(stuck.pid) == "D"


def thaw_and_judge(field: Field, stuck: Stuck, freezer: Freezer, ending: str, *, restarted: bool = False) -> Run:
    """Let the process die; nobody asks again, and the job ends."""
    with stuck.siege.client.follow(stuck.siege.action_id, complete=False) as stream:
        thawed_at = time.time()
        freezer.thaw()
        stream.rest()
    stop = stuck.siege.view()["stop"]
    run = field.judge(stuck.siege, ending, stop)
    run = msgspec.structs.replace(run, attack=FROZEN, restarted=restarted)
    assert stop["confirmed_at"] is None or stop["confirmed_at"] > thawed_at
    return run


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("method", METHODS)
def test_a_stop_is_confirmed_by_itself_once_the_process_dies(
    stuck_fields: dict[str, Field], freezer: Freezer, matrix: Matrix, method: str, ending: str, runs: int
) -> None:
    for _ in range(runs):
        matrix.add(get_stuck(stuck_fields[method], freezer, ending))
        freezer.close()


def get_stuck(field: Field, freezer: Freezer, ending: str) -> Run:
    """One job that cannot be stopped before the thaw."""
    with ThreadPoolExecutor(1) as pool:
        stuck = begin(field, freezer, pool, ending)
        try:
            answer = stuck.caller.result()
            assert (answer.status, answer.json()["code"]) == (503, "stop_unconfirmed")
            assert_unproved(stuck)
            assert field.run("double_fork", "cancel").faults() == [], "another job is none the worse for it"
            run = thaw_and_judge(field, stuck, freezer, ending)
            assert run.faults() == []
            expected = {"cancel": "cancelled", "timeout": "failed", "completion": "completed"}[ending]
            assert stuck.siege.view()["status"] == expected
            return run
        finally:
            freezer.thaw()
            stuck.siege.close()


def begin(field: Field, freezer: Freezer, pool: ThreadPoolExecutor, ending: str) -> Stuck:
    """A job that is stuck in that ending."""
    if ending == "timeout":
        for timeout_ms in TIMEOUTS_MS:
            stuck = freeze_one(field, freezer, pool, then="block", timeout_ms=timeout_ms)
            if stuck.siege.view()["phase"] == "running":
                return stuck
            freezer.close()
            stuck.siege.close()
        raise AssertionError("the process was never frozen in time")
    stuck = freeze_one(field, freezer, pool, then="wait" if ending == "completion" else "block")
    if ending == "completion":
        stuck.siege.strike()
    else:
        refusal = stuck.siege.client.cancel(stuck.siege.action_id, CREW)
        assert (refusal.status, refusal.json()["code"]) == (503, "stop_unconfirmed")
    return stuck


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("method", METHODS)
def test_a_supervisor_that_is_told_to_go_says_that_it_leaves_work_behind(
    tmp_path: Path, freezer: Freezer, matrix: Matrix, method: str, runs: int
) -> None:
    with make_server(tmp_path / "server", method, settings=SETTINGS) as server, ThreadPoolExecutor(1) as pool:
        field = Field(server, method, None)
        for _ in range(runs):
            stuck = freeze_one(field, freezer, pool, then="block")
            assert server.stop() == 1
            server.wait_log("left_running", action_id=stuck.siege.action_id, phase="stopping")
            assert state(stuck.pid) == "D"
            freezer.thaw()
            procs.wait_until(lambda stuck=stuck: not outside.belonging_to(stuck.siege.heartbeats), WAIT_S, "it dies")
            server.start()
            view = stuck.siege.view()
            assert (view["status"], view["uncertain_outcome"]) == ("failed", True)
            run = field.judge(stuck.siege, "sigterm", view["stop"])
            run = matrix.add(msgspec.structs.replace(run, attack=FROZEN, restarted=True))
            assert run.faults() == []
            # The leaf's emptiness excludes no escape, and the keeper was killed by a supervisor that looked itself.
            assert run.confirmed is (method == "namespace")
            freezer.close()


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("method", METHODS)
def test_a_restart_is_confirmed_late_too(
    tmp_path: Path, freezer: Freezer, matrix: Matrix, method: str, runs: int
) -> None:
    with make_server(tmp_path / "server", method, settings=SETTINGS) as server, ThreadPoolExecutor(1) as pool:
        field = Field(server, method, None)
        for _ in range(runs):
            stuck = freeze_one(field, freezer, pool, then="block")
            server.kill()
            server.start()
            server.wait_log("stop_unconfirmed", action_id=stuck.siege.action_id)
            assert_unproved(stuck)
            assert field.run("double_fork", "cancel").faults() == [], "the next supervisor works"
            run = matrix.add(thaw_and_judge(field, stuck, freezer, "sigkill", restarted=True))
            assert run.faults() == []
            assert run.confirmed is (method != "cgroup"), "an empty leaf excludes no escape"
            assert stuck.siege.view()["status"] == "failed"
            freezer.close()
