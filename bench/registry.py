"""Crews for the measurements: factories that say when they were called, and real crews that want to be stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from bench import fakes
from bench.stamps import stamped
from tests.crews import fake_crews, real_crews


class Kept:
    """Kicks a real crew with two agents off, streams ``ready``, then stays."""

    def kickoff(self, inputs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Until it is stopped."""
        real_crews.support().kickoff(inputs=dict(inputs))
        yield {"content": "ready"}
        time.sleep(600)


CREWS: dict[str, Callable[[], Any]] = {
    **fakes.CREWS,
    "fake": stamped(fake_crews.Instant),
    "real": stamped(real_crews.support),
    "blocking": real_crews.blocking,
    "daemon": real_crews.daemon,
    "kept": Kept,
}
