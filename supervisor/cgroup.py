"""cgroup v2: one leaf a job, its kill switch and the kernel's word that it is empty.

Source: Linux, Documentation/admin-guide/cgroup-v2.rst (cgroup.kill, cgroup.events, cgroup.procs).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from protocol.errors import StartError
from supervisor.limits import CONTROLLERS
from supervisor.processes import cgroup_of, identify_child, is_unprivileged_for_good, process_of, read_kernel_file

#: How long the probe at start waits for its victim to be gone, seconds.
PROBE_DEADLINE_S = 5.0
#: Where the supervisor moves when the cgroup that it was started in passes controllers on.
SUPERVISOR_LEAF = "supervisor"
#: Tasks of a bounded cgroup that templates and jobs together may not take: our threads, and what else we start.
RESERVED_TASKS = 32


class Leaf:
    """One cgroup directory. ``proc_path`` is how /proc/PID/cgroup names it."""

    def __init__(self, path: Path, proc_path: str) -> None:
        self.path = path
        self.proc_path = proc_path

    def __repr__(self) -> str:
        return f"Leaf({str(self.path)!r})"

    def below(self, name: str) -> Leaf:
        """Handle of a cgroup inside this one, made or not."""
        return Leaf(self.path / name, f"{self.proc_path.rstrip('/')}/{name}")

    def open(self) -> int:
        """Descriptor of the directory, for a launch; the caller closes it."""
        return os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def add(self, pid: int) -> None:
        """Move a process in. Raises OSError."""
        (self.path / "cgroup.procs").write_text(str(pid), encoding="ascii")

    def exists(self) -> bool:
        """Whether the directory is still there."""
        return self.path.is_dir()

    def write(self, files: Iterable[tuple[str, str]]) -> None:
        """Write control files. Raises OSError naming the file."""
        for name, text in files:
            (self.path / name).write_text(text, encoding="ascii")

    def controllers(self) -> frozenset[str]:
        """Controllers that cgroups below this one may be given."""
        return frozenset((self.path / "cgroup.controllers").read_text(encoding="ascii").split())

    def kill(self) -> None:
        """SIGKILL everything below, forks in flight included. Raises OSError where the kernel has no cgroup.kill."""
        with contextlib.suppress(FileNotFoundError):
            (self.path / "cgroup.kill").write_text("1", encoding="ascii")

    def sweep(self) -> int:
        """kill(2) whatever is still listed; returns how many.

        Needed beside cgroup.kill, which passes over a process whose leader thread has exited.
        """
        pids = self.pids()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(pids)

    def populated(self) -> bool:
        """Whether any live process is in here or below; a removed cgroup has none."""
        try:
            text = read_kernel_file(f"{self.path}/cgroup.events")
        except (FileNotFoundError, OSError) as error:
            if isinstance(error, FileNotFoundError) or not self.exists():
                return False
            raise
        return b"populated 1" in text

    def pids(self) -> list[int]:
        """Processes in here and in nested cgroups (the kernel's lists are not recursive).

        A process that moved in after its leader thread had exited is in no cgroup.procs; its threads tell of it.
        """
        if not self.populated():
            return []
        listed = self.listed("cgroup.procs")
        return listed or list({process_of(tid) for tid in self.listed("cgroup.threads")})

    def listed(self, name: str) -> list[int]:
        """The ids in the files of that name here and below."""
        found: list[int] = []
        for directory, _, _ in os.walk(self.path):
            # EOPNOTSUPP: a threaded cgroup's processes are listed at its domain.
            with contextlib.suppress(OSError):
                found += [int(pid) for pid in read_kernel_file(f"{directory}/{name}").split()]
        return found

    def holds(self, pid: int) -> bool:
        """Whether the process is in here or below."""
        where = cgroup_of(pid)
        return where is not None and (where == self.proc_path or where.startswith(self.proc_path + "/"))

    def oom_kills(self) -> int | None:
        """Out-of-memory kills in here (memory.events), None without the memory controller."""
        with contextlib.suppress(OSError):
            for line in (self.path / "memory.events").read_text(encoding="ascii").splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
        return None

    def memory_bytes(self) -> int | None:
        """Memory charged to this cgroup, None without the memory controller."""
        with contextlib.suppress(OSError):
            return int((self.path / "memory.current").read_text(encoding="ascii"))
        return None

    def remove(self) -> None:
        """Remove the empty cgroup, nested ones first. Raises OSError while something is in it."""
        for directory, _, _ in os.walk(self.path, topdown=False):
            with contextlib.suppress(FileNotFoundError):
                os.rmdir(directory)


class Tree:
    """The supervisor's own branch of the cgroup v2 hierarchy, below which every leaf is made.

    ``own``: the cgroup that was given to the supervisor, in which the branch is. ``sealed``: no process of its user can
    leave that one, see ``is_sealed``. ``alone``: it was made for this very process.
    """

    def __init__(self, base: Leaf, own: Leaf | None = None, *, sealed: bool = False, alone: bool = False) -> None:
        self.base = base
        self.own = own or base
        self.sealed = sealed
        self.alone = alone
        #: Controllers in force in every leaf.
        self.controllers: frozenset[str] = frozenset()
        self._lock = -1

    def lock(self) -> None:
        """Own the branch. Raises StartError when another supervisor does, OSError."""
        self._lock = os.open(self.base.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise StartError(
                f"cgroup {self.base.path} belongs to a running supervisor: this journal is a copy of its journal; "
                "start on the original, or on a new journal"
            ) from None

    def settle(self) -> None:
        """Have the kernel account and limit in our leaves what is delegated to us.

        A cgroup that passes controllers on may hold no process itself (the "no internal processes" rule), so we move
        into a leaf of our own first; in a cgroup made for us in any case, so that it shows who is who. What cannot be
        had is left out: rlimits take its place.
        """
        own = self.own
        wanted = own.controllers() & frozenset(CONTROLLERS)
        if not wanted and not self.alone:
            return
        request = [("cgroup.subtree_control", " ".join(f"+{name}" for name in sorted(wanted)))] if wanted else []
        home = own.below(SUPERVISOR_LEAF)
        try:
            home.path.mkdir(exist_ok=True)
            home.add(os.getpid())
            own.write(request)
            self.base.write(request)
        except OSError:
            with contextlib.suppress(OSError):
                own.add(os.getpid())
                os.rmdir(home.path)
            return
        self.controllers = wanted
        if "pids" in wanted:
            self._reserve_tasks(own)

    def _reserve_tasks(self, own: Leaf) -> None:
        """Where ``own`` may hold so many tasks only, keep some of them from everything below our branch."""
        with contextlib.suppress(OSError, ValueError):  # at the root there is no such file; no bound reads "max"
            bound = int((own.path / "pids.max").read_text(encoding="ascii"))
            self.base.write([("pids.max", str(max(bound - RESERVED_TASKS, bound // 2)))])

    def strangers(self) -> frozenset[int]:
        """Every process but ourselves in the cgroup that was given to us, whoever put it there.

        Before anything of ours is started, those are what a predecessor left.
        """
        listed = self.own.listed("cgroup.procs") + [process_of(tid) for tid in self.own.listed("cgroup.threads")]
        return frozenset(listed) - {os.getpid()}

    def leaf(self, name: str) -> Leaf:
        """Handle of the leaf ``name``, made or not."""
        return self.base.below(name)

    def make(self, name: str) -> Leaf:
        """Make a new leaf. Raises OSError."""
        leaf = self.leaf(name)
        leaf.path.mkdir()
        return leaf

    def names(self) -> list[str]:
        """Leaves that exist."""
        return sorted(entry.name for entry in os.scandir(self.base.path) if entry.is_dir(follow_symlinks=False))

    def remove(self) -> None:
        """Remove the branch itself once it is empty; what is left in it keeps it."""
        with contextlib.suppress(OSError):
            self.base.remove()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _mounted_at() -> list[tuple[Path, str]]:
    """(mount point, root inside the hierarchy) of each cgroup2 mount (proc_pid_mountinfo(5))."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        fields, _, tail = line.partition(" - ")
        if tail.startswith("cgroup2 "):
            root, point = fields.split()[3:5]
            found.append((Path(point.encode().decode("unicode_escape")), root))
    return found


def own_directory(root: Path | None) -> Leaf:
    """The directory to make our branch in: ``root``, or our own cgroup. Raises StartError where there is no v2."""
    own = cgroup_of(os.getpid())
    mounts = _mounted_at()
    if root is not None:
        for point, inside in mounts:
            if root.is_relative_to(point):
                return Leaf(root, os.path.normpath(os.path.join(inside, root.relative_to(point))))
        raise StartError(f"cgroup_root {root} is in no cgroup v2 hierarchy; mount one or name another directory")
    if own is None or not mounts:
        raise StartError("no cgroup v2 hierarchy is mounted")
    point, inside = mounts[0]
    relative = os.path.relpath(own, inside)
    if relative.startswith(".."):
        raise StartError(f"our own cgroup {own} is outside of what is mounted at {point}")
    return Leaf((point / relative).resolve(), own)


def is_sealed(own: Leaf) -> bool:
    """Whether neither we nor anything that we start can ever leave ``own``, short of the kernel or root moving it.

    To move a process, its user must be able to write ``cgroup.procs`` of an ancestor that both cgroups have in common
    (cgroup-v2.rst, "Delegation Containment"). So: that of the parent is closed to us, and we can gain no privilege any
    more, neither by capabilities nor by executing what is setuid (PR_SET_NO_NEW_PRIVS). Children inherit all of it.
    """
    above = own.path.parent / "cgroup.procs"
    closed = above.exists() and not os.access(above, os.W_OK, effective_ids=True)
    return closed and own.holds(os.getpid()) and is_unprivileged_for_good()


def open_tree(root: Path | None, instance_id: str, *, main: bool = False, delegate: bool = True) -> Tree:
    """Find or make our branch and prove with a live probe that a leaf's kill empties it.

    ``root``: the directory to work below, by default the supervisor's own cgroup. ``main``: systemd executed this very
    process, so that a service's cgroup was made for it. ``delegate``: pass its controllers on, which changes it.
    Raises StartError saying what fails.
    """
    own = own_directory(root)
    base = own.below(f"crew-supervisor-{instance_id[:12]}")
    alone = main and root is None and own.path.name.endswith(".service")
    tree = Tree(base, own, sealed=is_sealed(own), alone=alone)
    try:
        base.path.mkdir(exist_ok=True)
        tree.lock()
        if root is None and delegate:
            tree.settle()
        _probe(tree)
    except OSError as error:
        tree.remove()
        raise StartError(f"cgroup {base.path} cannot be used: {error.strerror or error}") from None
    return tree


def _probe(tree: Tree) -> None:
    leaf = tree.leaf("probe")
    leaf.path.mkdir(exist_ok=True)
    # Spawned and not forked: our own threads may hold locks. It sleeps until it is killed.
    victim = [sys.executable, "-I", "-S", "-c", "import signal; signal.pause()"]
    pid = os.posix_spawn(sys.executable, victim, {})
    try:
        identify_child(pid)
        leaf.add(pid)
        if not leaf.populated() or not leaf.holds(pid):
            raise OSError(0, "a process put into a leaf does not show there")
        leaf.kill()
        give_up = time.monotonic() + PROBE_DEADLINE_S
        while leaf.populated():
            if time.monotonic() > give_up:
                raise OSError(0, "cgroup.kill did not empty a leaf")
            time.sleep(0.001)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        leaf.remove()
