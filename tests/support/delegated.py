"""Execute a command as an unprivileged user in a cgroup that was given to it: ``UID CGROUP -- COMMAND...``.

What systemd's ``User=`` and ``Delegate=yes`` do: the directory and its process lists belong to the user, who works
below it. Source: Documentation/admin-guide/cgroup-v2.rst, Delegation.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def give(cgroup: Path, uid: int) -> None:
    """Let the user make cgroups below ``cgroup`` and move processes between them. Raises OSError."""
    for path in (cgroup, cgroup / "cgroup.procs", cgroup / "cgroup.threads", cgroup / "cgroup.subtree_control"):
        os.chown(path, uid, uid)


if __name__ == "__main__":
    uid, cgroup, _, *command = sys.argv[1:]
    Path(cgroup, "cgroup.procs").write_text("0", encoding="ascii")
    os.setgroups([])
    os.setresgid(int(uid), int(uid), int(uid))
    os.setresuid(int(uid), int(uid), int(uid))
    os.execvp(command[0], command)
