"""Who may import what (the rooms). One table; a violation fails with the file, the line and the rule."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = ("protocol", "supervisor", "worker")

#: What else than the standard library and itself a package may import at all.
ALLOWED: dict[str, frozenset[str]] = {
    "protocol": frozenset({"msgspec", "rfc8785"}),
    "supervisor": frozenset(
        {
            "protocol", "aiohttp", "click", "msgspec", "multidict", "prometheus_client", "psutil", "psycopg", "rich",
            "yarl",
        }
    ),
    "worker": frozenset({"protocol", "crewai", "msgspec", "numpy", "pydantic", "pydantic_core", "rfc8785"}),
}

#: Imports that belong to a few rooms only; a room's name covers what is below it and, with ``*``, what begins so.
RESERVED: dict[str, tuple[str, ...]] = {
    "aiohttp": ("supervisor.http", "supervisor.client", "supervisor.serve", "supervisor.fleet.relay"),
    "click": ("supervisor.cli",),
    "rich": ("supervisor.cli",),
    "sqlite3": ("supervisor.journal*", "worker.ledger"),
    "crewai": ("worker",),
    "prometheus_client": ("supervisor.metrics",),
    "psycopg": ("supervisor.fleet",),
    "multidict": ("supervisor.fleet.relay",),
    "yarl": ("supervisor.fleet.relay",),
}

#: Rooms of ours that only some may enter, so that nobody else can come to depend on what may not be installed.
CLOSED: dict[str, tuple[str, ...]] = {"supervisor.fleet": ("supervisor.fleet", "supervisor.serve", "supervisor.cli")}

#: Rooms that need nothing else of their package.
ALONE = ("supervisor.client",)

IO = {
    "asyncio", "concurrent", "ctypes", "fcntl", "http", "io", "logging", "mmap", "multiprocessing", "os",
    "pathlib", "resource", "select", "selectors", "shutil", "signal", "socket", "sqlite3", "ssl", "subprocess",
    "tempfile", "threading", "time", "urllib",
}  # fmt: skip
#: Rooms that only compute: no IO, no clock, no threads.
PURE = ("protocol", "supervisor.admission", "supervisor.run.ending", "supervisor.fleet.lease")


class Import(NamedTuple):
    """One imported module, where it stands."""

    line: int
    name: str


def imports(source: str, module: str, *, package: bool) -> Iterator[Import]:
    """Every module that ``source`` imports, anywhere in it: relative ones resolved, constant dynamic ones included."""
    here = module.split(".") if package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            name = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            yield from (Import(node.lineno, f"{name}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in {"import_module", "__import__", "find_spec", "run_module"} and node.args:
                yield from (Import(node.lineno, text) for text in _constant_start(node.args[0]))


def _constant_start(node: ast.expr) -> Iterator[str]:
    first = node.values[0] if isinstance(node, ast.JoinedStr) and node.values else node
    if isinstance(first, ast.Constant) and isinstance(first.value, str) and first.value:
        yield first.value


def within(module: str, room: str) -> bool:
    """Whether ``module`` is in ``room``."""
    return module.startswith(room[:-1]) if room.endswith("*") else f"{module}.".startswith(f"{room}.")


def violations(source: str, module: str, *, package: bool = False) -> list[str]:
    """Broken rules of one module's source."""
    top = module.partition(".")[0]
    broken = []
    for line, name in imports(source, module, package=package):
        root = name.partition(".")[0]
        if root != top and root not in sys.stdlib_module_names and root not in ALLOWED[top]:
            broken.append(f"{module}:{line} imports {name}: {top} may not import {root}")
        elif root in RESERVED and not any(within(module, room) for room in RESERVED[root]):
            broken.append(f"{module}:{line} imports {name}: only {', '.join(RESERVED[root])} may import {root}")
        elif any(within(name, room) and not any(within(module, one) for one in may) for room, may in CLOSED.items()):
            broken.append(f"{module}:{line} imports {name}: that room is closed to {module}")
        elif root == top and any(within(module, room) and not within(name, room) for room in ALONE):
            broken.append(f"{module}:{line} imports {name}: {module} stands alone")
        elif root in IO and any(within(module, room) for room in PURE):
            broken.append(f"{module}:{line} imports {name}: {module} only computes")
    return broken


