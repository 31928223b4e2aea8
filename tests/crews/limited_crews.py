"""Crews for tests of limits."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

POLL_S = 0.01
PATIENCE_S = 60.0


class Hungry:
    """Takes ``inputs.bytes`` of memory and writes to each page of it."""

    def kickoff(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        eaten = bytearray(int(inputs["bytes"]))
        eaten[:: 4096] = b"x" * len(range(0, len(eaten), 4096))
        return {"raw": "full"}


class Waiting:
    """Waits for the file ``inputs.release``."""

    def kickoff(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        give_up = time.monotonic() + PATIENCE_S
        while not Path(inputs["release"]).exists() and time.monotonic() < give_up:
            time.sleep(POLL_S)
        return {"raw": "waited"}


CREWS: dict[str, Callable[[], Any]] = {"hungry": Hungry, "waiting": Waiting}
