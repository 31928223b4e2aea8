"""One unit of ours in the booted systemd: its configuration, its drop-in, and what can be seen of it."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from protocol.operations import Operation
from tests.support import procs
from tests.support.booted import Booted
from tests.support.client import Client

PROGRAM = "/opt/crew/bin/crew-supervisor"
PYTHON = "/opt/crew/bin/python"
START_S = 60.0
#: Deadline of what is waited for by looking, seconds.
LOOK_S = 30.0


def free_port() -> int:
    """A port that was free a moment ago; the network is the machine's."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


class Service:
    """``crew-supervisor@NAME``, or the unit without an instance for ``""``.

    ``registry`` and ``settings`` as for a server of the other tests; ``drop_in``: lines for ``[Service]``; ``socket``:
    whether systemd listens.
    """

    def __init__(
        self,
        machine: Booted,
        name: str,
        *,
        registry: str = "tests.crews.stop_crews:CREWS",
        settings: Mapping[str, Any] | None = None,
        drop_in: Iterable[str] = (),
        socket: bool = False,
    ) -> None:
        self.machine = machine
        stem = f"crew-supervisor@{name}" if name else "crew-supervisor"
        self.config = name or "supervisor"
        self.unit, self.socket_unit = f"{stem}.service", f"{stem}.socket"
        directory = f"crew-supervisor-{name}" if name else "crew-supervisor"
        self.state, self.private = f"/var/lib/{directory}", f"/var/lib/private/{directory}"
        self.port = free_port()
        self.token = secrets.token_hex(16)
        self._socket = socket
        defaults: dict[str, Any] = {
            "host": "127.0.0.1",
            "port": self.port,
            "registry": registry,
            "state_file": f"{self.state}/state/journal.db",
            "training_dir": f"{self.state}/training",
            "allowed_operations": [operation.value for operation in Operation],
            "stop_method": "cgroup",
            "template": {"preload": []},
        }
        chosen = {name: value for name, value in {**defaults, **(settings or {})}.items() if value is not None}
        machine.write(f"/etc/crew-supervisor/{self.config}.toml", tomli_w.dumps(chosen))
        self.set_token(self.token)
        machine.write(f"/etc/systemd/system/{self.unit}.d/tests.conf", "\n".join(["[Service]", *drop_in, ""]))
        listen = f"[Socket]\nListenStream=\nListenStream=127.0.0.1:{self.port}\n"
        machine.write(f"/etc/systemd/system/{self.socket_unit}.d/tests.conf", listen)
        machine.run("systemctl", "daemon-reload")

    def set_token(self, token: str) -> None:
        """Write the file that the unit's credential is loaded from: of root, closed to everybody else."""
        self.token = token
        self.machine.write(f"/etc/crew-supervisor/{self.config}.bearer_token", token + "\n", 0o600)

    def start(self) -> Service:
        """Start it; returns when it said that it is ready."""
        if self._socket:
            self.machine.run("systemctl", "start", self.socket_unit)
        done = self.machine.run("systemctl", "start", self.unit, check=False, limit_s=START_S)
        if done.returncode:
            raise AssertionError(f"{done.stderr}\n{self.status()}\n{self.log()}")
        return self

    def log(self) -> str:
        """The end of its log, for messages."""
        return self.machine.run("journalctl", "--no-pager", "-n", "400", "-u", self.unit, check=False).stdout

    def status(self) -> str:
        """What ``systemctl status`` says."""
        return self.machine.run("systemctl", "status", "--no-pager", "--full", self.unit, check=False).stdout

    def show(self, name: str) -> str:
        """One property."""
        return self.machine.show(self.unit, name)

    def client(self, *, token: str | None = None, timeout_s: float = 60.0) -> Client:
        """A client with its token."""
        return Client("127.0.0.1", self.port, token=token or self.token, timeout_s=timeout_s)

    @property
    def cgroup(self) -> str:
        """Its cgroup, as /proc inside names it."""
        return self.show("ControlGroup")

    def leaves(self, prefix: str = "") -> list[str]:
        """Names of the leaves in its branch."""
        branch = self.machine.inside(f"/sys/fs/cgroup{self.cgroup}")
        return sorted(leaf.name for leaf in branch.glob(f"crew-supervisor-*/{prefix}*") if leaf.is_dir())

    def main_pid(self) -> int:
        """Its main process, numbered as we count them."""
        inner = int(self.show("MainPID"))
        for pid in self.machine.pids_in(self.cgroup):
            with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as status:
                if any(line.startswith("NSpid:") and int(line.split()[-1]) == inner for line in status):
                    return pid
        raise AssertionError(f"no main process {inner} in {self.cgroup}\n{self.status()}\n{self.log()}")

    def events(self, event: str, **fields: str) -> list[dict[str, Any]]:
        """Its log records of that event."""
        return self.machine.records(self.unit, EVENT=event, **fields)

    def wait_event(self, event: str, *, count: int = 1, **fields: str) -> dict[str, Any]:
        """The record number ``count`` of that event, waiting for it."""

        def found() -> dict[str, Any] | None:
            records = self.events(event, **fields)
            return records[count - 1] if len(records) >= count else None

        return procs.wait_until(found, LOOK_S, f"{count} x {event} {fields} in the log of {self.unit}")

    def wait_property(self, name: str, value: str, limit_s: float = LOOK_S) -> None:
        """Wait until a property has that value."""
        procs.wait_until(lambda: self.show(name) == value, limit_s, f"{name} of {self.unit} is {value}")

    def wait_ready(self, limit_s: float = LOOK_S) -> float:
        """Wait until it answers and is active; returns when, on the monotonic clock."""

        def answers() -> bool:
            try:
                return self.client(timeout_s=5).request("GET", "/readyz").status == 200
            except OSError:
                return False

        procs.wait_until(answers, limit_s, f"{self.unit} is ready")
        return time.monotonic()

    def path(self, name: str) -> Path:
        """Our path of a file in its state directory."""
        return self.machine.inside(f"{self.private}/{name}")

    def heartbeat(self, name: str) -> tuple[str, Path]:
        """A heartbeat file that its workers can write: its path in there, and ours."""
        return f"{self.state}/{name}", self.path(name)

    def close(self) -> None:
        """Stop it, whatever state it is in."""
        self.machine.run("systemctl", "stop", self.socket_unit, self.unit, check=False)
        self.machine.run("systemctl", "reset-failed", self.unit, self.socket_unit, check=False)


ServiceFactory = Callable[..., Service]
