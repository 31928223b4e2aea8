"""The state machine: every pair of phase and step has an answer."""

from __future__ import annotations

from itertools import product

import pytest

from protocol.errors import IllegalTransition
from protocol.states import TERMINAL, TRANSITIONS, Phase, Status, Step, advance

EXPECTED = {
    (Phase.QUEUED, Step.SLOT_GRANTED): Phase.STARTING,
    (Phase.QUEUED, Step.ENDING_DECIDED): Phase.STOPPING,
    (Phase.STARTING, Step.START_RECORDED): Phase.RUNNING,
    (Phase.STARTING, Step.LAUNCH_RETRIED): Phase.STARTING,
    (Phase.STARTING, Step.ENDING_DECIDED): Phase.STOPPING,
    (Phase.RUNNING, Step.ENDING_DECIDED): Phase.STOPPING,
    (Phase.STOPPING, Step.ENDING_RECORDED): Phase.DONE,
}


@pytest.mark.parametrize(("phase", "step"), list(product(Phase, Step)))
def test_each_pair_is_legal_or_raises(phase: Phase, step: Step) -> None:
    if (phase, step) in EXPECTED:
        assert advance(phase, step) is EXPECTED[phase, step]
    else:
        with pytest.raises(IllegalTransition, match=f"{step.value}.*{phase.value}"):
            advance(phase, step)


def test_every_job_can_end_and_nothing_leaves_the_end() -> None:
    reachable = {Phase.DONE}
    while more := {phase for (phase, _), after in TRANSITIONS.items() if after in reachable} - reachable:
        reachable |= more
    assert reachable == set(Phase)
    assert not [pair for pair in TRANSITIONS if pair[0] is Phase.DONE]


def test_work_is_proved_stopped_before_any_end() -> None:
    assert {phase for (phase, _), after in TRANSITIONS.items() if after is Phase.DONE} == {Phase.STOPPING}


def test_terminal_statuses_are_all_but_running() -> None:
    assert set(Status) - TERMINAL == {Status.RUNNING}
