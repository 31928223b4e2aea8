"""``kill -9`` of the supervisor in every phase of a job, at random instants and at chosen ones.

Each time the next supervisor on the same state must have one terminal record for every admitted Action, must take back
nothing that a reader has seen, must leave no process of the old one alive, and must answer repeats without executing.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.crash.load import Action, Load
from tests.crash.trial import Trial
from tests.support import procs
from tests.support.server import Server, ServerFactory

#: Enough of the seed is in a failure's message to run the same choices again.
SEED = int(os.environ.get("CRASH_SEED", "20250117"))
SERVERS, INSTANTS = 4, 13
STRESS_INSTANTS = 500
MUTANT_KILLS = 10
PR_SET_CHILD_SUBREAPER = 36
SETTINGS: dict[str, Any] = {
    "max_concurrency": 3,
    "max_retained_runs": 100_000,
    "linger_s": 0.05,
    "grace_s": 0.1,
    "template": {"preload": []},
}


MakeTrial = Callable[..., Trial]


@pytest.fixture
def make_trial(make_server: ServerFactory) -> MakeTrial:
    """Make a trial whose server listens; keywords are settings."""

    def make(*, mutant: str | None = None, **settings: Any) -> Trial:
        registry = "tests.crews.counted_crews:CREWS"
        trial = Trial(make_server(registry=registry, settings=SETTINGS | settings, mutant=mutant))
        trial.server.start()
        return trial

    return make


def kill_at_random(trial: Trial, rng: random.Random, label: str) -> None:
    """Load the server, kill it at a random instant, start it again and check."""
    load = Load(trial.client(), label=label, seed=rng.randrange(2**32), heartbeats=trial.heartbeats)
    load.run(rng.uniform(0.02, 0.4), trial.server.kill)
    trial.violations += load.faults
    if rng.random() < 0.15:
        # The next supervisor is killed too, while it starts and fences.
        trial.server.launch()
        time.sleep(rng.uniform(0.0, 0.4))
        trial.server.kill()
    trial.restart_and_check(load.actions)


@pytest.mark.case(15, 24, 67, 68)
@pytest.mark.parametrize("number", range(SERVERS))
def test_random_instants(make_trial: MakeTrial, number: int) -> None:
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
def test_many_random_instants(make_trial: MakeTrial) -> None:
    seed = random.SystemRandom().randrange(2**32)
    rng = random.Random(seed)
    trial = make_trial()
    for instant in range(STRESS_INSTANTS):
        kill_at_random(trial, rng, f"s{instant}")
        assert not trial.violations, f"seed {seed}, instant {instant}:\n" + "\n".join(trial.violations)


def test_a_server_that_shows_events_before_their_commit_is_caught(make_trial: MakeTrial) -> None:
    trial = make_trial(mutant="hasty")
    for kill in range(MUTANT_KILLS):
        action = ticking(f"hasty-{kill}")
        with action.stream(trial.client()) as stream:
            for _ in range(4):
                stream.next()
            trial.server.kill()
        trial.restart_and_check([action])
        if any("a reader saw" in violation for violation in trial.violations):
            return
    raise AssertionError(f"{MUTANT_KILLS} kills did not show that events were taken back: {trial.violations}")


def test_a_restart_that_kills_nothing_is_caught(make_trial: MakeTrial) -> None:
    trial = make_trial(mutant="sparing", linger_s=60)
    beats = trial.heartbeats / "spared"
    action = Action("spared", "daemon", {"action": "spared", "heartbeat": str(beats)})
    with action.stream(trial.client()):
        procs.wait_until(lambda: procs.read_beats(beats), 10, "a heartbeat")
        trial.server.kill()
    trial.restart_and_check([action])
    for told in ("outlived their supervisor", "its daemons", "leaves"):
        assert any(told in violation for violation in trial.violations), (told, trial.violations)


# --- chosen instants -----------------------------------------------------------------------------------------------


def ticking(action_id: str) -> Action:
    """Streams for some seconds."""
    return Action(action_id, "ticking", {"action": action_id, "chunks": 900, "every_s": 0.005})


def working(action_id: str, crew_id: str, **inputs: Any) -> Action:
    """A job of one of the counted crews."""
    return Action(action_id, crew_id, {"action": action_id, **inputs})


def kill_and_check(trial: Trial, *actions: Action) -> list[dict[str, Any]]:
    """Kill the server, start it again, check; returns the last event's data of each of ``actions``."""
    trial.server.kill()
    return check(trial, *actions)


