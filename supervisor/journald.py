"""The log as systemd-journald takes it: native datagrams with a field for each fact.

Source: "Native Journal Protocol" of systemd (JOURNAL_NATIVE_PROTOCOL), systemd.exec(5) on JOURNAL_STREAM.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import sys
from collections.abc import Mapping
from typing import TextIO

SOCKET = "/run/systemd/journal/socket"
IDENTIFIER = "crew-supervisor"
#: syslog(3) levels; a level between two takes the lower one's.
PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6), (logging.DEBUG, 7))
#: Fields that no fact of a record may replace.
OWN = frozenset({"MESSAGE", "PRIORITY", "SYSLOG_IDENTIFIER", "LOGGER", "EVENT"})
#: Constants of the process: fields of every record, which its sentence need not repeat.
CONSTANT = frozenset({"version", "instance_id", "config_digest", "registry_digest"})
MAX_NAME = 64
_NO_NAME = re.compile(r"[^A-Z0-9]+")


def is_connected(environ: Mapping[str, str], stream: TextIO) -> bool:
    """Whether ``stream`` is the one that JOURNAL_STREAM (``device:inode``) names: it was not redirected since."""
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


def priority(level: int) -> int:
    """The syslog priority of a logging level."""
    return next((number for lowest, number in PRIORITIES if level >= lowest), 7)


def encode(fields: Mapping[str, str]) -> bytes:
    """Fields in the native form; text with a newline gets a length, 64 bits little-endian."""
    parts = []
    for name, text in fields.items():
        value = text.encode("utf-8", "backslashreplace")
        plain = b"\n" not in value
        parts.append(name.encode("ascii") + (b"=" if plain else b"\n" + len(value).to_bytes(8, "little")) + value)
    return b"\n".join(parts) + b"\n"


def fields_of(line: Mapping[str, object]) -> dict[str, str]:
    """The journal's fields of one record, given as ``supervisor.log`` writes it in JSON."""
    event = str(line["event"])
    facts = {name: _text(value) for name, value in line.items() if name not in {"time", "level", "logger", "event"}}
    message = str(line["message"]) if event == "library" and "message" in line else _sentence(event, facts)
    fields = {"MESSAGE": message, "EVENT": event, "LOGGER": str(line["logger"]), "SYSLOG_IDENTIFIER": IDENTIFIER}
    for name, text in facts.items():
        known = _NO_NAME.sub("_", name.upper()).strip("_")[:MAX_NAME]
        if known and not known[0].isdigit() and known not in OWN:
            fields[known] = text
    return fields


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _sentence(event: str, facts: Mapping[str, str]) -> str:
    return " ".join([event, *(f"{name}={text}" for name, text in facts.items() if name not in CONSTANT)])


class Handler(logging.Handler):
    """Sends each record as one datagram. What the socket does not take goes to stderr as JSON; none of it blocks long.

    Its formatter must write JSON objects.
    """

    def __init__(self, address: str = SOCKET) -> None:
        super().__init__()
        self._address = address
        self._socket = socket.socket(
            socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        )
        self._lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Send one record. Never raises."""
        text = self.format(record)
        fields = {"PRIORITY": str(priority(record.levelno)), **fields_of(json.loads(text))}
        if self._lost:
            fields["LOST"] = str(self._lost)
        try:
            self._socket.sendto(encode(fields), self._address)
            self._lost = 0
        except BlockingIOError:
            self._lost += 1  # journald is behind: waiting for it would stop everything else
        except OSError:
            # Too long for a datagram, or journald is being restarted; its stream on stderr outlives that.
            try:
                print(text, file=sys.stderr, flush=True)  # noqa: T201 - the log's own last resort
            except OSError:
                self._lost += 1

    def close(self) -> None:
        """Give the socket back."""
        self._socket.close()
        super().close()
