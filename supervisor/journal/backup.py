"""A consistent copy of a journal, taken while its owner goes on writing."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path

from supervisor.journal.files import beside, sync_directory
from supervisor.journal.reading import CommandRefused, reading


def back_up(path: Path, copy: Path) -> int:
    """Copy the journal at ``path`` to the new file ``copy`` (0600, one file without a log). Returns its size in bytes.

    The copy is checked and durable when this returns. It still names its owner: while that one lives no supervisor
    opens it, or it would end the owner's running jobs. Raises CommandRefused; ``copy`` is not there then.
    """
    copy = copy.absolute()
    partial = beside(copy, ".partial")
    with contextlib.ExitStack() as stack:
        try:
            _claim(copy)
            stack.callback(copy.unlink, missing_ok=True)
            partial.unlink(missing_ok=True)
            stack.callback(partial.unlink, missing_ok=True)
            _copy(path, partial)
            os.replace(partial, copy)
            stack.pop_all()
            sync_directory(copy.parent)
        except OSError as error:
            raise CommandRefused(f"journal {path} cannot be copied to {copy}: {error.strerror}") from None
    return copy.stat().st_size


def _claim(copy: Path) -> None:
    """Make the empty file whose name the copy takes, so that no file of anybody is ever replaced."""
    try:
        os.close(os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        raise CommandRefused(f"{copy} exists already; a backup replaces nothing, name another file") from None


def _copy(path: Path, partial: Path) -> None:
    fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with reading(path) as source, contextlib.closing(sqlite3.connect(partial, isolation_level=None)) as target:
            # One step: the copy is of one state, however long it takes.
            source.backup(target)
            # A copy whose header asks for a log could not be read on a read-only medium.
            target.execute("PRAGMA journal_mode = DELETE").fetchall()
            verdict = target.execute("PRAGMA quick_check(1)").fetchone()[0]
        if verdict != "ok":
            raise CommandRefused(f"journal {path} is damaged ({verdict}); no copy was made, restore an earlier one")
        os.fsync(fd)
    finally:
        os.close(fd)
