"""An interpreter, our packages and what they need, that every user of the machine may execute and read.

The tests' own interpreter, its packages or the repository may lie below a closed directory, such as the home of root;
what does is copied.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import Requirement

from tests.support.pythons import NEEDED
from tests.support.server import ROOT, instead_of_ours

#: Of nobody: somebody who has nothing but what everybody has.
STRANGER = 54_321
#: A user that every Debian has and nothing runs as, for ``worker_user``.
USER = "games"
PACKAGES = ("protocol", "supervisor", "worker", "tests", "demo")
#: What an unprivileged server and its workers import.
PROBE = "import supervisor.__main__, supervisor.serve, worker.template, tests.crews.adversaries, tests.support.mutants"
IGNORED = shutil.ignore_patterns("site-packages", "test", "idlelib", "tkinter", "ensurepip")
PROBE_S = 120


class OpenPython(NamedTuple):
    """``python`` imports our packages from ``root``. ``libraries``: where its own shared library is, if that moved."""

    python: Path
    root: Path
    libraries: Path | None = None

    @property
    def prefix(self) -> tuple[str, ...]:
        """``prefix`` of a Server that is to run under it."""
        return instead_of_ours(str(self.python))

    @property
    def environment(self) -> dict[str, str]:
        """Variables that it needs."""
        moved = {} if self.libraries is None else {"LD_LIBRARY_PATH": str(self.libraries)}
        return {"PYTHONPATH": str(self.root), **moved}


def is_open(path: Path) -> bool:
    """Whether every user may get to ``path`` and read it."""
    real = path.resolve()
    needed = 0o005 if real.is_dir() else 0o004
    return real.stat().st_mode & needed == needed and all(parent.stat().st_mode & 0o001 for parent in real.parents)


@contextlib.contextmanager
def open_directory(owner: int = 0) -> Iterator[Path]:
    """A directory that every user may get to and read, removed at the end; pytest's own are closed to others."""
    parent = Path(tempfile.gettempdir())
    directory = Path(tempfile.mkdtemp(prefix="crew-tests-", dir=parent if is_open(parent) else "/tmp"))
    try:
        directory.chmod(0o755)
        os.chown(directory, owner, owner)
        yield directory
    finally:
        shutil.rmtree(directory)


def for_user(directory: Path, **more: Any) -> dict[str, Any]:
    """Settings of a server whose workers are USER: they may pass to its work directory, and to no other of its own."""
    return {"worker_user": USER, "stop_method": "cgroup", "work_dir": str(directory / "work"), **more}


def provide(directory: Path) -> OpenPython:
    """Make one, as far as it is not there, below ``directory``, which must be open. Raises CalledProcessError."""
    python = directory / "environment" / "bin" / "python"
    interpreter, libraries = _interpreter(directory)
    subprocess.run([interpreter, "-m", "venv", "--without-pip", python.parents[1]], check=True, timeout=60)
    (packages,) = (python.parents[1] / "lib").glob("python*/site-packages")
    link = packages / "open.pth"
    ours = [entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]
    link.write_text("".join(f"{entry}\n" for entry in ours), encoding="utf-8")
    found = OpenPython(python, ROOT, libraries)
    if _works(found).returncode == 0:
        return found
    link.unlink()
    _copy_dependencies(packages)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, directory / "repository" / name, ignore=shutil.ignore_patterns("__pycache__"))
    found = OpenPython(python, directory / "repository", libraries)
    # Without bytecode each start of a server would compile all of it again.
    compiling = [python, "-m", "compileall", "-qq", packages, found.root]
    subprocess.run(compiling, check=False, timeout=60)
    _open_up(directory)
    _works(found).check_returncode()
    return found


def _works(found: OpenPython) -> subprocess.CompletedProcess[bytes]:
    """Have a stranger import everything."""
    return subprocess.run(
        [found.python, "-c", PROBE],
        cwd="/",
        env=found.environment,
        user=STRANGER,
        group=STRANGER,
        extra_groups=[],
        stderr=subprocess.DEVNULL if found.root == ROOT else None,
        check=False,
        timeout=PROBE_S,
    )


def _interpreter(directory: Path) -> tuple[Path, Path | None]:
    """The real interpreter of the tests, or a copy of it with its libraries, and where its shared one is then.

    Where the loader may not read the shared library it takes one that the system has, of another release perhaps.
    """
    ours = Path(sys.executable).resolve()
    library = Path(sysconfig.get_path("stdlib"))
    if is_open(ours) and is_open(library / "os.py"):
        return ours, None
    home = directory / "python"
    shutil.copytree(library, home / "lib" / library.name, ignore=IGNORED)
    copy = home / "bin" / ours.name
    copy.parent.mkdir()
    shutil.copy2(ours, copy)
    shared = Path(sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("INSTSONAME"))
    if shared.suffix != ".a":
        shutil.copy2(shared, home / "lib" / shared.name)
    _open_up(home)
    return copy, home / "lib"


def _copy_dependencies(packages: Path) -> None:
    """Copy the distributions that a server of fake crews needs, and what those need."""
    left, seen = list(NEEDED), set[str]()
    while left:
        name = left.pop()
        if name in seen:
            continue
        seen.add(name)
        distribution = metadata.distribution(name)
        for requirement in map(Requirement, distribution.requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                left.append(requirement.name)
        for file in distribution.files or ():
            if ".." not in file.parts and (source := Path(str(file.locate()))).is_file():
                (packages / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, packages / file)


def _open_up(directory: Path) -> None:
    """Let everybody read what was copied, and execute what its owner may."""
    for path in (directory, *directory.rglob("*")):
        if not path.is_symlink():
            mode = path.stat().st_mode
            path.chmod(stat.S_IMODE(mode) | 0o044 | (0o011 if mode & 0o100 else 0))
