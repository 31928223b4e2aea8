"""Captured output: lines of a worker's stdout and stderr into a bounded file, what is above the bound counted."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from protocol import points

READ_BYTES = 65_536
#: A longer line is cut into pieces of this many bytes.
LINE_BYTES = 8_192
#: A pipe holds 1 MiB at most (pipe-max-size in proc_sys_fs(5)).
READS_AT_CLOSE = 16


class Bell:
    """Tells whoever follows a file that it has grown."""

    def __init__(self) -> None:
        self._next: asyncio.Event | None = None

    def next(self) -> asyncio.Event:
        """Set at the next growth: take it before the read that it is to follow."""
        if self._next is None:
            self._next = asyncio.Event()
        return self._next

    def ring(self) -> None:
        """It has grown."""
        if self._next is not None:
            self._next.set()
            self._next = None


class Capture:
    """Reads pipes by line and appends ``stream line`` to one file, at most ``limit_bytes`` of it."""

    def __init__(
        self, path: Path, limit_bytes: int, *, kept_bytes: Mapping[str, int] | None = None, bell: Bell | None = None
    ) -> None:
        """``kept_bytes``: what the pipes of other labels leave free for that label, so that a flood hides no error.

        ``bell`` is rung after each line that was written.
        """
        self._bell = Bell() if bell is None else bell
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._room = limit_bytes
        self._kept = {label.encode("ascii") + b" ": size for label, size in (kept_bytes or {}).items()}
        self._at_line_start = True
        self._loop = asyncio.get_running_loop()
        self._pipes: dict[int, tuple[bytes, bytearray]] = {}
        self.dropped_bytes = 0

    def attach(self, fd: int, label: str) -> None:
        """Take over the reading end ``fd``."""
        os.set_blocking(fd, False)
        self._pipes[fd] = (label.encode("ascii") + b" ", bytearray())
        self._loop.add_reader(fd, self._read, fd)

    def _read(self, fd: int) -> bool:
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._detach(fd)
            return False
        self._take(fd, data)
        return True

    def _take(self, fd: int, data: bytes) -> None:
        label, rest = self._pipes[fd]
        rest += data
        lines = rest.split(b"\n")
        kept = lines.pop()
        out = bytearray()
        for line in lines:
            for start in range(0, max(len(line), 1), LINE_BYTES):
                out += label + line[start : start + LINE_BYTES] + b"\n"
        while len(kept) >= LINE_BYTES:
            out += label + kept[:LINE_BYTES] + b"\n"
            del kept[:LINE_BYTES]
        rest[:] = kept
        self._write(label, bytes(out))

    def _write(self, label: bytes, data: bytes) -> None:
        """Append ``data`` as far as the bound allows; a full disk drops it, since a log must not stop a job."""
        kept = sum(size for other, size in self._kept.items() if other != label)
        taken = data[: max(0, self._room - kept)]
        try:
            points.write("log.write")
            written = os.write(self._file, taken) if taken else 0
        except OSError:
            written = 0
        self._room -= written
        if label in self._kept:
            self._kept[label] = max(0, self._kept[label] - written)
        if written:
            self._at_line_start = taken[:written].endswith(b"\n")
            self._bell.ring()
        self.dropped_bytes += len(data) - written

    def _detach(self, fd: int) -> None:
        label, rest = self._pipes.pop(fd)
        if rest:
            self._write(label, label + bytes(rest) + b"\n")
        self._loop.remove_reader(fd)
        os.close(fd)

    def close(self) -> None:
        """Read what the pipes hold now (not what a surviving writer adds), then close everything."""
        for fd in list(self._pipes):
            for _ in range(READS_AT_CLOSE):
                if fd not in self._pipes or not self._read(fd):
                    break
            if fd in self._pipes:
                self._detach(fd)
        if self.dropped_bytes:
            with contextlib.suppress(OSError):
                start = b"" if self._at_line_start else b"\n"
                note = b"supervisor %d bytes above the bound were dropped\n" % self.dropped_bytes
                os.write(self._file, start + note)
        os.close(self._file)


def size_of(path: Path) -> int:
    """Bytes of a captured output so far, 0 where there is none."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def read_from(path: Path, start: int, limit_bytes: int) -> bytes:
    """At most ``limit_bytes`` of a captured output from ``start`` on; empty behind its end, and where there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(start)
            return file.read(limit_bytes)
    except OSError:
        return b""


def read_end(path: Path, limit_bytes: int) -> tuple[bytes, int]:
    """The last ``limit_bytes`` of a captured output, and how many bytes are before them."""
    start = max(0, size_of(path) - limit_bytes)
    return read_from(path, start, limit_bytes), start
