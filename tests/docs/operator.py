"""Somebody who follows a page on a machine where systemd looks after the supervisor.

The commands run in a shell, with curl and our program. Only systemd is played, by the test: ``systemctl`` and
``journalctl`` are answered from the server that it started, whose directories stand for those of the service.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from tests.support.page import Page
from tests.support.server import MARK, ROOT, TOKEN, Server

COMMAND_S = 90.0
SERVICE = "crew-supervisor"
#: Asks the thread that plays systemd, and says what it says.
ASK = '#!/bin/sh\necho "$(basename "$0") $*" > "{asked}"\ncat "{answered}"\n'
PROGRAM = '#!/bin/sh\nexec "{python}" -m supervisor "$@"\n'


class Operator:
    """Follows the sections of a page; the first block before them names the places.

    ``prefix``: a command that executes the rest of its arguments where the server is.
    """

    def __init__(self, page: Page, server: Server, home: Path, prefix: tuple[str, ...] = ()) -> None:
        self.prefix = prefix
        self._server = server
        self._home = home
        self._page = page
        self._asked, self._answered = home / "asked", home / "answered"
        self._play()
        token_file = home / "bearer_token"
        token_file.touch(mode=0o600)
        token_file.write_text(TOKEN, encoding="utf-8")
        self._places = {
            "http://127.0.0.1:8090": lambda: server.url,
            "/etc/crew-supervisor/supervisor.toml": lambda: str(server.config_file),
            "/etc/crew-supervisor/supervisor.bearer_token": lambda: str(token_file),
            "/var/lib/crew-supervisor/state": lambda: str(server.state_file.parent),
        }
        (self._setup,) = [text for text in page.blocks("sh") if "export CREW_SUPERVISOR_SERVER" in text]

    def _play(self) -> None:
        (self._home / "bin").mkdir()
        ask = ASK.format(asked=self._asked, answered=self._answered)
        texts = {"systemctl": ask, "journalctl": ask, SERVICE: PROGRAM.format(python=sys.executable)}
        for name, text in texts.items():
            self.provide(name, text)
        os.mkfifo(self._asked)
        os.mkfifo(self._answered)
        threading.Thread(target=self._answer_all, daemon=True).start()

    def provide(self, name: str, text: str) -> None:
        """Put a program before all others of that name."""
        program = self._home / "bin" / name
        program.write_text(text, encoding="utf-8")
        program.chmod(0o755)

    def _answer_all(self) -> None:
        while True:
            program, *words = self._asked.read_text(encoding="utf-8").split()
            said = self._systemctl(words) if program == "systemctl" else self._journalctl(words)
            self._answered.write_text(said, encoding="utf-8")

    def _systemctl(self, words: list[str]) -> str:
        server, (verb, unit) = self._server, words
        assert unit == SERVICE, words
        does: dict[str, Callable[[], object]] = {
            "restart": lambda: (server.stop(), server.start()),
            "reload": lambda: os.kill(server.pid, signal.SIGHUP),
            "status": lambda: None,
        }
        does[verb]()
        return f"{unit}: {'active' if server.process.poll() is None else 'failed'}, pid {server.pid}\n"

    def _journalctl(self, words: list[str]) -> str:
        unit, number = (words[words.index(name) + 1] for name in ("-u", "-n"))
        assert unit == SERVICE, words
        wanted = dict(word.split("=") for word in words if "=" in word)
        lines = [line for line in self._server.log_lines() if line["event"] == wanted["EVENT"]]
        return "".join(json.dumps(line) + "\n" for line in lines[-int(number) :])

    def steps(self, section: str, count: int) -> list[str]:
        """The blocks of a section, of which there are ``count``: a test that leaves one out would not know it."""
        found = self._page.blocks("sh", section=section)
        assert len(found) == count, found
        return found

    def follow(self, step: str, *, status: int = 0, **words: str) -> str:
        """Run a block; its words in capitals are replaced. Returns what it prints."""
        script = f"{self._setup}\n{step}"
        for place, path in self._places.items():
            script = script.replace(place, path())
        for word, value in words.items():
            script = script.replace(word, value)
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(("AIP_", "CREW", "PYTHONPATH"))
        }
        path = os.pathsep.join([str(self._home / "bin"), inherited["PATH"]])
        modules = os.pathsep.join(map(str, (ROOT, *self._server.python_path)))
        mine = {"PATH": path, "PYTHONPATH": modules, "COLUMNS": "200", MARK: self._server.mark}
        done = subprocess.run(
            [*self.prefix, "sh", "-eu", "-c", script],
            cwd=self._home,
            env=inherited | mine,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        assert done.returncode == status, f"{done.returncode} from {script}\n{done.stdout}{done.stderr}"
        return done.stdout
