"""What a newborn does to itself before it says hello: leaf, session, signals, descriptors, limits, environment."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import random
import resource
import signal
import sys
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

from protocol.frames import Launch, User

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
MS_REC, MS_PRIVATE = 0x4000, 0x40000
#: Protocol descriptors live above what a careless ``close()`` loop or ``dup2`` of a crew usually hits.
PROTOCOL_FD_FLOOR = 500
#: Added to the supervisor's oom_score_adj (1..1000), so that the kernel prefers a worker.
OOM_SCORE_STEP = 200


class ParentGone(Exception):
    """The supervisor died before PDEATHSIG was in force."""


def join_leaf(leaf_fd: int) -> None:
    """Move this process (all its threads) into the cgroup whose directory ``leaf_fd`` is. Raises OSError."""
    procs = os.open("cgroup.procs", os.O_WRONLY | os.O_CLOEXEC, dir_fd=leaf_fd)
    try:
        os.write(procs, b"0")
    finally:
        os.close(procs)


def die_with_parent(expected_ppid: int) -> None:
    """Ask for SIGKILL when the thread that made us ends (PR_SET_PDEATHSIG in prctl(2)), then check it is not too late.

    ``expected_ppid`` is 0 for the init of a PID namespace, whose parent is outside: there the end of the pipe tells.
    Raises ParentGone. Must follow any change of user, which clears the setting.
    """
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != expected_ppid:
        raise ParentGone(f"parent is {os.getppid()}, not {expected_ppid}")


def _prctl(option: int, value: int) -> None:
    _check(ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0))


def _check(result: int) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def become_user(user: User) -> None:
    """Take on another user for good (setresuid(2)). Raises OSError.

    The change makes the process undumpable, and /proc/self root's; dumpable again, it may raise its own OOM score.
    """
    os.setgroups(user.groups)
    os.setresgid(user.gid, user.gid, user.gid)
    os.setresuid(user.uid, user.uid, user.uid)
    _prctl(PR_SET_DUMPABLE, 1)


def adopt_orphans() -> None:
    """Become the subreaper of everything below this process. Raises OSError."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


class Descendant(NamedTuple):
    """A process below this one, told from a later one of its pid by its start in clock ticks since boot."""

    pid: int
    start_ticks: int


def descendants(root: int) -> Iterator[Descendant]:
    """Every process below ``root``, zombies included, as the kernel shows it now (proc_pid_task(5))."""
    parents = [root]
    while parents:
        parent = parents.pop()
        for child in _children(parent):
            with contextlib.suppress(OSError):
                its_parent, ticks = _parent_and_ticks(child)
                if its_parent == parent:
                    yield Descendant(child, ticks)
                    parents.append(child)


def _children(pid: int) -> list[int]:
    """Pids of the children of all threads of a process; none when it is gone."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for tid in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{tid}/children", "rb") as file:
                found += [int(child) for child in file.read().split()]
    return found


def _parent_and_ticks(pid: int) -> tuple[int, int]:
    """Fields 4 and 22 of proc_pid_stat(5)."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        text = file.read()
    fields = text[text.rindex(b")") + 2 :].split()
    return int(fields[1]), int(fields[19])


def start_ticks(pid: int) -> int:
    """When a process started, in clock ticks since boot. Raises OSError when there is none."""
    return _parent_and_ticks(pid)[1]


def send_signal(to: Descendant, number: int) -> None:
    """Signal that very process; nothing happens when it is gone or somebody else's.

    Where pidfds are refused there is an instant in which its pid could be given to another.
    """
    with contextlib.suppress(OSError):
        try:
            fd = os.pidfd_open(to.pid)
        except OSError as error:
            if error.errno in (errno.ENOSYS, errno.EPERM, errno.EINVAL) and start_ticks(to.pid) == to.start_ticks:
                os.kill(to.pid, number)
            return
        try:
            if start_ticks(to.pid) == to.start_ticks:
                signal.pidfd_send_signal(fd, number)
        finally:
            os.close(fd)


