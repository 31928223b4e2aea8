"""The supported Pythons of this machine, and virtual environments of them that can run a server of fake crews."""

from __future__ import annotations

import atexit
import contextlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from tests.support.server import ROOT, instead_of_ours

VERSIONS = ("3.11", "3.12", "3.13")
#: Ask for the other versions with this variable, or with CI: making an environment costs a download.
ASKED = "CREW_TESTS_PYTHONS"
#: What a server without CrewAI imports, and its command line.
NEEDED = ("aiohttp", "click", "msgspec", "prometheus-client", "psutil", "rfc8785", "rich")
INSTALL_S = 300


def asked() -> bool:
    """Whether every version is to be tested."""
    return bool(os.environ.get(ASKED) or os.environ.get("CI"))


def running() -> str:
    """The version that runs these tests, ``3.11``."""
    return ".".join(platform.python_version_tuple()[:2])


def found() -> dict[str, Path]:
    """An interpreter of each supported version that there is, by its version; the running one among them."""
    interpreters = {running(): Path(sys.executable)}
    for version in VERSIONS:
        if version not in interpreters and (path := _find(version)) is not None:
            interpreters[version] = path
    return dict(sorted(interpreters.items()))


def _find(version: str) -> Path | None:
    candidates = [shutil.which(f"python{version}", path=entry) for entry in os.get_exec_path()]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates += [str(path) for path in sorted(pyenv.glob(f"{version}.*/bin/python"))]
    for candidate in candidates:
        # A pyenv shim is there for every version and works for the chosen ones only.
        if candidate is not None and _version_of(candidate) == version:
            return Path(candidate)
    return None


def _version_of(path: str) -> str | None:
    script = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        made = subprocess.run([path, "-c", script], capture_output=True, text=True, timeout=30, check=True)
        return made.stdout.strip()
    return None


def environment(version: str, interpreter: Path) -> Path:
    """The interpreter of an environment of ``version`` with what a server needs; made once a session.

    Raises CalledProcessError.
    """
    if version == running():
        return interpreter
    home = Path(_directory()) / f"python{version}"
    python = home / "bin" / "python"
    if home.exists():
        return python
    subprocess.run([interpreter, "-m", "venv", home], check=True, timeout=INSTALL_S)
    install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([str(python), *install, *NEEDED], check=True, timeout=INSTALL_S)
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    compiling = [str(python), "-m", "compileall", "-qq", "protocol", "supervisor", "worker"]
    subprocess.run(compiling, cwd=ROOT, env=environ, check=True, timeout=INSTALL_S)
    return python


@cache
def _directory() -> str:
    made = tempfile.mkdtemp(prefix="crew-tests-pythons-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


def instead(python: Path) -> tuple[str, ...]:
    """``prefix`` of a Server that runs under ``python``; nothing for the running one."""
    return () if python == Path(sys.executable) else instead_of_ours(str(python))
