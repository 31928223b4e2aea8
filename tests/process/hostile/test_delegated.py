"""A supervisor without privileges in a delegated cgroup: its workers are of its own user and may leave their leaves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.hostile.field import RUNS, Field, make_server
from tests.process.hostile.matrix import DELEGATED, ENDINGS, METHODS, Matrix
from tests.support import delegated, procs
from tests.support.open_python import STRANGER, OpenPython, open_directory

UID = STRANGER
ATTACKS = ("other_cgroup", "double_fork", "exited_leader")

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can delegate a cgroup"),
    pytest.mark.skipif(procs.cgroup2_mount() is None, reason="no cgroup v2 hierarchy is mounted"),
]


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A cgroup of that user."""
    with delegated.cgroup(UID) as directory:
        yield directory


@pytest.fixture(name="field")
def make_field(cgroup: Path, open_python: OpenPython) -> Iterator[Field]:
    """A server of that user."""
    become = ("-m", "tests.support.delegated", str(UID), str(cgroup / "supervisor"), "--")
    with open_directory(UID) as directory:
        server = make_server(
            directory,
            "cgroup",
            token=None,
            prefix=(str(open_python.python), *become, *open_python.prefix),
            environment=open_python.environment,
            settings={**METHODS["cgroup"], "cgroup_root": str(cgroup), "allow_unauthenticated": True},
        )
        with server:
            field = Field(server, DELEGATED, cgroup / "refuge")
            os.chown(directory / "attacks", UID, UID)
            yield field


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
