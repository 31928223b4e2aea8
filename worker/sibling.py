"""Fork a child of our own parent, so that the supervisor, not the template, is the worker's parent.

``clone3`` puts the newborn straight into its cgroup; where a seccomp filter answers ENOSYS (systemd's
RestrictNamespaces=, Docker's default profile) plain ``clone`` takes the same flags in a register and the child moves
itself; where neither works ``os.fork`` makes a child of the template, whose status is relayed.
Sources: clone(2), clone3(2), PR_GET_TID_ADDRESS in prctl(2).
"""

from __future__ import annotations

import ctypes
import os
import platform
from enum import StrEnum

CLONE_PARENT = 0x00008000
CLONE_CHILD_CLEARTID = 0x00200000
CLONE_CHILD_SETTID = 0x01000000
CLONE_INTO_CGROUP = 0x200000000
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


class SiblingForker:
    """Forks with the best method that works here; a method that is refused once is not tried again.

    The caller must have exactly one thread: raw clone skips glibc's pthread_atfork handlers.
    """

    def __init__(self) -> None:
        self._libc = ctypes.PyDLL(None, use_errno=True)
        self._libc.syscall.restype = ctypes.c_long
        self._api = ctypes.pythonapi
        self._tid_address = self._find_tid_address()
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

    def fork(self, leaf_fd: int | None) -> tuple[int, ForkMethod, bool]:
        """Fork. Returns (pid, method, born in the leaf); pid is 0 in the child.

        Raises OSError when the last method fails.
        """
        while True:
            method = self._methods[0]
            try:
                if method is ForkMethod.FORK:
                    return os.fork(), method, False
                if method is ForkMethod.CLONE3:
                    return self._clone3(leaf_fd), method, leaf_fd is not None
                return self._clone(), method, False
            except OSError:
                if len(self._methods) == 1:
                    raise
                self._methods.pop(0)

    def _clone3(self, leaf_fd: int | None) -> int:
        flags = CLONE_PARENT | CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID
        if leaf_fd is not None:
            flags |= CLONE_INTO_CGROUP
        # exit_signal must be 0 with CLONE_PARENT: the kernel copies the template's own (SIGCHLD).
        args = _CloneArgs(flags=flags, child_tid=self._tid_address, cgroup=leaf_fd or 0)
        return self._enter(SYS_CLONE3, ctypes.byref(args), ctypes.c_size_t(ctypes.sizeof(args)))

    def _clone(self) -> int:
        number, swapped = SYS_CLONE[platform.machine()]
        flags = ctypes.c_ulong(CLONE_PARENT | CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID)
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
