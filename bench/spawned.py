"""Baseline of the memory: a child of multiprocessing that kicks the crew off and stays until our stdin ends."""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing.synchronize import Event


def keep(ready: Event, end: Event) -> None:
    """The child."""
    from bench.registry import CREWS

    next(CREWS["kept"]().kickoff({}))
    ready.set()
    end.wait()


def main() -> None:
    """Say ``ready`` and the child's pid."""
    context = multiprocessing.get_context("spawn")
    ready, end = context.Event(), context.Event()
    child = context.Process(target=keep, args=(ready, end))
    child.start()
    ready.wait()
    print(f"ready {child.pid}", flush=True)
    sys.stdin.read()
    end.set()
    child.join()


if __name__ == "__main__":
    main()
