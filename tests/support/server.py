"""A real supervisor in a process and session of its own, its log as a source of events, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import tomli_w

from protocol.operations import Operation
from tests.support import procs
from tests.support.client import Client

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "a-token-of-the-tests"
#: Set in the environment of everything a server starts, so that leftovers can be found.
MARK = "CREW_TESTS_SERVER_MARK"
START_DEADLINE_S = 60.0
COMMAND_DEADLINE_S = 60.0
#: A drain is bounded by 30 s; the rest is slack for a busy machine.
STOP_DEADLINE_S = 45.0


#: Names an interpreter that servers run under in the place of the tests' own.
PYTHON_VARIABLE = "CREW_TESTS_SERVER_PYTHON"
_INSTEAD = "import os, sys; os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"


def instead_of_ours(python: str | None = None) -> tuple[str, ...]:
    """``prefix`` of a Server that runs under ``python``, by default the one of PYTHON_VARIABLE; () without one."""
    python = python or os.environ.get(PYTHON_VARIABLE)
    return (python, "-c", _INSTEAD) if python else ()


class ServerFailed(AssertionError):
    """The server ended or did not say what it should have said; the message has the end of its log."""


class Log:
    """The lines of one process's stderr: kept in memory, appended to ``path``, and waited for without polling."""

    def __init__(self, process: subprocess.Popen[bytes], path: Path) -> None:
        self._changed = threading.Condition()
        self._lines: list[dict[str, Any]] = []
        self._ended = False
        self.raw: list[str] = []
        assert process.stderr is not None, "stderr must be a pipe"
        # Opened before anybody can reap the process, so it is that process and no later one of its pid.
        pidfd = os.pidfd_open(process.pid)
        threading.Thread(target=self._read, args=(process.stderr, pidfd, path), daemon=True).start()

    def _read(self, stderr: IO[bytes], pidfd: int, path: Path) -> None:
        poller = select.poll()
        poller.register(stderr, select.POLLIN)
        poller.register(pidfd, select.POLLIN)
        rest = b""
        with path.open("ab") as copy, contextlib.closing(stderr):
            while True:
                ready = {fd for fd, _ in poller.poll()}
                if stderr.fileno() in ready:
                    data = os.read(stderr.fileno(), 1 << 16)
                    if not data:
                        break
                    copy.write(data)
                    copy.flush()
                    *whole, rest = (rest + data).split(b"\n")
                    self._add(whole)
                else:
                    # The process has ended and all that it wrote is read; a child may hold the pipe open for longer.
                    poller.unregister(pidfd)
                    self._end()
        os.close(pidfd)
        self._end()

    def _add(self, lines: list[bytes]) -> None:
        with self._changed:
            for line in lines:
                self.raw.append(line.decode("utf-8", "replace"))
                with contextlib.suppress(ValueError):
                    parsed = json.loads(line)
                    if isinstance(parsed, dict):
                        self._lines.append(parsed)
            self._changed.notify_all()

    def _end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def lines(self) -> list[dict[str, Any]]:
        """The JSON lines so far."""
        with self._changed:
            return list(self._lines)

    def wait(self, event: str, *, deadline_s: float, skip: int = 0, where: Mapping[str, Any]) -> dict[str, Any]:
        """Return the first line from number ``skip`` on with that event and the fields of ``where``."""
        give_up = time.monotonic() + deadline_s
        seen = skip
        with self._changed:
            while True:
                for line in self._lines[seen:]:
                    if line.get("event") == event and where.items() <= line.items():
                        return line
                seen = len(self._lines)
                left = give_up - time.monotonic()
                if self._ended or left <= 0:
                    why = "the process ended first" if self._ended else f"not within {deadline_s:g} s"
                    raise ServerFailed(f"no log line {event} {dict(where)}: {why}\n" + "\n".join(self.raw[-40:]))
                self._changed.wait(left)


