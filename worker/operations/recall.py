"""knowledge_query and memory_reset."""

from __future__ import annotations

from worker import outputs
from worker.operations.job import Job

#: CrewAI's own defaults.
RESULTS_LIMIT = 3
SCORE_THRESHOLD = 0.35


def knowledge_query(job: Job) -> bytes:
    """Ask the crew's knowledge. The synchronous call is preferred: CrewAI's asynchronous one always answers []."""
    query = job.input["query"]
    limit = job.input.get("results_limit", RESULTS_LIMIT)
    threshold = job.input.get("score_threshold", SCORE_THRESHOLD)
    if callable(getattr(job.crew, "query_knowledge", None)):
        found = job.call(job.crew.query_knowledge, query, limit, threshold)
    else:
        method = job.method("aquery_knowledge")
        found = job.call(method, query, results_limit=limit, score_threshold=threshold)
    return outputs.to_json({"results": found or []}, job.go.output_limit_bytes)


def memory_reset(job: Job) -> bytes:
    """Reset one kind of the crew's memory, or all."""
    kind = job.input["command_type"]
    job.call(job.method("reset_memories"), kind)
    return outputs.to_json({"status": "completed", "command_type": kind}, job.go.output_limit_bytes)
