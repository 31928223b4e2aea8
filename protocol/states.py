"""The job's state machine. Imports nothing of ours but the error it raises."""

from __future__ import annotations

from enum import StrEnum

from protocol.errors import IllegalTransition


class Status(StrEnum):
    """What the wire contract shows: ``running`` from admission to the terminal record."""

    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


TERMINAL = frozenset({Status.COMPLETED, Status.FAILED, Status.CANCELLED})


class Phase(StrEnum):
    """Where an admitted job stands.

    ``queued``: durable, waits for a slot. ``starting``: a worker is being launched, ``go`` not sent.
    ``running``: ``go`` may have been sent. ``stopping``: an ending is decided, its work is being killed and proved.
    ``done``: the terminal record is durable.
    """

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    DONE = "done"


class Step(StrEnum):
    """What can happen to a job."""

    SLOT_GRANTED = "slot_granted"
    START_RECORDED = "start_recorded"
    LAUNCH_RETRIED = "launch_retried"
    ENDING_DECIDED = "ending_decided"
    ENDING_RECORDED = "ending_recorded"


#: Every legal (phase, step); a pair that is missing is illegal.
TRANSITIONS: dict[tuple[Phase, Step], Phase] = {
    (Phase.QUEUED, Step.SLOT_GRANTED): Phase.STARTING,
    (Phase.QUEUED, Step.ENDING_DECIDED): Phase.STOPPING,
    (Phase.STARTING, Step.START_RECORDED): Phase.RUNNING,
    (Phase.STARTING, Step.LAUNCH_RETRIED): Phase.STARTING,
    (Phase.STARTING, Step.ENDING_DECIDED): Phase.STOPPING,
    (Phase.RUNNING, Step.ENDING_DECIDED): Phase.STOPPING,
    (Phase.STOPPING, Step.ENDING_RECORDED): Phase.DONE,
}


def advance(phase: Phase, step: Step) -> Phase:
    """Return the phase after ``step``. Raises IllegalTransition for a pair that the table does not have."""
    try:
        return TRANSITIONS[phase, step]
    except KeyError:
        raise IllegalTransition(f"{step.value} cannot happen to a job in phase {phase.value}") from None


class Method(StrEnum):
    """How a stop was carried out and proved."""

    NEVER_STARTED = "never_started"
    CGROUP = "cgroup"
    PID_NAMESPACE = "pid_namespace"
    KEEPER = "keeper"
    SUBREAPER = "subreaper"
    GROUP = "group"
    BOOT_CHANGED = "boot_changed"
    #: Nothing could be done: the work belonged to another program, whose journal was imported.
    NONE = "none"
