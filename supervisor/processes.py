"""Processes by identity: start ticks, boot id, pid namespace; pidfds; reaping of children and adopted orphans.

Sources: proc_pid_stat(5), pidfd_open(2), waitid(2), PR_SET_CHILD_SUBREAPER in prctl(2).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

import msgspec

PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
#: How long a new child may take to show in /proc, and between two looks, seconds.
SHOWN_S = 1.0
SHOWN_POLL_S = 0.0005
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
KERNEL_BLOCK_BYTES = 1 << 16


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """A process that can be told from a later one with the same pid. ``start_ticks``: clock ticks since boot."""

    pid: int
    start_ticks: int
    boot_id: str
    pid_ns: int

    @property
    def started_at(self) -> float:
        """Unix seconds at which the process started, from the kernel's ticks."""
        return boot_time() + self.start_ticks / CLOCK_TICKS


@cache
def boot_id() -> str:
    """The kernel's random id of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


@cache
def boot_time() -> float:
    """Unix seconds of boot, finer than the whole seconds of btime in proc_stat(5)."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


@cache
def pid_namespace() -> int:
    """Inode of our pid namespace."""
    return os.stat("/proc/self/ns/pid").st_ino


def read_kernel_file(path: str) -> bytes:
    """All of a file of procfs or cgroupfs, in a third of a file object's time. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = b""
        while block := os.read(fd, KERNEL_BLOCK_BYTES):
            text += block
        return text
    finally:
        os.close(fd)


def _stat_fields(pid: int) -> list[bytes] | None:
    try:
        text = read_kernel_file(f"/proc/{pid}/stat")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text[text.rindex(b")") + 2 :].split()


def start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat, or None when there is no such process. A zombie still has it."""
    fields = _stat_fields(pid)
    return int(fields[19]) if fields else None


def parent_of(pid: int) -> int | None:
    """Pid of the parent, None when there is no such process."""
    fields = _stat_fields(pid)
    return int(fields[1]) if fields else None


def is_zombie(pid: int) -> bool:
    """Whether ``pid`` has exited entirely and waits to be reaped.

    State Z alone is not enough: a process whose leader thread has exited shows Z while another thread runs.
    """
    fields = _stat_fields(pid)
    if not fields or fields[0] != b"Z":
        return False
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/task")) <= 1
    return True


def identify(pid: int) -> Identity | None:
    """Identity of a process in our pid namespace, None when it is gone."""
    ticks = start_ticks(pid)
    if ticks is None:
        return None
    return Identity(pid=pid, start_ticks=ticks, boot_id=boot_id(), pid_ns=pid_namespace())


def identify_child(pid: int) -> Identity | None:
    """Identity of a child of ours that was just started and is not reaped; None if /proc does not show it in time.

    Where /proc hides what we may not trace (hidepid=, systemd's ProtectProc=), a child of an undumpable parent is
    hidden until its exec is through, which posix_spawn does not wait for to the very end.
    """
    give_up = time.monotonic() + SHOWN_S
    while (found := identify(pid)) is None and time.monotonic() < give_up:
        time.sleep(SHOWN_POLL_S)
    return found


def is_alive(identity: Identity) -> bool:
    """Whether that very process still exists here (a zombie that nobody reaped counts)."""
    if identity.boot_id != boot_id() or identity.pid_ns != pid_namespace():
        return False
    return start_ticks(identity.pid) == identity.start_ticks


def command(pid: int) -> str:
    """The command name, for evidence."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    return ""


def resident_bytes(pid: int) -> int | None:
    """Resident memory from proc_pid_statm(5), None when there is no such process."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * PAGE_BYTES
    return None


def process_of(tid: int) -> int:
    """Id of the process that a thread belongs to; ``tid`` itself when it is gone."""
    with contextlib.suppress(OSError), open(f"/proc/{tid}/status", encoding="utf-8", errors="replace") as status:
        for line in status:
            if line.startswith("Tgid:"):
                return int(line.split()[1])
    return tid