def sources() -> list[tuple[str, Path]]:
    """(module, file) of everything that is shipped."""
    found = []
    for top in OURS:
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return found


def test_every_package_was_found() -> None:
    assert {module.partition(".")[0] for module, _ in sources()} == set(OURS)
    assert {"protocol.states", "supervisor.config.load", "worker"} <= {module for module, _ in sources()}


def test_no_module_leaves_its_room() -> None:
    broken = [
        rule
        for module, path in sources()
        for rule in violations(path.read_text(encoding="utf-8"), module, package=path.name == "__init__.py")
    ]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("protocol.states", "import supervisor.log"),
        ("protocol.states", "from worker import job"),
        ("protocol.states", "import aiohttp"),
        ("protocol.states", "import os"),
        ("protocol.states", "def f():\n    from pathlib import Path"),
        ("supervisor.log", "import worker"),
        ("supervisor.log", "from worker.job import run"),
        ("supervisor.log", "from .. import worker"),
        ("supervisor.log", "import crewai"),
        ("supervisor.log", "def f():\n    import crewai.tools as t"),
        ("supervisor.log", "__import__('crewai')"),
        ("supervisor.log", "import importlib\nimportlib.import_module(f'crewai.{x}')"),
        ("supervisor.log", "if TYPE_CHECKING:\n    import aiohttp"),
        ("supervisor.config.load", "import aiohttp.web"),
        ("supervisor.log", "import sqlite3"),
        ("supervisor.log", "import click"),
        ("supervisor.serve", "from rich.console import Console"),
        ("supervisor.climate", "import click"),
        ("supervisor.log", "import requests"),
        ("supervisor.jobs", "from prometheus_client import Counter"),
        ("supervisor.log", "from tests.support import procs"),
        ("supervisor.client.stream", "from supervisor.log import get_log"),
        ("supervisor.client", "from supervisor.http import edge"),
        ("supervisor.jobs", "import psycopg"),
        ("supervisor.jobs", "from supervisor.fleet import lease"),
        ("supervisor.http.routes", "from supervisor import fleet"),
        ("supervisor.fleet.ownership", "import aiohttp"),
        ("supervisor.admission", "import asyncio"),
        ("supervisor.admission", "from time import time"),
        ("worker.job", "import supervisor"),
        ("worker.job", "from supervisor.log import get_log"),
        ("worker.job", "import sqlite3"),
        ("worker.job", "import aiohttp"),
    ],
)
def test_a_violation_is_caught(module: str, source: str) -> None:
    assert len(violations(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("protocol.pipe", "import msgspec, json\nfrom protocol import frames\nfrom . import errors"),
        ("supervisor.http", "import aiohttp"),
        ("supervisor.http.routes", "from aiohttp import web"),
        ("supervisor.journal.writer", "import sqlite3"),
        ("supervisor.cli.jobs", "import click, rich.table"),
        ("supervisor.log", "import os\nfrom .config import load"),
        ("supervisor.client.stream", "import aiohttp\nfrom protocol import api\nfrom supervisor.client import sse"),
        ("supervisor.serve", "from supervisor.fleet import Fleet"),
        ("supervisor.fleet.database", "import psycopg\nfrom supervisor.fleet import schema"),
        ("worker.operations.kickoff", "from crewai import Crew\nfrom .. import job\nfrom protocol import frames"),
        ("worker.ledger", "import sqlite3"),
        ("worker.job", "importlib.import_module(name)"),
    ],
)
def test_what_a_room_may_import_passes(module: str, source: str) -> None:
    assert violations(source, module) == []
