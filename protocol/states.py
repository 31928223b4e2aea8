"""The state machines of jobs and effects. Imports nothing of ours but the error they raise."""

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
    #: A restart found nobody but itself in the whole cgroup given to the supervisor, which no process of it can leave.
    SEALED_CGROUP = "sealed_cgroup"
    PID_NAMESPACE = "pid_namespace"
    KEEPER = "keeper"
    SUBREAPER = "subreaper"
    GROUP = "group"
    BOOT_CHANGED = "boot_changed"
    #: Nothing could be done: the work belonged to another program, whose journal was imported.
    NONE = "none"


class EffectState(StrEnum):
    """What is known of one effect.

    ``claimed``: its call may be under way. ``settled``: it happened, its receipt is durable. ``not_applied``: the tool
    itself said that it did not happen. ``unknown``: nobody can say; it blocks its key until it is reconciled.
    ``abandoned``: an operator gave up finding out; it blocks its key for ever.
    """

    CLAIMED = "claimed"
    SETTLED = "settled"
    NOT_APPLIED = "not_applied"
    UNKNOWN = "unknown"
    ABANDONED = "abandoned"


class EffectStep(StrEnum):
    """What can happen to an effect. None of them is the passing of time.

    ``repeat`` is a claim under the policy ``provider``, whose provider tells repeats by the key that it was given.
    """

    CLAIM = "claim"
    SETTLE = "settle"
    NOT_APPLY = "not_apply"
    LOSE = "lose"
    REPEAT = "repeat"
    RECONCILE_SETTLED = "reconcile_settled"
    RECONCILE_NOT_APPLIED = "reconcile_not_applied"
    RECONCILE_ABANDONED = "reconcile_abandoned"


#: Every legal (state, step); None stands for a key that was never claimed. A pair that is missing is illegal.
EFFECT_TRANSITIONS: dict[tuple[EffectState | None, EffectStep], EffectState] = {
    (None, EffectStep.CLAIM): EffectState.CLAIMED,
    (EffectState.NOT_APPLIED, EffectStep.CLAIM): EffectState.CLAIMED,
    (EffectState.CLAIMED, EffectStep.SETTLE): EffectState.SETTLED,
    (EffectState.CLAIMED, EffectStep.NOT_APPLY): EffectState.NOT_APPLIED,
    (EffectState.CLAIMED, EffectStep.LOSE): EffectState.UNKNOWN,
    (EffectState.UNKNOWN, EffectStep.SETTLE): EffectState.SETTLED,
    (EffectState.UNKNOWN, EffectStep.REPEAT): EffectState.CLAIMED,
    (EffectState.UNKNOWN, EffectStep.RECONCILE_SETTLED): EffectState.SETTLED,
    (EffectState.UNKNOWN, EffectStep.RECONCILE_NOT_APPLIED): EffectState.NOT_APPLIED,
    (EffectState.UNKNOWN, EffectStep.RECONCILE_ABANDONED): EffectState.ABANDONED,
}
#: An effect in one of these states keeps its job from being archived.
OPEN_EFFECTS = frozenset({EffectState.CLAIMED, EffectState.UNKNOWN})


def advance_effect(state: EffectState | None, step: EffectStep) -> EffectState:
    """Return the state after ``step``. Raises IllegalTransition for a pair that the table does not have."""
    try:
        return EFFECT_TRANSITIONS[state, step]
    except KeyError:
        was = "was never claimed" if state is None else f"is {state.value}"
        raise IllegalTransition(f"{step.value} cannot happen to an effect that {was}") from None
