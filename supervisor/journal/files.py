"""The journal's files: directory, modes, the owner's lock, and the reserve for a full disk."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from pathlib import Path

import msgspec

from protocol.errors import StartError
from supervisor.filesystems import file_system_of
from supervisor.processes import Identity, identify, is_alive, is_zombie

SQLITE_MAGIC = b"SQLite format 3\x00"
#: Room kept for terminal records and archives when the disk is full.
RESERVE_BYTES = 16 * 1024 * 1024
#: Seconds between two attempts to make the reserve again.
RESTORE_EVERY_S = 1.0
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class JournalOwned(StartError):
    """Another living process owns the journal."""


def beside(path: Path, suffix: str) -> Path:
    """``journal.db`` and ``.lock`` give ``journal.db.lock``."""
    return path.with_name(path.name + suffix)


def sync_directory(path: Path) -> None:
    """Make names in the directory durable (fsync(2))."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def prepare_directory(path: Path) -> list[str]:
    """Make ``path`` with mode 0700, parents included, or check the one that is there. See ``check_directory``."""
    # Before anything is made: what is missing will be on the file system of what is there.
    kind = file_system_of(path)
    if kind.network:
        raise StartError(
            f"state directory {path} is on {kind.name}, a network file system, where the journal's lock and log are "
            "not safe; put state_file on a local disk"
        )
    _make_directories(path)
    warnings = check_directory(path)
    if kind.served:
        warnings.append(
            f"state directory {path} is on {kind.name}: locks and syncs are what another program makes of them; "
            "put state_file on a local disk"
        )
    return warnings


def check_directory(path: Path) -> list[str]:
    """Check a state directory that exists, changing nothing.

    Returns warnings. Raises StartError for a symlink, a foreign owner or a directory that others may write.
    """
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        raise StartError(f"state directory {path} is a symlink or no directory; name a real directory")
    if found.st_uid not in (0, os.geteuid()):
        raise StartError(f"state directory {path} belongs to uid {found.st_uid}, not to us or root; chown it")
    mode = stat.S_IMODE(found.st_mode)
    if mode & _OTHERS_WRITE:
        raise StartError(f"state directory {path} has mode {mode:04o}, others may write in it; chmod 0700 it")
    if mode & 0o077:
        return [f"state directory {path} has mode {mode:04o}; 0700 would keep others from looking into it"]
    return []


def _make_directories(path: Path) -> None:
    missing = []
    while not os.path.lexists(path):
        missing.append(path)
        path = path.parent
    for made in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(made, 0o700)
        sync_directory(made.parent)


def prepare_journal(path: Path) -> None:
    """Create the journal's file with mode 0600, or check the one that is there without changing it.

    Must run before SQLite opens the file in this process: closing any descriptor of it drops all of SQLite's locks
    (fcntl(2), "record locks"). SQLite gives -wal and -shm the file's mode. Raises StartError.
    """
    for suffix in ("-wal", "-shm", "-journal"):
        _refuse_odd_file(beside(path, suffix))
    if not os.path.lexists(path):
        _refuse_orphaned_log(path)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        sync_directory(path.parent)
        return
    _refuse_odd_file(path)
    _refuse_foreign_content(path)


def _refuse_odd_file(path: Path) -> None:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISREG(found.st_mode):
        raise StartError(f"{path} is a symlink or no regular file; the journal must be a real file")
    if found.st_nlink != 1:
        raise StartError(f"{path} has {found.st_nlink} hard links; a journal under two names gets two logs, copy it")
    if found.st_uid != os.geteuid():
        raise StartError(f"{path} belongs to uid {found.st_uid}, we are uid {os.geteuid()}; chown it")
    if mode & 0o077:
        raise StartError(f"{path} has mode {mode:04o}; the journal must be 0600, chmod it after a look at who read it")


def _refuse_orphaned_log(path: Path) -> None:
    wal = beside(path, "-wal")
    if wal.exists() and wal.stat().st_size:
        raise StartError(f"{wal} holds records but {path} is gone or empty; restore it, or move {wal} away")


