"""Directories of crews and jobs, captured logs, kept replay stores, and training artifacts moved into place.

Paths of a job use its row number: an Action id may have 256 bytes and is no file name.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec

from protocol import points
from protocol.errors import CrewError
from protocol.frames import Directories

COPY_BYTES = 1 << 20
#: Flags of open(2) for a file that nobody else can have made.
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class ArtifactRefused(CrewError):
    """A training artifact cannot be put in place; ``error_type`` goes into the terminal event."""

    code = "artifact_refused"
    status = 409
    title = "Training artifact refused"

    def __init__(self, detail: str, error_type: str) -> None:
        super().__init__(detail)
        self.error_type = error_type


class Artifact(msgspec.Struct, frozen=True, kw_only=True):
    """A training artifact in its place."""

    sha256: str
    bytes: int


class Workspace:
    """Everything below ``work_dir``: crews/, jobs/, logs/, replays/, template/."""

    def __init__(self, root: Path, owner: tuple[int, int] | None = None) -> None:
        """``owner``: (uid, gid) of the workers, where they are not the supervisor's own user."""
        self.root = root
        self._owner = owner
        for name in ("crews", "jobs", "logs", "replays"):
            (root / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        # Workers of another user pass through, and see no names.
        shared = 0o700 if owner is None else 0o711
        for path in (root, root / "crews", root / "jobs"):
            path.chmod(shared)
        #: Storage of templates and standbys, and their home where they are another user's: CrewAI makes it at import.
        self.template = root / "template"
        self._make(self.template)

    def prepare(self, row: int, crew_id: str) -> Directories:
        """Make the directories of one job. Raises OSError."""
        crew = self.root / "crews" / _slug(crew_id)
        job = self.job(row)
        paths = Directories(
            job=str(job),
            cwd=str(job / "cwd"),
            tmp=str(job / "tmp"),
            home=str(crew / "home"),
            storage=str(crew / "storage"),
            locks=str(crew / "locks"),
        )
        points.write("workspace.prepare")
        for path in (crew, job, *map(Path, msgspec.structs.astuple(paths))):
            self._make(path)
        return paths

    def _make(self, path: Path) -> None:
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            return
        if self._owner is not None:
            # The directory above may be the worker's user's, who could have put something else in its place by now.
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.fchown(fd, *self._owner)
            finally:
                os.close(fd)

    def job(self, row: int) -> Path:
        """A job's own directory."""
        return self.root / "jobs" / str(row)

    def log(self, row: int) -> Path:
        """A job's captured output."""
        return self.root / "logs" / f"{row}.log"

    def remove_job(self, row: int) -> None:
        """Remove a job's directory. Its processes are gone, so nothing can be swapped under us."""
        shutil.rmtree(self.job(row), ignore_errors=True)

    def forget(self, row: int) -> None:
        """Remove what is kept beyond a job's end: for an archive."""
        for path in (self.log(row), self._replay(row)):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()

    def kept(self) -> Iterator[int]:
        """Rows of which something is kept beyond their end, some of them twice."""
        for name in ("logs", "replays"):
            with os.scandir(self.root / name) as entries:
                for entry in entries:
                    row, _, _ = entry.name.partition(".")
                    if row.isdigit():
                        yield int(row)

    def leftovers(self) -> list[int]:
        """Rows that have a job directory."""
        return [int(entry.name) for entry in os.scandir(self.root / "jobs") if entry.name.isdigit()]

    def _replay(self, row: int) -> Path:
        return self.root / "replays" / f"{row}.db"

    def keep_replay(self, row: int) -> None:
        """Keep a finished job's kickoff outputs, so that its tasks can be replayed."""
        with contextlib.suppress(OSError):
            made = self.job(row) / "replay.db"
            if stat.S_ISREG(made.lstat().st_mode):
                made.replace(self._replay(row))

    def copy_replay(self, owner: int, row: int) -> Path | None:
        """Give job ``row`` its own copy of what ``owner`` kept, None if there is nothing. Raises OSError.

        The job's directory may be another user's: what somebody has put there is neither followed nor replaced.
        """
        try:
            kept_fd = os.open(self._replay(owner), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        copy = self.job(row) / "replay.db"
        with open(kept_fd, "rb") as kept, open(os.open(copy, NEW_FILE, 0o600), "wb") as made:
            shutil.copyfileobj(kept, made)
            if self._owner is not None:
                os.fchown(made.fileno(), *self._owner)
        return copy

    def training_file(self, row: int) -> Path:
        """Where a ``train`` writes before its artifact is moved."""
        return self.job(row) / "artifact"


def check_artifact_free(directory: Path, name: str, *, overwrite: bool) -> None:
    """Refuse a name that is taken, before anything runs. Raises ArtifactRefused."""
    if os.path.lexists(directory / name) and not overwrite:
        raise ArtifactRefused(
            f"training artifact {name} exists; choose another name or send overwrite: true", "ArtifactExists"
        )


def place_artifact(source: Path, directory: Path, name: str, *, overwrite: bool) -> Artifact:
    """Move a trained file into the training directory without following links, and digest it.

    Raises ArtifactRefused when the file is missing, is no regular file or the name is taken.
    """
    try:
        # Opening a FIFO would wait for a writer.
        source_fd = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ArtifactRefused(f"the training left no artifact: {error.strerror}", "ArtifactMissing") from None
    part = f".{name}.part"
    directory_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(source_fd).st_mode):
            raise ArtifactRefused("the training left something that is no regular file", "ArtifactMissing")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part, dir_fd=directory_fd)
        artifact = _copy(source_fd, directory_fd, part)
        if overwrite:
            os.rename(part, name, src_dir_fd=directory_fd, dst_dir_fd=directory_fd)
        else:
            _link(part, name, directory_fd)
        os.fsync(directory_fd)
        points.reach("artifact.placed")
        return artifact
    finally:
        os.close(source_fd)
        os.close(directory_fd)


def _link(part: str, name: str, directory_fd: int) -> None:
    try:
        os.link(part, name, src_dir_fd=directory_fd, dst_dir_fd=directory_fd, follow_symlinks=False)
    except FileExistsError:
        raise ArtifactRefused(
            f"training artifact {name} appeared while the training ran; it was not replaced", "ArtifactExists"
        ) from None
    finally:
        os.unlink(part, dir_fd=directory_fd)


def _copy(source_fd: int, directory_fd: int, part: str) -> Artifact:
    target_fd = os.open(part, NEW_FILE, 0o600, dir_fd=directory_fd)
    digest, size = hashlib.sha256(), 0
    try:
        while block := os.read(source_fd, COPY_BYTES):
            points.write("artifact.write")
            digest.update(block)
            size += len(block)
            view = memoryview(block)
            while view:
                view = view[os.write(target_fd, view) :]
        os.fsync(target_fd)
    except OSError as error:
        os.unlink(part, dir_fd=directory_fd)
        if error.errno in (errno.ENOSPC, errno.EIO, errno.EDQUOT):
            raise ArtifactRefused(f"the artifact cannot be stored: {error.strerror}", "ArtifactNotStored") from None
        raise
    finally:
        os.close(target_fd)
    return Artifact(sha256=digest.hexdigest(), bytes=size)


def _slug(crew_id: str) -> str:
    readable = re.sub(r"[^A-Za-z0-9._-]+", "_", crew_id)[:48].lstrip(".")
    return f"{readable or 'crew'}-{hashlib.sha256(crew_id.encode('utf-8', 'surrogatepass')).hexdigest()[:12]}"
