"""Kernels and filters that refuse clone3, clone with CLONE_PARENT, or pidfds: the same promises on whatever is left."""

from __future__ import annotations

import os
import platform
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.process.hostile.field import Field, make_server
from tests.process.hostile.matrix import ENDINGS
from tests.support import procs, seccomp
from tests.support.server import ROOT, Server

ATTACKS = ("double_fork", "exited_leader", "kills_worker")
METHOD_ATTACKS = {"cgroup": (*ATTACKS, "other_cgroup"), "keeper": (*ATTACKS, "kills_keeper")}
#: What is refused, and how workers (or their keepers) are made then.
REFUSALS = {
    ("pidfds",): "clone3",
    ("clone3",): "clone",
    ("pidfds", "clone3", "siblings"): "fork",
}

needs_filter = pytest.mark.skipif(
    platform.machine() not in seccomp.MACHINES, reason="no seccomp filter is written for this machine"
)
pytestmark = [
    needs_filter,
    pytest.mark.skipif(os.geteuid() != 0, reason="the attacks and one of the methods need root"),
]


def under(refusals: tuple[str, ...]) -> tuple[str, ...]:
    """The prefix of a command that runs under a filter."""
    return (sys.executable, "-m", "tests.support.seccomp", *refusals, "--")


def launch_methods(server: Server) -> set[str]:
    """How the recorded workers were made."""
    with closing(sqlite3.connect(f"{server.state_file.as_uri()}?mode=ro", uri=True)) as connection:
        return {method for (method,) in connection.execute("SELECT method FROM workers")}


def test_the_filter_refuses_pidfds() -> None:
    opening = "import os\ntry: os.pidfd_open(os.getpid())\nexcept OSError as error: print(error.errno)"
    command = [*under(("pidfds",)), sys.executable, "-c", opening]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True, timeout=60)
    assert done.stdout == "38\n", "ENOSYS"


@pytest.mark.parametrize("refusals", REFUSALS, ids="-".join)
@pytest.mark.parametrize("method", METHOD_ATTACKS)
def test_nothing_survives_whatever_is_refused(
    tmp_path: Path, refuge: Path | None, method: str, refusals: tuple[str, ...]
) -> None:
    attacks = METHOD_ATTACKS[method]
    with make_server(tmp_path / "server", method, prefix=under(refusals)) as server:
        field = Field(server, method, refuge)
        cells = [(attack, ending) for ending in ENDINGS for attack in attacks]
        runs = field.run_cells(cells, at_once=4)
        assert [fault for run in runs for fault in run.faults()] == []
        assert launch_methods(server) == {REFUSALS[refusals]}
        assert [fault for run in field.kill_and_restart(("double_fork",)) for fault in run.faults()] == []
        assert [fault for run in field.terminate(attacks) for fault in run.faults()] == []
        assert server.returncode == 0


@pytest.mark.parametrize("refusals", [("pidfds",), ("pidfds", "clone3", "siblings")], ids="-".join)
@pytest.mark.parametrize("method", METHOD_ATTACKS)
def test_a_template_that_dies_is_noticed_without_pidfds(
    tmp_path: Path, method: str, refusals: tuple[str, ...]
) -> None:
    with make_server(tmp_path / "server", method, prefix=under(refusals)) as server:
        field = Field(server, method, None)
        (template,) = procs.children(server.pid)
        os.kill(template, 9)
        server.wait_log("template_lost", pid=template)
        assert field.run("plain_child", "completion").faults() == []
        procs.wait_until(lambda: procs.start_ticks(template) is None, 10, "the dead template is reaped")
