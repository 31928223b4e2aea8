"""Which kind of file system a path is on: statfs(2). SQLite's log and flock(2) need one that only this machine writes.

Sources: linux/magic.h, statfs(2), sqlite.org/wal.html ("WAL does not work over a network filesystem").
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import msgspec

#: File systems of which another machine may have the other end.
NETWORK = {
    0x6969: "nfs",
    0x517B: "smb",
    0xFF534D42: "cifs",
    0xFE534D42: "smb2",
    0x564C: "ncp",
    0x5346414F: "afs",
    0x6B414653: "afs",
    0x73757245: "coda",
    0x00C36400: "ceph",
    0x0BD00BD0: "lustre",
    0x47504653: "gpfs",
    0x01161970: "gfs2",
    0x7461636F: "ocfs2",
    0x19830326: "beegfs",
    0x20030528: "orangefs",
    0xAAD7AAEA: "panfs",
}
#: Served by another program, which may be anywhere and keep its own promises.
SERVED = {0x65735546: "fuse", 0x01021997: "9p", 0x786F4256: "vboxsf", 0xBACBACBC: "vmhgfs"}
#: Gone with the machine's power, or with the container.
VOLATILE = {0x01021994: "tmpfs", 0x858458F6: "ramfs", 0x794C7630: "overlay"}
#: As good as any; listed for their names.
LOCAL = {0xEF53: "ext4", 0x58465342: "xfs", 0x9123683E: "btrfs", 0x2FC12FC1: "zfs", 0xF2F52010: "f2fs"}
#: Larger than struct statfs of any architecture, bytes.
_STATFS_BYTES = 512


class FileSystem(msgspec.Struct, frozen=True, kw_only=True):
    """What can be told of a file system by its kind; ``name`` is its number in hexadecimal where we know no name."""

    name: str
    network: bool
    served: bool
    volatile: bool


def file_system_of(path: Path) -> FileSystem:
    """The file system of ``path``, or of the nearest directory above it that exists. Raises OSError."""
    magic = magic_of(nearest(path))
    known = NETWORK | SERVED | VOLATILE | LOCAL
    return FileSystem(
        name=known.get(magic, f"{magic:#x}"),
        network=magic in NETWORK,
        served=magic in SERVED,
        volatile=magic in VOLATILE,
    )


def nearest(path: Path) -> Path:
    """``path``, or the nearest directory above it that exists, as far as we may look."""
    path = Path(os.path.abspath(path))
    while not os.path.exists(path) and path != path.parent:
        path = path.parent
    return path


def magic_of(path: Path) -> int:
    """``f_type`` of statfs(2). Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    if libc.statfs(os.fsencode(path), buffer) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), str(path))
    # The first field, a long on the machines that we run on; a magic number has 32 bits.
    return ctypes.c_long.from_buffer(buffer).value & 0xFFFFFFFF