def check(trial: Trial, *actions: Action) -> list[dict[str, Any]]:
    """``kill_and_check`` of a server that was killed already."""
    trial.restart_and_check(list(actions))
    assert not trial.violations, "\n".join(trial.violations)
    ends = []
    for action in actions:
        last = trial.client().events(action.action_id).expect(200)["events"][-1]
        ends.append(last["data"] | {"event": last["event"]})
    return ends


def wait_for_phase(trial: Trial, action: Action, phase: str) -> None:
    """Wait until the server says that a job is in ``phase``."""
    client = trial.client()
    procs.wait_until(lambda: action.show(client).json()["phase"] == phase, 10, f"{action.action_id} is {phase}")


def template_of(server: Server) -> int:
    """Pid of the template: the only child of a server without jobs."""
    (template,) = procs.children(server.pid)
    return template


def test_killed_right_after_the_admission_was_answered(make_trial: MakeTrial) -> None:
    trial = make_trial()
    for number in range(3):
        action = working(f"admitted-{number}", "sleeper")
        with action.stream(trial.client()):
            (end,) = kill_and_check(trial, action)
        assert (end["event"], end["error_type"]) == ("failed", "SupervisorRestart")


def test_killed_while_a_job_waits_for_its_slot(make_trial: MakeTrial) -> None:
    trial = make_trial(max_concurrency=1)
    first, second = working("first", "sleeper"), working("second", "sleeper")
    with first.stream(trial.client()) as running, second.stream(trial.client()):
        running.until("started")
        procs.wait_until(trial.executions, 10, "the first crew is at work")
        wait_for_phase(trial, second, "queued")
        ends = kill_and_check(trial, first, second)
    assert [end["uncertain_outcome"] for end in ends] == [True, False]
    assert (ends[1]["stop"]["confirmed"], ends[1]["stop"]["method"]) == (True, "never_started")
    assert trial.executions() == {"first": 1}


def test_killed_while_a_worker_is_being_launched(make_trial: MakeTrial) -> None:
    trial = make_trial()
    action = working("launching", "instant")
    os.kill(template_of(trial.server), signal.SIGSTOP)
    with action.stream(trial.client()):
        wait_for_phase(trial, action, "starting")
        (end,) = kill_and_check(trial, action)
    assert (end["event"], end["uncertain_outcome"]) == ("failed", False)
    assert not trial.executions()


@pytest.mark.parametrize("events", [1, 2, 40])
def test_killed_after_an_event_of_a_running_job(make_trial: MakeTrial, events: int) -> None:
    trial = make_trial()
    action, daemon = ticking("running"), working("daemon", "daemon", heartbeat=str(trial.heartbeats / "daemon"))
    with daemon.stream(trial.client()) as beating, action.stream(trial.client()) as stream:
        beating.rest()
        for _ in range(events):
            stream.next()
        end, before = kill_and_check(trial, action, daemon)
    assert (end["event"], end["uncertain_outcome"]) == ("failed", True)
    assert before["event"] == "completed"


@pytest.mark.parametrize("delay_ms", [0.0, 1.0, 3.0])
def test_killed_after_a_cancel_was_sent(make_trial: MakeTrial, delay_ms: float) -> None:
    trial = make_trial()
    beats = trial.heartbeats / "stopping"
    action = working("stopping", "beating_sleeper", heartbeat=str(beats))
    with action.stream(trial.client()) as stream:
        stream.until("started")
        procs.wait_until(lambda: procs.read_beats(beats), 10, "a heartbeat")
        cancel = in_background(lambda: action.cancel(trial.client()))
        time.sleep(delay_ms / 1000)  # an instant between the request and the proof
        trial.server.kill()
        cancel.join()
        (end,) = check(trial, action)
    assert end["event"] in {"cancelled", "failed"}
    assert end["uncertain_outcome"] is True
    assert not any(procs.alive(beat.pid, beat.start_ticks) for beat in procs.read_beats(beats))


