"""Crews without CrewAI for the measurements: instant, idle, with descendants, emitting."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.crews import fake_crews


class Idle:
    """Streams ``ready``, then sleeps."""

    def kickoff(self, inputs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """``inputs.seconds``: how long."""
        yield {"content": "ready"}
        time.sleep(float(inputs.get("seconds", 600)))


class Family:
    """Starts ``inputs.descendants`` processes, streams ``ready`` with their pids, then sleeps."""

    def kickoff(self, inputs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """All of them ignore SIGTERM, half of them lead sessions of their own."""
        # Ignored signals stay ignored by what is executed (signal(7)).
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        children = [
            subprocess.Popen(["sleep", "600"], start_new_session=number % 2 == 0)
            for number in range(inputs["descendants"])
        ]
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        yield {"content": "ready", "pids": [child.pid for child in children]}
        time.sleep(600)


class Emitter:
    """Streams ``inputs.events`` chunks of ``inputs.bytes`` of content, ``inputs.per_s`` a second or as fast as it can.

    Begins once ``inputs.gate`` exists. Every chunk says when it was emitted, monotonic ns.
    """

    def kickoff(self, inputs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Returns ``began_ns``."""
        while not Path(inputs["gate"]).exists():
            time.sleep(0.001)
        content, per_s = "x" * inputs.get("bytes", 60), inputs.get("per_s", 0)
        began_ns = time.monotonic_ns()
        for number in range(inputs["events"]):
            if per_s:
                _wait_until(began_ns + number * 1_000_000_000 // per_s)
            yield {"content": content, "emitted_ns": time.monotonic_ns()}
        return {"raw": "done", "began_ns": began_ns}


def _wait_until(at_ns: int) -> None:
    left_ns = at_ns - time.monotonic_ns()
    # What is due within the next millisecond is emitted at once: a sleep for each costs more than its event.
    if left_ns > 1_000_000:
        time.sleep(left_ns / 1e9)


def blocking_factory() -> Any:
    """A factory that takes its time."""
    time.sleep(3)
    return fake_crews.Instant()


CREWS: dict[str, Callable[[], Any]] = {
    "instant": fake_crews.Instant,
    "flood": fake_crews.Flood,
    "idle": Idle,
    "family": Family,
    "emitter": Emitter,
    "blocking_factory": blocking_factory,
}
