"""Crews that an operator looks at: one that prints, one that reports as CrewAI does; and those of the cases."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from tests.crews import case_crews
from tests.crews.case_crews import wait_for
from tests.crews.fake_crews import LLM_ANSWER


def say(text: str, file: TextIO) -> None:
    """Write a line that is there at once."""
    file.write(f"{text}\n")
    file.flush()


class Talker:
    """Prints, makes the file ``inputs.began``, waits for ``inputs.release``, and prints again."""

    def kickoff(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        say("first words", sys.stdout)
        say("a complaint", sys.stderr)
        if "began" in inputs:
            Path(inputs["began"]).touch()
            wait_for(inputs["release"])
        say("last words", sys.stdout)
        return LLM_ANSWER | {"raw": "said"}


class Reporter:
    """Says what it does as CrewAI's events do, waits for ``inputs.release`` where it is given, and answers in text."""

    async def akickoff(self, inputs: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        return self._chunks(inputs)

    async def _chunks(self, inputs: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        where = {"task_name": "write the letter", "agent_role": "Writer"}
        yield {"channel": "progress", "type": "task_started", **where}
        yield {"channel": "tools", "type": "tool_usage_started", "tool_name": "dictionary", **where}
        yield {"channel": "tools", "type": "tool_usage_finished", "tool_name": "dictionary", **where}
        yield {"channel": "progress", "type": "llm_call_completed", "usage": {"total_tokens": 1234}, **where}
        yield {"channel": "messages", "content": "Dear bees,"}
        if "release" in inputs:
            wait_for(inputs["release"])
        yield {"channel": "messages", "content": " yours."}


CREWS: dict[str, Callable[[], Any]] = {**case_crews.CREWS, "talker": Talker, "reporter": Reporter}
