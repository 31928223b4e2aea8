"""Crews on CrewAI's own ``LLM`` with a model behind HTTP, whose address is MODEL_URL. No key and no other network."""

from __future__ import annotations

import os

from crewai import LLM, Agent, Crew, Task
from crewai.tools import BaseTool, tool

from tests.crews.model_readers import in_a_child


def _crew(name: str, tools: list[BaseTool]) -> Crew:
    # CrewAI's own client of OpenAI, and no litellm; it insists on a key.
    llm = LLM(model="openai/gpt-4o-mini", base_url=f"{os.environ['MODEL_URL']}/v1", api_key="none", max_retries=2)
    agent = Agent(role=name, goal="answer", backstory="works here", llm=llm, tools=tools, allow_delegation=False)
    task = Task(name=name, description="{say}", expected_output="an answer", agent=agent)
    return Crew(name=name, agents=[agent], tasks=[task])


def speaker() -> Crew:
    """Has the model say ``inputs.say``."""
    return _crew("speaker", [])


@tool("add_numbers")
def add_numbers(left: int, right: int) -> str:
    """Add two numbers."""
    return str(left + right)


def adder() -> Crew:
    """The same, with a tool."""
    return _crew("adder", [add_numbers])


CREWS = {"speaker": speaker, "adder": adder, "in_a_child": in_a_child}
