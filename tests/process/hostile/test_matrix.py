"""Hostile work by every ending and every method: nothing survives, and no proof is false.

Each cell runs once here, four at a time, and 20 times under ``make stress``, one at a time. The session ends with the
matrix. Every supervisor here runs as root beside its workers, so that they may attack it and its cgroups.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.process.hostile.field import RUNS, Field, make_server
from tests.process.hostile.matrix import ENDINGS, METHODS, Matrix, Run, attacks_on
from tests.support import procs
from tests.support.server import MARK, Server

AT_ONCE = 4

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the attacks and two of the methods need root")


def bystanders(server: Server) -> list[int]:
    """Processes that carry the server's mark and are neither it nor its template."""
    ours = {server.pid, *procs.children(server.pid)}
    return [pid for pid in procs.with_environment(f"{MARK}={server.mark}") if pid not in ours]


def faults_of(matrix: Matrix, runs: list[Run]) -> list[str]:
    """Keep the runs; returns what must not be."""
    return [fault for run in runs for fault in matrix.add(run).faults()]


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("method", METHODS)
def test_nothing_survives(fields: dict[str, Field], matrix: Matrix, method: str, ending: str, runs: int) -> None:
    field = fields[method]
    cells = [(attack, ending) for _ in range(runs) for attack in attacks_on(method)]
    assert faults_of(matrix, field.run_cells(cells, at_once=AT_ONCE if runs == 1 else 1)) == []
    assert bystanders(field.server) == []


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("method", METHODS)
def test_nothing_survives_a_supervisor_that_is_told_to_go(
    tmp_path: Path, refuge: Path | None, matrix: Matrix, method: str, runs: int
) -> None:
    with make_server(tmp_path / "server", method, preload_mcp=True) as server:
        field = Field(server, method, refuge)
        for number in range(runs):
            if number:
                server.start()
            assert faults_of(matrix, field.terminate(attacks_on(method))) == []
            assert server.returncode == 0


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("method", METHODS)
def test_nothing_survives_the_restart_of_a_killed_supervisor(
    tmp_path: Path, refuge: Path | None, matrix: Matrix, method: str, runs: int
) -> None:
    with make_server(tmp_path / "server", method, preload_mcp=True) as server:
        field = Field(server, method, refuge)
        for _ in range(runs):
            assert faults_of(matrix, field.kill_and_restart(attacks_on(method))) == []
