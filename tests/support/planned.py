"""A server that follows a plan of ``tests.support.crash_build``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.crash_build import PLAN, PlanFile
from tests.support.server import Server


class PlannedServer(Server):
    """Dies, fails or stands still where ``plan`` says; ``mutant`` as for any server."""

    def __init__(self, directory: Path, *, mutant: str | None = None, **options: Any) -> None:
        super().__init__(directory, mutant=mutant, **options)
        if mutant is None:
            self._program = ["tests.support.crash_build"]
        self.plan = PlanFile(directory / "plan")
        self.environment |= {PLAN: str(self.plan.path)}
