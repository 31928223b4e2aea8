"""Somebody who follows README.md from its top, in a directory of their own, with nothing but what it says.

Played are: the installation, by the environment of the tests; the endpoint of the model, by tests.support.model; and
the port, since 8090 may be taken.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.support.client import Client
from tests.support.model import Model
from tests.support.server import ROOT, Server

COMMAND_S = 90.0
#: The doctor's import of CrewAI, and then the server's own, on a machine that does other things too.
SERVE_S = 150.0
SERVE = "crew-supervisor serve"
#: What the environment of the tests stands for, line by line.
INSTALLING = {
    "python3 -m venv crews && . crews/bin/activate": "the tests run in an environment",
    "pip install path/to/crew-supervisor": "it is installed there, or on the path",
    "pip install -e your_project": "its source is on the path",
}
PROGRAMS = {
    "crew-supervisor": "-m supervisor",
    "crewai": '-c "from crewai_cli.cli import crewai; crewai()"',
    "python": "",
}
#: Nothing of the surroundings reaches the crew's model client.
SURROUNDINGS = ("AIP_", "CREW", "OPENAI_", "MODEL", "PYTHONPATH", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")


class Served(Server):
    """The server of the page's own configuration, started by the page's own commands."""

    def _write_config(self) -> None:
        """The page has done that."""


class Newcomer:
    """Runs blocks of a page, each in the terminal where the ones before it were run."""

    def __init__(self, home: Path, model: Model) -> None:
        self.home = home / "home"
        self.home.mkdir(parents=True)
        self.model = model
        self.server: Served | None = None
        self._programs = home / "bin"
        self._programs.mkdir()
        for name, arguments in PROGRAMS.items():
            (self._programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
            (self._programs / name).chmod(0o755)
        self._terminal = home / "terminal"
        self._terminal.touch()

    @property
    def client(self) -> Client:
        """A client of the server, with the token that the page has made."""
        assert self.server is not None
        return Client(self.server.host, self.server.port, token=(self.home / "token").read_text().strip())

    def close(self) -> None:
        """Leave nothing."""
        if self.server is not None:
            self.server.close()

    def write(self, text: str) -> Path:
        """Save a block whose first line names its file; one without goes to ``example.py``."""
        named = re.match(r"# (\S+\.\w+)\n", text)
        path = self.home / (named[1] if named else "example.py")
        path.write_text(self._here(text), encoding="utf-8")
        return path

    def run(self, block: str) -> str:
        """Run a block of commands. Returns what they print, which must be what the block says that they print."""
        commands = "\n".join(line for line in block.splitlines() if line not in INSTALLING)
        printed = self._shell(commands)
        if expected := pattern_of(block):
            assert re.search(expected, without_space(printed), re.DOTALL), f"{block}\nprinted\n{printed}"
        return printed

    def serve(self, block: str) -> None:
        """Run a block that ends in the server, and wait until it listens."""
        assert block.splitlines()[-1].startswith(SERVE), block
        script = f"set -eu\n{self._here(block)}".replace(SERVE, f"exec {SERVE}")
        environment: dict[str, str | None] = {
            **dict.fromkeys(name for name in os.environ if name.startswith(SURROUNDINGS)),
            **self._environment(),
            "AIP_CREWAI_PORT": "0",
        }
        self.server = Served(
            self.home, registry="", token=None, environment=environment, prefix=("sh", "-c", script)
        )
        self.server.start(deadline_s=SERVE_S)

    def _shell(self, commands: str) -> str:
        script = f'set -aeu\n. "{self._terminal}"\n{self._here(commands)}\nexport -p > "{self._terminal}"\n'
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(SURROUNDINGS)}
        places = {} if self.server is None else {"CREW_SUPERVISOR_SERVER": self.server.url}
        done = subprocess.run(
            ["sh", "-c", script],
            cwd=self.home,
            env=inherited | self._environment() | places,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        assert done.returncode == 0, f"{done.returncode} from\n{commands}\n{done.stdout}{done.stderr}"
        return done.stdout

    def _environment(self) -> Mapping[str, str]:
        path = os.pathsep.join([str(self._programs), os.environ["PATH"]])
        modules = os.pathsep.join([str(ROOT), str(self.home / "your_project" / "src")])
        quiet = {"CREWAI_DISABLE_TELEMETRY": "true", "HOME": str(self.home), "XDG_CONFIG_HOME": os.devnull}
        return {"PATH": path, "PYTHONPATH": modules, **quiet}

    def _here(self, text: str) -> str:
        text = text.replace("http://127.0.0.1:11434", self.model.url)
        return text if self.server is None else text.replace("http://127.0.0.1:8090", self.server.url)


def pattern_of(block: str) -> str:
    """What a block says that its commands print: the lines after ``# ``, with ``...`` for anything. "" for nothing."""
    lines = [line[1:] for line in block.splitlines() if line.startswith("# ")]
    return ".*".join(re.escape(without_space(line)).replace(re.escape("..."), ".*") for line in lines)


def without_space(text: str) -> str:
    """The text, which may be broken into lines elsewhere."""
    return re.sub(r"\s+", "", text)
