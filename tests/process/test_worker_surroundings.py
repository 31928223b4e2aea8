"""What a worker finds around it: no secret, no descriptor, no signal setting and no directory that is not its own."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support import procs
from tests.support.client import Client
from tests.support.server import TOKEN, Server, ServerFactory

SECRETS: dict[str, str | None] = {
    "AIP_CREWAI_BEARER_TOKEN": TOKEN,
    "CREW_SUPERVISOR_GRACE_S": "0.4",
    "NOTIFY_SOCKET": "@a-socket-of-the-tests",
    "CREDENTIALS_DIRECTORY": "/credentials-of-the-tests",
    "WATCHDOG_USEC": "30000000",
    "WATCHDOG_PID": "1",
    "LISTEN_FDS": "0",
    "LISTEN_PID": "1",
    "LISTEN_FDNAMES": "http",
    "INVOCATION_ID": "0123456789abcdef",
    "JOURNAL_STREAM": "9:9",
    "SYSTEMD_EXEC_PID": "1",
    "STATE_DIRECTORY": "/state-of-the-tests",
    "MEMORY_PRESSURE_WATCH": "/dev/null",
}
KEPT = "A_VARIABLE_OF_THE_OPERATOR"
OPEN_FILES = 1024


class Seen(NamedTuple):
    """A server, and what its worker said of itself."""

    server: Server
    report: dict[str, Any]


@pytest.fixture(scope="module", params=["fork", "spawn"])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    """One report for each way of launching."""
    settings = {"launch": request.param, "crews": {"report": {"environment": {"OF_THE_CREW": "1"}}}}
    environment = {**SECRETS, KEPT: "kept", "CREWAI_TRACING_ENABLED": None}
    registry = "tests.crews.hostile_crews:CREWS"
    directory = tmp_path_factory.mktemp(request.param)
    shell = f'ulimit -S -n {OPEN_FILES}; trap "" HUP USR1; exec "$@"'
    with Server(
        directory,
        registry=registry,
        settings=settings,
        environment=environment,
        token=None,
        prefix=("sh", "-c", shell, "sh"),
    ) as server:
        client = Client(server.host, server.port, token=TOKEN)
        yield Seen(server, client.start("report", "report").expect(200))


def test_secrets_of_the_supervisor_are_not_in_its_environment(seen: Seen) -> None:
    environ = seen.report["environ"]
    assert not [name for name in environ if name in SECRETS or name.startswith(("AIP_CREWAI_", "CREW_SUPERVISOR_"))]
    assert TOKEN not in str(environ)
    # A fork shows the environment that its template was executed with.
    assert TOKEN not in str(seen.report["first_environ"])
    assert "NOTIFY_SOCKET" not in str(seen.report["first_environ"])
    assert environ[KEPT] == "kept"
    assert environ["OF_THE_CREW"] == "1"
    assert environ["CREWAI_DISABLE_TELEMETRY"] == environ["OTEL_SDK_DISABLED"] == "true"


def test_only_its_streams_and_the_protocol_are_open(seen: Seen) -> None:
    found = {int(fd): target for fd, target in seen.report["descriptors"].items()}
    assert found.pop(0) == "/dev/null"
    assert found.pop(1).startswith("pipe:")
    assert found.pop(2).startswith("pipe:")
    ((protocol, target),) = found.items()
    assert protocol >= 500
    assert target.startswith("socket:")


def test_its_directories_are_the_jobs_and_the_crews(seen: Seen) -> None:
    report, work = seen.report, seen.server.state_file.parent / "work"
    job, environ = work / "jobs" / "1", seen.report["environ"]
    assert report["cwd"] == environ["PWD"] == str(job / "cwd")
    assert report["tempdir"] == environ["TMPDIR"] == str(job / "tmp")
    crew = Path(environ["HOME"]).parent
    assert crew.parent == work / "crews"
    assert Path(environ["CREWAI_STORAGE_DIR"]) == crew / "storage"
    assert set(report["modes"].values()) == {0o700}
    assert crew.is_dir()
    procs.wait_until(lambda: not job.exists(), 5, "the job's directory is removed")


def test_session_signals_and_limits_are_its_own(seen: Seen) -> None:
    report = seen.report
    assert report["session"] == report["pid"]
    assert report["blocked"] == []
    assert report["term"] is True
    assert report["ignored"] == [int(signal.SIGPIPE)]
    assert report["core"] == [0, 0]
    assert report["open_files"][0] == OPEN_FILES
    ours = int(Path(f"/proc/{seen.server.pid}/oom_score_adj").read_text())
    assert report["oom_score_adj"] > ours or ours == 1000


@pytest.mark.parametrize("launch", ["fork", "spawn"])
def test_neither_lock_nor_journal_nor_listener_is_inherited(make_server: ServerFactory, launch: str) -> None:
    # Without a spare standby: one that is just being executed would still have everything.
    settings = {"launch": launch, "standby": 0}
    server = make_server(registry="tests.crews.fake_crews:CREWS", settings=settings).start()
    with server.client().stream("a", "sleeper") as stream:
        stream.until("started")
        files = open_files(server.pid)
        assert [name for name in files if name.endswith("journal.db.lock")]
        for pid in procs.descendants(server.pid):
            shared = {name for name in open_files(pid) & files if not name.startswith(("/dev/null", "pipe:"))}
            assert not shared, f"{pid} shares {shared} with the supervisor"


def open_files(pid: int) -> set[str]:
    """Targets of every descriptor of a process."""
    return {str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()}


def test_neither_crewai_nor_the_registry_is_ever_in_the_supervisor(start_server: ServerFactory, tmp_path: Path) -> None:
    imported = tmp_path / "imported"
    (tmp_path / "witness.py").write_text(
        "import os, pathlib\n"
        f"with open({str(imported)!r}, 'a') as file:\n"
        "    file.write(f'{os.getpid()}\\n')\n"
        "from tests.crews.real_crews import CREWS\n"
    )
    server = start_server(
        registry="witness:CREWS", python_path=(tmp_path,), settings={"template": {"preload": ["crewai"]}}
    )
    client = server.client()
    assert client.start("a", "support", input={"topic": "bees"}).expect(200)["raw"] == "case triaged"
    (template,) = procs.children(server.pid)
    assert imported.read_text().split() == [str(template)]
    # Its compiled dependencies would show as mapped files.
    packages = ("pydantic_core", "numpy", "chromadb")
    mapped = {pid: Path(f"/proc/{pid}/maps").read_text() for pid in (server.pid, template)}
    assert [name for name in packages if name in mapped[template]]
    assert not [name for name in packages if name in mapped[server.pid]]
    resident = Path(f"/proc/{server.pid}/status").read_text().partition("VmRSS:")[2].split()[0]
    assert int(resident) < 70 * 1024
