"""The crews of the demo: real CrewAI agents, tasks and tools on the scripted model. Nothing is built at import."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from crewai import Agent, Crew, Task
from crewai.tools import tool

from demo.scripted_llm import Script, ScriptedLLM, final, use

HEARTBEAT = str(Path(__file__).with_name("heartbeat.py"))
#: How long a model call of ``lookout`` blocks: longer than anybody watches.
BLOCK_S = 60.0
#: Between two words of ``newsroom``, so that a person sees them come.
PACE_S = 0.04

FACTS = "A bee sees 2000 flowers a day. A hive eats 30 kg of honey a winter."
STORY = "Two thousand flowers a day, thirty kilos a winter, and then they sleep."


def _agent(role: str, script: Script, *, pace_s: float = 0.0, tools: tuple[Any, ...] = ()) -> Agent:
    llm = ScriptedLLM(script, pace_s=pace_s)
    return Agent(role=role, goal="do the task", backstory="demo", llm=llm, tools=list(tools), allow_delegation=False)


def newsroom() -> Crew:
    """A reporter collects facts, a writer makes a story of them."""
    reporter = _agent("Reporter", lambda said: final(FACTS), pace_s=PACE_S)
    writer = _agent("Writer", lambda said: final(STORY), pace_s=PACE_S)
    collect = Task(name="collect", description="Facts about {topic}", expected_output="facts", agent=reporter)
    write = Task(
        name="write", description="A story about {topic}", expected_output="a story", agent=writer, context=[collect]
    )
    return Crew(name="newsroom", agents=[reporter, writer], tasks=[collect, write])


@tool("light_the_lamp")  # type: ignore[untyped-decorator]
def light_the_lamp(path: str) -> str:
    """Start a process that writes heartbeats to a file."""
    subprocess.run([sys.executable, "-I", "-S", HEARTBEAT, path], check=True, stdin=subprocess.DEVNULL, timeout=30)
    return "the lamp burns"


def lookout() -> Crew:
    """Its tool leaves a process behind; then a model call blocks in its thread. ``inputs``: ``heartbeat``, a path."""

    def script(said: str) -> str:
        if "Observation: the lamp burns" not in said:
            return use("light_the_lamp", path=_between(said, "lamp <", ">"))
        time.sleep(BLOCK_S)
        return final("nothing seen")

    watchman = _agent("Watchman", script, tools=(light_the_lamp,))
    watch = Task(name="watch", description="Light the lamp <{heartbeat}>", expected_output="a report", agent=watchman)
    return Crew(name="lookout", agents=[watchman], tasks=[watch])


@tool("charge_card")  # type: ignore[untyped-decorator]
def charge_card(ledger: str, invoice: str) -> str:
    """Charge the card of an invoice: one line in the ledger for every time this runs."""
    with open(ledger, "a", encoding="utf-8") as file:
        file.write(f"charged {invoice} by pid {os.getpid()}\n")
    return f"charged {invoice}"


def billing() -> Crew:
    """Charges a card. ``inputs``: ``ledger``, a path, and ``invoice``."""

    def script(said: str) -> str:
        invoice = _between(said, "Charge invoice <", ">")
        if f"Observation: charged {invoice}" not in said:
            return use("charge_card", ledger=_between(said, "ledger <", ">"), invoice=invoice)
        return final(f"invoice {invoice} is paid")

    clerk = _agent("Clerk", script, tools=(charge_card,))
    description = "Charge invoice <{invoice}>, ledger <{ledger}>"
    charge = Task(name="charge", description=description, expected_output="a receipt", agent=clerk)
    return Crew(name="billing", agents=[clerk], tasks=[charge])


def _between(text: str, before: str, after: str) -> str:
    return text.partition(before)[2].partition(after)[0]


CREWS: dict[str, Callable[[], Crew]] = {"newsroom": newsroom, "lookout": lookout, "billing": billing}
