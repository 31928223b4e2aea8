"""replay, train and test."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Sequence
from typing import Any

from worker import outputs, stores
from worker.operations import human
from worker.operations.job import Job, Refused
from worker.operations.kickoff import task_ids_by_output

#: CrewAI's pickle writer appends this to names that do not end with it.
PICKLE_SUFFIX = ".pkl"


def replay(job: Job) -> bytes:
    """Run the crew again from a task of an earlier job, whose store came as a copy."""
    method = job.method("replay")
    task_id: str = job.input["task_id"]
    if job.is_crewai and (job.go.replay_store is None or task_id not in stores.replayable()):
        raise Refused(f"no retained job of this crew has a task {task_id!r}", "TaskNotRetained")
    output = job.call(method, task_id, job.input.get("inputs"))
    job.settle()
    if job.is_crewai:
        job.task_ids = stores.replayable(replayed_only=True)
    return outputs.crew_output(output, task_ids_by_output(job.crew), job.go.output_limit_bytes)


def train(job: Job) -> bytes:
    """Train the crew; human feedback comes from the input, the artifact goes to ``go.artifact_path``."""
    method = job.method("train")
    texts = _feedback(job.input.get("feedback"))
    if job.is_crewai:
        if not texts:
            raise Refused("train needs the input field 'feedback': a text, or an array of texts", "FeedbackRequired")
        human.answer_with(texts)
    path = job.go.artifact_path or os.path.join(job.directories.job, job.input["artifact_name"])
    for leftover in (path, path + PICKLE_SUFFIX):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(leftover)
    job.call(method, job.input["n_iterations"], path, job.input.get("inputs"))
    job.settle()
    _settle_artifact(path)
    return _report(job, artifact_name=job.input["artifact_name"], n_iterations=job.input["n_iterations"])


def test(job: Job) -> bytes:
    """Test the crew with the evaluator that the registry names so, else with a model of that name."""
    method = job.method("test")
    name: str = job.input["eval_llm"]
    evaluator = _evaluator(job.evaluators[name]) if name in job.evaluators else name
    job.call(method, job.input["n_iterations"], evaluator, job.input.get("inputs"))
    job.settle()
    scores = job.subscription.scores if job.subscription is not None else []
    return _report(job, n_iterations=job.input["n_iterations"], eval_llm=name, scores=scores)


def _report(job: Job, **fields: Any) -> bytes:
    return outputs.to_json({"status": "completed", **fields}, job.go.output_limit_bytes)


def _feedback(value: Any) -> Sequence[str]:
    return [value] if isinstance(value, str) else list(value or ())


def _evaluator(entry: Any) -> Any:
    """An LLM object as it is (it has ``call``), a class or other callable called."""
    return entry() if isinstance(entry, type) or (callable(entry) and not hasattr(entry, "call")) else entry


def _settle_artifact(path: str) -> None:
    """Move CrewAI's file to exactly ``path``: rename(2) replaces a link there instead of following it."""
    if not os.path.lexists(path) and os.path.lexists(path + PICKLE_SUFFIX):
        os.rename(path + PICKLE_SUFFIX, path)
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        raise OSError(f"the training artifact {os.path.basename(path)!r} is not a regular file")
