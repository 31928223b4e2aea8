"""A process whose wall clock is elsewhere: ``python -m tests.effects.clock LEDGER URL JUMP``; prints two outcomes."""

from __future__ import annotations

import os
import sys
import time

from protocol.errors import CrewError
from tests.effects.dying import pay
from worker.effect import effect

JUMPS = {"+1h": 3600.0, "-1h": -3600.0, "+1y": 365 * 86400.0}


def main(ledger: str, url: str, jump: str) -> None:
    """Pay what is settled and what is unknown."""
    if "LD_PRELOAD" not in os.environ:
        real = time.time
        time.time = lambda: real() + JUMPS[jump]
    effect.use_ledger(ledger, action="elsewhen")
    sys.stdout.write(f"{pay(url)('17', 120.0)}\n")
    try:
        sys.stdout.write(f"{pay(url)('18', 1.0)}\n")
    except CrewError as error:
        sys.stdout.write(f"{error.code}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
