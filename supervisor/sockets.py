"""Listening sockets that the service manager opened and passed on (sd_listen_fds(3))."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping

from protocol.errors import StartError

#: The first passed descriptor; the others follow it.
FIRST_FD = 3


def inherited(environ: Mapping[str, str]) -> list[socket.socket]:
    """The sockets that were passed to this very process, none where there was no passing.

    They are closed on exec from here on, so call this before anything is started. Raises StartError for what is no
    listening stream socket.
    """
    if environ.get("LISTEN_PID") != str(os.getpid()):
        return []
    count = environ.get("LISTEN_FDS", "")
    names = environ.get("LISTEN_FDNAMES", "").split(":")
    return [
        _adopt(FIRST_FD + index, names[index] if index < len(names) else "")
        for index in range(int(count) if count.isdigit() else 0)
    ]


def _adopt(fd: int, name: str) -> socket.socket:
    try:
        os.set_inheritable(fd, False)
        found = socket.socket(fileno=fd)
        listens = found.type == socket.SOCK_STREAM and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError:
        listens = False
    if not listens:
        raise StartError(f"descriptor {fd} ({name or 'unnamed'}) was passed and is no listening stream socket")
    found.setblocking(False)
    return found


def is_local(found: socket.socket) -> bool:
    """Whether only this machine can reach it: a loopback address, or none of the network's."""
    if found.family == socket.AF_UNIX:
        return True
    return ipaddress.ip_address(found.getsockname()[0].partition("%")[0]).is_loopback


def place(found: socket.socket) -> str:
    """Its address for a log: ``127.0.0.1:8090``, or a path."""
    address = found.getsockname()
    return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else str(address)
