"""What a reader of events has seen is a prefix of what the journal gives after a restart, whoever was killed and when.

Jobs stream while readers of every kind follow them; then the workers, the supervisor or both are killed with SIGKILL at
a random instant, the supervisor is started again, and every reader's memory is held against the journal.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.crash.trial import read_journal
from tests.support import procs
from tests.support.client import Client
from tests.support.server import Server, ServerFactory

#: Enough of the seed is in a failure's message to run the same choices again.
SEED = int(os.environ.get("CRASH_SEED", "20250117"))
SERVERS, TRIALS = 3, 10
STRESS_TRIALS = 500
#: Kills within which a server that shows events before their commit must have been caught.
MUTANT_TRIALS = 10
JOBS = 2
JOIN_S = 30.0
SETTINGS: dict[str, Any] = {"max_retained_runs": 100_000, "linger_s": 0.05, "grace_s": 0.1}
REGISTRY = "tests.crews.counted_crews:CREWS"

Event = tuple[int, str, Any]


@dataclass
class Reader:
    """One reader of one job: what it saw, from ``first`` on. ``counts``: event counts that it was told."""

    what: str
    action_id: str
    first: int = 0
    seen: list[Event] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def follow(self, client: Client) -> None:
        """Read a stream to its end."""
        with client.follow(self.action_id, cursor=self.first) as stream:
            for event in stream:
                self.seen.append((event.sequence, event.event, event.data))

    def page(self, client: Client) -> None:
        """Read slices, each from where the last one ended, and views."""
        while True:
            self.counts.append(client.get(self.action_id).expect(200)["event_count"])
            part = client.events(self.action_id, cursor=self.first + len(self.seen)).expect(200)
            self.seen += [(event["sequence"], event["event"], event["data"]) for event in part["events"]]
            self.counts.append(part["next_cursor"])

    def violation(self, stored: tuple[Event, ...]) -> str | None:
        """How what was seen differs from the journal, None if it is a prefix."""
        expected = stored[self.first : self.first + len(self.seen)]
        if tuple(self.seen) != expected:
            return f"{self.what} of {self.action_id} saw {self.seen[-2:]} at the end, the journal has {expected[-2:]}"
        if max(self.counts, default=0) > len(stored):
            return f"{self.what} of {self.action_id} was told of {max(self.counts)} events of {len(stored)}"
        return None


class Trial:
    """Jobs and their readers on one server, up to the kill."""

    def __init__(self, server: Server, rng: random.Random, label: str) -> None:
        self._server = server
        self._rng = rng
        self._actions = [f"{label}-{number}" for number in range(JOBS)]
        self.readers: list[Reader] = []
        self._threads: list[threading.Thread] = []

    def run(self) -> None:
        """Start the jobs and the readers, kill at a random instant, and wait for the readers to notice."""
        client, rng = self._server.client(), self._rng
        for action_id in self._actions:
            given = {"action": action_id, "chunks": rng.randrange(1, 400), "every_s": rng.choice([0.0, 0.001, 0.004])}
            with client.stream(action_id, "ticking", input=given) as stream:
                # Admitted; a reader may only begin where there are events.
                event = stream.next()
            assert event.event == "started"
            for first in (0, 1):
                self._read(Reader("a stream", action_id, first=first), Reader.follow)
            self._read(Reader("a pager", action_id), Reader.page)
        workers = [worker for worker in map(self._worker, self._actions) if worker is not None]
        time.sleep(rng.uniform(0.0, 0.25))  # the instant of the kill is the point: it waits for nothing
        self._kill(workers)
        for thread in self._threads:
            thread.join(JOIN_S)
            assert not thread.is_alive(), "a reader did not notice that the server was killed"

    def _read(self, reader: Reader, how: Callable[[Reader, Client], None]) -> None:
        def work() -> None:
            # The kill cuts connections and streams at any byte; what counts is what was seen before.
            with contextlib.suppress(OSError, http.client.HTTPException, AssertionError):
                how(reader, self._server.client())

        self.readers.append(reader)
        self._threads.append(threading.Thread(target=work, daemon=True))
        self._threads[-1].start()

    def _worker(self, action_id: str) -> tuple[int, int] | None:
        worker = self._server.client().get(action_id).expect(200)["worker"]
        ticks = None if worker is None else procs.start_ticks(worker["pid"])
        return None if ticks is None else (worker["pid"], ticks)

    def _kill(self, workers: list[tuple[int, int]]) -> None:
        order: list[Callable[[], object]] = [self._server.kill]
        if self._rng.random() < 0.6:
            order += [lambda worker=worker: _kill_worker(*worker) for worker in workers]  # type: ignore[misc]
            self._rng.shuffle(order)
        for kill in order:
            kill()
            time.sleep(self._rng.choice([0.0, 0.0, 0.002]))

    def check(self) -> list[str]:
        """Start again and hold every reader against the journal; what contradicts it."""
        self._server.start()
        stored, client = read_journal(self._server.state_file), self._server.client()
        found = []
        for action_id in self._actions:
            shown = client.events(action_id).expect(200)["events"]
            if [(event["sequence"], event["event"], event["data"]) for event in shown] != [*stored[action_id].events]:
                found.append(f"{action_id} is shown otherwise than it is stored")
        return found + [why for reader in self.readers if (why := reader.violation(stored[reader.action_id].events))]

    def interrupted(self) -> int:
        """How many of the jobs the kill has met at work."""
        stored = read_journal(self._server.state_file)
        return sum(stored[action_id].last.get("error_type") == "SupervisorRestart" for action_id in self._actions)


def _kill_worker(pid: int, ticks: int) -> None:
    with contextlib.suppress(ProcessLookupError, AssertionError):
        procs.kill(pid, ticks)


@pytest.fixture
def make(make_server: ServerFactory) -> Callable[..., Server]:
    """Make a server of the counted crews that listens."""

    def made(**options: Any) -> Server:
        server = make_server(registry=REGISTRY, settings=SETTINGS, **options)
        server.environment["EXECUTIONS_FILE"] = str(server.directory / "executions")
        return server.start()

    return made


def run_trials(server: Server, rng: random.Random, label: str, count: int) -> tuple[list[str], int, int]:
    """Violations of the first trial that has any, jobs met at work, events seen."""
    met = seen = 0
    for number in range(count):
        trial = Trial(server, rng, f"{label}.{number}")
        trial.run()
        violations = trial.check()
        met += trial.interrupted()
        seen += sum(len(reader.seen) for reader in trial.readers)
        if violations:
            return [f"trial {label}.{number}: {violation}" for violation in violations], met, seen
    return [], met, seen


@pytest.mark.parametrize("number", range(SERVERS))
def test_what_was_seen_is_a_prefix_of_what_is_kept(make: Callable[..., Server], number: int) -> None:
    """B18: the reference shows events before they are durable."""
    violations, met, seen = run_trials(make(), random.Random(SEED + number), str(number), TRIALS)
    assert not violations, f"seed {SEED}:\n" + "\n".join(violations)
    # Or the kills would have met idle servers and blind readers.
    assert met >= TRIALS // 2, met
    assert seen >= TRIALS * JOBS * 3, seen


@pytest.mark.stress
@pytest.mark.timeout(3600)
def test_many_kills(make: Callable[..., Server]) -> None:
    seed = random.SystemRandom().randrange(2**32)
    violations, _, _ = run_trials(make(), random.Random(seed), "s", STRESS_TRIALS)
    assert not violations, f"seed {seed}:\n" + "\n".join(violations)


def test_a_server_that_shows_events_before_their_commit_fails(make: Callable[..., Server]) -> None:
    violations, _, _ = run_trials(make(mutant="hasty"), random.Random(SEED), "hasty", MUTANT_TRIALS)
    assert any("saw" in violation for violation in violations), violations
