"""The fake crews with a witness: every execution appends its Action's id to EXECUTIONS_FILE, and never twice."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.crews import fake_crews as fakes


def note(inputs: Mapping[str, Any]) -> None:
    """Append the line of ``inputs.action`` with one write(2)."""
    fd = os.open(os.environ["EXECUTIONS_FILE"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(fd, f"{inputs['action']}\n".encode("ascii"))
    os.close(fd)


def counted(factory: Callable[[], Any]) -> Callable[[], Any]:
    """A factory of the same crew whose kickoff notes its execution first."""

    def make() -> Any:
        crew = factory()
        name = "kickoff" if hasattr(crew, "kickoff") else "akickoff"
        original = getattr(crew, name)

        def kickoff(inputs: Mapping[str, Any]) -> Any:
            note(inputs)
            return original(inputs)

        setattr(crew, name, kickoff)
        return crew

    return make


class Ticking:
    """Streams ``inputs.chunks`` numbered chunks, one every ``inputs.every_s`` seconds."""

    def kickoff(self, inputs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        for number in range(int(inputs["chunks"])):
            yield {"content": f"chunk {number} of {inputs['action']}"}
            time.sleep(float(inputs["every_s"]))


class Closing:
    """Sleeps on the event loop. A cancel makes it touch ``inputs.closes`` and close for a minute."""

    async def akickoff(self, inputs: Mapping[str, Any]) -> None:
        import asyncio

        try:
            await asyncio.sleep(60)
        finally:
            Path(inputs["closes"]).touch()
            await asyncio.sleep(60)


class BeatingSleeper:
    """Leaves a heartbeat daemon behind and sleeps."""

    def kickoff(self, inputs: Mapping[str, Any]) -> Any:
        fakes.Daemon().kickoff(inputs)
        return fakes.Sleeper().kickoff(inputs)


class Knowing:
    """Answers a knowledge query after a while: a read, whose outcome is never uncertain."""

    def kickoff(self, inputs: Mapping[str, Any]) -> str:
        return "unused"

    def query_knowledge(self, query: list[str], results_limit: int, score_threshold: float) -> list[Any]:
        note({"action": query[0]})
        time.sleep(0.02)
        return [{"content": query}]


CREWS: dict[str, Callable[[], Any]] = {
    **{
        name: counted(fakes.CREWS[name])
        for name in ("instant", "daemon", "sleeper", "factory_blocks", "crash", "failing", "flood")
    },
    "ticking": counted(Ticking),
    "closing": counted(Closing),
    "beating_sleeper": counted(BeatingSleeper),
    "knowing": Knowing,
}
