"""The user that workers run as: who that is, and whether this supervisor can make it so."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

from protocol.errors import ConfigError
from protocol.frames import User
from supervisor.config.settings import Settings


def resolve_worker_user(settings: Settings) -> User | None:
    """Ids of ``worker_user``, None without one.

    Raises ConfigError for an unknown user, for root, where the supervisor may not change users, and where the user
    could not reach ``work_dir``.
    """
    name = settings.worker_user
    if name is None:
        return None
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        raise ConfigError(f"worker_user {name!r} is no user of this machine; create it or name another") from None
    if entry.pw_uid == 0:
        raise ConfigError("worker_user is root, who may leave any cgroup; name a user without privileges")
    if os.geteuid() != 0:
        raise ConfigError(f"worker_user {name!r} needs a supervisor that runs as root; remove it or start as root")
    user = User(uid=entry.pw_uid, gid=entry.pw_gid, groups=tuple(os.getgrouplist(name, entry.pw_gid)))
    if settings.work_dir is not None:
        _check_reach(settings.work_dir, name)
    return user


def _check_reach(work_dir: Path, name: str) -> None:
    """Every directory above ``work_dir`` must let others pass; the work directory itself is made so."""
    for directory in reversed(work_dir.parents):
        try:
            mode = directory.stat().st_mode
        except FileNotFoundError:
            return
        if not mode & 0o001:
            raise ConfigError(
                f"worker_user {name!r} cannot reach work_dir {str(work_dir)!r}: {str(directory)!r} lets others not pass"
                f" (mode {mode & 0o7777:04o}); set work_dir outside of the state directory"
            )
