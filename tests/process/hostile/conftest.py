"""The session's matrix, printed at its end, and servers for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.hostile import outside
from tests.process.hostile.field import Field, make_server
from tests.process.hostile.matrix import METHODS, Matrix

MATRIX = pytest.StashKey[Matrix]()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print what was found."""
    matrix = config.stash.get(MATRIX, None)
    if matrix is not None and matrix.runs:
        terminalreporter.section("hostile work: case by ending by method")
        for line in matrix.lines():
            terminalreporter.line(line)


@pytest.fixture(scope="session")
def matrix(pytestconfig: pytest.Config) -> Matrix:
    """Where runs are kept."""
    return pytestconfig.stash.setdefault(MATRIX, Matrix())


@pytest.fixture(scope="session")
def refuge() -> Iterator[Path | None]:
    """A cgroup to escape to."""
    with outside.refuge() as directory:
        yield directory


@pytest.fixture(scope="session")
def fields(tmp_path_factory: pytest.TempPathFactory, refuge: Path | None) -> Iterator[dict[str, Field]]:
    """One server a method, for all that it lives through."""
    made = {}
    try:
        for method in METHODS:
            server = make_server(tmp_path_factory.mktemp(method), method, preload_mcp=True)
            made[method] = Field(server, method, refuge)
            server.start()
        yield made
    finally:
        for field in made.values():
            field.server.close()
