"""What the kernel lets us do, and its clock.

Sources: cgroup-v2.rst, pidfd_open(2), clone3(2), pid_namespaces(7), adjtimex(2).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import subprocess
import sys
import time

from protocol.errors import StartError
from supervisor.cgroup import Tree, open_tree, own_directory
from supervisor.config import Settings
from supervisor.doctor.finding import Said, failure, ok, warning
from supervisor.limits import CONTROLLERS
from supervisor.processes import has_pidfds

#: The same number on every machine that we run on.
SYS_CLONE3 = 435
#: In a child of its own: unshare(2) of argv[1]; its exit status is the errno.
UNSHARE = "import ctypes, sys; c = ctypes.CDLL(None, use_errno=True)\n"
UNSHARE += "sys.exit(c.unshare(int(sys.argv[1])) and ctypes.get_errno())"
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
#: Unix seconds of 2025: no clock that is right shows less.
NOT_BEFORE = 1_735_689_600
#: Two clocks are compared over this long, and may differ by so much, seconds.
CLOCK_WATCH_S = 0.1
CLOCK_DRIFT_S = 0.01
TIME_ERROR = 5
_WRITABLE = "a writable cgroup v2 directory (Delegate=yes, or cgroup_root)"


def stop_method(settings: Settings) -> Said:
    """How stops would be carried out, found with the probe of the start; nothing of it stays."""
    method = settings.stop_method
    if method == "group":
        advice = 'set stop_method = "auto" unless nothing else works'
        return warning('stop_method = "group": stops are carried out and never confirmed', advice)
    if method == "keeper":
        return ok("a keeper process per job, as configured")
    try:
        probed_tree(settings).remove()
        own = own_directory(settings.cgroup_root)
    except StartError as error:
        if method == "cgroup":
            return failure(error.detail, f'give the supervisor {_WRITABLE}, or set stop_method = "keeper"')
        advice = f"{_WRITABLE} lets workers be spawned too, and proves stops sooner"
        return warning(f"a keeper process per job, since {error.detail}", advice)
    controllers = " ".join(sorted(own.controllers() & frozenset(CONTROLLERS))) or "none"
    whose = "" if settings.cgroup_root else " (of this shell: a service has its own)"
    return ok(f"cgroup: a probe in {own.path}{whose} was killed and seen empty; controllers: {controllers}")


def probed_tree(settings: Settings) -> Tree:
    """A branch of our own for leaves; a service's, whose name is an instance's id, is another. Raises StartError."""
    return open_tree(settings.cgroup_root, f"doctor{os.getpid():x}", delegate=False)


def pidfd() -> Said:
    """Whether processes can be held by descriptors."""
    if has_pidfds():
        return ok("pidfd_open, pidfd_send_signal and waitid(P_PIDFD) work")
    advice = "allow pidfd_open, pidfd_send_signal and waitid in the container's filter of calls; Linux 5.4 has them"
    return warning("no pidfds: processes are told by their start times, which is slower and safe", advice)


def namespaces(settings: Settings) -> Said:
    """Whether workers get PID namespaces, where they would need them."""
    users = _may_unshare(CLONE_NEWUSER)
    told = f"user namespaces: {'allowed' if users is None else users}"
    if settings.worker_user is not None or os.geteuid() != 0:
        return ok(f"workers need no PID namespace here; {told}")
    refused, remedy = _may_unshare(CLONE_NEWPID), "allow CLONE_NEWPID"
    if settings.pid_namespace == "off":
        refused, remedy = "configured", 'set pid_namespace = "auto"'
    if refused is None:
        return ok(f"each worker is the init of a PID namespace of its own; {told}")
    detail = f"no PID namespaces for the workers of a root supervisor ({refused}): they could leave their cgroups"
    return warning(f"{detail}, so that a restart confirms no stop; {told}", f"set worker_user, or {remedy}")


def _may_unshare(flag: int) -> str | None:
    """None if it may, else why not. Tried in a process that ends at once."""
    command = [sys.executable, "-I", "-S", "-c", UNSHARE, str(flag)]
    status = subprocess.run(command, capture_output=True, timeout=30, check=False).returncode
    return None if status == 0 else os.strerror(status) if status > 0 else f"killed by signal {-status}"


def clone3() -> Said:
    """Whether workers can be born in their cgroup."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall(SYS_CLONE3, None, 0)  # no arguments at all: refused by whoever knows the call
    if ctypes.get_errno() == errno.EINVAL:
        return ok(f"clone3 is there: workers are born in their cgroups (Linux {platform.release()})")
    why = os.strerror(ctypes.get_errno())
    return ok(f"no clone3 ({why}): workers are cloned plainly and move into their cgroups (Linux {platform.release()})")


def clock() -> Said:
    """Whether the wall clock is plausible, steady and synchronised."""
    began = time.time(), time.monotonic()
    time.sleep(CLOCK_WATCH_S)
    drift_s = (time.time() - began[0]) - (time.monotonic() - began[1])
    return judge_clock(time.time(), drift_s, synchronised=_synchronised())


def judge_clock(now: float, drift_s: float, *, synchronised: bool | None) -> Said:
    """What these come to; ``synchronised`` is None where the kernel does not say."""
    advice = "run chrony or systemd-timesyncd on the machine"
    if now < NOT_BEFORE:
        return warning(f"the clock shows {time.strftime('%Y-%m-%d', time.gmtime(now))}", f"set it; {advice}")
    if abs(drift_s) > CLOCK_DRIFT_S:
        return warning(f"the wall clock moved by {drift_s * 1000:+.0f} ms in {CLOCK_WATCH_S:g} s", advice)
    if synchronised is False:
        return warning("the kernel says that nobody keeps the clock right: recorded times may be off", advice)
    return ok("steady; whether it is synchronised cannot be asked here" if synchronised is None else "synchronised")


def _synchronised() -> bool | None:
    libc = ctypes.CDLL(None, use_errno=True)
    # struct timex, modes = 0: only asks. 256 bytes are more than it has anywhere.
    state = libc.adjtimex(ctypes.create_string_buffer(256))
    return None if state < 0 else bool(state != TIME_ERROR)
