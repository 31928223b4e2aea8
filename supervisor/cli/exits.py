"""How commands exit: one table."""

from __future__ import annotations

from enum import IntEnum

from protocol.states import Status
from supervisor.client import (
    ClientFailure,
    InvalidCredential,
    InvalidRequest,
    InvalidStream,
    Job,
    TransportFailed,
)


class Exit(IntEnum):
    """Exit statuses of every command but ``serve``."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    CONFLICT = 4
    UNCERTAIN = 5
    UNREACHABLE = 6
    TIMED_OUT = 124
    INTERRUPTED = 130

    @property
    def word(self) -> str:
        """As people read it."""
        return self.name.lower().replace("_", " ")


MEANINGS: dict[Exit, str] = {
    Exit.OK: "done; of a job that was waited for: completed",
    Exit.FAILED: "the job failed or was cancelled, and that is all of it; the server refused; something was found",
    Exit.USAGE: "wrong usage, or a configuration or request that a server would refuse",
    Exit.NOT_FOUND: "there is no such job, crew or effect",
    Exit.CONFLICT: "it is not, or is no more, what the command was about; another process owns what it needs",
    Exit.UNCERTAIN: "the job ended and its effects are not known; a stop is not proved; a request may have arrived",
    Exit.UNREACHABLE: "the server does not answer, or is none",
    Exit.TIMED_OUT: "the job reached its timeout (its outcome is uncertain), or the command's own has passed",
    Exit.INTERRUPTED: "SIGINT ended the command; a job that it followed goes on",
}

#: By the status of a refusal; another one is FAILED.
BY_STATUS = {
    400: Exit.USAGE,
    404: Exit.NOT_FOUND,
    409: Exit.CONFLICT,
    410: Exit.CONFLICT,
    412: Exit.CONFLICT,
    413: Exit.USAGE,
    416: Exit.USAGE,
    422: Exit.USAGE,
    428: Exit.USAGE,
}
#: First word of a stop's reason where the timeout ended the job.
TIMEOUT_REASON = "timeout"


def of_failure(failure: ClientFailure) -> Exit:
    """The exit status that a failure of the client stands for."""
    if isinstance(failure, InvalidRequest | InvalidCredential):
        return Exit.USAGE
    if failure.uncertain:
        return Exit.UNCERTAIN
    if isinstance(failure, TransportFailed | InvalidStream):
        return Exit.UNREACHABLE
    return Exit.FAILED if failure.refusal is None else BY_STATUS.get(failure.refusal.status, Exit.FAILED)


def of_job(job: Job) -> Exit:
    """The exit status that a terminal record stands for; a reconciled outcome is uncertain no more."""
    if job.status is Status.COMPLETED:
        return Exit.OK
    if job.stop is not None and job.stop.reason.partition(":")[0] == TIMEOUT_REASON:
        return Exit.TIMED_OUT
    return Exit.UNCERTAIN if job.uncertain_outcome is not False and job.reconciliation is None else Exit.FAILED
