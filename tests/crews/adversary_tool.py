"""What hostile work leaves behind: ``adversary_tool.py ATTACK HEARTBEATS READY FIRE CGROUP``.

Each process of an attack appends lines ``pid start_ticks monotonic_ns`` to HEARTBEATS while it lives, and has that path
in its command line. READY is made once the attack is in place. Attacks on a process strike when the file FIRE appears.
Plain script: it is run with ``-I -S``, starts fast and needs nothing of its starter. All of it ends after LIFETIME_S.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

LIFETIME_S = 90.0
INTERVAL_S = 0.002
#: Of each process of a crowd, so that it does not take the whole machine.
CROWD_INTERVAL_S = 0.02
CROWD = 50
#: Forks that the whole crowd's ancestry may be deep, in case that nobody stops it.
GENERATIONS = 20
HOPS_UNTIL_READY = 5
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
SYS_EXIT = {"x86_64": 60, "aarch64": 93}


def stat_of(pid: int | str) -> list[str]:
    """Fields of /proc/PID/stat from the state on (proc_pid_stat(5))."""
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
        return stat.read().rpartition(")")[2].split()


class Attack:
    """One run; ``beat`` never returns before the end of the lifetime."""

    def __init__(self, heartbeats: str, ready: str, fire: str, cgroup: str) -> None:
        self.heartbeats = heartbeats
        self.fire = fire
        self.cgroup = cgroup
        self._ready = ready
        self._end = time.monotonic() + LIFETIME_S
        self._out = -1
        self._writer = (0, "")

    def line(self) -> None:
        """Append one line for the calling process."""
        pid = os.getpid()
        if self._writer[0] != pid:
            self._writer = (pid, f"{pid} {stat_of('self')[19]}")
        if self._out < 0:
            self._out = os.open(self.heartbeats, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.write(self._out, f"{self._writer[1]} {time.monotonic_ns()}\n".encode())

    def in_place(self) -> None:
        """Tell that the attack stands."""
        os.close(os.open(self._ready, os.O_WRONLY | os.O_CREAT, 0o666))

    def over(self) -> bool:
        """Whether the lifetime has ended."""
        return time.monotonic() > self._end

    def beat(self, *, strike: Callable[[], object] | None = None) -> NoReturn:
        """Beat, say that the attack stands, call ``strike`` once when FIRE appears, and make ``FIRE-done``."""
        self.line()
        self.in_place()
        while not self.over():
            self.line()
            if strike is not None and os.path.exists(self.fire):
                strike()
                strike = None
                os.close(os.open(f"{self.fire}-done", os.O_WRONLY | os.O_CREAT, 0o666))
            time.sleep(INTERVAL_S)
        os._exit(0)


def prctl(option: int, value: int) -> None:
    assert ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0


def leave_parent() -> None:
    """Go on in a child of our own, whose parent is gone."""
    parent = os.getpid()
    if os.fork():
        os._exit(0)
    while os.getppid() == parent:
        time.sleep(INTERVAL_S / 10)


# --- hiding ----------------------------------------------------------------------------------------------------------


def plain_child(attack: Attack) -> NoReturn:
    attack.beat()


def new_session(attack: Attack) -> NoReturn:
    os.setsid()
    attack.beat()


def double_fork(attack: Attack) -> NoReturn:
    if os.fork():
        os._exit(0)
    os.setsid()
    leave_parent()
    attack.beat()


def cleared_environment(attack: Attack) -> NoReturn:
    if os.fork():
        os._exit(0)
    os.setsid()
    leave_parent()
    os.execve(sys.executable, [sys.executable, "-I", "-S", __file__, "plain_child", *sys.argv[2:]], {})


def changed_group(attack: Attack) -> NoReturn:
    os.setpgid(0, 0)
    attack.beat()


def reparented(attack: Attack) -> NoReturn:
    leave_parent()
    attack.beat()


def undumpable(attack: Attack) -> NoReturn:
    prctl(PR_SET_DUMPABLE, 0)
    attack.beat()


def closed_descriptors(attack: Attack) -> NoReturn:
    os.closerange(0, 1 << 16)
    attack.beat()


def own_subreaper(attack: Attack) -> NoReturn:
    """Orphans below it never reach the worker's own reaper while it lives."""
    os.setsid()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    child = os.fork()
    if child == 0:
        leave_parent()
        attack.beat()
    os.waitpid(child, 0)
    attack.beat()


def other_cgroup(attack: Attack) -> NoReturn:
    """Leaves the job's leaf, and its session and parents too."""
    if os.fork():
        os._exit(0)
    os.setsid()
    leave_parent()
    if attack.cgroup:
        with open(os.path.join(attack.cgroup, "cgroup.procs"), "w", encoding="ascii") as procs:
            procs.write("0")
    attack.beat()


