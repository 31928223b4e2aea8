"""Baseline of the memory: a child of multiprocessing that kicks a crew off and stays until our stdin ends."""

from __future__ import annotations

import importlib
import multiprocessing
import sys
from multiprocessing.synchronize import Event


def keep(registry: str, ready: Event, end: Event) -> None:
    """The child."""
    next(importlib.import_module(registry).CREWS["kept"]().kickoff({}))
    ready.set()
    end.wait()


def main() -> None:
    """Say ``ready`` and the child's pid."""
    context = multiprocessing.get_context("spawn")
    ready, end = context.Event(), context.Event()
    child = context.Process(target=keep, args=(sys.argv[1], ready, end))
    child.start()
    ready.wait()
    print(f"ready {child.pid}", flush=True)
    sys.stdin.read()
    end.set()
    child.join()


if __name__ == "__main__":
    main()
