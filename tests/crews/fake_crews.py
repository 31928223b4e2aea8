"""A registry of duck-typed crews: instant, hostile or slow, and without CrewAI."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

HEARTBEAT_SCRIPT = str(Path(__file__).with_name("heartbeat.py"))
LLM_ANSWER: dict[str, Any] = {"raw": "done", "token_usage": {}, "tasks_output": []}


class Instant:
    """Every operation, at once. ``calls`` records names and arguments, and every output shows them."""

    def __init__(self) -> None:
        self.stream: bool | None = None
        self.tracing: bool | None = None
        self.calls: list[Any] = []

    def _note(self, name: str, *arguments: Any) -> dict[str, Any]:
        self.calls.append([name, *arguments])
        seen = {"stream": self.stream, "tracing": self.tracing, "crewai_loaded": "crewai" in sys.modules}
        return LLM_ANSWER | seen | {"calls": list(self.calls)}

    def kickoff(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return self._note("kickoff", inputs)

    async def kickoff_for_each_async(self, inputs: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return [self._note("kickoff_for_each_async", one) for one in inputs]

    def replay(self, task_id: str, inputs: Mapping[str, Any] | None) -> dict[str, Any]:
        return self._note("replay", task_id, inputs)

    def train(self, n_iterations: int, filename: str, inputs: Mapping[str, Any] | None) -> None:
        Path(filename).write_bytes(b"trained")

    def test(self, n_iterations: int, eval_llm: object, inputs: Mapping[str, Any] | None) -> None:
        self._note("test", n_iterations, str(eval_llm), inputs)

    def query_knowledge(self, query: list[str], results_limit: int, score_threshold: float) -> list[Any]:
        return [{"content": query, "limit": results_limit, "threshold": score_threshold}]

    def reset_memories(self, command_type: str) -> None:
        self._note("reset_memories", command_type)


class Echo:
    """Answers with its inputs."""

    def kickoff(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {"raw": "echo", "echo": inputs}


class Streaming:
    """An asynchronous crew: ``inputs.chunks`` chunks (2), as CrewAI's stream looks from outside."""

    def __init__(self) -> None:
        self.stream = False

    async def akickoff(self, inputs: Mapping[str, Any]) -> AsyncStream:
        return AsyncStream(int(inputs.get("chunks", 2)))


class AsyncStream:
    """Chunks that are objects with ``content``, and ``result`` at the end."""

    def __init__(self, chunks: int) -> None:
        self._chunks = chunks
        self.result: Any = None

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        for number in range(self._chunks):
            yield {"content": f"chunk {number}"}
        self.result = LLM_ANSWER | {"raw": "streamed"}


class AsyncSleeper:
    """Streams ``sleeping``, then sleeps on the event loop until it is cancelled (or ``inputs.seconds``, 60).

    ``inputs.closed`` names a file that it makes while closing.
    """

    async def akickoff(self, inputs: Mapping[str, Any]) -> AsyncIterator[str]:
        return self._chunks(inputs)

    async def _chunks(self, inputs: Mapping[str, Any]) -> AsyncIterator[str]:
        try:
            yield "sleeping"
            await asyncio.sleep(float(inputs.get("seconds", 60)))
        finally:
            if "closed" in inputs:
                Path(inputs["closed"]).touch()