def cgroup_of(pid: int) -> str | None:
    """Path of the process in the v2 hierarchy as /proc shows it, None when it is gone or there is none."""
    try:
        with open(f"/proc/{pid}/cgroup", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("0::"):
                    return line[3:].rstrip("\n").removesuffix(" (deleted)")
    except (FileNotFoundError, ProcessLookupError):
        pass
    return None


def children(of: int | str = "self") -> list[int]:
    """Pids of a process's children, by default our own, adopted orphans and zombies included (proc_pid_task(5))."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for tid in os.listdir(f"/proc/{of}/task"):
            with contextlib.suppress(OSError):
                found += [int(pid) for pid in read_kernel_file(f"/proc/{of}/task/{tid}/children").split()]
    return found


def descendants(pid: int) -> list[int]:
    """Every process below ``pid`` at this moment."""
    below = children(pid)
    for child in below:  # it grows meanwhile
        below += children(child)
    return below


def become_subreaper() -> None:
    """Adopt orphaned descendants, so that they can be seen, killed and reaped. Raises OSError."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def become_undumpable() -> None:
    """Keep processes of the same user from reading our memory and environment."""
    _prctl(PR_SET_DUMPABLE, 0)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def is_main_of_unit(environ: Mapping[str, str]) -> bool:
    """Whether systemd itself executed this very process (systemd.exec(5)); children of such a one inherit the name."""
    return environ.get("SYSTEMD_EXEC_PID") == str(os.getpid())


def is_unprivileged_for_good() -> bool:
    """Whether we are not root, have no capability, and nothing that we execute can gain any (proc_pid_status(5))."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines()
    status = {name: text.strip() for name, _, text in (line.partition(":") for line in lines)}
    held = [int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")]
    return 0 not in os.getresuid() and not any(held) and status.get("NoNewPrivs") == "1"


@cache
def has_pidfds() -> bool:
    """Whether the kernel gives pidfds, takes signals for them and waits on them; a seccomp filter may refuse any.

    Where it does not, a process is told by its identity, and acted on by pid only while no other can have that.
    """
    try:
        fd = os.pidfd_open(os.getpid())
    except OSError:
        return False
    try:
        signal.pidfd_send_signal(fd, 0)
        os.waitid(os.P_PIDFD, fd, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        return True  # the kernel knows P_PIDFD, and we are no child of ours
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def kill_identity(identity: Identity) -> None:
    """SIGKILL for that process; see ``signal_identity``."""
    signal_identity(identity, signal.SIGKILL)


def signal_identity(identity: Identity, number: int) -> None:
    """Signal that process if it still exists, whoever its parent is.

    Without a pidfd, and if it is no unreaped child of ours, there is an instant between the look and the signal in
    which its pid could be given to another.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        fd = _pidfd_of(identity.pid)
        try:
            if not is_alive(identity):
                return
            if fd is None:
                os.kill(identity.pid, number)
            else:
                signal.pidfd_send_signal(fd, number)
        finally:
            if fd is not None:
                os.close(fd)


def _pidfd_of(pid: int) -> int | None:
    """A pidfd, None where there are none or no descriptor is left. Raises ProcessLookupError."""
    if not has_pidfds():
        return None
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return None
        raise


class Child:
    """A process that the supervisor started or had started; its wait status comes in ``exited``.

    ``exited`` holds a waitpid(2) status. The pidfd stays open until ``close``, so ``kill`` can never hit a stranger;
    where there are none, our own child's pid stays its own until we reap it, and for a relayed one see
    ``kill_identity``. Raises ProcessLookupError when it is gone already.
    """

    def __init__(self, identity: Identity, *, relayed: bool = False) -> None:
        loop = asyncio.get_running_loop()
        self.identity = identity
        self.relayed = relayed
        self.exited: asyncio.Future[int] = loop.create_future()
        self.gone = asyncio.Event()
        self._pidfd = os.pidfd_open(identity.pid) if has_pidfds() else -1
        if self._pidfd >= 0:
            loop.add_reader(self._pidfd, self._on_exit)
        elif not is_alive(identity):
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        else:
            loop.call_soon(self.look)  # its SIGCHLD may have come before us

    @property
    def pid(self) -> int:
        """Process id."""
        return self.identity.pid

    def kill(self) -> None:
        """SIGKILL; nothing happens when the process is gone."""
        if self._pidfd < 0:
            kill_identity(self.identity)
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _is_ours(self) -> bool:
        """Whether that very process is our child, and unreaped."""
        return is_alive(self.identity) and parent_of(self.pid) == os.getpid()

    def collect(self) -> bool:
        """Reap without waiting. Returns whether the status is in hand."""
        if self.exited.done():
            return True
        try:
            if self._pidfd >= 0:
                result = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
            elif self._is_ours():
                result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG)
            else:
                return False
        except ChildProcessError:
            return False  # relayed: another process is its parent and sends the status
        if result is None:
            return False
        code = result.si_status
        self.settle(code << 8 if result.si_code == os.CLD_EXITED else code)
        return True

    def settle(self, status: int) -> None:
        """Record a wait status that the template relayed."""
        if not self.exited.done():
            self.exited.set_result(status)
        self.gone.set()

    def _on_exit(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        self.gone.set()
        self.collect()

    def look(self) -> None:
        """Without a pidfd: see whether it has ended. To be called on each SIGCHLD."""
        if self._pidfd < 0 and not self.gone.is_set() and (not is_alive(self.identity) or is_zombie(self.pid)):
            self.gone.set()
            self.collect()

    def close(self) -> None:
        """Give the pidfd back."""
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1


class Reaper:
    """Reaps every child that is not a known one: orphans that the supervisor adopted as subreaper."""

    def __init__(self) -> None:
        self.known: dict[int, Child] = {}
        #: Answers whether an unknown child may be a newborn whose launch has not been answered yet.
        self.may_be_newborn: Callable[[int], bool] = lambda pid: False
        self.reaped_orphans = 0

    def install(self) -> None:
        """Start reaping on SIGCHLD (signal(7))."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self.reap)

    def add(self, child: Child) -> None:
        """Leave this child's status to itself."""
        self.known[child.pid] = child

    def forget(self, child: Child) -> None:
        """The child's status is in hand, or it will be treated as an orphan."""
        if self.known.get(child.pid) is child:
            del self.known[child.pid]
        child.close()

    def unknown(self) -> Iterator[int]:
        """Live children that are no known process: adopted orphans, newborns not announced yet, strays."""
        for pid in children():
            if pid not in self.known and not is_zombie(pid):
                yield pid

    def reap(self) -> None:
        """Collect known children that ended and every orphan that is a zombie."""
        for child in list(self.known.values()):
            child.look()
        for pid in children():
            known = self.known.get(pid)
            if known is not None:
                if not known.exited.done() and is_zombie(pid):
                    known.collect()
            elif is_zombie(pid) and not self.may_be_newborn(pid):
                self.collect_orphan(pid)

    def collect_orphan(self, pid: int) -> bool:
        """Reap a child that is no known one, if it has ended. Returns whether it is gone."""
        try:
            gone = os.waitpid(pid, os.WNOHANG)[0] == pid
        except ChildProcessError:
            return True
        self.reaped_orphans += gone
        return gone
