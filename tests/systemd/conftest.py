"""One booted systemd for all tests of this directory, with the project installed in it as an operator would."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.booted import Booted, boot, why_not
from tests.support.server import ROOT
from tests.systemd.service import PROGRAM, Service, ServiceFactory

HOME = "/opt/crew"
DEPENDENCIES = "/opt/dependencies"
VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"
BUILD_S = 120
TEST_S = 300
#: What a wheel is made of.
SOURCES = ("protocol", "supervisor", "worker", "systemd")


def interpreter() -> Path | None:
    """An interpreter of our version that a service may execute: none below a home directory."""
    for directory in ("/usr/bin", "/usr/local/bin"):
        for name in (f"python{VERSION}", "python3"):
            path = Path(directory, name)
            if path.exists() and _version_of(path) == VERSION:
                return path
    return None


def _version_of(path: Path) -> str:
    script = "import sys; print('%d.%d' % sys.version_info[:2])"
    return subprocess.run([path, "-c", script], capture_output=True, text=True, check=False).stdout.strip()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say once, and before anything is built, why these tests cannot run here."""
    ours = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    if not ours:
        return
    for item in ours:
        # The first one boots, and installs the project.
        item.add_marker(pytest.mark.timeout(TEST_S))
    reason = why_not() or (None if interpreter() else f"no Python {VERSION} in /usr/bin or /usr/local/bin")
    if reason:
        for item in ours:
            item.add_marker(pytest.mark.skip(reason=f"no systemd of our own: {reason}"))


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project as a wheel: what an installation has of it, package data included."""
    source = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        # With its links as links, as a checkout has them.
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    made = tmp_path_factory.mktemp("wheel")
    options = ["--quiet", "--no-deps", "--no-build-isolation"]
    command = [sys.executable, "-m", "pip", "wheel", *options, "-w", str(made), "."]
    subprocess.run(command, cwd=source, check=True, timeout=BUILD_S)
    return next(made.glob("*.whl"))


@pytest.fixture(scope="session")
def machine(wheel: Path) -> Iterator[Booted]:
    """The running system, with ``crew-supervisor`` and its units installed, and nothing started."""
    site_packages = Path(sysconfig.get_path("purelib"))
    python = interpreter()
    assert python is not None
    with boot({site_packages: DEPENDENCIES}) as machine:
        machine.run(str(python), "-m", "venv", "--without-pip", HOME)
        own = f"{HOME}/lib/python{VERSION}/site-packages"
        # Only what is in a .pth file is read for .pth files: an editable installation in there has no effect.
        machine.write(f"{own}/dependencies.pth", f"{DEPENDENCIES}\n{HOME}/checkout\n")
        tests = machine.inside(f"{HOME}/checkout/tests")
        shutil.copytree(ROOT / "tests", tests, ignore=shutil.ignore_patterns("__pycache__", ".artifacts"))
        shutil.copy(wheel, machine.inside(HOME))
        pip = (f"{HOME}/bin/python", "-m", "pip", "install", "--quiet", "--root-user-action=ignore")
        machine.run(*pip, "--no-deps", "--no-index", "--ignore-installed", f"{HOME}/{wheel.name}")
        machine.run(f"{HOME}/bin/python", "-m", "compileall", "-q", f"{HOME}/checkout")
        machine.run(PROGRAM, "install-units")
        machine.run("systemctl", "daemon-reload")
        yield machine


@pytest.fixture
def make_service(machine: Booted) -> Iterator[ServiceFactory]:
    """Make instances of the service, not started; they are stopped after the test."""
    made: list[Service] = []

    def make(name: str = "", **options: object) -> Service:
        service = Service(machine, name, **options)  # type: ignore[arg-type]
        made.append(service)
        return service

    yield make
    for service in made:
        service.close()
