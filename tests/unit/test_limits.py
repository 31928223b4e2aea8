"""How a crew's limits are divided, and the control files that are written where controllers are delegated.

The machine of these tests has no controllers in its v2 hierarchy: a directory of plain files stands for the leaf.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from protocol.api import Stray
from protocol.frames import Limits
from protocol.states import Status
from supervisor.cgroup import RESERVED_TASKS, Leaf, Tree
from supervisor.limits import CONTROLLERS, plan
from supervisor.processes import Child, identify
from supervisor.run import finish
from supervisor.run.ending import Decision
from supervisor.stop import Stop, Work
from supervisor.strays import Hunter

LIMITS = Limits(memory_bytes=1 << 30, processes=64, open_files=256, file_bytes=1 << 20, cpu_weight=50)


def test_without_controllers_everything_is_left_to_rlimits() -> None:
    division = plan(LIMITS, frozenset())
    assert division.files == ()
    assert division.rlimits == LIMITS


def test_controllers_take_over_what_they_do_better() -> None:
    division = plan(LIMITS, frozenset(CONTROLLERS))
    assert dict(division.files) == {
        "memory.max": str(1 << 30),
        "memory.oom.group": "1",
        "pids.max": "64",
        "cpu.weight": "50",
    }
    assert (division.rlimits.memory_bytes, division.rlimits.processes) == (None, None)
    assert (division.rlimits.open_files, division.rlimits.file_bytes) == (256, 1 << 20)


def test_a_crew_without_limits_writes_nothing() -> None:
    assert plan(Limits(), frozenset(CONTROLLERS)).files == ()


def test_the_files_are_written_into_the_leaf(tmp_path: Path) -> None:
    Leaf(tmp_path, "/x").write(plan(LIMITS, frozenset(CONTROLLERS)).files)
    assert (tmp_path / "memory.max").read_text() == str(1 << 30)
    assert (tmp_path / "pids.max").read_text() == "64"


def _directory(path: Path, controllers: str) -> Leaf:
    path.mkdir(parents=True)
    (path / "cgroup.controllers").write_text(controllers)
    for name in ("cgroup.procs", "cgroup.subtree_control"):
        (path / name).touch()
    return Leaf(path, "/own")


def test_delegated_controllers_are_passed_on_after_we_have_moved_aside(tmp_path: Path) -> None:
    own = _directory(tmp_path / "own", "cpu io memory pids")
    base = _directory(tmp_path / "own" / "base", "")
    home = tmp_path / "own" / "supervisor"
    _directory(home, "")
    tree = Tree(base, own)
    tree.settle()
    assert tree.controllers == {"cpu", "memory", "pids"}
    assert (own.path / "cgroup.subtree_control").read_text() == "+cpu +memory +pids"
    assert (base.path / "cgroup.subtree_control").read_text() == "+cpu +memory +pids"
    assert (home / "cgroup.procs").read_text().isdigit()


def test_a_kernel_that_refuses_leaves_us_where_we_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = _directory(tmp_path / "own", "memory pids")
    _directory(tmp_path / "own" / "supervisor", "")
    tree = Tree(_directory(tmp_path / "own" / "base", ""), own)

    def busy(self: Leaf, files: object) -> None:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(Leaf, "write", busy)
    tree.settle()
    assert tree.controllers == frozenset()
    assert (own.path / "cgroup.procs").read_text().isdigit()


# --- tasks that are kept for the supervisor --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("allowed", "left"), [("4915", str(4915 - RESERVED_TASKS)), ("40", "20"), ("max", None), (None, None)]
)
def test_jobs_together_may_not_take_every_task_of_a_bounded_cgroup(
    tmp_path: Path, allowed: str | None, left: str | None
) -> None:
    own = _directory(tmp_path / "own", "pids")
    base = _directory(tmp_path / "own" / "base", "")
    _directory(tmp_path / "own" / "supervisor", "")
    if allowed is not None:
        (own.path / "pids.max").write_text(f"{allowed}\n")
    tree = Tree(base, own)
    tree.settle()
    assert tree.controllers == {"pids"}
    bound = base.path / "pids.max"
    assert (bound.read_text() if bound.exists() else None) == left


def test_without_the_pids_controller_no_bound_is_written(tmp_path: Path) -> None:
    own = _directory(tmp_path / "own", "memory")
    base = _directory(tmp_path / "own" / "base", "")
    _directory(tmp_path / "own" / "supervisor", "")
    (own.path / "pids.max").write_text("4915\n")
    Tree(base, own).settle()
    assert not (base.path / "pids.max").exists()


# --- out of memory ---------------------------------------------------------------------------------------------------


def _victim() -> int:
    """A child of ours that dies of SIGKILL; its status is left to be collected."""
    command = [sys.executable, "-I", "-S", "-c", "import os; os.kill(os.getpid(), 9)"]
    return os.posix_spawn(sys.executable, command, {})


class NothingToHunt:
    """Stands for a hunter that finds no stray."""

    def pass_once(self) -> tuple[list[Stray], bool]:
        return [], True


@pytest.mark.parametrize(
    ("events", "oom"),
    [
        ("low 0\nhigh 0\nmax 17\noom 1\noom_kill 2\noom_group_kill 1\n", True),
        ("low 0\nhigh 0\nmax 17\noom 0\noom_kill 0\noom_group_kill 0\n", False),
        (None, None),
    ],
)
async def test_an_out_of_memory_kill_is_in_the_record_of_the_stop(
    tmp_path: Path, events: str | None, oom: bool | None
) -> None:
    leaf = _directory(tmp_path / "job", "")
    (leaf.path / "cgroup.events").write_text("populated 0\nfrozen 0\n")
    if events is not None:
        (leaf.path / "memory.events").write_text(events)
    identity = identify(_victim())
    assert identity is not None
    child = Child(identity)
    await child.exited
    proof = await Stop(Work(child=child, leaf=leaf), cast(Hunter, NothingToHunt())).attempt(1)
    child.close()
    assert (proof.confirmed, proof.worker.oom) == (True, oom)
    decision = Decision(status=Status.FAILED, reason="crashed", uncertain=True, error_type="WorkerDied", message="")
    evidence = finish.evidence_of(proof, decision, 0.0, None)
    recorded: dict[str, Any] = json.loads(finish.terminal_data(decision, evidence, b""))
    assert recorded["stop"]["worker"]["oom"] is oom


def test_in_a_cgroup_of_its_own_it_moves_aside_without_controllers_too(tmp_path: Path) -> None:
    own = _directory(tmp_path / "own", "")
    home = _directory(tmp_path / "own" / "supervisor", "")
    tree = Tree(_directory(tmp_path / "own" / "base", ""), own, alone=True)
    tree.settle()
    assert (home.path / "cgroup.procs").read_text().isdigit()
    assert (own.path / "cgroup.subtree_control").read_text() == ""
    assert tree.controllers == frozenset()


def test_in_a_cgroup_of_others_it_stays_where_it_is_without_controllers(tmp_path: Path) -> None:
    own = _directory(tmp_path / "own", "")
    Tree(_directory(tmp_path / "own" / "base", ""), own).settle()
    assert not (own.path / "supervisor").exists()
