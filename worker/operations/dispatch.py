"""From ``go`` to the result or failure frame."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from protocol import frames
from protocol.operations import Operation
from worker import crew_events, failures, guard, outputs, registry, stores
from worker.guarding import session
from worker.guarding.policies import EffectPolicyError, Guarding, configured
from worker.guarding.session import Ledger, Session
from worker.operations import human, kickoff, recall, rerun
from worker.operations.cancellation import Cancellation
from worker.operations.job import Job, Refused
from worker.stream import Stream, Violation

WORK: dict[Operation, Callable[[Job], bytes]] = {
    Operation.RUN: kickoff.run,
    Operation.BATCH_RUN: kickoff.batch_run,
    Operation.REPLAY: rerun.replay,
    Operation.TRAIN: rerun.train,
    Operation.TEST: rerun.test,
    Operation.KNOWLEDGE_QUERY: recall.knowledge_query,
    Operation.MEMORY_RESET: recall.memory_reset,
}
#: Longest detail of a failure, in characters; the end of a traceback says most.
MAX_DETAIL = 32_768
MAX_ERROR_TYPE = 128


def perform(
    entry: object,
    go: frames.Go,
    *,
    directories: frames.Directories,
    evaluators: Mapping[str, object],
    send: Callable[[frames.Frame], None],
    cancelled: Cancellation,
    ledger: Ledger,
    policies: Mapping[str, Guarding],
) -> frames.Result | frames.Failure:
    """Build the crew of ``entry`` and do ``go.operation`` with it. Never raises; sends Chunk frames only.

    ``stores.redirect`` has been called. ``send`` blocks until the frame is on its way; it is called from any thread,
    but not after the return. ``ledger``: where claims of effects are made. ``policies``: those of the registry by tool
    name; ``go.effects`` goes before them.
    """
    stream = Stream(send, event_limit=go.event_limit, event_limit_bytes=go.event_limit_bytes)
    job = Job(
        crew=None,
        go=go,
        input={},
        directories=directories,
        evaluators=evaluators,
        stream=stream,
        cancellation=cancelled,
    )
    try:
        _guard(go, ledger, policies)
        output = _work(job, entry)
        stream.close()
    except BaseException as error:  # noqa: BLE001 - the boundary of foreign code: SystemExit is a failure too
        with contextlib.suppress(Exception):
            stream.close()
        return _failure(error, dispatched=job.dispatched)
    return frames.Result(output=output, task_ids=job.task_ids)


def _work(job: Job, entry: object) -> bytes:
    work = WORK[Operation(job.go.operation)]
    job.input = json.loads(job.go.input)
    job.crew = registry.build(entry)
    guard.prepare(job.crew, job.go.crew_id)
    if crew_events.available():
        _attach(job)
    job.set("tracing", job.go.tracing, only_existing=True)
    return work(job)


def _guard(go: frames.Go, ledger: Ledger, policies: Mapping[str, Guarding]) -> None:
    """Name the ledger before anything of the crew runs, so that its factory may use it too."""
    named = {**policies, **configured(go.effects)}
    session.begin(Session(ledger=ledger, action_id=go.action_id, crew_id=go.crew_id, policies=named))


def _attach(job: Job) -> None:
    """Connect the job to the CrewAI that is loaded, which a factory may have done only now."""
    stores.redirect(job.directories, job.go.replay_store)
    stores.adopt(job.crew, job.directories)
    human.answer_with(())
    job.subscription = crew_events.Subscription(job.stream, job.crew, job.violated)
    job.subscription.start(messages=job.go.operation == Operation.RUN)


def _failure(error: BaseException, *, dispatched: bool) -> frames.Failure:
    """The frame of ``error``: its class, and what the job's own log may say of it; texts of our own errors always."""
    named = isinstance(error, Refused | Violation | registry.NotACrew | EffectPolicyError)
    if isinstance(error, outputs.TooLarge):
        error_type = Violation.error_type
    else:
        error_type = error.error_type if named else type(error).__name__  # type: ignore[attr-defined]
    text = str(error) if named else failures.text_of(error)
    return frames.Failure(
        error_type=_encodable(error_type[:MAX_ERROR_TYPE]),
        dispatched=dispatched,
        detail=_encodable(text[-MAX_DETAIL:]),
    )


def _encodable(text: Any) -> str:
    return str(text).encode("utf-8", "replace").decode("utf-8")
