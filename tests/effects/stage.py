"""What scenes are made of: a stage with a provider that counts, tools, crews, and a model that follows a script."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from crewai import Agent, Crew, Task
from crewai.tools import tool

from demo.payments import provider
from tests.crews.scripted_llm import Prompt, ScriptedLLM, final, tool_call, use_tool
from worker.effect import effect

Script = Callable[[Prompt], Any]


class Stage:
    """Where a scene plays. ``name`` is what the provider is charged for."""

    def __init__(self, name: str, url: str, *, guarded: bool) -> None:
        self.name, self.url, self.guarded = name, url, guarded

    def act(self, what: str = "") -> str:
        """Take effect at the provider."""
        made = provider.charge(self.url, self.name, 1.0)
        return f"charged {made['id']}{what}"

    def guard(self, **policy: Any) -> Callable[[Any], Any]:
        """The decorator, or none."""
        return effect(**policy) if self.guarded else lambda function: function

    def tool(self, *, fail: bool = False, **policy: Any) -> Any:
        """A tool ``pay`` that acts and, with ``fail``, raises then."""

        @tool("pay")
        @self.guard(**policy)
        def pay(invoice: str) -> str:
            """Pay an invoice."""
            done = self.act()
            if fail:
                raise ConnectionError("the answer was lost")
            return done

        return pay

    def crew(self, script: Script, tools: list[Any], *, native: bool = False, **task: Any) -> Crew:
        """One agent, one task."""
        llm = ScriptedLLM(script, native_tools=native)
        agent = Agent(role="Clerk", goal="pay", backstory="b", llm=llm, tools=tools, allow_delegation=False)
        return Crew(
            name=self.name,
            agents=[agent],
            tasks=[Task(name="pay", description="Pay scene {invoice}", expected_output="e", agent=agent, **task)],
        )


def paying(*, native: bool = False, calls: int = 1, name: str = "pay", **arguments: Any) -> Script:
    """Call the tool ``calls`` times at once or, in text, once; then repeat what the tool said."""

    def script(prompt: Prompt) -> Any:
        if heard := observed(prompt):
            return heard if native else final(heard)
        wanted = arguments or {"invoice": invoice_of(prompt)}
        if native:
            return [tool_call(name, **wanted) | {"id": f"call_{at}"} for at in range(calls)]
        return use_tool(name, **wanted)

    return script


def invoice_of(prompt: Prompt) -> str:
    """The invoice that the task names, which is the scene's name."""
    found = re.search(r"Pay scene (\w+)", prompt.text)
    assert found is not None, prompt.text
    return found[1]


def observed(prompt: Prompt) -> str:
    """What the last tool call of this conversation gave, empty before it."""
    if isinstance(prompt.messages, str):
        return ""
    for message in reversed(prompt.messages):
        content = str(message.get("content") or "")
        if message["role"] == "tool":
            return content
        if message["role"] == "assistant" and "Observation:" in content:
            return content.rpartition("Observation:")[2].strip().splitlines()[0]
    return ""


def failing_after_tool(script: Script, times: int = 1) -> Script:
    """The provider of the model fails once the tool has answered, ``times`` times; CrewAI enters the task again."""
    left = [times]

    def failing(prompt: Prompt) -> Any:
        if observed(prompt) and left[0]:
            left[0] -= 1
            raise RuntimeError("the model's provider failed")
        return script(prompt)

    return failing


def run(crew: Crew) -> dict[str, Any]:
    """Kick off; what came out, and the codes of the tool failures."""
    output = crew.kickoff(inputs={"invoice": crew.name})
    return {"raw": output.raw, "codes": [record.failure.code for record in output.tasks_output[0].tool_failures]}
