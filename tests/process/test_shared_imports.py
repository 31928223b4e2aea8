"""What a forked worker would import for every job is imported once, where all of them share it."""

from __future__ import annotations

from pathlib import Path

from tests.support.server import ServerFactory

#: Says what was loaded when the factory was called, and what was when the crew was.
LOOKING = """
import sys

import crewai


class Looking:
    def __init__(self):
        self.before = set(sys.modules)

    def kickoff(self, inputs):
        return {"raw": "", "late": sorted(set(sys.modules) - self.before), "crewai": "crewai.mcp.client" in self.before}


CREWS = {"looking": Looking}
"""


def test_a_forked_worker_imports_nothing_between_its_factory_and_its_kickoff(
    start_server: ServerFactory, tmp_path: Path
) -> None:
    (tmp_path / "looking.py").write_text(LOOKING, encoding="ascii")
    server = start_server(registry="looking:CREWS", python_path=(tmp_path,), settings={"launch": "fork"})
    seen = server.client().start("a", "looking").expect(200)
    assert seen["crewai"]
    assert seen["late"] == []
