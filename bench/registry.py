"""Crews for the measurements: factories that say when they were called, and crews that want to be stopped."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from tests.crews import fake_crews, real_crews

#: Environment variable that names the file for ``pid monotonic_ns``, one line for every call of a factory.
STAMPS = "BENCH_STAMPS"


def _stamped(factory: Callable[[], Any]) -> Callable[[], Any]:
    def build() -> Any:
        line = f"{os.getpid()} {time.monotonic_ns()}\n".encode()
        file = os.open(os.environ[STAMPS], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(file, line)
        os.close(file)
        return factory()

    return build


CREWS: dict[str, Callable[[], Any]] = {
    "fake": _stamped(fake_crews.Instant),
    "real": _stamped(real_crews.support),
    "blocking": real_crews.blocking,
    "daemon": real_crews.daemon,
}
