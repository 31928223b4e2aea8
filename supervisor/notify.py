"""What the service manager is told and tells (sd_notify(3), sd_watchdog_enabled(3)); nothing where there is none."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping


class Notifier:
    """Sends state changes to NOTIFY_SOCKET; one that cannot be reached is as good as none."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        address = environ.get("NOTIFY_SOCKET", "")
        #: An abstract address begins with NUL, written as ``@`` (unix(7)).
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self.watchdog_s = _watchdog_s(environ)

    @property
    def present(self) -> bool:
        """Whether somebody listens."""
        return bool(self._address)

    def send(self, **fields: str | int) -> None:
        """Send ``NAME=value`` lines in one datagram. Never blocks and never raises."""
        if not self._address:
            return
        message = "\n".join(f"{name}={value}" for name, value in fields.items())
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as sender,
        ):
            sender.sendto(message.encode("utf-8", "replace"), self._address)

    def extend(self, seconds: float) -> None:
        """Ask for that much time from now on for the start or the stop under way, where less is left."""
        self.send(EXTEND_TIMEOUT_USEC=int(seconds * 1_000_000))

    def reloading(self) -> None:
        """A reload has begun; READY ends it. The time tells the manager that it was begun after its signal."""
        self.send(RELOADING=1, MONOTONIC_USEC=time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000)


def _watchdog_s(environ: Mapping[str, str]) -> float | None:
    """Seconds within which the manager wants to hear from this process, None if it does not."""
    try:
        limit_s = int(environ.get("WATCHDOG_USEC", "0")) / 1_000_000
        ours = int(environ.get("WATCHDOG_PID", os.getpid())) == os.getpid()
    except ValueError:
        return None
    return limit_s if ours and limit_s > 0 else None
