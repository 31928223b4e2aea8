"""Crews for the numbered cases: the fakes, some whose ends a test decides, and some that show what they were asked."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.crews import fake_crews, heartbeat, stop_crews
from tests.crews.fake_crews import LLM_ANSWER

POLL_S = 0.002
#: In case nobody makes the file that is waited for.
PATIENCE_S = 60.0


def note(*words: object) -> None:
    """Append one JSON line to WITNESS_FILE with one write(2)."""
    fd = os.open(os.environ["WITNESS_FILE"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(fd, json.dumps(words).encode("ascii") + b"\n")
    os.close(fd)


def wait_for(path: str) -> None:
    """Wait until a file is there."""
    give_up = time.monotonic() + PATIENCE_S
    while not Path(path).exists() and time.monotonic() < give_up:
        time.sleep(POLL_S)


class Witness:
    """Every operation; each call is noted with its arguments, as they came."""

    def kickoff(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        note("kickoff", inputs)
        return LLM_ANSWER

    def kickoff_for_each(self, inputs: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
        note("kickoff_for_each", inputs)
        return [LLM_ANSWER | {"raw": str(one)} for one in inputs]

    def replay(self, task_id: str, inputs: Mapping[str, Any] | None) -> dict[str, Any]:
        note("replay", task_id, inputs)
        return LLM_ANSWER | {"raw": "replayed"}

    def train(self, n_iterations: int, filename: str, inputs: Mapping[str, Any] | None) -> None:
        note("train", n_iterations, inputs)
        Path(filename).write_bytes(b"trained %d times" % n_iterations)

    def test(self, n_iterations: int, eval_llm: object, inputs: Mapping[str, Any] | None) -> None:
        note("test", n_iterations, str(eval_llm), inputs)

    def query_knowledge(self, query: list[str], results_limit: int, score_threshold: float) -> list[Any]:
        note("query_knowledge", query, results_limit, score_threshold)
        return [{"content": text} for text in query]

    def reset_memories(self, command_type: str) -> None:
        note("reset_memories", command_type)


class Beating:
    """Every operation leaves a heartbeat daemon behind and sleeps in its thread, as a synchronous model call does.

    The heartbeats go to ``inputs.heartbeat``, the first query, or HEARTBEAT_FILE.
    """

    def _work(self, path: str) -> None:
        heartbeat.detach(path)
        time.sleep(PATIENCE_S)

    def kickoff(self, inputs: Mapping[str, Any]) -> None:
        self._work(inputs["heartbeat"])

    def kickoff_for_each(self, inputs: list[Mapping[str, Any]]) -> None:
        self._work(inputs[0]["heartbeat"])

    def replay(self, task_id: str, inputs: Mapping[str, Any]) -> None:
        self._work(inputs["heartbeat"])

    def train(self, n_iterations: int, filename: str, inputs: Mapping[str, Any]) -> None:
        self._work(inputs["heartbeat"])

    def test(self, n_iterations: int, eval_llm: object, inputs: Mapping[str, Any]) -> None:
        self._work(inputs["heartbeat"])

    def query_knowledge(self, query: list[str], results_limit: int, score_threshold: float) -> None:
        self._work(query[0])

    def reset_memories(self, command_type: str) -> None:
        self._work(os.environ["HEARTBEAT_FILE"])


class BeatingStream(Beating):
    """Streams a chunk first."""

    def kickoff(self, inputs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:  # type: ignore[override]
        yield {"content": "here it comes"}
        self._work(inputs["heartbeat"])


class Stepping:
    """Streams ``inputs.chunks`` chunks; chunk n waits for the file ``inputs.steps`` + n, and so does the end."""

    def kickoff(self, inputs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        for number in range(int(inputs["chunks"])):
            wait_for(f"{inputs['steps']}{number}")
            yield {"content": f"step {number}"}
        wait_for(f"{inputs['steps']}{inputs['chunks']}")


class GatedFlood:
    """Makes the file ``inputs.began``, waits for the file ``inputs.release``, then floods ``inputs.chunks`` chunks."""

    def kickoff(self, inputs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        Path(inputs["began"]).touch()
        wait_for(inputs["release"])
        for number in range(int(inputs["chunks"])):
            yield {"content": f"chunk {number}"}


class Odd:
    """Streams and returns what no JSON document can carry."""

    def kickoff(self, inputs: Mapping[str, Any]) -> Any:
        deep: Any = "the bottom"
        for _ in range(400):
            deep = [deep]
        document = {"content": "odd", "nan": float("nan"), "infinite": float("-inf"), "half": "a \ud800 b"}
        yield document
        return {"raw": "odd", **document, "deep": deep}


def _batch(name: str) -> Callable[..., Any]:
    def kickoff_for_each(inputs: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return [{"raw": f"{name} {one['n']}"} for one in inputs]

    async def awaited(inputs: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return kickoff_for_each(inputs)

    return kickoff_for_each if name == "kickoff_for_each" else awaited


def batch(*names: str) -> Callable[[], Any]:
    """A factory of crews that have just these batch methods; each result names the method used."""

    def make() -> Any:
        crew = stop_crews.Turnstile()
        for name in names:
            setattr(crew, name, _batch(name))
        return crew

    return make


CREWS: dict[str, Callable[[], Any]] = {
    **stop_crews.CREWS,
    "witness": Witness,
    "beating": Beating,
    "beating_stream": BeatingStream,
    "stepping": Stepping,
    "odd": Odd,
    "gated_flood": GatedFlood,
    "batch_all": batch("kickoff_for_each_async", "kickoff_for_each", "akickoff_for_each"),
    "batch_sync": batch("kickoff_for_each", "akickoff_for_each"),
    "batch_last": batch("akickoff_for_each"),
    "narrow": stop_crews.Turnstile,
}

EVALUATORS: dict[str, Any] = fake_crews.EVALUATORS
