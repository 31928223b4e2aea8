"""The live line of a job that is waited for: task, agent, tool, tokens, time. Shown on a terminal only."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from supervisor.cli.shared import printable
from supervisor.client import Event

REFRESHES_PER_S = 4
#: No part of the line is longer, in characters.
WIDEST_PART = 40


class Progress:
    """What a job's events say of where it is."""

    def __init__(self) -> None:
        self._phase = "queued"
        self._task = self._agent = self._tool = ""
        self._tokens = 0
        self._began = time.monotonic()

    def take(self, event: Event) -> None:
        """Read on."""
        self._phase = "running" if event.event in ("started", "chunk") else event.event
        data = event.data if event.event == "chunk" and isinstance(event.data, dict) else {}
        self._task = _name(data, "task_name") or self._task
        self._agent = _name(data, "agent_role") or self._agent
        kind = data.get("type")
        if kind == "tool_usage_started":
            self._tool = _name(data, "tool_name")
        elif isinstance(kind, str) and (kind.startswith("tool_") or kind == "task_started"):
            self._tool = ""
        usage = data.get("usage")
        if kind == "llm_call_completed" and isinstance(usage, dict):
            used = usage.get("total_tokens")
            self._tokens += used if isinstance(used, int) else 0

    def line(self, elapsed_s: float) -> str:
        """The line after that time."""
        parts = [self._phase, self._task, self._agent, self._tool and f"tool {self._tool}"]
        parts += [f"{self._tokens} tokens" if self._tokens else "", _duration(elapsed_s)]
        return " · ".join(part for part in parts if part)

    def __rich__(self) -> Text:
        return Text(self.line(time.monotonic() - self._began), no_wrap=True, overflow="ellipsis")


def _name(data: dict[str, Any], field: str) -> str:
    found = data.get(field)
    text = printable(found).replace("\n", " ") if isinstance(found, str) else ""
    return text if len(text) <= WIDEST_PART else f"{text[: WIDEST_PART - 1]}…"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02}"


def wanted(*, as_json: bool) -> bool:
    """Whether somebody would see it."""
    return not as_json and sys.stderr.isatty()


@contextlib.contextmanager
def shown(progress: Progress) -> Iterator[None]:
    """Show it on stderr, and leave nothing of it there."""
    with Live(progress, console=Console(stderr=True), refresh_per_second=REFRESHES_PER_S, transient=True):
        yield
