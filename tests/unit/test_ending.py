"""What record each cause makes, and promise 5: uncertainty is said exactly (B20)."""

from __future__ import annotations

import pytest

from protocol.states import Status
from supervisor.run.ending import (
    CancelAsked,
    Cause,
    Exited,
    Finished,
    JournalLost,
    LaunchLost,
    Raised,
    ShutDown,
    TimedOut,
    Violated,
    decide,
)

CAUSES: list[tuple[Cause, Status, str | None, bool]] = [
    (Finished(output=b"{}"), Status.COMPLETED, None, False),
    (CancelAsked(reason=None, at=1.0), Status.CANCELLED, None, True),
    (Raised(error_type="ValueError", dispatched=True), Status.FAILED, "ValueError", True),
    (Raised(error_type="NotACrew", dispatched=False), Status.FAILED, "NotACrew", False),
    (TimedOut(), Status.FAILED, "TimeoutError", True),
    (Exited(signal_name="SIGKILL"), Status.FAILED, "WorkerDied", True),
    (Exited(exit_code=3), Status.FAILED, "WorkerDied", True),
    (Violated(error_type="ProtocolViolation", detail="x"), Status.FAILED, "ProtocolViolation", True),
    (LaunchLost(error_type="LaunchError", detail="x"), Status.FAILED, "LaunchError", False),
    (ShutDown(), Status.FAILED, "SupervisorShutdown", True),
    (JournalLost(), Status.FAILED, "JournalUnavailable", True),
]


@pytest.mark.parametrize(("cause", "status", "error_type", "uncertain"), CAUSES)
def test_a_cause_after_go_makes_its_record(
    cause: Cause, status: Status, error_type: str | None, uncertain: bool
) -> None:
    decision = decide(cause, operation="run", go_sent=True)
    assert (decision.status, decision.error_type, decision.uncertain) == (status, error_type, uncertain)


@pytest.mark.parametrize("cause", [case[0] for case in CAUSES])
def test_nothing_is_uncertain_before_go_or_for_a_read(cause: Cause) -> None:
    assert not decide(cause, operation="run", go_sent=False).uncertain
    assert not decide(cause, operation="knowledge_query", go_sent=True).uncertain


def test_every_cause_is_in_the_table() -> None:
    assert {type(case[0]) for case in CAUSES} == set(Cause.__args__)


def test_a_crash_names_its_signal_or_exit_code() -> None:
    assert "SIGSEGV" in (decide(Exited(signal_name="SIGSEGV"), operation="run", go_sent=True).message or "")
    assert "exited with 3" in (decide(Exited(exit_code=3), operation="run", go_sent=True).message or "")
