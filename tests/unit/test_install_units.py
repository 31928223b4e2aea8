"""``crew-supervisor install-units`` and the files that it copies."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from click.testing import CliRunner

from supervisor.cli import cli
from supervisor.cli.units import SHIPPED_PROGRAM, shipped
from supervisor.config import load
from supervisor.config.table import MAX_SHUTDOWN_S
from tests.support.server import ROOT

PROGRAM = "/srv/venv/bin/crew-supervisor"


def install(directory: Path, *arguments: str) -> int:
    """Run the command; returns its exit status."""
    command = ["install-units", "--directory", str(directory), "--program", PROGRAM, *arguments]
    return CliRunner().invoke(cli, command).exit_code


def value_of(unit: Path, name: str) -> str:
    """The last value of a setting."""
    lines = unit.read_text(encoding="utf-8").splitlines()
    return next(line.partition("=")[2] for line in reversed(lines) if line.startswith(f"{name}="))


def test_what_is_shipped_is_what_the_repository_has() -> None:
    assert [entry.name for entry in shipped()] == sorted(path.name for path in (ROOT / "systemd").iterdir())


def test_units_start_the_program_that_was_named(tmp_path: Path) -> None:
    assert install(tmp_path) == 0
    installed = sorted(path.name for path in tmp_path.iterdir())
    assert installed == [
        "crew-supervisor.service", "crew-supervisor.socket", "crew-supervisor@.service", "crew-supervisor@.socket",
    ]  # fmt: skip
    for path in tmp_path.glob("*.service"):
        assert value_of(path, "ExecStart").split()[:2] == [PROGRAM, "serve"]
        assert SHIPPED_PROGRAM not in path.read_text(encoding="utf-8")
        assert path.stat().st_mode & 0o777 == 0o644


def test_a_unit_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "crew-supervisor.socket").write_text("# mine\n")
    assert install(tmp_path) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["crew-supervisor.socket"]
    assert install(tmp_path, "--force") == 0
    assert install(tmp_path) == 0, "the same again is no conflict"


def test_a_path_that_a_unit_cannot_hold_is_refused(tmp_path: Path) -> None:
    assert install(tmp_path, "--program", "/srv/my venv/bin/crew-supervisor") == 2


def test_a_directory_that_is_missing_is_said(tmp_path: Path) -> None:
    assert install(tmp_path / "missing") == 1


def test_the_two_services_differ_in_names_only(tmp_path: Path) -> None:
    install(tmp_path)
    single = (tmp_path / "crew-supervisor.service").read_text(encoding="utf-8").splitlines()
    template = (tmp_path / "crew-supervisor@.service").read_text(encoding="utf-8").splitlines()
    single.remove("User=crew-supervisor")
    settings = [[line.partition("=")[0] for line in lines] for lines in (single, template)]
    assert settings[0] == settings[1]
    for one, other in zip(single, template, strict=True):
        assert one == other or "%i" in other


def test_the_service_waits_longer_than_a_drain_can_take(tmp_path: Path) -> None:
    install(tmp_path)
    assert int(value_of(tmp_path / "crew-supervisor.service", "TimeoutStopSec")) > MAX_SHUTDOWN_S


def test_the_example_configuration_is_accepted(tmp_path: Path) -> None:
    example = ROOT / "systemd" / "supervisor.toml"
    settings = load(example, {"AIP_CREWAI_BEARER_TOKEN": "t"})
    assert settings.stop_method == "cgroup"
    assert str(settings.state_file).startswith("/var/lib/crew-supervisor/")
    written_out = re.sub(r'^# (?=\[|\w+ = )', "", example.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert {"allowed_operations", "training_dir", "crews"} <= tomllib.loads(written_out).keys()
