"""Real CrewAI crews under the supervisor: stages of ``tests.effects.stage``, each crew charging under its own id.

``PAYMENTS_URL`` names the provider.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from crewai import Crew
from crewai.tools import tool

from tests.crews.scripted_llm import Prompt, final, use_tool
from tests.effects.stage import Script, Stage, failing_after_tool, paying


def _crew(script: Callable[[], Script], *, native: bool = False, **options: Any) -> Callable[[str], Crew]:
    """A crew whose tool ``pay`` is decorated."""

    def build(name: str) -> Crew:
        stage = _stage(name)
        return stage.crew(script(), [stage.tool(**options)], native=native)

    return build


def _stage(name: str) -> Stage:
    return Stage(name, os.environ["PAYMENTS_URL"], guarded=True)


def _third_party(name: str) -> Crew:
    """A tool that nobody decorated; it acts and raises, and its call is repeated."""
    stage = _stage(name)

    @tool("Third Party")
    def third_party(invoice: str, memo: str = "") -> str:
        """Pay an invoice."""
        stage.act()
        raise ConnectionError("the answer was lost")

    return stage.crew(paying(name="third_party", invoice=name), [third_party])


def _reworded(name: str) -> Crew:
    """A tool that nobody decorated; the model calls it twice, with another memo, and reports the second answer."""
    stage = _stage(name)

    @tool("Third Party")
    def third_party(invoice: str, memo: str = "") -> str:
        """Pay an invoice."""
        return stage.act()

    def script(prompt: Prompt) -> str:
        if prompt.calls < 2:
            return use_tool("third_party", invoice=name, memo=f"memo {prompt.calls}")
        return final(prompt.text.rpartition("Observation: ")[2].partition('"')[0].partition("\\n")[0])

    return stage.crew(script, [third_party])


BUILD: dict[str, Callable[[str], Crew]] = {
    "react_raises": _crew(paying, fail=True),
    "native_raises": _crew(lambda: paying(native=True), native=True, fail=True),
    "react_model_fails": _crew(lambda: failing_after_tool(paying())),
    "native_model_fails": _crew(lambda: failing_after_tool(paying(native=True)), native=True),
    "parallel": _crew(lambda: paying(native=True, calls=2), native=True),
    "parallel_with_key": _crew(lambda: paying(native=True, calls=2), native=True, key="invoice"),
    "across_actions": _crew(paying, key="invoice", scope="global"),
    "unguarded": _third_party,
    "third_party": _third_party,
    "read_only": _third_party,
    "reworded": _reworded,
    "wrong_tool": _third_party,
    "wrong_argument": _third_party,
    "wrong_lookup": _third_party,
}
CREWS = {name: lambda name=name, build=build: build(name) for name, build in BUILD.items()}
