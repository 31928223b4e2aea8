"""PID 1 of a container: a small parent that reaps and forwards signals, while its child serves.

Orphans of a container, such as those of an operator's shell, become children of PID 1 and not of the supervisor, which
hunts its own. Sources: pid_namespaces(7), signal(7).
"""

from __future__ import annotations

import os
import signal
import sys

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def serve_below_init() -> None:
    """In PID 1: fork, return in the child only; the parent ends with the child's status. Elsewhere: do nothing."""
    if os.getpid() != 1:
        return
    # A signal that comes before there is a handler waits for it; the kernel would drop it, this being an init.
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        return
    sys.exit(_reap_until(child))


def _reap_until(child: int) -> int:
    for number in FORWARDED:
        signal.signal(number, lambda sent, frame: os.kill(child, sent))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    while True:
        pid, status = os.wait()
        if pid == child:
            return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
