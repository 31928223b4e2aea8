"""``crew-supervisor doctor`` as a process: what it says, to whom, and that it leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.process.doctor.examined import NAMES, examine
from tests.support import procs
from tests.support.server import Server


def branches() -> set[Path]:
    """Cgroups that a doctor made which has ended; their names end in its pid."""
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines() if line.split()[2] == "cgroup2"]
    made = {path for mount in mounts for path in Path(mount).rglob("crew-supervisor-doctor*")}
    return {path for path in made if not procs.alive(int(path.name.removeprefix("crew-supervisor-doctor"), 16))}


def everything_below(directory: Path) -> dict[str, tuple[int, int, bytes]]:
    """Path to mode, time of change and content of every file and directory."""
    return {
        str(path): (path.lstat().st_mode, path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in [directory, *sorted(directory.rglob("*"))]
    }


# --- what it says -----------------------------------------------------------------------------------------------------


def test_a_good_configuration_has_no_failure_and_every_line(server: Server) -> None:
    found = examine(server)
    assert found.failures == []
    assert found.status == 0
    assert list(found.findings) == NAMES
    assert "1 crews" in found.findings["registry"].detail
    assert str(os.path.realpath(sys.executable)) in os.path.realpath(found.findings["python"].detail.split()[-1])


def test_json_is_of_its_schema(server: Server) -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "additionalProperties": False,
        "required": ["ok", "findings"],
        "properties": {
            "ok": {"type": "boolean"},
            "findings": {
                "type": "array",
                "minItems": len(NAMES),
                "items": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["name", "verdict", "detail", "advice"],
                    "properties": {
                        "name": {"enum": NAMES},
                        "verdict": {"enum": ["ok", "warning", "failure"]},
                        "detail": {"type": "string", "minLength": 1},
                        "advice": {"type": "string"},
                    },
                },
            },
        },
    }
    document = json.loads(server.run_command("doctor", "--json").stdout)
    jsonschema.Draft202012Validator(schema).validate(document)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(schema).validate({**document, "findings": document["findings"][1:]})


def test_lines_are_plain_where_nobody_looks(server: Server) -> None:
    done = server.run_command("doctor")
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert [line.split()[1].rstrip(":") for line in done.stdout.splitlines()] == NAMES


@pytest.mark.parametrize("colours", [True, False])
def test_a_terminal_gets_a_table_and_no_colours_if_it_wants_none(server: Server, colours: bool) -> None:
    server.environment |= {"TERM": "xterm-256color", "COLUMNS": "200", "NO_COLOR": None if colours else "1"}
    text = on_terminal(server)
    assert "check" in text.splitlines()[0]
    assert all(name in text for name in NAMES)
    assert ("\x1b[32m" in text) is colours


def on_terminal(server: Server) -> str:
    """What the doctor prints on a terminal."""
    ours, theirs = pty.openpty()
    server._write_config()
    command = [sys.executable, "-m", "supervisor", "doctor", "--config", str(server.config_file)]
    process = subprocess.Popen(command, cwd=server.directory, env=server._environment(), stdout=theirs, stderr=theirs)
    os.close(theirs)
    text = b""
    with contextlib.suppress(OSError):  # EIO: the other end is closed
        while block := os.read(ours, 65_536):
            text += block
    os.close(ours)
    assert process.wait(30) == 0, text
    return text.decode()


def test_without_a_configuration_the_machine_is_looked_at() -> None:
    clean: Mapping[str, str] = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    root = str(Path(__file__).resolve().parents[3])
    done = subprocess.run(
        [sys.executable, "-m", "supervisor", "doctor", "--json"],
        env={**clean, "PYTHONPATH": root}, cwd=root, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert [one["name"] for one in report["findings"] if one["verdict"] == "failure"] == ["configuration"]


# --- it changes nothing -----------------------------------------------------------------------------------------------


def test_nothing_is_made_where_nothing_was(server: Server, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    server.environment["TMPDIR"] = str(scratch)
    server._write_config()
    before = everything_below(server.directory)
    assert examine(server).status == 0
    assert set(everything_below(server.directory)) == set(before)
    assert os.listdir(scratch) == []
    assert branches() == set()


def test_a_running_supervisor_is_named_and_not_disturbed(server: Server) -> None:
    server.start()
    server.client().start("before", "good").expect(200)
    server.settings["port"] = server.port
    state = server.state_file.parent
    jobs = state / "work" / "jobs"
    procs.wait_until(lambda: not os.listdir(jobs), 10, "the directory of the job that ended is gone")
    before = everything_below(state)
    found = examine(server)
    assert found.failures == []
    assert f"pid {server.pid}" in found.findings["journal"].detail
    assert f"the running supervisor, pid {server.pid}," in found.findings["port"].detail
    after = everything_below(state)
    moved = {path for path in before if before[path] != after.get(path)} | (after.keys() - before.keys())
    assert moved <= {str(state)}, "only the time of the directory, in which a file was written and removed"
    assert branches() == set()
    server.client().start("after", "good").expect(200)


def test_a_supervisor_that_is_gone_owns_nothing(server: Server) -> None:
    server.start()
    server.kill()
    found = examine(server)
    assert "nobody here has" in found.findings["journal"].detail


def test_a_supervisor_of_another_pid_namespace_is_not_called_gone(server: Server) -> None:
    server.start()
    owner = json.loads(server.state_file.with_name("journal.db.lock").read_bytes())
    server.stop()
    elsewhere = {**owner, "pid_ns": owner["pid_ns"] + 1}
    server.state_file.with_name("journal.db.lock").write_text(json.dumps(elsewhere))
    found = examine(server)
    assert found.verdict("journal") == "warning"
    assert "PID namespace" in found.findings["journal"].detail