def test_killed_during_the_grace_of_a_cancel(make_trial: MakeTrial) -> None:
    trial = make_trial(grace_s=5)
    action = working("closing", "closing", closes=str(trial.server.directory / "closes"))
    with action.stream(trial.client()) as stream:
        stream.until("started")
        procs.wait_until(trial.executions, 10, "the crew is at work")
        cancel = in_background(lambda: action.cancel(trial.client()))
        procs.wait_until((trial.server.directory / "closes").exists, 10, "the crew closes")
        trial.server.kill()
        cancel.join()
        (end,) = check(trial, action)
    assert (end["event"], end["error_type"], end["uncertain_outcome"]) == ("failed", "SupervisorRestart", True)


def test_killed_between_the_result_and_the_proof(make_trial: MakeTrial) -> None:
    trial = make_trial(linger_s=60)
    beats = trial.heartbeats / "finishing"
    action = working("finishing", "daemon", heartbeat=str(beats))
    with action.stream(trial.client()) as stream:
        stream.until("started")
        procs.wait_until(lambda: procs.read_beats(beats), 10, "a heartbeat")
        worker = action.show(trial.client()).json()["worker"]["pid"]
        # The worker ends after its result, and its daemon holds the proof up until linger_s is over.
        procs.wait_until(lambda: not procs.alive(worker), 10, "the worker has ended")
        (end,) = kill_and_check(trial, action)
    assert (end["event"], end["uncertain_outcome"]) == ("failed", True)
    assert not any(procs.alive(beat.pid, beat.start_ticks) for beat in procs.read_beats(beats))


def test_killed_right_after_a_terminal_event_was_seen(make_trial: MakeTrial) -> None:
    trial = make_trial()
    for number, crew_id in enumerate(["instant", "daemon", "failing"]):
        action = working(f"seen-{number}", crew_id, heartbeat=str(trial.heartbeats / f"seen-{number}"))
        with action.stream(trial.client()) as stream:
            last = stream.rest()[-1]
            (end,) = kill_and_check(trial, action)
        assert end == last.data | {"event": last.event}


def test_killed_again_and_again_while_it_recovers(make_trial: MakeTrial) -> None:
    trial = make_trial()
    beats = trial.heartbeats / "recovering"
    actions = [working("recovering", "beating_sleeper", heartbeat=str(beats)), ticking("streaming")]
    with actions[0].stream(trial.client()) as first, actions[1].stream(trial.client()) as second:
        first.until("started")
        second.until("chunk")
        procs.wait_until(lambda: procs.read_beats(beats), 10, "a heartbeat")
        trial.server.kill()
    for step in ("job_fenced", "stop_method", "launch_mode"):
        trial.server.launch()
        trial.server.wait_log(step)
        trial.server.kill()
    trial.restart_and_check(actions)
    assert not trial.violations, "\n".join(trial.violations)
    assert trial.fenced == {"started": 2}


@pytest.fixture
def unreaping() -> Iterator[None]:
    """Orphans become our children, and stay zombies until the end: a container's PID 1 may be such a parent."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    before = set(procs.children(os.getpid()))
    yield
    assert libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0) == 0
    for orphan in set(procs.children(os.getpid())) - before:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(orphan, os.WNOHANG)


@pytest.mark.usefixtures("unreaping")
def test_a_dead_worker_that_nobody_reaps_holds_no_restart_up(make_trial: MakeTrial) -> None:
    trial = make_trial(stop_timeout_s=5)
    action = working("zombie", "sleeper")
    with action.stream(trial.client()) as stream:
        stream.until("started")
        worker = action.show(trial.client()).json()["worker"]["pid"]
        trial.server.kill()
    procs.wait_until(lambda: not procs.alive(worker), 5, "the worker died with its supervisor")
    assert procs.start_ticks(worker) is not None, "somebody reaped the worker: this proves nothing"
    (end,) = check(trial, action)
    assert (end["event"], end["error_type"]) == ("failed", "SupervisorRestart")


def in_background(work: Callable[[], object]) -> threading.Thread:
    """Run a request whose answer the kill may cut off."""

    def run() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            work()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread
