"""``kill -9`` of the supervisor in every phase of a job, at random instants and at chosen ones.

Each time the next supervisor on the same state must have one terminal record for every admitted Action, must take back
nothing that a reader has seen, must leave no process of the old one alive, and must answer repeats without executing.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.crash.load import Action, Load
from tests.crash.trial import Trial
from tests.support import procs
from tests.support.client import Stream
from tests.support.server import Server, ServerFactory

#: Enough of the seed is in a failure's message to run the same choices again.
SEED = int(os.environ.get("CRASH_SEED", "20250117"))
SERVERS, INSTANTS = 4, 13
STRESS_INSTANTS = 500
SETTINGS: dict[str, Any] = {
    "max_concurrency": 3,
    "max_retained_runs": 100_000,
    "linger_s": 0.05,
    "grace_s": 0.1,
    "template": {"preload": []},
}


@pytest.fixture
def make_trial(make_server: ServerFactory) -> Callable[..., Trial]:
    """Make a trial whose server listens; keywords are settings."""

    def make(**settings: Any) -> Trial:
        trial = Trial(make_server(registry="tests.crews.counted_crews:CREWS", settings=SETTINGS | settings))
        trial.server.start()
        return trial

    return make


def kill_at_random(trial: Trial, rng: random.Random, label: str) -> None:
    """Load the server, kill it at a random instant, start it again and check."""
    load = Load(trial.client(), label=label, seed=rng.randrange(2**32), heartbeats=trial.heartbeats)
    load.run(rng.uniform(0.02, 0.4), trial.server.kill)
    trial.violations += load.faults
    if rng.random() < 0.2:
        # The next supervisor is killed too, while it starts and fences.
        trial.server.launch()
        procs.wait_until(lambda: True, 1, "launched")
        threading.Event().wait(rng.uniform(0.0, 0.4))
        trial.server.kill()
    trial.restart_and_check(load.actions)


@pytest.mark.timeout(120)
@pytest.mark.case(15, 24, 67, 68)
@pytest.mark.parametrize("number", range(SERVERS))
def test_random_instants(make_trial: Callable[..., Trial], number: int) -> None:
    rng = random.Random(SEED + number)
    trial = make_trial()
    for instant in range(INSTANTS):
        kill_at_random(trial, rng, f"{number}.{instant}")
        assert not trial.violations, f"seed {SEED}, instant {number}.{instant}:\n" + "\n".join(trial.violations)
    # Or the kills would have met an idle server.
    assert trial.fenced["started"] >= INSTANTS // 2, trial.fenced
    assert trial.fenced["not started"] >= 1, trial.fenced


@pytest.mark.stress
@pytest.mark.timeout(3600)
def test_many_random_instants(make_trial: Callable[..., Trial]) -> None:
    seed = random.SystemRandom().randrange(2**32)
    rng = random.Random(seed)
    trial = make_trial()
    for instant in range(STRESS_INSTANTS):
        kill_at_random(trial, rng, f"s{instant}")
        assert not trial.violations, f"seed {seed}, instant {instant}:\n" + "\n".join(trial.violations)
