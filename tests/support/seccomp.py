"""Execute a command under a seccomp filter: ``python -m tests.support.seccomp REFUSAL... -- COMMAND...``.

Refusals: ``clone3`` answers ENOSYS, as systemd's RestrictNamespaces= and Docker's default profile make it; ``siblings``
makes clone(2) with CLONE_PARENT answer EPERM; ``pidfds`` makes pidfd_open answer ENOSYS, as kernels before 5.3 do. All
leave fork, threads and posix_spawn alone.
Sources: seccomp(2), Documentation/networking/filter.rst (classic BPF), struct seccomp_data in linux/seccomp.h.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from typing import NamedTuple

PR_SET_NO_NEW_PRIVS = 38
PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2
RET_ALLOW = 0x7FFF0000
RET_ERRNO = 0x00050000
CLONE_PARENT = 0x00008000
#: BPF_LD | BPF_W | BPF_ABS, BPF_JMP | BPF_JEQ | BPF_K, BPF_JMP | BPF_JSET | BPF_K, BPF_RET | BPF_K
LOAD, EQUALS, HAS_BITS, RETURN = 0x20, 0x15, 0x45, 0x06
#: Offsets in struct seccomp_data: the call's number, the architecture, the low half of the first argument.
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16
SYS_PIDFD_OPEN = 434
SYS_CLONE3 = 435


class Machine(NamedTuple):
    """AUDIT_ARCH value and number of clone(2); both machines are little-endian."""

    audit: int
    sys_clone: int


MACHINES = {"x86_64": Machine(0xC000003E, 56), "aarch64": Machine(0xC00000B7, 220)}


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def _instruction(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, operand)


def program(refusals: set[str], machine: Machine) -> bytes:
    """The filter as an array of struct sock_filter."""
    allow = _instruction(RETURN, RET_ALLOW)
    parts = [_instruction(LOAD, ARCHITECTURE), _instruction(EQUALS, machine.audit, 1, 0), allow]
    parts.append(_instruction(LOAD, NUMBER))
    for refusal, number in (("clone3", SYS_CLONE3), ("pidfds", SYS_PIDFD_OPEN)):
        if refusal in refusals:
            parts += [_instruction(EQUALS, number, 0, 1), _instruction(RETURN, RET_ERRNO | errno.ENOSYS)]
    if "siblings" in refusals:
        parts += [
            _instruction(EQUALS, machine.sys_clone, 0, 3),
            _instruction(LOAD, FIRST_ARGUMENT),
            _instruction(HAS_BITS, CLONE_PARENT, 0, 1),
            _instruction(RETURN, RET_ERRNO | errno.EPERM),
        ]
    return b"".join([*parts, allow])


def install(refusals: set[str]) -> None:
    """Put this process and all its descendants under the filter, for good. Raises OSError."""
    code = program(refusals, MACHINES[platform.machine()])
    libc = ctypes.CDLL(None, use_errno=True)
    filters = _Program(len(code) // 8, code)
    for arguments in ((PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(filters))):
        if libc.prctl(*arguments) != 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))


if __name__ == "__main__":
    separator = sys.argv.index("--")
    install(set(sys.argv[1:separator]))
    os.execvp(sys.argv[separator + 1], sys.argv[separator + 1 :])
