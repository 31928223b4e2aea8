"""The command line, as a process: what it says, how it exits, and what ``serve`` does not import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from supervisor import config
from tests.support.server import ROOT

SECRET = "a-secret-that-nobody-may-see"


def run(*arguments: str, python: tuple[str, ...] = ("-m", "supervisor"), **environ: str) -> Any:
    """Run a command to its end in an environment without settings but those given."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("AIP_", "CREW"))}
    return subprocess.run(
        [sys.executable, *python, *arguments],
        # Nobody's client file is below a device.
        env=clean | {"PYTHONPATH": str(ROOT), "COLUMNS": "200", "XDG_CONFIG_HOME": os.devnull} | environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """A configuration that a server accepts."""
    path = tmp_path / "good.toml"
    path.write_text(
        f'registry = "crews:registry"\nstate_file = "j.db"\nbearer_token = "{SECRET}"\n'
        f'[crews.billing]\nenvironment = {{ API_KEY = "{SECRET}" }}\n'
    )
    path.chmod(0o600)
    return path


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    """A configuration with a misspelt key."""
    path = tmp_path / "bad.toml"
    path.write_text('registri = "crews:registry"\n')
    return path


def test_config_check_prints_the_settings_and_no_secret(good: Path) -> None:
    done = run("config", "check", "--config", str(good), AIP_CREWAI_MAX_CONCURRENCY="9")
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: line.split()[1] for line in done.stdout.splitlines() if len(line.split()) == 2}
    assert rows["max_concurrency"] == "9"
    assert rows["authenticated"] == "true"
    assert rows["state_file"] == str(good.parent / "j.db")
    assert "API_KEY" in done.stdout
    assert SECRET not in done.stdout + done.stderr


def test_config_check_as_json_has_the_settings_and_their_digest(good: Path) -> None:
    done = run("config", "check", "--json", "--config", str(good))
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    settings = config.load(good, {})
    assert document == {"ok": True, "digest": settings.digest, "settings": settings.public()}
    assert SECRET not in done.stdout


def test_config_check_takes_the_file_from_the_environment(good: Path) -> None:
    done = run("config", "check", "--json", CREW_SUPERVISOR_CONFIG=str(good))
    assert json.loads(done.stdout)["ok"] is True


def test_config_check_refuses_with_status_2_and_says_why(bad: Path) -> None:
    done = run("config", "check", "--config", str(bad))
    assert done.returncode == 2
    assert done.stdout == ""
    assert "registri" in done.stderr
    assert "'registry'" in done.stderr
    assert "Traceback" not in done.stderr


def test_config_check_refuses_as_json_too(bad: Path) -> None:
    done = run("config", "check", "--json", "--config", str(bad))
    assert done.returncode == 2
    document = json.loads(done.stdout)
    assert document["ok"] is False
    assert document["error"]["code"] == "config_invalid"
    assert "registri" in document["error"]["detail"]


def test_help_names_the_commands() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert "serve" in done.stdout
    assert "config" in done.stdout


@pytest.mark.parametrize("arguments", [("serve", "--conf", "x", "y"), ("nothing",), ("config", "nothing")])
def test_wrong_usage_exits_with_2(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).returncode == 2


SERVE_AND_LIST = """
import atexit, json, sys
atexit.register(lambda: print(json.dumps(sorted(sys.modules))))
sys.argv = ["crew-supervisor", *sys.argv[1:]]
from supervisor.__main__ import main
main()
"""


def test_serve_starts_without_the_command_lines_imports_and_without_crewai(tmp_path: Path) -> None:
    missing = tmp_path / "missing.toml"
    done = run("serve", "--config", str(missing), python=("-c", SERVE_AND_LIST))
    assert done.returncode != 0
    assert str(missing) in done.stderr
    modules = json.loads(done.stdout.splitlines()[-1])
    assert {"supervisor.serve", "supervisor.config.load"} <= set(modules)
    roots = {name.partition(".")[0] for name in modules}
    assert roots.isdisjoint({"click", "rich", "crewai", "worker", "pydantic", "chromadb", "tests"})


def test_the_list_of_modules_would_show_click() -> None:
    done = run("--help", python=("-c", SERVE_AND_LIST))
    assert {"click", "rich"} <= set(json.loads(done.stdout.splitlines()[-1]))
