"""Execute a command as an unprivileged user in a cgroup that was given to it: ``UID CGROUP -- COMMAND...``.

What systemd's ``User=`` and ``Delegate=yes`` do: the directory and its process lists belong to the user, who works
below it. Source: Documentation/admin-guide/cgroup-v2.rst, Delegation.
"""

from __future__ import annotations

import contextlib
import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

from tests.support import procs


def give(cgroup: Path, uid: int) -> None:
    """Let the user make cgroups below ``cgroup`` and move processes between them. Raises OSError."""
    for path in (cgroup, cgroup / "cgroup.procs", cgroup / "cgroup.threads", cgroup / "cgroup.subtree_control"):
        os.chown(path, uid, uid)


@contextlib.contextmanager
def cgroup(uid: int) -> Iterator[Path]:
    """A cgroup of that user with a ``supervisor`` and a ``refuge`` in it; whatever is left in it at the end dies."""
    mount = procs.cgroup2_mount()
    assert mount is not None, "no cgroup v2 hierarchy is mounted"
    made = mount / f"delegated-{uuid.uuid4().hex[:12]}"
    for directory in (made, made / "refuge", made / "supervisor"):
        directory.mkdir()
        give(directory, uid)
    yield made
    (made / "cgroup.kill").write_text("1", encoding="ascii")
    events = made / "cgroup.events"
    procs.wait_until(lambda: "populated 0" in events.read_text(encoding="ascii"), 10, "the cgroup is empty")
    for path, _, _ in os.walk(made, topdown=False):
        os.rmdir(path)


if __name__ == "__main__":
    uid, cgroup, _, *command = sys.argv[1:]
    Path(cgroup, "cgroup.procs").write_text("0", encoding="ascii")
    os.setgroups([])
    os.setresgid(int(uid), int(uid), int(uid))
    os.setresuid(int(uid), int(uid), int(uid))
    os.execvp(command[0], command)
