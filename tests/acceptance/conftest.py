"""Fixtures of the acceptance tests; and what the numbered cases of the wire contract came to, at the end of a run."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from _pytest.terminal import TerminalReporter

from tests.support.client import Client
from tests.support.numbered import CASES
from tests.support.server import Server

_HERE = Path(__file__).parent


@pytest.fixture
def client(server: Server) -> Client:
    """A client of the module's server."""
    return server.client()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """For calls that wait."""
    with ThreadPoolExecutor(8) as pool:
        yield pool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the reports of this directory's tests carry their case numbers."""
    CASES.tag(item for item in items if item.path.is_relative_to(_HERE))


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    """Print which case numbers ran, and how each of them ended."""
    CASES.summarize(terminalreporter)
