"""The reference's runs.json for tests: records as it writes them, and the file as it leaves it on disk."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from protocol import canonical


def event(name: str, sequence: int, **data: Any) -> dict[str, Any]:
    """One event as the reference stores it."""
    return {"event": name, "sequence": sequence, "data": data}


def record(action_id: str = "a-1", **changes: Any) -> dict[str, Any]:
    """A run that completed; a change to ``...`` removes the field."""
    output = {"raw": f"done {action_id}", "token_usage": {}, "tasks_output": []}
    made: dict[str, Any] = {
        "action_id": action_id,
        "crew_id": "instant",
        "input_hash": "5" * 64,
        "operation": "run",
        "status": "completed",
        "output": output,
        "events": [
            event("started", 0, status="running", operation="run"),
            event("chunk", 1, content="é 🙂", task_index=0),
            event("completed", 2, **output),
        ],
    } | changes
    return {name: value for name, value in made.items() if value is not ...}


def running(action_id: str = "r-1", **changes: Any) -> dict[str, Any]:
    """A run that was under way when the file was written."""
    events = [event("started", 0, status="running", operation="run"), event("chunk", 1, content="half")]
    return record(action_id, **{"status": "running", "output": None, "events": events} | changes)


def encoded(records: Any) -> bytes:
    """The bytes that the reference writes: ASCII, compact, sorted at every level."""
    return canonical.canonical_bytes(records)


def write(path: Path, content: Any) -> Path:
    """Write records, or bytes as they are, to a private file in a private directory."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(fd, "wb") as file:
        file.write(content if isinstance(content, bytes) else encoded(content))
    return path


def parsed(path: Path) -> list[dict[str, Any]]:
    """The records of a runs.json, parsed."""
    found: list[dict[str, Any]] = json.loads(path.read_bytes())
    return found
