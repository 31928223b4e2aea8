"""How a crew's limits are divided, and the control files that are written where controllers are delegated.

The machine of these tests has no controllers in its v2 hierarchy: a directory of plain files stands for the leaf.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.frames import Limits
from supervisor.cgroup import Leaf, Tree
from supervisor.limits import CONTROLLERS, plan

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
    tree = Tree(base)
    tree.enable_controllers(own)
    assert tree.controllers == {"cpu", "memory", "pids"}
    assert (own.path / "cgroup.subtree_control").read_text() == "+cpu +memory +pids"
    assert (base.path / "cgroup.subtree_control").read_text() == "+cpu +memory +pids"
    assert (home / "cgroup.procs").read_text().isdigit()


def test_a_kernel_that_refuses_leaves_us_where_we_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = _directory(tmp_path / "own", "memory pids")
    _directory(tmp_path / "own" / "supervisor", "")
    tree = Tree(_directory(tmp_path / "own" / "base", ""))

    def busy(self: Leaf, files: object) -> None:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(Leaf, "write", busy)
    tree.enable_controllers(own)
    assert tree.controllers == frozenset()
    assert (own.path / "cgroup.procs").read_text().isdigit()
