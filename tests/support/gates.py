"""Files by which a crew and its test talk: the crew says where it is, the test says when it may go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support import procs

WAIT_S = 30.0
EVENTS = ("began", "closing", "release")


class Gate:
    """The files of one ``turnstile``, ``closer`` or ``gated`` job; ``name`` must be its own in ``directory``."""

    def __init__(self, directory: Path, name: str) -> None:
        self._files = {event: directory / f"{name}-{event}" for event in EVENTS}

    @property
    def input(self) -> dict[str, Any]:
        """What the crew needs of it."""
        return {event: str(path) for event, path in self._files.items()}

    def happened(self, event: str) -> bool:
        """Whether the crew has got there."""
        return self._files[event].exists()

    def wait(self, event: str) -> None:
        """Wait until the crew gets there."""
        procs.wait_until(lambda: self.happened(event), WAIT_S, self._files[event].name)

    def release(self) -> None:
        """Let the crew go on."""
        self._files["release"].touch()