class Sleeper:
    """Every long operation sleeps in this thread for ``inputs.seconds`` (60)."""

    def kickoff(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        time.sleep(float(inputs.get("seconds", 60)))
        return LLM_ANSWER

    def kickoff_for_each(self, inputs: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return [self.kickoff(one) for one in inputs]

    def replay(self, task_id: str, inputs: Mapping[str, Any] | None) -> dict[str, Any]:
        return self.kickoff(inputs or {})

    def train(self, n_iterations: int, filename: str, inputs: Mapping[str, Any] | None) -> None:
        self.kickoff(inputs or {})

    def test(self, n_iterations: int, eval_llm: object, inputs: Mapping[str, Any] | None) -> None:
        self.kickoff(inputs or {})

    def query_knowledge(self, query: list[str], results_limit: int, score_threshold: float) -> list[Any]:
        time.sleep(60)
        return []

    def reset_memories(self, command_type: str) -> None:
        time.sleep(60)


class Daemon:
    """Leaves a heartbeat daemon behind (``inputs.heartbeat``, else HEARTBEAT_FILE) and returns at once."""

    def kickoff(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        path = str(inputs.get("heartbeat") or os.environ["HEARTBEAT_FILE"])
        command = [sys.executable, "-I", "-S", HEARTBEAT_SCRIPT, path]
        subprocess.run(command, check=True, timeout=60, stdin=subprocess.DEVNULL)
        return LLM_ANSWER


class Flood:
    """Chunks as fast as they are taken: ``inputs.chunks``, else for ever; ``inputs.bytes`` of content each (100)."""

    def kickoff(self, inputs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        content = "x" * int(inputs.get("bytes", 100))
        left = int(inputs.get("chunks", -1))
        while left != 0:
            left -= 1
            yield {"content": content}


class Crash:
    """Ends its process: ``inputs.how`` is ``signal`` (SIGKILL), ``exit`` (os._exit 3) or ``raise`` (SystemExit)."""

    def kickoff(self, inputs: Mapping[str, Any]) -> None:
        how = inputs.get("how", "signal")
        if how == "exit":
            os._exit(3)
        if how == "raise":
            raise SystemExit(3)
        os.kill(os.getpid(), signal.SIGKILL)


class Failing:
    """Raises from every operation; the text is a secret."""

    def kickoff(self, inputs: Mapping[str, Any]) -> None:
        raise ValueError("the secret of the crew")

    def query_knowledge(self, query: list[str], results_limit: int, score_threshold: float) -> None:
        raise LookupError("the secret of the crew")


class BigOutput:
    """An output of ``inputs.bytes`` characters (5 MiB)."""

    def kickoff(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {"raw": "x" * int(inputs.get("bytes", 5 * 1024 * 1024))}


class BatchOfOne:
    """Has ``kickoff`` alone: no batch, no replay, nothing else."""

    def kickoff(self, inputs: Mapping[str, Any]) -> str:
        return "alone"


class AsyncKnowledge:
    """A duck type whose only knowledge method is asynchronous."""

    def kickoff(self, inputs: Mapping[str, Any]) -> str:
        return "unused"

    async def aquery_knowledge(self, query: list[str], *, results_limit: int, score_threshold: float) -> list[Any]:
        return [{"content": query, "limit": results_limit, "threshold": score_threshold}]


def lazily_real() -> Any:
    """A factory that imports CrewAI only when it is called."""
    from tests.crews import real_crews

    return real_crews.support()


def factory_raises() -> None:
    """A factory that fails."""
    raise RuntimeError("no crew today")


def factory_blocks() -> Instant:
    """A factory that blocks for FACTORY_BLOCK_S seconds (5)."""
    time.sleep(float(os.environ.get("FACTORY_BLOCK_S", "5")))
    return Instant()


def not_a_crew() -> object:
    """A factory of something else."""
    return {"kickoff": "not callable"}


CREWS: dict[str, Callable[[], Any]] = {
    "instant": Instant,
    "echo": Echo,
    "streaming": Streaming,
    "async_sleeper": AsyncSleeper,
    "sleeper": Sleeper,
    "daemon": Daemon,
    "flood": Flood,
    "crash": Crash,
    "failing": Failing,
    "big_output": BigOutput,
    "batch_of_one": BatchOfOne,
    "async_knowledge": AsyncKnowledge,
    "lazily_real": lazily_real,
    "factory_raises": factory_raises,
    "factory_blocks": factory_blocks,
    "not_a_crew": not_a_crew,
}

EVALUATORS: dict[str, Any] = {"judge": lambda: "the judge"}
