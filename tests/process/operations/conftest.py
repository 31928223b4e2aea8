"""Starts operations, each in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process.operation_child import FAKE, REAL, Child, Order

Start = Callable[..., Child]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start an operation: crew id, operation, its input as keywords; options of Order with ``order_``."""
    children: list[Child] = []

    def begin(crew_id: str, operation: str = "run", /, *, spec: str = REAL, order: Any = None, **input: Any) -> Child:
        options = {"job": f"job{len(children)}"} | (order or {})
        made = Child(Order(root=tmp_path, spec=spec, crew_id=crew_id, operation=operation, input=input, **options))
        children.append(made)
        return made

    yield begin
    for child in children:
        child.kill()


def fake(start: Start, crew_id: str, operation: str = "run", /, **options: Any) -> Child:
    """The same with a crew that only looks like one."""
    return start(crew_id, operation, spec=FAKE, **options)
