"""The instant crew and one that waits, with a witness: every factory call and every execution adds a line to a file.

The file is WITNESS_FILE, opened with O_APPEND; a line is one write(2): what happened, to which crew or Action, and when
on CLOCK_MONOTONIC, which is the same for all processes of the machine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.crews import stop_crews
from tests.crews.fake_crews import Instant


class Line(NamedTuple):
    """``what`` is ``factory`` (``whose``: the crew) or ``execution`` (the Action, as ``inputs.action`` has it)."""

    what: str
    whose: str
    at_ns: int


def note(what: str, whose: str) -> None:
    """Add a line."""
    fd = os.open(os.environ["WITNESS_FILE"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(fd, f"{what} {whose} {time.monotonic_ns()}\n".encode("ascii"))
    os.close(fd)


def read(path: Path) -> list[Line]:
    """Every line so far."""
    if not path.exists():
        return []
    lines = (line.split() for line in path.read_text(encoding="ascii").splitlines())
    return [Line(what, whose, int(at)) for what, whose, at in lines]


class Witnessed(Instant):
    """Every operation at once; ``run`` is witnessed."""

    def kickoff(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        note("execution", str(inputs.get("action", "-")))
        return super().kickoff(inputs)


class Turnstile(stop_crews.Turnstile):
    """Waits for the file ``inputs.release``; witnessed."""

    def kickoff(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        note("execution", str(inputs["action"]))
        return super().kickoff(inputs)


def witnessed(crew_id: str, make: Callable[[], Any]) -> Callable[[], Any]:
    """A factory whose calls are witnessed."""

    def factory() -> Any:
        note("factory", crew_id)
        return make()

    return factory


CREWS: dict[str, Callable[[], Any]] = {
    crew_id: witnessed(crew_id, make)
    for crew_id, make in {"instant": Witnessed, "turnstile": Turnstile, "support": Instant}.items()
}