def next_ended(pid: int | None = None) -> tuple[int, int] | None:
    """(pid, wait status) of a child that has ended, or of that one; None when none has. It stays unreaped (waitid(2)).

    Who tells the status before it reaps cannot take it to its own grave: until then it is the next parent's to read.
    Raises ChildProcessError when there is no child left.
    """
    kind = os.P_ALL if pid is None else os.P_PID
    ended = os.waitid(kind, pid or 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_pid, ended.si_status << 8 if ended.si_code == os.CLD_EXITED else ended.si_status


def wake_on_children() -> int:
    """Make SIGCHLD write to a pipe; returns the end to poll. Undone by ``reset_signals`` in a child (signal(7))."""
    wake, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    return wake


def drain_wake(descriptor: int) -> None:
    """Empty the pipe of ``wake_on_children``."""
    with contextlib.suppress(BlockingIOError):
        os.read(descriptor, 4096)


def keep_only(descriptor: int) -> int:
    """Close every descriptor but this one, with /dev/null at 0-2. Returns its new number."""
    high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    null = os.open(os.devnull, os.O_RDWR)
    for target in range(3):
        os.dup2(null, target, inheritable=True)
    os.closerange(3, high)
    os.closerange(high + 1, 1 << 20)
    return high


def show_own_processes() -> None:
    """Inside a new mount and PID namespace: a /proc of our own, seen by nobody else (mount(2)). Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
    _check(libc.mount(b"proc", b"/proc", b"proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, None))


def reset_signals() -> None:
    """Default disposition for every signal that can have one, nothing blocked."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def place_descriptors(protocol_fd: int, stdout_fd: int, stderr_fd: int) -> int:
    """Put /dev/null, stdout and stderr at 0-2 and the protocol high up; close everything else.

    Returns the protocol's new number.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    floor = PROTOCOL_FD_FLOOR if soft > PROTOCOL_FD_FLOOR + 16 else 3
    high = fcntl.fcntl(protocol_fd, fcntl.F_DUPFD_CLOEXEC, floor)
    null = os.open(os.devnull, os.O_RDONLY)
    parked = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, floor) for fd in (null, stdout_fd, stderr_fd)]
    for target, source in enumerate(parked):
        os.dup2(source, target, inheritable=True)
    os.closerange(3, high)
    os.closerange(high + 1, max(soft, high + 16) if soft < 1 << 20 else 1 << 20)
    return high


def set_limits(launch: Launch, open_files: tuple[int, int]) -> None:
    """Apply the crew's rlimits; core dumps are off always. A limit above the hard one is cut to it."""
    limits = launch.limits
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    wanted = {
        resource.RLIMIT_NOFILE: limits.open_files or open_files[0],
        resource.RLIMIT_AS: limits.memory_bytes,
        resource.RLIMIT_NPROC: limits.processes,
        resource.RLIMIT_FSIZE: limits.file_bytes,
    }
    for kind, value in wanted.items():
        if value is None:
            continue
        _, hard = resource.getrlimit(kind)
        ceiling = open_files[1] if kind == resource.RLIMIT_NOFILE else hard
        bound = value if ceiling == resource.RLIM_INFINITY else min(value, ceiling)
        inherited = kind == resource.RLIMIT_NOFILE and limits.open_files is None
        resource.setrlimit(kind, (bound, ceiling if inherited else bound))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "r+b", buffering=0) as score:
        score.write(b"%d" % min(1000, int(score.read()) + OOM_SCORE_STEP))


def set_environment(launch: Launch) -> None:
    """Point the process at its directories and the crew's own variables."""
    where = launch.directories
    os.environ.update(launch.environment)
    # Given as keywords, they cost 1.2 ms in a fork: what is no Mapping is compared with every class that is one.
    os.environ.update(
        {
            "HOME": where.home,
            "TMPDIR": where.tmp,
            "TEMP": where.tmp,
            "TMP": where.tmp,
            "CREWAI_STORAGE_DIR": where.storage,
            "PWD": where.cwd,
        }
    )
    tempfile.tempdir = None
    os.chdir(where.cwd)


def reseed() -> None:
    """Give the child its own random streams; forks of one template would all draw the same numbers.

    numpy imports its ``random`` when it is first asked for, which takes 12 ms. Nobody shares what nobody has used.
    """
    random.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed(int.from_bytes(os.urandom(4), "little"))
