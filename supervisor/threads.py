"""Threads that exist before they are needed, so that a machine without room for another one still gets work done."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from protocol.errors import StartError


def started_pool(size: int, name: str) -> ThreadPoolExecutor:
    """A pool that never has to start a thread again. Raises StartError when not all can be had.

    A ThreadPoolExecutor starts its threads on demand, and fails what it is given while pthread_create(3) says EAGAIN:
    at the user's RLIMIT_NPROC or the cgroup's pids.max, to which a job may have brought us.
    """
    pool = ThreadPoolExecutor(size, thread_name_prefix=name)
    together = threading.Barrier(size + 1)
    try:
        for _ in range(size):
            pool.submit(together.wait)
        together.wait()
    except RuntimeError as error:
        together.abort()
        pool.shutdown()
        raise StartError(f"{size} threads cannot be started: {error}; allow more processes") from None
    return pool
