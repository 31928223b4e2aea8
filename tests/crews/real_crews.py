"""A registry of real CrewAI crews on scripted models. Nothing is built at import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from crewai import Agent, Crew, Process, Task
from crewai.knowledge.source.string_knowledge_source import StringKnowledgeSource
from crewai.project import CrewBase, agent, crew, task
from crewai.tools import tool
from pydantic import BaseModel

from tests.crews.scripted_llm import EMBEDDER, Prompt, Script, ScriptedLLM, final, tool_call, use_tool

HEARTBEAT_SCRIPT = str(Path(__file__).with_name("heartbeat.py"))
#: How long ``blocking`` and ``daemon`` block where neither the inputs (``seconds``) nor BLOCK_S say.
DEFAULT_BLOCK_S = 60.0
BEE_FACT = "The queen of hive seven is called Melissa."
SEA_FACT = "the sea is salty"
ANT_FACT = "The ants of hill nine march at dawn."


def _agent(role: str, script: Script, **options: Any) -> Agent:
    llm_options = {name: options.pop(name) for name in ("native_tools", "chunk_size", "tokens") if name in options}
    llm = ScriptedLLM(script, **llm_options)
    return Agent(role=role, goal="help", backstory="works here", llm=llm, allow_delegation=False, **options)


def _single(role: str, description: str, script: Script, **crew_options: Any) -> Crew:
    """A crew of one agent with one task."""
    agent_options = crew_options.pop("agent_options", {})
    task_options = crew_options.pop("task_options", {})
    worker = _agent(role, script, **agent_options)
    work = Task(name=role, description=description, expected_output="an answer", agent=worker, **task_options)
    return Crew(name=role, agents=[worker], tasks=[work], **crew_options)


def support() -> Crew:
    """Two agents; always answers ``case triaged`` with five tokens in all."""
    reader = _agent("Reader", lambda prompt: final("a broken lamp"), tokens=2)
    triager = _agent("Triager", lambda prompt: final("case triaged"), tokens=3)
    read = Task(name="read", description="Read the case", expected_output="a summary", agent=reader)
    triage = Task(name="triage", description="Triage it", expected_output="a verdict", agent=triager, context=[read])
    return Crew(name="support", agents=[reader, triager], tasks=[read, triage], process=Process.sequential)


def topical() -> Crew:
    """Answers with the topic of its inputs."""

    def answer(prompt: Prompt) -> str:
        return final("about " + prompt.text.partition("Topic: ")[2].partition("!")[0])

    return _single("topical", "Topic: {topic}!", answer)


def _knowing(name: str, fact: str) -> Callable[[], Crew]:
    """A crew that says whether its fact was in the prompt."""

    def build() -> Crew:
        def answer(prompt: Prompt) -> str:
            return final("told" if fact in prompt.text else "not told")

        source = StringKnowledgeSource(content=fact)
        description = f"Repeat: {fact[:20]}"
        return _single(name, description, answer, knowledge_sources=[source], embedder=EMBEDDER)

    return build


def memory() -> Crew:
    """Says that the sea is salty, and next time that it remembers so."""

    def script(prompt: Prompt) -> str:
        return final("I remember" if SEA_FACT in prompt.text else SEA_FACT)

    return _single("memory", "Tell me how the sea is", script, memory=True, embedder=EMBEDDER)


def _block(prompt: Prompt) -> str:
    time.sleep(prompt.number(r"Block for ([0-9.]+) s", float(os.environ.get("BLOCK_S", DEFAULT_BLOCK_S))))
    return final("awake")


def blocking() -> Crew:
    """Its LLM call blocks in its thread: ``inputs.seconds``, else BLOCK_S."""
    return _single("blocking", "Block for {seconds} s", _block)


@tool("leave_heartbeat")
def leave_heartbeat(path: str) -> str:
    """Start a daemon that appends heartbeats to a file."""
    command = [sys.executable, "-I", "-S", HEARTBEAT_SCRIPT, path]
    subprocess.run(command, check=True, timeout=60, stdin=subprocess.DEVNULL)
    return "beating"


def daemon() -> Crew:
    """A tool leaves a daemon behind, then an LLM call blocks. ``inputs``: ``heartbeat`` (a path) and ``seconds``.

    Without inputs: HEARTBEAT_FILE and BLOCK_S.
    """

    def script(prompt: Prompt) -> str:
        if prompt.observed("beating"):
            return _block(prompt)
        path = prompt.text.partition("heartbeat file <")[2].partition(">")[0]
        return use_tool("leave_heartbeat", path=os.environ["HEARTBEAT_FILE"] if "{" in path else path)

    description = "Keep the heartbeat file <{heartbeat}>. Block for {seconds} s"
    return _single("daemon", description, script, agent_options={"tools": [leave_heartbeat]})


@tool("add_numbers")
def add_numbers(a: int, b: int) -> str:
    """Add two integers."""
    return str(a + b)


def calculator() -> Crew:
    """Uses a native tool call, then answers."""

    def script(prompt: Prompt) -> Any:
        return "the sum is 5" if prompt.calls else [tool_call("add_numbers", a=2, b=3)]

    return _single("calculator", "Add", script, agent_options={"tools": [add_numbers], "native_tools": True})


class Verdict(BaseModel):
    """What ``structured`` returns."""

    verdict: str
    score: float


def structured() -> Crew:
    """Answers with a pydantic model."""
    answer = json.dumps({"verdict": "guilty", "score": 0.5})

    def script(prompt: Prompt) -> str:
        return answer if prompt.response_model is Verdict else final(answer)

    return _single("structured", "Judge", script, task_options={"output_pydantic": Verdict})


def human() -> Crew:
    """Asks a human about its answer."""
    return _single("human", "Ask", lambda prompt: final("is it right?"), task_options={"human_input": True})


def failing() -> Crew:
    """Its model raises."""

    def script(prompt: Prompt) -> str:
        raise RuntimeError("the secret of the model")

    return _single("failing", "Fail", script)


def talkative() -> Crew:
    """Its first task streams some 370 chunks, its second blocks as ``blocking`` does."""
    talker = _agent("Talker", lambda prompt: final("x" * 320), chunk_size=1)
    sleeper = _agent("Sleeper", _block)
    talk = Task(name="talk", description="Talk", expected_output="words", agent=talker)
    sleep = Task(name="sleep", description="Block for {seconds} s", expected_output="quiet", agent=sleeper)
    return Crew(name="talkative", agents=[talker, sleeper], tasks=[talk, sleep])


class Wrapper:
    """A duck type around a real crew, whose stream it passes on."""

    def kickoff(self, inputs: dict[str, Any]) -> Generator[Any, None, Any]:
        inner = support()
        inner.stream = True
        output = inner.kickoff(inputs=inputs)
        yield from output
        return output.result


@CrewBase
class Project:
    """The ordinary project layout: methods here, words in ``config/*.yaml``."""

    agents: Any
    tasks: Any
    agents_config: Any
    tasks_config: Any

    @agent
    def clerk(self) -> Agent:
        return Agent(config=self.agents_config["clerk"], llm=ScriptedLLM(lambda prompt: final("filed")))

    @task
    def filing(self) -> Task:
        return Task(config=self.tasks_config["filing"])

    @crew
    def crew(self) -> Crew:
        return Crew(agents=self.agents, tasks=self.tasks)


CREWS: dict[str, Any] = {
    "support": support,
    "topical": topical,
    "knowledge": _knowing("knowledge", BEE_FACT),
    "other_knowledge": _knowing("other_knowledge", ANT_FACT),
    "memory": memory,
    "blocking": blocking,
    "daemon": daemon,
    "calculator": calculator,
    "structured": structured,
    "human": human,
    "failing": failing,
    "talkative": talkative,
    "project": Project,
    "wrapper": Wrapper,
}

EVALUATORS: dict[str, Any] = {"scripted": lambda: ScriptedLLM(lambda prompt: final("scored"))}


def with_objects() -> dict[str, Any]:
    """A registry whose entries were built at import, as a module-level crew is."""
    built = support()
    return {"object": support(), "cached": lambda: built}
