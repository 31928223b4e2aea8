"""A supervisor without privileges in a delegated cgroup: its workers are of its own user and may leave their leaves."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.hostile import outside
from tests.process.hostile.field import RUNS, Field, make_server
from tests.process.hostile.matrix import DELEGATED, ENDINGS, METHODS, Matrix
from tests.support import delegated, procs
from tests.support.server import ROOT

#: Of nobody.
UID = 54_321
ATTACKS = ("other_cgroup", "double_fork", "exited_leader")


def may_read_us() -> bool:
    """Whether an unprivileged user can run our interpreter and read the repository; only root can try."""
    if os.geteuid() != 0:
        return False
    program = "import os, sys; os.setuid(int(sys.argv[1])); import aiohttp, msgspec, supervisor"
    command = [sys.executable, "-c", program, str(UID)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False, timeout=60).returncode == 0


pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can delegate a cgroup"),
    pytest.mark.skipif(outside.cgroup2_mount() is None, reason="no cgroup v2 hierarchy is mounted"),
    pytest.mark.skipif(not may_read_us(), reason="the interpreter or the repository is closed to other users"),
]


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A cgroup of that user with a refuge in it; whatever is left in it at the end dies."""
    mount = outside.cgroup2_mount()
    assert mount is not None
    cgroup = mount / f"delegated-{uuid.uuid4().hex[:12]}"
    for directory in (cgroup, cgroup / "refuge", cgroup / "supervisor"):
        directory.mkdir()
        delegated.give(directory, UID)
    yield cgroup
    (cgroup / "cgroup.kill").write_text("1", encoding="ascii")
    events = cgroup / "cgroup.events"
    procs.wait_until(lambda: "populated 0" in events.read_text(encoding="ascii"), 10, "the cgroup is empty")
    for path, _, _ in os.walk(cgroup, topdown=False):
        os.rmdir(path)


@pytest.fixture
def field(cgroup: Path) -> Iterator[Field]:
    """A server of that user. pytest's own directories are closed to others."""
    directory = Path(tempfile.mkdtemp(prefix="delegated-"))
    os.chown(directory, UID, UID)
    server = make_server(
        directory,
        "cgroup",
        token=None,
        prefix=(sys.executable, "-m", "tests.support.delegated", str(UID), str(cgroup / "supervisor"), "--"),
        settings={**METHODS["cgroup"], "cgroup_root": str(cgroup), "allow_unauthenticated": True},
    )
    with server:
        field = Field(server, DELEGATED, cgroup / "refuge")
        os.chown(directory / "attacks", UID, UID)
        yield field
    shutil.rmtree(directory)


@pytest.mark.parametrize("runs", RUNS)
def test_nothing_survives_where_workers_may_leave_their_leaf(field: Field, matrix: Matrix, runs: int) -> None:
    for _ in range(runs):
        cells = [(attack, ending) for ending in ENDINGS for attack in ATTACKS]
        assert [fault for run in field.run_cells(cells, at_once=2) for fault in matrix.add(run).faults()] == []
        restarted = field.kill_and_restart(ATTACKS)
        assert [fault for run in restarted for fault in matrix.add(run).faults()] == []
        assert {run.stop["reason"] for run in restarted if run.stop} == {"escape_possible"}
        assert [fault for run in field.terminate(ATTACKS) for fault in matrix.add(run).faults()] == []
        assert field.server.returncode == 0
        field.server.start()


def test_an_escaped_process_is_hunted_and_named(field: Field) -> None:
    run = field.run("other_cgroup", "cancel")
    assert run.faults() == []
    assert run.stop is not None
    assert len(run.stop["strays"]) == 1
