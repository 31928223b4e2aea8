"""From a proved stop to the durable terminal record."""

from __future__ import annotations

import asyncio
import itertools
import time

import msgspec

from protocol import canonical
from protocol.api import LateResult, StopEvidence
from protocol.errors import JournalUnavailable
from protocol.states import Method, Status
from supervisor.job import Job
from supervisor.journal import Ended, Ending, Journal
from supervisor.log import get_log
from supervisor.processes import boot_id
from supervisor.run.ending import CancelAsked, Cause, Decision, Finished, Violated, decide
from supervisor.run.means import Means
from supervisor.stop import Proof
from supervisor.workspace import ArtifactRefused, place_artifact

log = get_log(__name__)
#: Waits between attempts to record an ending that the journal does not take, seconds; the last repeats.
RECORD_DELAYS_S = (0.05, 0.2, 1.0, 2.0)


def requested_at(cause: Cause) -> float:
    """When the stop was asked for, Unix seconds."""
    return cause.at if isinstance(cause, CancelAsked) else time.time()


def never_started(decision: Decision, asked_at: float) -> StopEvidence:
    """Evidence of a job that never had a worker."""
    now = time.time()
    return StopEvidence(
        confirmed=True,
        method=Method.NEVER_STARTED,
        reason=decision.reason,
        requested_at=asked_at,
        confirmed_at=now,
        elapsed_ms=_milliseconds(now - asked_at),
        processes_left=0,
        boot_id=boot_id(),
    )


def evidence_of(proof: Proof, decision: Decision, asked_at: float, late: LateResult | None) -> StopEvidence:
    """Evidence of a stop that was carried out."""
    at = proof.confirmed_at
    return StopEvidence(
        confirmed=proof.confirmed,
        method=proof.method,
        reason=decision.reason if proof.missing is None else f"{decision.reason}: {proof.missing}",
        requested_at=asked_at,
        confirmed_at=at,
        elapsed_ms=None if at is None else _milliseconds(at - asked_at),
        worker=proof.worker,
        processes_killed=proof.killed,
        strays=proof.strays,
        processes_left=proof.left,
        late_result=late,
        boot_id=boot_id(),
    )


async def keep(job: Job, means: Means, decision: Decision, cause: Cause) -> tuple[Decision, bytes]:
    """Keep what a finished operation made. Returns the decision, which a lost artifact changes, and the output."""
    if not isinstance(cause, Finished):
        return decision, b""
    row, training_dir = job.record.row, means.settings.training_dir
    if cause.task_ids:
        await asyncio.to_thread(means.workspace.keep_replay, row)
    if job.artifact is None or training_dir is None:
        return decision, cause.output
    name, overwrite = job.artifact
    made = means.workspace.training_file(row)
    try:
        artifact = await asyncio.to_thread(place_artifact, made, training_dir, name, overwrite=overwrite)
    except (ArtifactRefused, OSError) as error:
        error_type = error.error_type if isinstance(error, ArtifactRefused) else "ArtifactNotStored"
        lost = Violated(error_type=error_type, detail="the training ended, but its artifact is not in place")
        return decide(lost, operation=job.record.operation, go_sent=True), b""
    return decision, canonical.with_fields(cause.output, {"sha256": artifact.sha256, "bytes": artifact.bytes})


def terminal_data(decision: Decision, evidence: StopEvidence, output: bytes) -> bytes:
    """Data of the terminal event: the output itself, or what happened with the stop's evidence."""
    if decision.status is Status.COMPLETED:
        return output
    document: dict[str, object] = {"status": decision.status.value}
    if decision.error_type is not None:
        document |= {"error_type": decision.error_type, "message": decision.message}
    document |= {"uncertain_outcome": decision.uncertain, "stop": msgspec.to_builtins(evidence)}
    return canonical.compact(document)


async def record(job: Job, journal: Journal, ending: Ending) -> Ended:
    """Make the terminal record durable, however long the journal refuses; whoever waits is told meanwhile."""
    for attempt in itertools.count():
        try:
            return await journal.finish(job.record.row, ending)
        except JournalUnavailable:
            if attempt == 0:
                log.error("ending_not_recorded", **job.facts)
            job.unrecorded.set()
            await asyncio.sleep(RECORD_DELAYS_S[min(attempt, len(RECORD_DELAYS_S) - 1)])
    raise AssertionError("unreachable")


def _milliseconds(seconds: float) -> float:
    return round(max(seconds, 0.0) * 1000, 3)
