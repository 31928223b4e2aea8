"""The crash points, read from the product's code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("protocol", "supervisor", "worker")
#: Where the journal's own hook is called: ``self._reach("commit")`` is the point ``journal.commit``.
WRITER = Path("supervisor/journal/writer.py")


class Point(NamedTuple):
    """One place in the code. ``writes``: something is about to be written, which may fail as well."""

    name: str
    writes: bool
    file: Path
    line: int


class PointNotFindable(AssertionError):
    """A call whose point cannot be read from the code."""


def points_in(source: str, file: Path) -> Iterator[Point]:
    """Every point of one module. Raises PointNotFindable for one whose name is no literal, or that is renamed."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "protocol.points":
            raise PointNotFindable(f"{file}:{node.lineno}: call points.reach or points.write, or nobody finds it")
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
        called = f"{owner}.{node.func.attr}"
        hooked = called == "self._reach" and file == WRITER
        if hooked or called in ("points.reach", "points.write"):
            name = node.args[0].value if len(node.args) == 1 and isinstance(node.args[0], ast.Constant) else None
            if not isinstance(name, str):
                raise PointNotFindable(f"{file}:{node.lineno}: a point's name must be one string literal")
            yield Point(
                f"journal.{name}" if hooked else name, hooked or called == "points.write", file, node.lineno
            )


def points_in_code() -> list[Point]:
    """All points, by name. Raises PointNotFindable, also for a name that stands in two places."""
    found: dict[str, Point] = {}
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            file = path.relative_to(ROOT)
            for point in points_in(path.read_text(encoding="utf-8"), file):
                first = found.setdefault(point.name, point)
                if first is not point:
                    raise PointNotFindable(f"{point.name} stands at {first.file}:{first.line} and {file}:{point.line}")
    return [found[name] for name in sorted(found)]
