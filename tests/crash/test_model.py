"""The model of the promises, without a server: what it allows, and every lie that it must catch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.crash.model import (
    ACTION_CONFLICT,
    ACTION_RUNNING,
    ARCHIVED_ANSWER,
    KINDS,
    RESTARTED,
    SHUT_DOWN,
    UNKNOWN,
    Broken,
    Event,
    Model,
    State,
)

STARTED: Event = (0, "started", {"status": "running"})
COMPLETED: Event = (1, "completed", {"raw": "done"})
CANCELLED: Event = (1, "cancelled", {"status": "cancelled", "uncertain_outcome": True})
FENCED: Event = (1, "failed", {"error_type": RESTARTED, "uncertain_outcome": True})
FENCED_CERTAIN: Event = (1, "failed", {"error_type": RESTARTED, "uncertain_outcome": False})
STOP: dict[str, Any] = {"confirmed": True, "confirmed_at": 1.0, "processes_left": 0}
OK = (200, None)


def view(status: str, *, crew_id: str = "instant", stop: Any = STOP, **changes: Any) -> dict[str, Any]:
    """A view of a job."""
    live = status == "running"
    shown = {
        "crew_id": crew_id,
        "status": status,
        "phase": "running" if live else "done",
        "uncertain_outcome": None if live else False,
        "stop": None if live else stop,
    }
    return shown | changes


def started(name: str = "instant") -> Model:
    """A start is on its way."""
    model = Model()
    model.start_sent("a", KINDS[name])
    return model


def at_work() -> Model:
    """A job that sleeps, and a reader who saw it start."""
    model = started("sleeping")
    model.stream_opened("a", OK)
    model.events_read("a", (STARTED,))
    return model


def completed() -> Model:
    """A job that was answered."""
    model = started()
    model.start_answered("a", OK)
    model.events_read("a", (STARTED, COMPLETED))
    return model


def crashed() -> Model:
    """A job whose supervisor was killed while it worked."""
    model = at_work()
    model.supervisor_ended(RESTARTED)
    return model


def archived() -> Model:
    """A job that was archived."""
    model = completed()
    model.archive_sent("a")
    model.archive_answered("a", OK)
    return model


Make = Callable[[], Model]
Say = Callable[[Model], None]


@pytest.mark.parametrize(
    ("make", "say"),
    [
        (started, lambda m: m.shown("a", UNKNOWN, {})),
        (started, lambda m: m.shown("a", OK, view("running"))),
        (started, lambda m: m.shown("a", OK, view("completed"))),
        (completed, lambda m: m.start_answered("a", OK)),
        (completed, lambda m: m.conflict_answered("a", ACTION_CONFLICT)),
        (completed, lambda m: m.events_read("a", (STARTED,))),
        (completed, lambda m: m.executed("a", 1)),
        (at_work, lambda m: m.archive_answered("a", ACTION_RUNNING)),
        (crashed, lambda m: m.events_read("a", (STARTED, FENCED))),
        (crashed, lambda m: m.shown("a", OK, view("failed", crew_id="sleeper", uncertain_outcome=True))),
        (crashed, lambda m: m.executed("a", 1)),
        (crashed, lambda m: m.executed("a", 0)),
        (archived, lambda m: m.start_answered("a", ARCHIVED_ANSWER)),
        (archived, lambda m: m.shown("a", UNKNOWN, {})),
        (archived, lambda m: m.archive_answered("a", UNKNOWN)),
    ],
)
def test_what_keeps_the_promises_passes(make: Make, say: Say) -> None:
    say(make())


def lie_after_cancel(model: Model) -> None:
    model.cancel_sent("a")
    model.shown("a", OK, view("cancelled", crew_id="sleeper", uncertain_outcome=True, stop=STOP | {"confirmed": False}))


def changed_end(model: Model) -> None:
    model.cancel_sent("a")
    model.events_read("a", (STARTED, CANCELLED))
    model.start_answered("a", (502, "action_failed"))


def certain_though_at_work(model: Model) -> None:
    model.executed("a", 1)
    model.events_read("a", (STARTED, FENCED_CERTAIN))


@pytest.mark.parametrize(
    ("make", "lie"),
    [
        (started, lambda m: m.start_answered("a", (502, "action_failed"))),
        (started, lambda m: m.executed("a", 1)),
        (completed, lambda m: m.start_answered("a", (409, "action_cancelled"))),
        (completed, lambda m: m.shown("a", UNKNOWN, {})),
        (completed, lambda m: m.shown("a", OK, view("running"))),
        (completed, lambda m: m.shown("a", OK, view("failed"))),
        (completed, lambda m: m.shown("a", OK, view("completed", stop=None))),
        (completed, lambda m: m.shown("a", OK, view("completed", stop=STOP | {"processes_left": 1}))),
        (completed, lambda m: m.shown("a", OK, view("completed", uncertain_outcome=True))),
        (completed, lambda m: m.conflict_answered("a", OK)),
        (completed, lambda m: m.executed("a", 2)),
        (completed, lambda m: m.events_read("a", (STARTED, FENCED))),
        (completed, lambda m: m.events_read("a", (STARTED, COMPLETED, (2, "chunk", {})))),
        (completed, lambda m: m.archive_answered("a", ACTION_RUNNING)),
        (at_work, lambda m: m.events_read("a", ((1, "chunk", {}),))),
        (at_work, lambda m: m.shown("a", OK, view("completed", crew_id="sleeper"))),
        (at_work, lambda m: m.archive_answered("a", OK)),
        (at_work, lie_after_cancel),
        (at_work, changed_end),
        (crashed, lambda m: m.shown("a", OK, view("running", crew_id="sleeper"))),
        (crashed, lambda m: m.shown("a", UNKNOWN, {})),
        (crashed, lambda m: m.events_read("a", (STARTED, COMPLETED))),
        (crashed, certain_though_at_work),
        (archived, lambda m: m.start_answered("a", OK)),
        (archived, lambda m: m.stream_opened("a", OK)),
        (archived, lambda m: m.shown("a", OK, view("completed"))),
        (archived, lambda m: m.conflict_answered("a", ARCHIVED_ANSWER)),
    ],
)
def test_a_lie_is_caught(make: Make, lie: Say) -> None:
    with pytest.raises(Broken):
        lie(make())


@pytest.mark.parametrize(("cause", "name"), [(RESTARTED, "reading on"), (SHUT_DOWN, "reading on")])
def test_a_read_is_never_uncertain(cause: str, name: str) -> None:
    model = started(name)
    model.stream_opened("a", OK)
    model.supervisor_ended(cause)
    with pytest.raises(Broken):
        model.events_read("a", (STARTED, (1, "failed", {"error_type": cause, "uncertain_outcome": True})))


def test_a_start_that_was_cut_off_leaves_every_world_open_and_the_next_look_closes_them() -> None:
    model = started()
    model.supervisor_ended(RESTARTED)
    assert model.states("a") == {State.ABSENT, State.ENDED}
    model.shown("a", UNKNOWN, {})
    assert model.states("a") == {State.ABSENT}
    model.start_sent("a", KINDS["instant"])
    model.start_answered("a", OK)
    model.events_read("a", (STARTED, COMPLETED))
    model.executed("a", 1)
