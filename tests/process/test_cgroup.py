"""Leaves: what the kernel says of them, and what cgroup.kill alone does not do."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.errors import StartError
from supervisor.cgroup import Tree, is_sealed, open_tree
from supervisor.processes import is_main_of_unit
from tests.support.procs import alive, wait_until

#: Its leader thread exits while another thread sleeps on: a zombie by its state, and alive.
HEADLESS = """
import ctypes, sys, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
sys.stdin.read()
ctypes.CDLL(None).pthread_exit(None)
"""
SLEEPER = "print('ready', flush=True); import signal; signal.pause()"


@pytest.fixture
def tree() -> Iterator[Tree]:
    made = open_tree(None, uuid.uuid4().hex)
    yield made
    for name in made.names():
        leaf = made.leaf(name)
        while leaf.populated():
            leaf.sweep()
        leaf.remove()
    made.remove()


def _start(script: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-I", "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def test_a_process_shows_in_its_leaf_and_is_killed_there(tree: Tree) -> None:
    leaf = tree.make("job-1.1")
    assert not leaf.populated()
    with _start(SLEEPER) as process:
        leaf.add(process.pid)
        assert leaf.populated()
        assert leaf.holds(process.pid)
        assert leaf.pids() == [process.pid]
        leaf.kill()
        assert process.wait(10) == -9
        wait_until(lambda: not leaf.populated(), 5, "the leaf is empty")
    leaf.remove()
    assert not leaf.exists()
    assert not leaf.populated()


def test_processes_of_nested_cgroups_are_listed_and_removed_depth_first(tree: Tree) -> None:
    leaf = tree.make("job-2.1")
    nested = leaf.below("inner").below("most")
    nested.path.mkdir(parents=True)
    with _start(SLEEPER) as process:
        nested.add(process.pid)
        assert leaf.populated()
        assert leaf.pids() == [process.pid]
        assert leaf.holds(process.pid)
        leaf.kill()
        process.wait(10)
        wait_until(lambda: not leaf.populated(), 5, "the leaf is empty")
    leaf.remove()
    assert not leaf.exists()


@pytest.mark.parametrize("moved_in", ["before", "after"])
def test_a_process_without_its_leader_thread_needs_the_sweep(tree: Tree, moved_in: str) -> None:
    leaf = tree.make("job-3.1")
    with subprocess.Popen([sys.executable, "-I", "-c", HEADLESS], stdin=subprocess.PIPE) as process:
        if moved_in == "before":
            leaf.add(process.pid)
        assert process.stdin is not None
        process.stdin.close()
        stat = Path(f"/proc/{process.pid}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z", 5, "the leader thread has exited")
        if moved_in == "after":
            leaf.add(process.pid)
        assert alive(process.pid), "state Z, but a thread lives"
        leaf.kill()
        assert leaf.populated(), "cgroup.kill alone passes over it"
        assert leaf.sweep() >= 1
        process.wait(10)
        wait_until(lambda: not leaf.populated(), 5, "the leaf is empty")


def test_a_branch_has_one_owner(tree: Tree) -> None:
    instance = tree.base.path.name.removeprefix("crew-supervisor-")
    with pytest.raises(StartError, match="copy"):
        open_tree(None, instance)
    assert tree.base.exists(), "the refused one must not take the branch away"


def test_a_directory_that_is_no_cgroup_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="no cgroup v2"):
        open_tree(tmp_path, uuid.uuid4().hex)
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="about root")
def test_root_is_never_sealed_in(tree: Tree) -> None:
    assert not is_sealed(tree.own)
    assert not tree.sealed


def test_only_the_process_that_systemd_executed_is_the_main_one_of_its_unit() -> None:
    assert is_main_of_unit({"SYSTEMD_EXEC_PID": str(os.getpid())})
    assert not is_main_of_unit({"SYSTEMD_EXEC_PID": str(os.getppid())})
    assert not is_main_of_unit({})
