"""Where CrewAI keeps things, pointed at the directories of this crew and this job.

CrewAI freezes some of its paths at import, which in a forked worker happened in the template. Whatever is loaded is
patched in place; whatever is loaded later reads ``CREWAI_STORAGE_DIR``. CrewAI itself is never imported here.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from protocol.frames import Directories
from worker import loaded

#: Name of a job's replay store in its directory.
REPLAY_STORE = "replay.db"
#: CrewAI's own bound for waiting on one of its locks.
LOCK_TIMEOUT_S = 120.0
#: A waiter looks again after this, doubled up to the longest; CrewAI's locks are held for milliseconds.
FIRST_LOOK_S = 0.002
LONGEST_LOOK_S = 0.05

#: Modules that froze ``db_storage_path()`` in DEFAULT_STORAGE_PATH at their import, and the path below the storage.
FROZEN_STORAGE = {
    "crewai.rag.chromadb.constants": "",
    "crewai.rag.chromadb.config": "",
    "crewai.rag.qdrant.constants": "qdrant",
    "crewai.rag.qdrant.config": "qdrant",
}

LockBackend = Callable[..., AbstractContextManager[None]]


class LockTimeout(Exception):
    """A lock of CrewAI was held by another thread or job of the crew for too long."""


def redirect(directories: Directories, replay_store: str | None) -> None:
    """Point CrewAI at ``directories``; may be called again when more of CrewAI has been loaded.

    Per crew: knowledge and memory (``storage``), settings (``home``), locks (``locks``). Per job: the replay store,
    ``<job>/replay.db``, which starts as a copy of ``replay_store`` where one is given. Raises OSError.
    """
    os.environ["CREWAI_STORAGE_DIR"] = directories.storage
    tempfile.tempdir = directories.tmp
    _place_replay_store(directories, replay_store)
    for name, below in FROZEN_STORAGE.items():
        if (module := loaded.module(name)) is not None:
            module.DEFAULT_STORAGE_PATH = os.path.join(directories.storage, below) if below else directories.storage
    if (settings := loaded.module("crewai_core.settings")) is not None:
        settings.DEFAULT_CONFIG_PATH = Path(directories.home, ".config", "crewai", "settings.json")
    if (outputs := loaded.module("crewai.memory.storage.kickoff_task_outputs_storage")) is not None:
        # db_path is the only parameter: its default is where every crew of this process keeps its task outputs.
        outputs.KickoffTaskOutputsSQLiteStorage.__init__.__defaults__ = (replay_path(directories),)
    if (locks := loaded.module("crewai_core.lock_store")) is not None:
        locks.set_lock_backend(lock_backend(directories))


def replay_path(directories: Directories) -> str:
    """This job's replay store."""
    return os.path.join(directories.job, REPLAY_STORE)


def _place_replay_store(directories: Directories, replay_store: str | None) -> None:
    target = replay_path(directories)
    if replay_store is None or os.path.abspath(replay_store) == os.path.abspath(target) or os.path.exists(target):
        return
    made = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(replay_store, "rb") as source, open(made, "wb") as copy:
        shutil.copyfileobj(source, copy)


def adopt(crew: object, directories: Directories) -> None:
    """Give a CrewAI crew this job's replay store if it was built before the stores were redirected."""
    if not loaded.is_crewai_crew(crew):
        return
    handler: Any = crew._task_output_handler  # type: ignore[attr-defined]
    if handler.storage.db_path != replay_path(directories):
        crew._task_output_handler = _handler()  # type: ignore[attr-defined]


def _handler() -> Any:
    module: Any = loaded.module("crewai.utilities.task_output_storage_handler")
    return module.TaskOutputStorageHandler()


def replayable(*, replayed_only: bool = False) -> tuple[str, ...]:
    """Ids of the tasks in this job's replay store, in order; only after redirect() and with CrewAI loaded."""
    rows = _handler().load() or []
    return tuple(str(row["task_id"]) for row in rows if row["was_replayed"] or not replayed_only)


def lock_backend(directories: Directories) -> LockBackend:
    """CrewAI's lock backend: one file per name below ``locks``, so that all jobs of the crew meet there.

    Names of files that belong to this job alone are locked in its ``tmp`` and leave nothing behind in ``locks``.
    """
    own = tuple(os.path.realpath(path) for path in (directories.job, directories.cwd, directories.tmp))

    def backend(name: str, *, timeout: float = LOCK_TIMEOUT_S) -> AbstractContextManager[None]:
        where = directories.tmp if any(path + os.sep in name for path in own) else directories.locks
        return _hold(os.path.join(where, hashlib.sha256(name.encode()).hexdigest()[:32] + ".lock"), name, timeout)

    return backend


@contextlib.contextmanager
def _hold(path: str, name: str, timeout_s: float) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        _acquire(descriptor, name, timeout_s)
        try:
            yield
        finally:
            # An explicit unlock also frees the lock in a child that was forked meanwhile (flock(2)).
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, name: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    pause = FIRST_LOOK_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() + pause > deadline:
                raise LockTimeout(f"lock {name!r} was held by another job of this crew for {timeout_s} s") from None
            time.sleep(pause)
            pause = min(pause * 2, LONGEST_LOOK_S)
        else:
            return