def _refuse_foreign_content(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        start = os.read(fd, 4096)
    finally:
        os.close(fd)
    if start.startswith(SQLITE_MAGIC):
        return
    if not start:
        _refuse_orphaned_log(path)
        # The reserve is made after the first schema is durable: with it, an empty journal has lost its content.
        if beside(path, ".reserve").exists():
            raise StartError(f"journal {path} is empty but was not before; restore it, or remove it and its .reserve")
        return
    raise StartError(f"{path} is not a journal (no SQLite header); it was left as it is, restore or name another file")


def check_files(journal: Path) -> None:
    """Check the journal's file and those of its log as far as they exist, by name and mode alone. Raises StartError."""
    for suffix in ("", "-wal", "-shm", "-journal"):
        _refuse_odd_file(beside(journal, suffix))


def last_owner(journal: Path) -> Identity | None:
    """Who took the journal's lock last, alive or not; found without touching lock or journal. Raises OSError."""
    try:
        return msgspec.json.decode(beside(journal, ".lock").read_bytes()[:4096], type=Identity)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def owner_of(journal: Path) -> Identity | None:
    """The living process of our PID namespace that took the journal's lock last. Raises OSError."""
    owner = last_owner(journal)
    return owner if owner is not None and is_alive(owner) and not is_zombie(owner.pid) else None


class Lock:
    """The exclusive flock(2) on ``<journal>.lock``, held for life; its content names the owner.

    The file is never deleted: whoever waits for the name would lock another inode.
    """

    def __init__(self, fd: int, path: Path) -> None:
        self._fd = fd
        self.path = path

    @classmethod
    def acquire(cls, journal: Path) -> Lock:
        """Take the lock at once. Raises StartError, with the owner's pid when it is busy."""
        path = beside(journal, ".lock")
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            fd = os.open(path, flags, 0o600)
        except OSError as error:
            raise StartError(f"lock {path} cannot be opened ({error.strerror}); it must be a regular file") from None
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise StartError(f"lock {path} is no regular file; remove it")
            _flock(fd, path, journal)
            os.fchmod(fd, 0o600)
            _write_owner(fd)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, path)

    def release(self) -> None:
        """Give the journal to the next owner."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _flock(fd: int, path: Path, journal: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise StartError(f"lock {path} cannot be taken: {error.strerror}") from None
        raise JournalOwned(f"journal {journal} is owned by {_owner_text(fd)}; stop it first") from None
    locked, named = os.fstat(fd), os.stat(path, follow_symlinks=False)
    if (locked.st_dev, locked.st_ino) != (named.st_dev, named.st_ino):
        raise StartError(f"lock {path} was replaced while it was taken; start again")


def _owner_text(fd: int) -> str:
    try:
        return f"pid {msgspec.json.decode(os.pread(fd, 4096, 0), type=Identity).pid}"
    except msgspec.MsgspecError:
        return "another process, which has not said its pid"


def _write_owner(fd: int) -> None:
    line = msgspec.json.encode(identify(os.getpid())) + b"\n"
    os.pwrite(fd, line, 0)
    os.ftruncate(fd, len(line))


class Reserve:
    """A preallocated file that is given up when the disk is full, so that endings can still be recorded.

    ``ready`` is false between ``release`` and the next successful ``restore``. A size of 0 bytes switches it off.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self.ready = size_bytes == 0
        self._not_before = 0.0

    def create(self) -> bool:
        """Allocate the file, or keep a whole one that is there. Returns ``ready``."""
        if not self.ready:
            self.ready = self._allocate()
        return self.ready

    def release(self) -> bool:
        """Give the room back to the file system. Returns whether there was any."""
        if not self.ready or not self.size_bytes:
            return False
        self.ready = False
        self._not_before = time.monotonic() + RESTORE_EVERY_S
        self._remove()
        return True

    def restore(self) -> bool:
        """Allocate again if there is room for two, at most once in RESTORE_EVERY_S seconds. Returns ``ready``."""
        if self.ready or time.monotonic() < self._not_before:
            return self.ready
        self._not_before = time.monotonic() + RESTORE_EVERY_S
        with contextlib.suppress(OSError):
            room = os.statvfs(self.path.parent)
            if room.f_bavail * room.f_frsize >= 2 * self.size_bytes:
                self.ready = self._allocate()
        return self.ready

    def _allocate(self) -> bool:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            fd = os.open(self.path, flags, 0o600)
            try:
                os.fchmod(fd, 0o600)
                os.ftruncate(fd, self.size_bytes)
                os.posix_fallocate(fd, 0, self.size_bytes)
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError:
            self._remove()
            return False
        return True

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self.path)
            sync_directory(self.path.parent)
