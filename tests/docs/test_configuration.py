"""The examples of docs/configuration.md are accepted, and say the same twice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.page import ROOT, Page
from tests.unit.test_cli import run

PAGE = Page("configuration.md")
SAME = ("registry", "state_file", "host", "allowed_operations", "training_dir")


def settings(directory: Path, text: str) -> dict[str, Any]:
    """The settings in force under a file with that text."""
    (directory / "token").touch(mode=0o600)
    (directory / "token").write_text("a-token-of-a-page", encoding="utf-8")
    file = directory / "supervisor.toml"
    file.touch(mode=0o600)
    file.write_text(text, encoding="utf-8")
    done = run("config", "check", "--json", "--config", str(file))
    assert done.returncode == 0, done.stdout
    return dict(json.loads(done.stdout)["settings"])


def test_the_file_and_the_variables_say_the_same(tmp_path: Path) -> None:
    whole, _ = PAGE.blocks("toml")
    (commands,) = PAGE.blocks("sh")
    by_file = settings(tmp_path, whole)
    script = commands.replace("crew-supervisor config check", f'"{sys.executable}" -m supervisor config check --json')
    done = subprocess.run(
        ["sh", "-eu", "-c", script],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    by_variables = json.loads(done.stdout)["settings"]
    assert {name: by_file[name] for name in SAME} == {name: by_variables[name] for name in SAME}
    assert by_file["crews"]["yours"]["grace_s"] == 2.0


def test_the_example_of_effects_is_accepted(tmp_path: Path) -> None:
    whole, effects = PAGE.blocks("toml")
    policies = settings(tmp_path, whole + effects)["crews"]["yours"]["effects"]
    assert policies["send_payment"]["key"] == ["invoice"]
