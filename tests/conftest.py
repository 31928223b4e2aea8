"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.open_python import OpenPython, open_directory, provide
from tests.support.server import Server, ServerFactory


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[ServerFactory]:
    """Make servers, not started yet, each with its own directory; whatever they started is gone after the test."""
    made: list[Server] = []

    def make(**options: Any) -> Server:
        options.setdefault("directory", tmp_path / f"server{len(made)}")
        server = Server(**options)
        made.append(server)
        return server

    yield make
    for server in made:
        server.close()


@pytest.fixture
def start_server(make_server: ServerFactory) -> ServerFactory:
    """Like ``make_server``, and the server listens already."""

    def start(**options: Any) -> Server:
        return make_server(**options).start()

    return start


@pytest.fixture(scope="session")
def open_python() -> Iterator[OpenPython]:
    """What processes of other users run under."""
    if os.geteuid() != 0:
        pytest.skip("only root can run a process as somebody else")
    with open_directory() as directory:
        yield provide(directory)
