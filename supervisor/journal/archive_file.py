"""The archive of removed jobs: JSON lines, appended and fsynced before a job's row goes."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from protocol.errors import JournalUnavailable

TAIL_BYTES = 65_536


class ArchiveFile:
    """One append-only file, mode 0600.

    A line that a crash has cut is dropped by the next append: its job's row still stands.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, pieces: Iterable[bytes]) -> None:
        """Append one line made of ``pieces`` and make it durable. Raises JournalUnavailable; nothing is left then."""
        try:
            fd = self._open()
        except OSError as error:
            raise JournalUnavailable(f"archive {self.path} cannot be opened: {error.strerror}") from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            start = _end_of_last_line(fd)
            try:
                os.ftruncate(fd, start)
                for piece in pieces:
                    _write(fd, piece)
                _write(fd, b"\n")
                os.fsync(fd)
            except OSError as error:
                os.ftruncate(fd, start)
                raise JournalUnavailable(f"archive {self.path} cannot be written: {error.strerror}") from None
            except BaseException:
                os.ftruncate(fd, start)
                raise
        finally:
            os.close(fd)

    def _open(self) -> int:
        new = not self.path.exists()
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(0, "it is no regular file")
        if new:
            directory = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            os.fsync(directory)
            os.close(directory)
        os.lseek(fd, 0, os.SEEK_END)
        return fd


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _end_of_last_line(fd: int) -> int:
    """Offset behind the last newline, and the file position set there."""
    end = os.lseek(fd, 0, os.SEEK_END)
    while end:
        start = max(0, end - TAIL_BYTES)
        tail = os.pread(fd, end - start, start)
        newline = tail.rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    return os.lseek(fd, end, os.SEEK_SET)
