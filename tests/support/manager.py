"""The service manager's side of sd_notify(3), and a prefix that passes a listening socket as sd_listen_fds(3) says."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

#: Executes its arguments with the listening socket of port ARGV[1] as descriptor 3.
_PASS = """
import os, socket, sys
made = socket.create_server(("127.0.0.1", int(sys.argv[1])), backlog=64)
os.dup2(made.fileno(), 3, inheritable=True)
os.set_inheritable(3, True)  # it may have been 3 already
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="1", LISTEN_FDNAMES="http")
os.execv(sys.argv[2], sys.argv[2:])
"""


def passing(port: int) -> tuple[str, ...]:
    """``prefix`` of a Server that gets its listener from a manager."""
    return (sys.executable, "-c", _PASS, str(port))


class Manager:
    """A datagram socket and what came on it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)

    def next(self, limit_s: float = 30.0) -> dict[str, str]:
        """The next message. Raises TimeoutError."""
        self._socket.settimeout(limit_s)
        lines = self._socket.recv(65536).decode("utf-8").split("\n")
        return dict(line.split("=", 1) for line in lines)

    def until(self, name: str, value: str = "1", limit_s: float = 30.0) -> dict[str, str]:
        """The next message that says ``name=value``. Raises TimeoutError."""
        give_up = time.monotonic() + limit_s
        while True:
            message = self.next(max(give_up - time.monotonic(), 0.001))
            if message.get(name) == value:
                return message

    def forget(self) -> None:
        """Leave out what has been said so far."""
        with contextlib.suppress(TimeoutError):
            while True:
                self.next(0.001)

    def close(self) -> None:
        """Listen no more."""
        self._socket.close()


@contextlib.contextmanager
def listening(directory: Path) -> Iterator[Manager]:
    """A manager at a path."""
    manager = Manager(str(directory / "notify"))
    try:
        yield manager
    finally:
        manager.close()
