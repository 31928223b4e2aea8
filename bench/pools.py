"""Baselines of the start: processes of the standard library and of pebble that import the registry for themselves.

``python -m bench.pools KIND SIZE REGISTRY``: starts SIZE calls at once, prints as JSON after how many ms each factory
was called.
"""

from __future__ import annotations

import concurrent.futures
import importlib
import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.measure import Unmet
from bench.stamps import STAMPS, read_stamps

ROOT = Path(__file__).resolve().parents[1]
DEADLINE_S = 300.0
#: Ends with status 3 where pebble is missing.
MISSING = 3


def measure_pool(kind: str, size: int, *, registry: str, stamps: Path) -> list[float]:
    """ms from the start of SIZE processes to the first line of each one's factory. Raises Unmet."""
    stamps.unlink(missing_ok=True)
    process = subprocess.run(
        [sys.executable, "-m", "bench.pools", kind, str(size), registry],
        cwd=ROOT,
        env={**os.environ, STAMPS: str(stamps), "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=DEADLINE_S,
        check=False,
    )
    if process.returncode == MISSING:
        raise Unmet("pebble is not installed (pip install -e '.[bench]')")
    if process.returncode != 0:
        raise RuntimeError(process.stderr.decode("utf-8", "replace")[-2000:])
    found: list[float] = json.loads(process.stdout)
    return found


def call_factory(registry: str) -> None:
    """What the child does: import everything, call the factory."""
    importlib.import_module(registry).CREWS["fake"]()


def _with_multiprocessing(size: int, registry: str) -> None:
    context = multiprocessing.get_context("spawn")
    children = [context.Process(target=call_factory, args=(registry,)) for _ in range(size)]
    for child in children:
        child.start()
    for child in children:
        child.join()


def _with_futures(size: int, registry: str) -> None:
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(size, mp_context=context, max_tasks_per_child=1) as pool:
        for called in [pool.submit(call_factory, registry) for _ in range(size)]:
            called.result()


def _with_pebble(size: int, registry: str) -> None:
    pool_type: Any = importlib.import_module("pebble").ProcessPool
    context = multiprocessing.get_context("spawn")
    with pool_type(max_workers=size, max_tasks=1, context=context) as pool:
        for called in [pool.schedule(call_factory, args=[registry]) for _ in range(size)]:
            called.result()


KINDS = {"multiprocessing": _with_multiprocessing, "futures": _with_futures, "pebble": _with_pebble}


def main() -> int:
    """Measure one kind."""
    kind, size, registry = sys.argv[1:]
    if kind == "pebble" and importlib.util.find_spec("pebble") is None:
        return MISSING
    began_ns = time.monotonic_ns()
    KINDS[kind](int(size), registry)
    stamps = read_stamps(Path(os.environ[STAMPS]))
    if len(stamps) != int(size):
        raise RuntimeError(f"{len(stamps)} of {size} factories were called")
    print(json.dumps([(at_ns - began_ns) / 1e6 for at_ns in stamps.values()]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
