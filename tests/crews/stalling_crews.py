"""Workers that hang before they have said anything: the registry's import patches what every worker does first."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from tests.crews.fake_crews import Instant
from worker import job


def _stall_once() -> None:
    enter = job._enter_sandbox
    # The template's working directory is the server's own.
    marker = Path.cwd() / "stalled"

    def stall(launch: Any, *rest: Any, **named: Any) -> Any:
        if not marker.exists():
            marker.write_text(f"{os.getpid()}\n")
            os.kill(os.getpid(), signal.SIGSTOP)
        return enter(launch, *rest, **named)

    job._enter_sandbox = stall


_stall_once()

CREWS: dict[str, Any] = {"stalls_once": Instant}
