"""Prepares a template's memory for its forks: less to copy while forking, less to copy when the child writes.

A fork copies one page table entry for each resident 4 KiB of memory, and its end takes them down again; a huge page
has one for 2 MiB. A child's first write to a page copies that page, and an allocator that hands out what was freed
during the import writes all over the heap. Each step is optional: a kernel or libc without it changes only speed.
Sources: MADV_COLLAPSE in madvise(2), malloc_trim(3), the free lists of CPython's Objects/obmalloc.c.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

MADV_COLLAPSE = 25
HUGE_BYTES = 1 << 21
#: Of CPython's small-object allocator: sizes come in steps, up to a largest, and one size fills a pool.
STEP_BYTES, LARGEST_BYTES, POOL_BYTES = 16, 512, 1 << 14
#: Objects of one size at most; a few thousand are usual.
FILL_LIMIT = 50_000
#: Below glibc's smallest threshold for mmap, and larger than anything it keeps in a cache.
SORTING_BYTES = 100_000
#: An empty bytes object.
BYTES_HEADER = 33


def fill_holes() -> list[object]:
    """Take up the free places between the objects that live, so that a child's new objects lie together.

    Returns what fills them; it must be kept. The memory was resident before.
    """
    filling: list[object] = []
    for size in range(STEP_BYTES, LARGEST_BYTES + 1, STEP_BYTES):
        make = _maker(size)
        batch = POOL_BYTES // size // 2
        for _ in range(FILL_LIMIT // batch):
            made = [make() for _ in range(batch)]
            filling += made
            if len({id(each) // POOL_BYTES for each in made}) <= 2:
                break  # half a pool's worth of objects lies together: the holes are filled
    return filling


def _maker(size: int) -> Callable[[], object]:
    """Makes objects of exactly that size which no free list of their type keeps."""
    if size == STEP_BYTES:
        return object
    if size == 2 * STEP_BYTES:
        return lambda: complex(1, 1)
    return lambda: bytes(size - BYTES_HEADER)


def tidy() -> None:
    """Have the C allocator merge and sort what was freed, which a child would do at its first large request."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    bytearray(SORTING_BYTES)


def collapse() -> Iterator[None]:
    """Put anonymous memory into huge pages, one a step of some ms, so that a caller can turn to work in between."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for start, end in _writable_anonymous():
        first = -(-start // HUGE_BYTES) * HUGE_BYTES
        for address in range(first, end - HUGE_BYTES + 1, HUGE_BYTES):
            madvise(address, HUGE_BYTES, MADV_COLLAPSE)
            yield


def _writable_anonymous() -> list[tuple[int, int]]:
    """Start and end of private mappings without a file that we may write (proc_pid_maps(5))."""
    found = []
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            span, permissions, _, _, inode, *name = line.split(maxsplit=5)
            if permissions == "rw-p" and inode == "0" and not (name and name[0].startswith("[stack")):
                start, _, end = span.partition("-")
                found.append((int(start, 16), int(end, 16)))
    return found
