"""Client threads that start, follow, repeat and cancel jobs, and remember everything that they were told."""

from __future__ import annotations

import http.client
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.client import Answer, Client, Event, Stream

THREADS = 5
JOIN_S = 30.0


@dataclass
class Action:
    """One start request and what clients heard of it. ``streams`` hold the events of each reader, from sequence 0."""

    action_id: str
    crew_id: str
    input: dict[str, Any]
    operation: str = "run"
    timeout_ms: int | None = None
    streams: list[list[Event]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    views: list[dict[str, Any]] = field(default_factory=list)
    slices: list[list[dict[str, Any]]] = field(default_factory=list)

    @property
    def admitted(self) -> bool:
        """Whether a client has seen that the Action exists."""
        return bool(self.streams or self.answers or self.views)

    def _material(self) -> dict[str, Any]:
        return {"operation": self.operation, "input": self.input, "timeout_ms": self.timeout_ms}

    def stream(self, client: Client) -> Stream:
        """Start or repeat it as a stream; the answer's head alone says that it is admitted."""
        return self._remember(client.stream(self.action_id, self.crew_id, **self._material()))

    def follow(self, client: Client) -> Stream:
        """Read its events from the first."""
        return self._remember(client.follow(self.action_id))

    def _remember(self, stream: Stream) -> Stream:
        self.streams.append(stream.events)
        return stream

    def start(self, client: Client) -> Answer:
        """Start or repeat it and wait for its end."""
        answer = client.start(self.action_id, self.crew_id, **self._material())
        self.answers.append(answer)
        return answer

    def cancel(self, client: Client) -> Answer:
        """Cancel it."""
        return self._view(client.cancel(self.action_id, self.crew_id, reason="enough"))

    def show(self, client: Client) -> Answer:
        """Read its record."""
        return self._view(client.get(self.action_id))

    def _view(self, answer: Answer) -> Answer:
        if answer.status == 200:
            self.views.append(answer.json())
        return answer

    def read(self, client: Client) -> None:
        """Read its events as one slice."""
        self.slices.append(client.events(self.action_id).expect(200)["events"])


#: How often each kind of new job comes.
MIX = {
    "instant": 6,
    "ticking": 8,
    "daemon": 3,
    "sleeper": 4,
    "timed_out": 1,
    "factory_blocks": 1,
    "crash": 1,
    "failing": 1,
    "knowing": 2,
}


class Load:
    """Threads that keep a server busy until it is killed. ``actions`` grows while they work."""

    def __init__(self, client: Client, *, label: str, seed: int, heartbeats: Path) -> None:
        self._client = client
        self._label = label
        self._seed = seed
        self._heartbeats = heartbeats
        self._killed = threading.Event()
        self.actions: list[Action] = []
        #: What went wrong while the server still lived.
        self.faults: list[str] = []
        self._threads = [threading.Thread(target=self._work, args=(number,), daemon=True) for number in range(THREADS)]

    def run(self, delay_s: float, kill: Callable[[], object]) -> None:
        """Load the server for ``delay_s`` seconds, then ``kill`` it and wait for the threads to notice."""
        for thread in self._threads:
            thread.start()
        time.sleep(delay_s)  # the instant of the kill is the point: it waits for nothing
        self._killed.set()
        kill()
        for thread in self._threads:
            thread.join(JOIN_S)
            assert not thread.is_alive(), "a client did not notice that the server was killed"

    def _work(self, number: int) -> None:
        rng = random.Random(f"{self._seed}/{self._label}/{number}")
        made = 0
        try:
            while not self._killed.is_set():
                if self.actions and rng.random() < 0.25:
                    self._look_again(rng)
                else:
                    self._begin(rng, f"{self._label}-{number}-{made}")
                    made += 1
        except (OSError, http.client.HTTPException, AssertionError) as error:
            # A stream that is cut by the kill breaks the protocol; before the kill nothing may.
            if not self._killed.is_set():
                self.faults.append(f"before the kill: {error!r}")

    def _begin(self, rng: random.Random, action_id: str) -> None:
        kind = rng.choices(list(MIX), list(MIX.values()))[0]
        action = self._new(kind, action_id, rng)
        self.actions.append(action)
        if kind in {"sleeper", "daemon", "ticking"} or rng.random() < 0.5:
            stream = action.stream(self._client)
            if kind == "sleeper" or rng.random() < 0.3:
                for _ in range(rng.randrange(3 if kind == "ticking" else 2)):
                    stream.next()
                action.cancel(self._client)
            stream.rest()
        else:
            action.start(self._client)

    def _new(self, kind: str, action_id: str, rng: random.Random) -> Action:
        witness: dict[str, Any] = {"action": action_id}
        match kind:
            case "ticking":
                witness |= {"chunks": rng.randrange(1, 60), "every_s": rng.choice([0.0, 0.002, 0.01])}
            case "daemon":
                witness |= {"heartbeat": str(self._heartbeats / action_id)}
            case "timed_out":
                return Action(action_id, "sleeper", witness, timeout_ms=rng.randrange(1, 80))
            case "crash":
                witness |= {"how": rng.choice(["signal", "exit", "raise"])}
            case "knowing":
                return Action(action_id, "knowing", {"query": [action_id]}, operation="knowledge_query")
        return Action(action_id, kind, witness)

    def _look_again(self, rng: random.Random) -> None:
        action = rng.choice(self.actions)
        if not action.admitted:
            return
        if action.crew_id == "sleeper":
            action.show(self._client)
            return
        match rng.randrange(4):
            case 0:
                action.start(self._client)
            case 1:
                action.follow(self._client).rest()
            case 2:
                action.show(self._client)
            case _:
                action.read(self._client)
