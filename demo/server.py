"""The supervisor of the demo: a process of its own on loopback, and nothing left of it at the end."""

from __future__ import annotations

import json
import os
import queue
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from demo.client import Client
from demo.kernel import empty_cgroup

ROOT = Path(__file__).resolve().parents[1]
START_LIMIT_S = 60.0
STOP_LIMIT_S = 20.0
#: Not passed on: settings of another supervisor, or of another CrewAI.
FOREIGN = ("AIP_CREWAI_", "CREW_SUPERVISOR_", "CREWAI_", "OTEL_", "NOTIFY_")


class StartFailed(Exception):
    """The supervisor did not come up; the text is what it said itself."""


class Server:
    """``start`` may be called again after ``kill``: same state, same token, new port."""

    def __init__(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="crew-supervisor-demo-"))
        self.ready_s = 0.0
        self.cgroup: Path | None = None
        #: Lines of the supervisor's log at level error.
        self.errors: list[dict[str, Any]] = []
        self._token = secrets.token_urlsafe(24)
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._reader: threading.Thread | None = None
        self._port = 0
        token_file = self.home / "token"
        token_file.touch(mode=0o600)
        token_file.write_text(self._token, encoding="ascii")

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        return {
            **kept,
            "PYTHONPATH": str(ROOT),
            "HOME": str(self.home),
            "AIP_CREWAI_HOST": "127.0.0.1",
            "AIP_CREWAI_PORT": "0",
            "AIP_CREWAI_REGISTRY": "demo.registry:CREWS",
            "AIP_CREWAI_STATE_FILE": str(self.home / "state" / "journal.db"),
            "AIP_CREWAI_BEARER_TOKEN_FILE": str(self.home / "token"),
            "AIP_CREWAI_ALLOWED_OPERATIONS": "run,train",
            "AIP_CREWAI_TRAINING_DIR": str(self.home / "training"),
            "CREW_SUPERVISOR_DRAIN_S": "0.5",
        }

    @property
    def pid(self) -> int:
        """The supervisor's pid."""
        assert self._process is not None
        return self._process.pid

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def client(self) -> Client:
        """A client that has the token."""
        return Client("127.0.0.1", self._port, self._token)

    def start(self) -> None:
        """Start the process and wait until it listens. Raises StartFailed."""
        began = time.monotonic()
        self._lines = queue.SimpleQueue()
        # A session of its own: Ctrl-C is for the demo, which then ends the supervisor in order.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "supervisor", "serve"],
            cwd=self.home,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stderr is not None
        self._reader = threading.Thread(target=self._read, args=(self._process.stderr, self._lines), daemon=True)
        self._reader.start()
        self._port = self._wait_listening()
        self.ready_s = time.monotonic() - began

    def _read(self, stderr: IO[bytes], lines: queue.SimpleQueue[dict[str, Any] | None]) -> None:
        with stderr:
            for raw in stderr:
                with suppress(ValueError):
                    line = json.loads(raw)
                    if line.get("event") == "stop_method" and line.get("cgroup"):
                        self.cgroup = Path(line["cgroup"])
                    if line.get("level") == "error":
                        self.errors.append(line)
                    lines.put(line)
        lines.put(None)

    def _wait_listening(self) -> int:
        said = ""
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise StartFailed(f"it does not listen after {START_LIMIT_S:g} s. {said}") from None
            if line is None:
                raise StartFailed(said or "it ended without a word")
            if line["event"] == "listening":
                return int(line["port"])
            said = line.get("detail", said)

    def kill(self) -> None:
        """SIGKILL: the supervisor has no chance to do anything, and nobody else is told."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> int:
        """SIGTERM. Returns the exit status, negative if a signal had to end it."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                self.kill()
        return self._process.returncode

    def clear(self) -> bool:
        """End whatever is left, however far we came, and remove every file. Returns whether nothing is left."""
        if self._process is not None:
            self.stop()
        if self._reader is not None:
            # To the end of its log, which names the cgroup to look into.
            self._reader.join(STOP_LIMIT_S)
        emptied = self.cgroup is None or not self.cgroup.exists() or empty_cgroup(self.cgroup)
        shutil.rmtree(self.home, ignore_errors=True)
        return emptied and not self.home.exists()
