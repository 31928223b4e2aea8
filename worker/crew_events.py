"""CrewAI's event bus turned into chunks: text and tool calls with their task, and small notes of progress.

Notes carry names, ids, counts and durations, never prompts, arguments, results or error texts.
"""

from __future__ import annotations

import datetime
import importlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

from worker import loaded
from worker.stream import Stream, Violation

#: Longest name taken over from an event; an unnamed task is named by its whole description.
MAX_NAME = 200
#: How long the bus may take to hand over what is pending once the operation has returned.
FLUSH_TIMEOUT_S = 10.0

PROGRESS = "progress"
TOOLS = "tools"
#: Event classes that are forwarded: module below ``crewai.events.types``, class, channel. Unknown ones are skipped, so
#: that another version of CrewAI forwards less and fails nothing.
FORWARDED: tuple[tuple[str, str, str], ...] = (
    ("crew_events", "CrewKickoffStartedEvent", PROGRESS),
    ("crew_events", "CrewKickoffCompletedEvent", PROGRESS),
    ("crew_events", "CrewKickoffFailedEvent", PROGRESS),
    ("crew_events", "CrewTrainStartedEvent", PROGRESS),
    ("crew_events", "CrewTrainCompletedEvent", PROGRESS),
    ("crew_events", "CrewTrainFailedEvent", PROGRESS),
    ("crew_events", "CrewTestStartedEvent", PROGRESS),
    ("crew_events", "CrewTestCompletedEvent", PROGRESS),
    ("crew_events", "CrewTestFailedEvent", PROGRESS),
    ("crew_events", "CrewTestResultEvent", PROGRESS),
    ("task_events", "TaskStartedEvent", PROGRESS),
    ("task_events", "TaskCompletedEvent", PROGRESS),
    ("task_events", "TaskFailedEvent", PROGRESS),
    ("agent_events", "AgentExecutionStartedEvent", PROGRESS),
    ("agent_events", "AgentExecutionCompletedEvent", PROGRESS),
    ("agent_events", "AgentExecutionErrorEvent", PROGRESS),
    ("llm_events", "LLMCallStartedEvent", PROGRESS),
    ("llm_events", "LLMCallCompletedEvent", PROGRESS),
    ("llm_events", "LLMCallFailedEvent", PROGRESS),
    ("tool_usage_events", "ToolUsageStartedEvent", TOOLS),
    ("tool_usage_events", "ToolUsageFinishedEvent", TOOLS),
    ("tool_usage_events", "ToolUsageErrorEvent", TOOLS),
    ("tool_usage_events", "ToolFailureDetectedEvent", TOOLS),
    ("tool_usage_events", "ToolValidateInputErrorEvent", TOOLS),
    ("tool_usage_events", "ToolSelectionErrorEvent", TOOLS),
    ("tool_usage_events", "ToolExecutionErrorEvent", TOOLS),
)
#: Fields of events that are copied as they are: short names, ids, counts.
COPIED = (
    "crew_name",
    "total_tokens",
    "n_iterations",
    "quality",
    "execution_duration",
    "model",
    "call_id",
    "response_id",
    "finish_reason",
    "tool_name",
    "run_attempts",
    "from_cache",
)

Events = Callable[[Any, Any], None]


