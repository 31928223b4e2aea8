"""What can end a job, and what record each makes of it. Pure."""

from __future__ import annotations

import msgspec

from protocol.operations import READ_OPERATIONS
from protocol.states import Status


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """The operation returned; ``output`` is a JSON object."""

    output: bytes
    task_ids: tuple[str, ...] = ()


class Raised(msgspec.Struct, frozen=True, kw_only=True):
    """The worker reported a failure; ``dispatched`` is false when the crew was never called."""

    error_type: str
    dispatched: bool


class CancelAsked(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody asked for the end; ``at`` is Unix seconds."""

    reason: str | None
    at: float


class TimedOut(msgspec.Struct, frozen=True, kw_only=True):
    """``timeout_ms`` is over."""


class Exited(msgspec.Struct, frozen=True, kw_only=True):
    """The worker ended without a result; ``signal_name`` when a signal did it."""

    signal_name: str | None = None
    exit_code: int | None = None


class Violated(msgspec.Struct, frozen=True, kw_only=True):
    """The worker broke the pipe's protocol or a bound."""

    error_type: str
    detail: str


class LaunchLost(msgspec.Struct, frozen=True, kw_only=True):
    """No worker came up."""

    error_type: str
    detail: str


class ShutDown(msgspec.Struct, frozen=True, kw_only=True):
    """The supervisor is going down and cannot wait any longer."""


class JournalLost(msgspec.Struct, frozen=True, kw_only=True):
    """Events could not be made durable."""


Cause = Finished | Raised | CancelAsked | TimedOut | Exited | Violated | LaunchLost | ShutDown | JournalLost


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The decided end of a job. ``message`` is fixed text: nothing of a prompt, output or exception is in it."""

    status: Status
    reason: str
    uncertain: bool
    error_type: str | None = None
    message: str | None = None


def decide(cause: Cause, *, operation: str, go_sent: bool) -> Decision:
    """The record that ``cause`` makes of a job.

    Uncertain means that work may have been dispatched and its effects are not known: never when ``go`` was not sent,
    when the worker itself said that it did not call the crew, or for reads.
    """
    uncertain = go_sent and operation not in READ_OPERATIONS
    match cause:
        case Finished():
            return Decision(status=Status.COMPLETED, reason="completed", uncertain=False)
        case CancelAsked():
            return Decision(status=Status.CANCELLED, reason="cancelled", uncertain=uncertain)
        case Raised(error_type=error_type, dispatched=dispatched):
            said = "the crew raised an exception" if dispatched else "the operation failed before the crew was called"
            return _failed("failed", error_type, said, uncertain=uncertain and dispatched)
        case TimedOut():
            return _failed("timeout", "TimeoutError", "the operation reached its timeout", uncertain=uncertain)
        case Exited(signal_name=name, exit_code=code):
            how = f"was killed by {name}" if name else f"exited with {code}"
            return _failed("crashed", "WorkerDied", f"the worker {how} before it had a result", uncertain=uncertain)
        case Violated(error_type=error_type, detail=detail):
            return _failed("violation", error_type, detail, uncertain=uncertain)
        case LaunchLost(error_type=error_type, detail=detail):
            return _failed("launch_failed", error_type, detail, uncertain=False)
        case ShutDown():
            return _failed("shutdown", "SupervisorShutdown", "the supervisor was shut down", uncertain=uncertain)
        case JournalLost():
            said = "events could not be made durable, so the work was stopped"
            return _failed("journal", "JournalUnavailable", said, uncertain=uncertain)


def loss(cause: Cause) -> str:
    """Why nobody will say what became of an effect that was claimed and not reported when ``cause`` ended its job."""
    match cause:
        case Exited():
            return "worker_died"
        case Finished() | Raised():
            return "worker_ended"
        case CancelAsked():
            return "cancelled"
        case TimedOut():
            return "timeout"
        case Violated():
            return "violation"
        case LaunchLost():
            return "launch_failed"
        case ShutDown():
            return "shutdown"
        case JournalLost():
            return "journal_unavailable"


def _failed(reason: str, error_type: str, message: str, *, uncertain: bool) -> Decision:
    return Decision(
        status=Status.FAILED, reason=reason, uncertain=uncertain, error_type=error_type, message=message
    )
