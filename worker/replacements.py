"""What else of CrewAI the guard replaces: where calls are counted, how their text is read, and retries below a tool."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from protocol.errors import NotCanonical
from worker.guarding import arguments, calls, places, session
from worker.guarding.places import Place
from worker.tools import sanitized

#: The object that has the function, its name, and what makes the new one of the old one.
Replacement = tuple[Any, str, Callable[[Any], Any]]


# --- where calls are made -----------------------------------------------------------------------------------------

def of_places() -> list[Replacement]:
    """Runs and copies of crews, and attempts at tasks; a retry enters the executor again."""
    crew: Any = importlib.import_module("crewai.crew").Crew
    executor: Any = importlib.import_module("crewai.agents.agent_executor").AgentExecutor
    return [
        (crew, "copy", _numbering_copies),
        # A listener of CrewAI's own copies a crew that is tested, whenever it comes to it.
        (crew, "train", _in_batch("train", ordered=False)),
        (crew, "test", _in_batch("test", ordered=False)),
        (crew, "kickoff_for_each", _in_batch("batch", ordered=True)),
        (crew, "kickoff_for_each_async", _in_batch_async),
        (crew, "akickoff_for_each", _in_batch_async),
        (crew, "_execute_tasks", _in_run),
        (crew, "_aexecute_tasks", _in_run_async),
        (executor, "invoke", _in_attempt),
        (executor, "invoke_async", _in_attempt_async),
    ]


def _kind(crew: Any) -> tuple[str, str]:
    return "crew", str(getattr(crew, "name", None) or "")


def _numbering_copies(original: Callable[..., Any]) -> Callable[..., Any]:
    def copy(crew: Any, *values: Any, **named: Any) -> Any:
        made = original(crew, *values, **named)
        if (here := session.known()) is not None:
            here.seats.copied(crew, made, *_kind(crew))
        return made

    return copy


@contextlib.contextmanager
def _batch(crew: Any, name: str, *, ordered: bool = True) -> Iterator[None]:
    """Work that copies of ``crew`` do."""
    here = session.known()
    with contextlib.nullcontext() if here is None else here.seats.batch(crew, name, *_kind(crew), ordered=ordered):
        yield


@contextlib.contextmanager
def _run(crew: Any) -> Iterator[None]:
    """Work that ``crew`` does itself."""
    here = session.known()
    with contextlib.nullcontext() if here is None else here.seats.run(crew, *_kind(crew)):
        yield


def _in_batch(name: str, *, ordered: bool) -> Callable[[Any], Any]:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def work(crew: Any, *values: Any, **named: Any) -> Any:
            with _batch(crew, name, ordered=ordered):
                return original(crew, *values, **named)

        return work

    return wrap


def _in_batch_async(original: Callable[..., Any]) -> Callable[..., Any]:
    async def work(crew: Any, *values: Any, **named: Any) -> Any:
        with _batch(crew, "batch"):
            return await original(crew, *values, **named)

    return work


def _in_run(original: Callable[..., Any]) -> Callable[..., Any]:
    def execute(crew: Any, *values: Any, **named: Any) -> Any:
        with _run(crew):
            return original(crew, *values, **named)

    return execute


def _in_run_async(original: Callable[..., Any]) -> Callable[..., Any]:
    async def execute(crew: Any, *values: Any, **named: Any) -> Any:
        with _run(crew):
            return await original(crew, *values, **named)

    return execute


@contextlib.contextmanager
def _attempt(executor: Any) -> Iterator[None]:
    """One attempt at a task: its calls are counted from 0 again, and none of them is part of a call outside."""
    here = session.known()
    if here is None:
        yield
        return
    index = _task_index(executor, here)
    try:
        with calls.part_of(None), places.inside(Place(index)):
            yield
    except BaseException:
        if executor.task is None:
            here.seats.leave(executor)
        raise


def _task_index(executor: Any, here: session.Session) -> places.Index:
    tasks: Iterable[Any] = getattr(executor.crew, "tasks", None) or ()
    at = next((at for at, task in enumerate(tasks) if task is executor.task), None)
    if at is not None:
        return [*places.current(here.root).index, "task", at]
    if executor.task is not None:
        # A task that an agent was given by another one: its place is the call that gave it.
        return [*places.current(here.root).index, "task"]
    return here.seats.of(executor, "agent", str(getattr(executor.agent, "role", ""))).index


def _in_attempt(original: Callable[..., Any]) -> Callable[..., Any]:
    def invoke(executor: Any, *values: Any, **named: Any) -> Any:
        with _attempt(executor):
            return original(executor, *values, **named)

    return invoke


def _in_attempt_async(original: Callable[..., Any]) -> Callable[..., Any]:
    async def invoke(executor: Any, *values: Any, **named: Any) -> Any:
        with _attempt(executor):
            return await original(executor, *values, **named)

    return invoke


# --- what a model writes ------------------------------------------------------------------------------------------

#: A tool's name, and why the text of the call that is about to be made of it has no canonical form.
_doubt: contextvars.ContextVar[tuple[str, NotCanonical] | None] = contextvars.ContextVar("effect_doubt", default=None)


def of_parsing() -> list[Replacement]:
    """CrewAI reads arguments before a tool sees them, and keeps the last of duplicate keys."""
    usage: Any = importlib.import_module("crewai.tools.tool_usage").ToolUsage
    executor: Any = importlib.import_module("crewai.agents.agent_executor")
    native: Any = importlib.import_module("crewai.utilities.agent_utils")
    return [
        (usage, "_validate_tool_input", _strict_react),
        (executor, "parse_tool_call_args", _strict_native),
        (native, "parse_tool_call_args", _strict_native),
    ]


def _read_text(tool: Callable[[], str], text: Any) -> None:
    """Note what is wrong with the text of a call; only a guarded tool minds."""
    _doubt.set(None)
    if isinstance(text, str):
        try:
            arguments.parse(text)
        except NotCanonical as refusal:
            _doubt.set((sanitized(tool()), refusal))


def check_text(tool: Any) -> None:
    """Raise NotCanonical if the text that this call was read from had no canonical form."""
    found = _doubt.get()
    if found is not None and found[0] == sanitized(tool.name):
        _doubt.set(None)
        raise found[1]


def _written(action: Any) -> str | None:
    """The object that the model wrote as the input of ``action``, before CrewAI repaired it."""
    pattern: Any = importlib.import_module("crewai.agents.constants").ACTION_INPUT_REGEX
    found = pattern.search(getattr(action, "text", None) or "")
    return None if found is None else arguments.leading(found[2])


def _strict_react(original: Callable[..., Any]) -> Callable[..., Any]:
    def validate(usage: Any, tool_input: Any, *values: Any, **named: Any) -> Any:
        _read_text(lambda: usage._select_tool(usage.action.tool).name, _written(usage.action) or tool_input)
        return original(usage, tool_input, *values, **named)

    return validate


def _strict_native(original: Callable[..., Any]) -> Callable[..., Any]:
    def parse(func_args: Any, func_name: str, *values: Any, **named: Any) -> Any:
        _read_text(lambda: func_name, func_args)
        return original(func_args, func_name, *values, **named)

    return parse


# --- MCP ----------------------------------------------------------------------------------------------------------


def of_mcp() -> list[Replacement]:
    """CrewAI repeats an MCP call that is slow or loses its connection, below the six methods: three effects."""
    client: Any = importlib.import_module("crewai.mcp.client").MCPClient
    wrapper: Any = importlib.import_module("crewai.tools.mcp_tool_wrapper").MCPToolWrapper
    return [(client, "call_tool_result", _once_by_client), (wrapper, "_run", _once_by_wrapper)]


def _once_by_client(original: Callable[..., Any]) -> Callable[..., Any]:
    async def call_tool_result(client: Any, *values: Any, **named: Any) -> Any:
        if calls.provider_key() is None:
            return await original(client, *values, **named)
        tries, client.max_retries = client.max_retries, 1
        try:
            return await original(client, *values, **named)
        finally:
            client.max_retries = tries

    return call_tool_result


def _once_by_wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
    """It also turns every failure into text, which would look like a result."""

    def run(tool: Any, **named: Any) -> Any:
        if calls.provider_key() is None:
            return original(tool, **named)
        return asyncio.run(tool._execute_tool_with_timeout(**named))

    return run