class Subscription:
    """The handlers of one job on the bus of this process. The process ends with its job, so they are never removed.

    ``scores`` collects what ``test`` measured. ``on_violation`` is called once, by the thread that streamed too much.
    """

    def __init__(self, stream: Stream, crew: Any, on_violation: Callable[[BaseException], None]) -> None:
        self.scores: list[dict[str, Any]] = []
        self._stream = stream
        self._on_violation = on_violation
        self._broken = False
        self._lock = threading.Lock()
        self._llm_started: dict[str, Any] = {}
        tasks = getattr(crew, "tasks", None)
        self._task_index = {str(task.id): at for at, task in enumerate(tasks or ()) if hasattr(task, "id")}

    def start(self, *, messages: bool) -> None:
        """Register the handlers; with ``messages`` the LLM's chunks are forwarded as the operation's own stream."""
        bus = importlib.import_module("crewai.events.event_bus").crewai_event_bus
        for module, name, channel in FORWARDED:
            kind = getattr(importlib.import_module(f"crewai.events.types.{module}"), name, None)
            if kind is not None:
                bus.register_handler(kind, self._handler(channel))
        if messages:
            llm_events = importlib.import_module("crewai.events.types.llm_events")
            bus.register_handler(llm_events.LLMStreamChunkEvent, self._message)

    def flush(self) -> None:
        """Wait until the bus has handed over what was emitted so far, FLUSH_TIMEOUT_S at most."""
        importlib.import_module("crewai.events.event_bus").crewai_event_bus.flush(timeout=FLUSH_TIMEOUT_S)

    def _handler(self, channel: str) -> Events:
        def forward(source: Any, event: Any) -> None:
            note = {"channel": channel} | self._note(event)
            if event.type == "crew_test_result":
                self._score(event)
            self._stream.progress(note)

        return forward

    def _note(self, event: Any) -> dict[str, Any]:
        note: dict[str, Any] = {"type": event.type} | self._where(event)
        for field in COPIED:
            value = getattr(event, field, None)
            if isinstance(value, str):
                note[field] = value[:MAX_NAME]
            elif isinstance(value, bool | int | float):
                note[field] = value
        if (duration := self._duration_ms(event)) is not None:
            note["duration_ms"] = duration
        if isinstance(usage := getattr(event, "usage", None), Mapping):
            note["usage"] = {str(name): count for name, count in usage.items() if isinstance(count, int | float)}
        if isinstance(error_type := getattr(event, "error_type", None), type):
            note["error_type"] = error_type.__name__
        return note

    def _where(self, event: Any) -> dict[str, Any]:
        """Task and agent of an event, from whichever of its fields knows them; unknown ones are left out."""
        task = getattr(event, "task", None)
        agent = getattr(event, "agent", None)
        task_id = getattr(event, "task_id", None) or getattr(task, "id", None)
        found = {
            "task_id": task_id and str(task_id),
            "task_name": getattr(event, "task_name", None) or getattr(task, "name", None),
            "agent_id": getattr(event, "agent_id", None) or getattr(agent, "id", None),
            "agent_role": getattr(event, "agent_role", None) or getattr(agent, "role", None),
        }
        where: dict[str, Any] = {name: str(value)[:MAX_NAME] for name, value in found.items() if value}
        if task_id and str(task_id) in self._task_index:
            where["task_index"] = self._task_index[str(task_id)]
        return where

    def _duration_ms(self, event: Any) -> float | None:
        if (started := getattr(event, "started_at", None)) is not None:
            return _milliseconds(started, event.finished_at)
        call_id = getattr(event, "call_id", None)
        if call_id is None:
            return None
        with self._lock:
            if event.type == "llm_call_started":
                self._llm_started[call_id] = event.timestamp
                return None
            since = self._llm_started.pop(call_id, None)
        return None if since is None else _milliseconds(since, event.timestamp)

    def _score(self, event: Any) -> None:
        with self._lock:
            self.scores.append(
                {"quality": event.quality, "execution_duration": event.execution_duration, "model": str(event.model)}
            )

    def _message(self, source: Any, event: Any) -> None:
        """Forward an LLM chunk. Runs in the LLM's own thread, so a slow reader slows the LLM and nothing piles up."""
        if self._broken:
            return
        try:
            self._stream.message(self._chunk(event))
        except Violation as violation:
            # The bus swallows what a handler raises, so the job hears of it another way.
            self._broken = True
            self._on_violation(violation)

    def _chunk(self, event: Any) -> dict[str, Any]:
        """The same fields as CrewAI's StreamChunk, whose task fields are always empty (its public issue 4347)."""
        where = self._where(event)
        call = event.tool_call
        return {
            "content": event.chunk,
            "chunk_type": "tool_call" if call else "text",
            "task_index": where.get("task_index", 0),
            "task_name": where.get("task_name", ""),
            "task_id": where.get("task_id", ""),
            "agent_role": where.get("agent_role", ""),
            "agent_id": where.get("agent_id", ""),
            "tool_call": call
            and {
                "tool_id": call.id,
                "tool_name": call.function.name,
                "arguments": call.function.arguments,
                "index": call.index,
            },
            "channel": TOOLS if call else "messages",
        }


def _milliseconds(since: datetime.datetime, until: datetime.datetime) -> float:
    return round((until - since).total_seconds() * 1000, 3)


def available() -> bool:
    """Whether this process has loaded enough of CrewAI for there to be events."""
    return loaded.module("crewai.crew") is not None
