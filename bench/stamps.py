"""When a factory was called, as it says itself."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Environment variable that names the file for ``pid monotonic_ns``, one line for every call of a factory.
STAMPS = "BENCH_STAMPS"


def stamped(factory: Callable[[], Any]) -> Callable[[], Any]:
    """The factory with a stamp as its first line."""

    def build() -> Any:
        line = f"{os.getpid()} {time.monotonic_ns()}\n".encode()
        file = os.open(os.environ[STAMPS], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(file, line)
        os.close(file)
        return factory()

    return build


def read_stamps(path: Path) -> dict[int, int]:
    """Pid to the moment of its factory's first line, monotonic ns."""
    return {int(pid): int(at) for pid, at in (line.split() for line in path.read_text(encoding="ascii").splitlines())}
