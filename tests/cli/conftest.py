"""A real server for each module, and the command line as a process beside it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from tests.support.gates import Gate
from tests.support.server import ROOT, Server
from tests.unit.test_cli import run

REGISTRY = "tests.crews.operated_crews:CREWS"
SETTINGS: dict[str, Any] = {"max_concurrency": 8, "grace_s": 0.1, "linger_s": 0.2}
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for the module."""
    directory = tmp_path_factory.mktemp("server")
    environment: dict[str, str | None] = {"WITNESS_FILE": str(directory / "witness")}
    with Server(directory, registry=REGISTRY, settings=SETTINGS, environment=environment) as running:
        yield running


def places(server: Server) -> dict[str, str]:
    """The environment in which a command finds the server and its token."""
    return {"CREW_SUPERVISOR_SERVER": server.url, "AIP_CREWAI_BEARER_TOKEN_FILE": str(server.directory / "token")}


@pytest.fixture
def crew(server: Server) -> Command:
    """Runs a command against the module's server, to its end."""

    def command(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        done: subprocess.CompletedProcess[str] = run(*arguments, **(places(server) | environ))
        assert "Traceback" not in done.stderr
        return done

    return command


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """Files for one job that waits; it may go on at the end of the test."""
    made = Gate(tmp_path, "gate")
    yield made
    made.release()


@contextlib.contextmanager
def running(server: Server, *arguments: str, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A command that is not waited for; killed and reaped at the end."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("AIP_", "CREW", "NO_COLOR"))}
    environ = clean | {"PYTHONPATH": str(ROOT), "XDG_CONFIG_HOME": os.devnull} | places(server)
    process = subprocess.Popen(
        [sys.executable, "-m", "supervisor", *arguments],
        env=environ | options.pop("environ", {}),
        # A shell that started the tests in the background has SIGINT ignored, which execve(2) would pass on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
        **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def check(document: Any, kind: type[msgspec.Struct]) -> Any:
    """A document that is of that struct's schema, with every field and no other; returns it."""
    jsonschema.validate(document, msgspec.json.schema(kind))
    assert document.keys() == set(kind.__struct_encode_fields__)
    return document
