"""Fixtures shared by all tests; and what the cases of the effect ledger came to, at the end of a run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.terminal import TerminalReporter

from tests.support.numbered import EFFECT_CASES
from tests.support.open_python import OpenPython, open_directory, provide
from tests.support.postgres import Postgres
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
def postgres() -> Iterator[Postgres]:
    """A running PostgreSQL. It listens everywhere, since replicas in network namespaces come from elsewhere."""
    with Postgres(addresses=("0.0.0.0",)) as server:
        yield server


@pytest.fixture(scope="session")
def open_python() -> Iterator[OpenPython]:
    """What processes of other users run under."""
    if os.geteuid() != 0:
        pytest.skip("only root can run a process as somebody else")
    with open_directory() as directory:
        yield provide(directory)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the reports carry the numbers of the effect ledger's cases."""
    EFFECT_CASES.tag(items)


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    """Print which cases of the effect ledger ran, and how each of them ended."""
    EFFECT_CASES.summarize(terminalreporter)
    if _skipped_what_must_run(terminalreporter):
        terminalreporter.line("what must run was skipped (-ra names it), so this run has failed")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A run that skips what must run has failed."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and _skipped_what_must_run(reporter) and exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _skipped_what_must_run(reporter: TerminalReporter) -> bool:
    """Anything in CI, which installs what the tests need; a case of the effect ledger anywhere."""
    if os.environ.get("CI"):
        return bool(reporter.stats.get("skipped"))
    return "skipped" in EFFECT_CASES.outcomes(reporter).values()
