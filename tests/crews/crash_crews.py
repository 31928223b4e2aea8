"""The counted crews in a registry that makes its template, workers and keepers follow the plan of a crash build."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tests.crews import counted_crews, effect_crews, fake_crews
from tests.support import crash_build


class Talking(counted_crews.Ticking):
    """Streams numbered chunks, and prints a line for each into the job's log."""

    def kickoff(self, inputs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        for chunk in super().kickoff(inputs):
            sys.stdout.write(f"{chunk['content']}\n")
            yield chunk


CREWS: dict[str, Callable[[], Any]] = {
    **counted_crews.CREWS,
    "talking": counted_crews.counted(Talking),
    "paying": counted_crews.counted(effect_crews.Scripted),
    "trainee": fake_crews.Instant,
    "unmade": fake_crews.factory_raises,
}

crash_build.install()
