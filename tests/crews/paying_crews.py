"""Crews whose tools take effect: a line in the file ``effects`` of the crew's home, for every time a body runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from crewai import Agent, Crew, Task
from crewai.tools import tool

from tests.crews.scripted_llm import Prompt, ScriptedLLM, final, use_tool
from worker.effect import effect


def act(what: str) -> str:
    """Take effect."""
    path = Path(os.environ["HOME"], "effects")
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{what}\n")
    return f"{what} {len(path.read_text(encoding='utf-8').splitlines())}"


@tool("pay")
@effect(volatile=("memo",))
def pay(invoice: str, memo: str = "") -> str:
    """Pay an invoice."""
    return act(invoice)


@tool("Third Party")
def third_party(invoice: str, memo: str = "") -> str:
    """Somebody else's tool; it cannot be decorated."""
    return act(invoice)


def _crew(own: Any, name: str, *, calls: int = 1) -> Crew:
    """Calls the tool ``calls`` times, each time with another memo, and answers with what it said last."""

    def script(prompt: Prompt) -> Any:
        if prompt.calls < calls:
            return use_tool(name, invoice="17", memo=f"memo {prompt.calls}")
        heard = prompt.text.rpartition("Observation: ")[2]
        return final(heard.partition('"')[0].partition("\\n")[0])

    clerk = Agent(
        role="Clerk", goal="pay", backstory="b", llm=ScriptedLLM(script), tools=[own], allow_delegation=False
    )
    return Crew(
        name="effects", agents=[clerk], tasks=[Task(description="Pay.", expected_output="a receipt", agent=clerk)]
    )


CREWS = {
    "decorated": lambda: _crew(pay, "pay"),
    "twice": lambda: _crew(pay, "pay", calls=2),
    "third_party": lambda: _crew(third_party, "third_party", calls=2),
    "unknown_tool": lambda: _crew(third_party, "third_party"),
    "unknown_argument": lambda: _crew(third_party, "third_party"),
}
EFFECTS = {
    "third_party": {"Third Party": {"key": "invoice", "volatile": ("memo",)}},
    "unknown_tool": {"fourth_party": {}},
    "unknown_argument": {"third_party": {"key": "number"}},
}
