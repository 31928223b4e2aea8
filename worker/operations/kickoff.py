"""run and batch_run."""

from __future__ import annotations

import contextvars
import inspect
import queue
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from worker import loaded, outputs, stores
from worker.operations.job import Job
from worker.registry import KICKOFF_METHODS

#: The first that a crew has is used. The inputs overlap in the first; the last loses the knowledge of a CrewAI crew.
BATCH_METHODS = ("kickoff_for_each_async", "kickoff_for_each", "akickoff_for_each")

#: What a plain generator returned, where it returned nothing.
EMPTY_OUTPUT: Mapping[str, Any] = {"raw": "", "token_usage": {}, "tasks_output": []}


def run(job: Job) -> bytes:
    """Kick the crew off, forward what it streams, return its output.

    The synchronous ``kickoff`` is preferred: ``akickoff`` of CrewAI silently loses the crew's knowledge, and this
    process can be killed in any case.
    """
    method = job.method(*KICKOFF_METHODS)
    job.set("stream", True)
    output = _consume(job, _call_kickoff(job, method))
    job.settle()
    if job.fault is not None:
        raise job.fault
    if job.is_crewai:
        job.task_ids = stores.replayable()
    return outputs.crew_output(output, task_ids_by_output(job.crew), job.go.output_limit_bytes)


def batch_run(job: Job) -> bytes:
    """Kick the crew off for every input; results in the order of the inputs."""
    method = job.method(*BATCH_METHODS)
    job.set("stream", False)
    results = job.call(method, inputs=job.input["inputs"])
    job.settle()
    return outputs.batch_output(results, job.go.output_limit_bytes)


def task_ids_by_output(crew: Any) -> dict[int, str]:
    """``id()`` of each task's output object to the task's id."""
    tasks = getattr(crew, "tasks", None)
    if not isinstance(tasks, list | tuple):
        return {}
    return {id(task.output): str(task.id) for task in tasks if getattr(task, "output", None) is not None}


def _call_kickoff(job: Job, method: Any) -> Any:
    """Call ``method``; an asynchronous one is run here, together with the stream that it may return."""
    job.dispatched = True
    result = method(inputs=job.input)
    if inspect.isawaitable(result):
        return job.cancellation.run(_follow(job, result))
    return result


async def _follow(job: Job, awaitable: Any) -> Any:
    result = await awaitable
    return await _consume_async(job, result) if hasattr(result, "__aiter__") else result


def _consume(job: Job, result: Any) -> Any:
    """Drain a stream and return its output; anything else is the output."""
    if loaded.is_crewai_stream(result):
        return _consume_crewai(job, result) if job.subscription is not None else _consume_sync(job, result)
    if _is_stream(result):
        return _consume_sync(job, result)
    if hasattr(result, "__aiter__"):
        return job.cancellation.run(_consume_async(job, result))
    return result


def _is_stream(result: Any) -> bool:
    if isinstance(result, Mapping | str | bytes | list | tuple | set) or hasattr(result, "model_dump"):
        return False
    return isinstance(result, Iterator) or (hasattr(result, "__iter__") and hasattr(result, "result"))


def _consume_sync(job: Job, result: Any) -> Any:
    iterator = iter(result)
    while True:
        try:
            chunk = next(iterator)
        except StopIteration as end:
            return _output_of(result, end.value)
        _forward(job, chunk)


async def _consume_async(job: Job, result: Any) -> Any:
    """Drain an asynchronous stream; it is closed when the operation is cancelled or the stream broke a bound."""
    iterator: AsyncIterator[Any] = result.__aiter__()
    try:
        async for chunk in iterator:
            _forward(job, chunk)
    finally:
        for closable in (result, iterator):
            if callable(aclose := getattr(closable, "aclose", None)):
                await aclose()
                break
    return _output_of(result, None)


def _forward(job: Job, chunk: Any) -> None:
    """Send a chunk, unless it is one of CrewAI's own that a duck type passes on: those came by the bus."""
    if job.subscription is None or not loaded.is_crewai_chunk(chunk):
        job.stream.message(outputs.chunk_document(chunk))


def _output_of(stream: Any, returned: Any) -> Any:
    if returned is not None:
        return returned
    return getattr(stream, "result", EMPTY_OUTPUT)


def _consume_crewai(job: Job, result: Any) -> Any:
    """Drain CrewAI's stream, whose chunks were already sent by the bus handler, which knows their task.

    A thread of its own drains it: a broken bound must end the job at once, while CrewAI's generator would first wait
    for the whole crew.
    """
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    job.on_fault = ended.put

    def drain() -> None:
        try:
            for _ in result:
                pass
        except BaseException as error:  # noqa: BLE001 - handed to the waiting thread
            ended.put(error)
        else:
            ended.put(None)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(drain,), name="stream", daemon=True).start()
    if (error := ended.get()) is not None:
        raise error
    return result.result
