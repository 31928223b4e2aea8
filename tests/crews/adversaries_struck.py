"""The hostile suite's crew below parents that die as soon as they see a child's end, before they tell it to anybody.

The parent is a keeper, or a template whose workers are its own children: both import this registry, or are forked by
who did.
"""

from __future__ import annotations

import os
import signal

from tests.crews.adversaries import CREWS
from worker import sandbox

__all__ = ["CREWS"]

see = sandbox.next_ended


def next_ended(pid: int | None = None) -> tuple[int, int] | None:
    ended = see(pid)
    if ended is not None:
        os.kill(os.getpid(), signal.SIGKILL)
    return ended


sandbox.next_ended = next_ended
