"""Registries that a test writes itself, as a module on the server's path."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from tests.support.server import Server, ServerFactory

#: The smallest registry that works.
GOOD = """
    class Crew:
        def kickoff(self, inputs):
            return {"raw": "fine"}

    CREWS = {"good": Crew}
"""


def write_registry(tmp_path: Path, *parts: str) -> Path:
    """Write the module ``my_registry``; returns the directory to put on the path."""
    directory = tmp_path / "registry"
    directory.mkdir(exist_ok=True)
    (directory / "my_registry.py").write_text("".join(textwrap.dedent(part) for part in parts), encoding="utf-8")
    return directory


def with_registry(make_server: ServerFactory, tmp_path: Path, *parts: str, **settings: Any) -> Server:
    """A server, not started, whose registry has these parts."""
    path = write_registry(tmp_path, *parts)
    return make_server(registry="my_registry:CREWS", python_path=(path,), settings=settings)