# --- hard to kill ----------------------------------------------------------------------------------------------------


def ignored_signals(attack: Attack) -> NoReturn:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    attack.beat()


def stopped(attack: Attack) -> NoReturn:
    child = os.fork()
    if child == 0:
        attack.line()
        os.kill(os.getpid(), signal.SIGSTOP)
        attack.beat()
    os.waitpid(child, os.WUNTRACED)
    attack.beat()


def exited_leader(attack: Attack) -> NoReturn:
    """The leader thread exits, and the process lives in another: its state is Z, and cgroup.kill passes over it."""
    attack.line()

    def go_on() -> None:
        while stat_of("self")[0] != "Z":
            time.sleep(INTERVAL_S)
        attack.beat()

    threading.Thread(target=go_on).start()
    ctypes.CDLL(None).syscall(SYS_EXIT[platform.machine()], 0)
    raise AssertionError("exit(2) came back")


def held_gil(attack: Attack) -> NoReturn:
    """No Python code of the process runs any more; its child beats."""
    if os.fork() == 0:
        attack.beat()
    sum(range(10**18))
    os._exit(0)


def fork_bomb(attack: Attack) -> NoReturn:
    """A crowd in which everyone whose parent dies makes another one."""
    for _ in range(CROWD):
        if os.fork() == 0:
            refill(attack, 0)
    attack.in_place()
    refill(attack, 0)


def refill(attack: Attack, generation: int) -> NoReturn:
    parent = os.getppid()
    while not attack.over():
        attack.line()
        time.sleep(CROWD_INTERVAL_S)
        if os.getppid() != parent and generation < GENERATIONS:
            generation += 1
            os.fork()
            parent = os.getppid()
    os._exit(0)


def pid_hopper(attack: Attack) -> NoReturn:
    """Never the same pid for long: fork, and the parent exits."""
    hops = 0
    while not attack.over():
        attack.line()
        hops += 1
        if hops == HOPS_UNTIL_READY:
            attack.in_place()
        if os.fork():
            os._exit(0)
    os._exit(0)


# --- striking back ---------------------------------------------------------------------------------------------------


def _is_worker_program(pid: int) -> bool:
    with open(f"/proc/{pid}/cmdline", "rb") as cmdline:
        return b"-m\0worker\0" in cmdline.read()


def _strike_at(pid: int) -> Callable[[], object]:
    """SIGKILL for that process and no later one of its pid, as well as a system without pidfds lets us."""
    born = stat_of(pid)[19]

    def strike() -> None:
        with contextlib.suppress(OSError):
            if stat_of(pid)[19] == born:
                os.kill(pid, signal.SIGKILL)

    return strike


def kills_worker(attack: Attack) -> NoReturn:
    """In a PID namespace the worker is its init, at which nobody inside can strike."""
    attack.beat(strike=_strike_at(os.getppid()))


def kills_keeper(attack: Attack) -> NoReturn:
    """The parent of the worker: only where that is a keeper."""
    attack.beat(strike=_strike_at(int(stat_of(os.getppid())[1])))


def kills_template(attack: Attack) -> NoReturn:
    """From the worker up to the supervisor, and its eldest child that runs the worker's program.

    In a PID namespace nothing of this can be seen, and nothing is killed.
    """
    supervisor = os.getppid()
    while supervisor and _is_worker_program(supervisor):
        supervisor = int(stat_of(supervisor)[1])
    eldest: tuple[int, int] | None = None
    for name in os.listdir("/proc") if supervisor else ():
        try:
            fields = stat_of(int(name))
            if int(fields[1]) == supervisor and _is_worker_program(int(name)):
                eldest = min(eldest or (1 << 62, 0), (int(fields[19]), int(name)))
        except (OSError, ValueError):
            continue
    attack.beat(strike=_strike_at(eldest[1]) if eldest else lambda: None)


ATTACKS: dict[str, Callable[[Attack], NoReturn]] = {
    attack.__name__: attack
    for attack in (
        plain_child,
        new_session,
        double_fork,
        cleared_environment,
        changed_group,
        reparented,
        undumpable,
        closed_descriptors,
        own_subreaper,
        other_cgroup,
        ignored_signals,
        stopped,
        exited_leader,
        held_gil,
        fork_bomb,
        pid_hopper,
        kills_worker,
        kills_keeper,
        kills_template,
    )
}

if __name__ == "__main__":
    ATTACKS[sys.argv[1]](Attack(*sys.argv[2:6]))
