"""What the doctor says of a registry, and of packages that stand in each other's way."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.process.doctor.examined import examine
from tests.process.test_faults_start import OPEN_SOCKET, THREADED
from tests.support.registries import GOOD, with_registry
from tests.support.server import Server, ServerFactory

LEAVES_DAEMON = """
    import subprocess, sys
    subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
"""


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (("raise LookupError('where is my key')",), "LookupError: where is my key"),
        (("CREWS = {}",), "is empty"),
        (("import os; os._exit(7)",), "ended"),
        (("import sys; sys.exit('no')",), "SystemExit: no"),
    ],
)
def test_a_registry_that_cannot_be_imported(
    make_server: ServerFactory, tmp_path: Path, parts: tuple[str, ...], said: str
) -> None:
    found = examine(with_registry(make_server, tmp_path, *parts))
    assert found.failures == ["registry"]
    assert said in found.findings["registry"].detail
    assert "\n" not in found.findings["registry"].detail


def test_a_registry_that_hangs(make_server: ServerFactory, tmp_path: Path) -> None:
    server = with_registry(make_server, tmp_path, "import time; time.sleep(3600)", registry_timeout_s=1.0)
    found = examine(server)
    assert found.failures == ["registry"]
    assert "registry_timeout_s" in found.findings["registry"].advice


@pytest.mark.parametrize("leftover", [THREADED, OPEN_SOCKET])
def test_a_registry_that_leaves_something_behind(make_server: ServerFactory, tmp_path: Path, leftover: str) -> None:
    forced = with_registry(make_server, tmp_path, GOOD, leftover, launch="fork")
    found = examine(forced)
    assert found.failures == ["registry"]
    assert "leaves" in found.findings["registry"].detail
    unproved = with_registry(make_server, tmp_path, GOOD, leftover, stop_method="keeper")
    assert examine(unproved).failures == ["registry"]
    chosen = with_registry(make_server, tmp_path, GOOD, leftover, stop_method="group")
    found = examine(chosen)
    assert found.verdict("registry") == "warning"
    assert "spawned" in found.findings["registry"].detail


@pytest.mark.parametrize("stop_method", ["auto", "keeper"])
def test_what_a_registry_starts_is_gone_afterwards(
    make_server: ServerFactory, tmp_path: Path, stop_method: str
) -> None:
    server = with_registry(make_server, tmp_path, GOOD, LEAVES_DAEMON, stop_method=stop_method)
    assert examine(server).verdict("registry") == "ok"  # and ``examine`` looks for what carries the server's mark


def test_the_doctor_itself_imports_neither_crews_nor_crewai(server: Server) -> None:
    listing = "import atexit, sys\natexit.register(lambda: print(*sys.modules, file=open('modules', 'w')))\n"
    listing += "del sys.argv[1:4]\nfrom supervisor.__main__ import main\nmain()\n"
    assert examine(server, prefix=(sys.executable, "-c", listing)).status == 0
    modules = set((server.directory / "modules").read_text().split())
    assert "supervisor.doctor.registry" in modules
    assert {name.partition(".")[0] for name in modules}.isdisjoint({"my_registry", "worker", "crewai", "pydantic"})


# --- names and packages -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["worker", "protocol"])
def test_a_package_of_the_same_name_in_the_working_directory(server: Server, tmp_path: Path, name: str) -> None:
    """A template is started with ``python -m``: what lies in the working directory comes first."""
    project = tmp_path / "project"
    (project / name).mkdir(parents=True)
    (project / name / "__init__.py").touch()
    started = "import sys; sys.path.remove('')\ndel sys.argv[1:4]\nfrom supervisor.__main__ import main\nmain()\n"
    found = examine(server, cwd=project, prefix=(sys.executable, "-c", started))
    assert "names" in found.failures
    assert f"{name} is {project / name / '__init__.py'} in a worker" in found.findings["names"].detail


def installed(directory: Path, name: str, version: str, *packages: str, top_level: bool = True) -> Path:
    """What pip leaves of a distribution, as far as it is looked at; not every one has a list of its packages."""
    info = directory / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if top_level:
        (info / "top_level.txt").write_text("\n".join(packages))
    (info / "RECORD").write_text("".join(f"{package}/__init__.py,,\n" for package in packages))
    return directory


@pytest.mark.parametrize("top_level", [True, False])
def test_supervisord_in_the_same_environment(
    make_server: ServerFactory, server: Server, tmp_path: Path, top_level: bool
) -> None:
    site = installed(tmp_path / "site", "supervisor", "4.2.5", "supervisor", top_level=top_level)
    same = make_server(registry=server.registry, python_path=(*server.python_path, site))
    found = examine(same)
    assert found.failures == ["names"]
    assert "supervisor also belongs to supervisor 4.2.5" in found.findings["names"].detail


def test_a_package_out_of_its_range(make_server: ServerFactory, server: Server, tmp_path: Path) -> None:
    site = installed(tmp_path / "site", "aiohttp", "2.0.0", "aiohttp")
    same = make_server(registry=server.registry, python_path=(*server.python_path, site))
    found = examine(same)
    assert found.failures == ["packages"]
    assert "aiohttp 2.0.0 is not" in found.findings["packages"].detail
