"""Fork a child of our own parent, so that the supervisor, not the template, is the worker's parent.

``clone3`` puts the newborn straight into its cgroup; where a seccomp filter answers ENOSYS (systemd's
RestrictNamespaces=, Docker's default profile) plain ``clone`` takes the same flags in a register and the child moves
itself; where neither works ``os.fork`` makes a child of the template, whose status is relayed.
Sources: clone(2), clone3(2), PR_GET_TID_ADDRESS in prctl(2).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from enum import StrEnum
from typing import NamedTuple

CLONE_PARENT = 0x00008000
CLONE_CHILD_CLEARTID = 0x00200000
CLONE_CHILD_SETTID = 0x01000000
CLONE_INTO_CGROUP = 0x200000000
CLONE_NEWNS = 0x00020000
CLONE_NEWPID = 0x20000000
NAMESPACES = CLONE_NEWPID | CLONE_NEWNS
#: What fork(2) says when there is no room for another process now: no method is to blame.
NO_ROOM = (errno.EAGAIN, errno.ENOMEM)
PR_GET_TID_ADDRESS = 40
SYS_CLONE3 = 435
#: Number of clone(2), and whether its child_tid is the fifth argument (aarch64) or the fourth (x86-64).
SYS_CLONE = {"x86_64": (56, False), "aarch64": (220, True)}


class ForkMethod(StrEnum):
    """How a worker was made."""

    CLONE3 = "clone3"
    CLONE = "clone"
    FORK = "fork"


class _CloneArgs(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            "flags",
            "pidfd",
            "child_tid",
            "parent_tid",
            "exit_signal",
            "stack",
            "stack_size",
            "tls",
            "set_tid",
            "set_tid_size",
            "cgroup",
        )
    ]


class Forked(NamedTuple):
    """What fork made; ``pid`` is 0 in the child."""

    pid: int
    method: ForkMethod
    in_leaf: bool
    namespace: bool


class SiblingForker:
    """Forks with the best method that works here; a method that is refused once is not tried again.

    The caller must have exactly one thread: raw clone skips glibc's pthread_atfork handlers.
    """

    def __init__(self) -> None:
        self._libc = ctypes.PyDLL(None, use_errno=True)
        self._libc.syscall.restype = ctypes.c_long
        self._api = ctypes.pythonapi
        self._tid_address = self._find_tid_address()
        self._namespaces = True
        self._methods = [ForkMethod.CLONE3, ForkMethod.CLONE, ForkMethod.FORK]
        if not self._tid_address:
            self._methods = [ForkMethod.FORK]
        elif platform.machine() not in SYS_CLONE:
            self._methods.remove(ForkMethod.CLONE)

    def _find_tid_address(self) -> int:
        # Without it glibc's cached thread id would stay the template's in the child.
        address = ctypes.c_void_p()
        if self._libc.prctl(PR_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0) != 0:
            return 0
        return address.value or 0

    def fork(self, leaf_fd: int | None, *, namespace: bool = False) -> Forked:
        """Fork, in a PID namespace where that is wanted and allowed. Raises OSError when no method can."""
        while True:
            method = self._methods[0]
            inside = namespace and self._namespaces and method is not ForkMethod.FORK
            try:
                return self._try(method, leaf_fd, inside=inside)
            except OSError as error:
                if error.errno in NO_ROOM:
                    raise
                if inside and error.errno in (errno.EPERM, errno.EINVAL, errno.ENOSPC):
                    self._namespaces = False
                elif len(self._methods) == 1:
                    raise
                else:
                    self._methods.pop(0)

    def _try(self, method: ForkMethod, leaf_fd: int | None, *, inside: bool) -> Forked:
        extra = NAMESPACES if inside else 0
        if method is ForkMethod.FORK:
            return Forked(os.fork(), method, in_leaf=False, namespace=False)
        if method is ForkMethod.CLONE3:
            return Forked(self._clone3(leaf_fd, extra), method, in_leaf=leaf_fd is not None, namespace=inside)
        return Forked(self._clone(extra), method, in_leaf=False, namespace=inside)

    def _clone3(self, leaf_fd: int | None, extra: int) -> int:
        flags = CLONE_PARENT | CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID | extra
        if leaf_fd is not None:
            flags |= CLONE_INTO_CGROUP
        # exit_signal must be 0 with CLONE_PARENT: the kernel copies the template's own (SIGCHLD).
        args = _CloneArgs(flags=flags, child_tid=self._tid_address, cgroup=leaf_fd or 0)
        return self._enter(SYS_CLONE3, ctypes.byref(args), ctypes.c_size_t(ctypes.sizeof(args)))

    def _clone(self, extra: int) -> int:
        number, swapped = SYS_CLONE[platform.machine()]
        flags = ctypes.c_ulong(CLONE_PARENT | CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID | extra)
        tid, none = ctypes.c_void_p(self._tid_address), ctypes.c_void_p(0)
        tail = (none, tid) if swapped else (tid, none)
        return self._enter(number, flags, none, none, *tail)

    def _enter(self, number: int, *arguments: object) -> int:
        self._api.PyOS_BeforeFork()
        pid = int(self._libc.syscall(ctypes.c_long(number), *arguments))
        if pid == 0:
            self._api.PyOS_AfterFork_Child()
            return 0
        error = ctypes.get_errno()
        self._api.PyOS_AfterFork_Parent()
        if pid < 0:
            raise OSError(error, os.strerror(error))
        return pid
