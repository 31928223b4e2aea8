"""A crew whose threads claim and settle as fast as the ledger answers."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from protocol.effects import Scope
from worker.effect import effect

RECEIPT = "r" * 98


class Claims:
    """``inputs``: ``threads``, ``effects`` of each, ``scope``, ``workers`` that must stand in ``gate`` first."""

    def kickoff(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns ``began_ns`` and ``ended_ns`` (monotonic), and ``waits_ms`` of every effect."""
        gate, count = Path(inputs["gate"]), inputs["effects"]
        scope = Scope(inputs.get("scope", "action"))
        (gate / str(os.getpid())).touch()
        while len(os.listdir(gate)) < inputs["workers"]:
            time.sleep(0.001)
        waits: list[list[float]] = [[] for _ in range(inputs["threads"])]
        threads = [
            threading.Thread(target=_claim, args=(f"{os.getpid()}-{number}", count, scope, waits[number]))
            for number in range(inputs["threads"])
        ]
        began = time.monotonic_ns()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ended = time.monotonic_ns()
        every = [wait for waited in waits for wait in waited]
        return {"raw": "done", "began_ns": began, "ended_ns": ended, "waits_ms": every}


def _claim(name: str, count: int, scope: Scope, waits: list[float]) -> None:
    for number in range(count):
        began = time.perf_counter()
        with effect.claim("charge", key=f"{name}-{number}", args={"amount": number}, scope=scope) as call:
            call.settle(RECEIPT)
        waits.append((time.perf_counter() - began) * 1000)


CREWS = {"claims": Claims}