class Server:
    """One supervisor on its own state directory; ``restart`` keeps the directory and takes a new port.

    ``registry``: ``module:attribute``, importable from the repository's root or ``python_path``. ``settings``: TOML
    settings that replace or extend the defaults below; None removes one. ``environment`` likewise. ``mutant``: a name
    in ``tests.support.mutants``, for a server with that mechanism switched off. ``prefix``: a command that executes
    the rest of its arguments in its own place, to start the server under other circumstances.
    """

    def __init__(
        self,
        directory: Path,
        *,
        registry: str,
        settings: Mapping[str, Any] | None = None,
        environment: Mapping[str, str | None] | None = None,
        python_path: tuple[Path, ...] = (),
        token: str | None = TOKEN,
        mutant: str | None = None,
        prefix: tuple[str, ...] = (),
    ) -> None:
        self.directory = directory
        self.state_file = directory / "state" / "journal.db"
        self.config_file = directory / "supervisor.toml"
        self.log_file = directory / "stderr.log"
        self.token = token
        self.registry = registry
        self.settings: dict[str, Any] = dict(settings or {})
        self.environment: dict[str, str | None] = dict(environment or {})
        self.python_path = python_path
        self._program = ["supervisor"] if mutant is None else ["tests.support.mutants", mutant]
        self._prefix = prefix or instead_of_ours()
        self.mark = uuid.uuid4().hex
        self.host = ""
        self.port = 0
        self.returncode: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._log: Log | None = None
        self._logs: list[Log] = []
        directory.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def launch(self) -> Self:
        """Start the process without waiting for anything."""
        self._write_config()
        self.returncode = None
        self._process = subprocess.Popen(
            [*self._prefix, sys.executable, "-m", *self._program, "serve", "--config", str(self.config_file)],
            cwd=self.directory,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._log = Log(self._process, self.log_file)
        self._logs.append(self._log)
        return self

    def start(self, *, deadline_s: float = START_DEADLINE_S) -> Self:
        """Start the process and return once it listens. Raises ServerFailed if it does not."""
        self.launch()
        line = self.wait_log("listening", deadline_s=deadline_s)
        self.host, self.port = line["host"], line["port"]
        return self

    def run_refused(self, *, deadline_s: float = START_DEADLINE_S) -> int:
        """Start a process that must refuse; returns its exit status."""
        self.launch()
        return self.wait_exit(deadline_s=deadline_s)

    def run_command(
        self, *arguments: str, prefix: tuple[str, ...] = (), cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run another command of the program with this server's configuration and environment, to its end."""
        self._write_config()
        return subprocess.run(
            [*prefix, sys.executable, "-m", "supervisor", *arguments, "--config", str(self.config_file)],
            cwd=cwd or self.directory,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_DEADLINE_S,
            check=False,
        )

    def _write_config(self) -> None:
        defaults: dict[str, Any] = {
            "host": "127.0.0.1",
            "port": 0,
            "registry": self.registry,
            "state_file": str(self.state_file),
            "allowed_operations": [operation.value for operation in Operation],
            "training_dir": str(self.directory / "training"),
            "template": {"preload": []},
            # Most tests read the pids that workers write of themselves; those of the namespace ask for it.
            "pid_namespace": "off",
        }
        if self.token is not None:
            token_file = self.directory / "token"
            token_file.touch(mode=0o600)
            token_file.write_text(self.token, encoding="utf-8")
            defaults["bearer_token_file"] = str(token_file)
        chosen = {name: value for name, value in {**defaults, **self.settings}.items() if value is not None}
        self.config_file.write_text(tomli_w.dumps(chosen), encoding="utf-8")

    def _environment(self) -> dict[str, str]:
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("AIP_CREWAI_", "CREW_SUPERVISOR_", "CREWAI_", "OTEL_", "NOTIFY_"))
        }
        path = os.pathsep.join(str(entry) for entry in (ROOT, *self.python_path))
        chosen = {**inherited, "PYTHONPATH": path, MARK: self.mark, **self.environment}
        return {name: value for name, value in chosen.items() if value is not None}

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The process that was started last."""
        assert self._process is not None, "the server was not started"
        return self._process

    @property
    def pid(self) -> int:
        """Pid of the process that was started last."""
        return self.process.pid

    @property
    def url(self) -> str:
        """Base URL without a slash at its end."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def client(self, *, timeout_s: float = 60.0) -> Client:
        """A client with the server's token."""
        return Client(self.host, self.port, token=self.token, timeout_s=timeout_s)

    def log_lines(self) -> list[dict[str, Any]]:
        """JSON log lines of every process of this server so far."""
        return [line for log in self._logs for line in log.lines()]

    def wait_log(self, event: str, *, deadline_s: float = 20.0, skip: int = 0, **where: Any) -> dict[str, Any]:
        """Return a log line of the current process by its event name and fields, waiting for it if need be.

        ``skip``: lines of the current process to leave out. Raises ServerFailed.
        """
        assert self._log is not None, "the server was not started"
        return self._log.wait(event, deadline_s=deadline_s, skip=skip, where=where)

    def wait_exit(self, *, deadline_s: float = STOP_DEADLINE_S) -> int:
        """Return the exit status (negative: the signal) once the process has ended."""
        try:
            self.returncode = self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise ServerFailed(f"still running after {deadline_s:g} s\n{self._tail()}") from None
        return self.returncode

    def _tail(self) -> str:
        return "\n".join(self._log.raw[-40:]) if self._log else ""

    def stop(self, *, deadline_s: float = STOP_DEADLINE_S) -> int:
        """SIGTERM; returns the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait_exit(deadline_s=deadline_s)

    def kill(self) -> int:
        """SIGKILL of the supervisor alone; what it started is left to itself."""
        self.process.kill()
        return self.wait_exit()

    def restart(self, *, deadline_s: float = START_DEADLINE_S) -> Self:
        """Start again on the same state directory; a process that still runs is killed first."""
        if self.process.poll() is None:
            self.kill()
        return self.start(deadline_s=deadline_s)

    def close(self) -> None:
        """Kill whatever this server started and is still there, and remove its cgroups."""
        if self._process is not None and self._process.poll() is None:
            # Still unreaped, so the group's id cannot be a stranger's.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        branches = cgroup_branches(self.log_lines())
        for branch in branches:
            _kill_cgroup(branch)
        needle = f"{MARK}={self.mark}"
        for pid in procs.with_environment(needle):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        procs.wait_until(lambda: not procs.with_environment(needle), 10, "every process of the server is gone")
        for branch in branches:
            _remove_cgroup(branch)


def cgroup_branches(lines: list[dict[str, Any]]) -> list[Path]:
    """Supervisors' own cgroup directories named anywhere in log lines: up to the part ``crew-supervisor-…``."""
    found: set[Path] = set()
    for text in _texts(lines):
        path = Path(text)
        if not path.is_absolute():
            continue
        for index, part in enumerate(path.parts):
            branch = Path(*path.parts[: index + 1])
            if part.startswith("crew-supervisor-") and (branch / "cgroup.kill").exists():
                found.add(branch)
    return sorted(found)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def _kill_cgroup(branch: Path) -> None:
    def empty() -> bool:
        for directory, _, _ in os.walk(branch):
            # cgroup.kill passes over processes whose leader thread has exited; kill(2) does not.
            with contextlib.suppress(OSError):
                for pid in (Path(directory) / "cgroup.procs").read_text(encoding="ascii").split():
                    os.kill(int(pid), signal.SIGKILL)
        return "populated 0" in (branch / "cgroup.events").read_text(encoding="ascii")

    with contextlib.suppress(FileNotFoundError):
        (branch / "cgroup.kill").write_text("1", encoding="ascii")
        procs.wait_until(empty, 10, f"{branch} is empty")


def _remove_cgroup(branch: Path) -> None:
    for directory, _, _ in os.walk(branch, topdown=False):
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(directory)


ServerFactory = Callable[..., Server]
