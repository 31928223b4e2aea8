"""Tools of CrewAI as the guard sees them: their policies, and what is wrong with those before the crew begins."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

from protocol.errors import CrewError
from worker import loaded
from worker.guarding import policies, session
from worker.guarding.policies import EffectPolicyError, Guarding

#: Attribute of a decorated function or tool that holds its policy.
MARK = "__effect__"
MODULE = "crewai.tools.base_tool"


def is_tool(value: object) -> bool:
    """Whether ``value`` is a tool object of the CrewAI that is loaded."""
    module = loaded.module(MODULE)
    return module is not None and isinstance(value, module.BaseTool | module.CrewStructuredTool)


def is_failure(result: object) -> bool:
    """Whether ``result`` is a tool's own report that it failed: then nobody knows what it did."""
    module = loaded.module("crewai.tools.tool_failure")
    return module is not None and isinstance(result, module.ToolFailure)


def failure(error: CrewError) -> Any:
    """A refusal as the agent hears it: a result, since CrewAI takes an exception for a reason to try again."""
    module: Any = importlib.import_module("crewai.tools.tool_failure")
    return module.ToolFailure(message=error.detail, code=error.code, retryable=error.retryable)


def policy_of(tool: Any) -> tuple[Guarding, str] | None:
    """The policy of a tool and its name in keys, None for a tool without one.

    The configuration's word goes before the registry's, and that before the author's.
    """
    own: Any = getattr(tool, "_original_tool", None) or tool
    decorated = _decoration(own)
    here = session.known()
    named = None if here is None else _named(here.policies, own.name)
    guarding = named or decorated
    if guarding is None:
        return None
    name = (guarding.tool or own.name) if decorated is None else _decorated_name(own, decorated)
    return guarding, name


def _named(named: Mapping[str, Guarding], tool: str) -> Guarding | None:
    """By the tool's name, or by the form of it that the model sees."""
    return named.get(tool) or named.get(sanitized(tool))


def sanitized(tool: str) -> str:
    """The form of a tool's name that the model sees."""
    module: Any = importlib.import_module("crewai.utilities.string_utils")
    return str(module.sanitize_tool_name(tool))


def _bodies(tool: Any) -> Iterator[Any]:
    yield getattr(tool, "func", None)
    yield getattr(type(tool), "_run", None)
    yield getattr(type(tool), "_arun", None)


def _decoration(tool: Any) -> Guarding | None:
    if isinstance(own := vars(tool).get(MARK), Guarding):
        return own
    for body in _bodies(tool):
        if isinstance(found := getattr(body, MARK, None), Guarding):
            return found
    return None


def _decorated_name(tool: Any, decorated: Guarding) -> str:
    """The name that the decorated function uses itself, so that a direct call has the same key."""
    function: Any = getattr(tool, "func", None)
    return decorated.tool or str(function.__name__ if getattr(function, MARK, None) is decorated else tool.name)


def check(crew: Any, crew_id: str) -> None:
    """Raise EffectPolicyError for a policy of this session that names a tool or an argument that the crew has not.

    The tools of an agent with ``mcps`` or ``apps`` are not known before it works; then no name is called unknown.
    """
    here = session.known()
    named = {} if here is None else here.policies
    tools = list(_tools(crew))
    known = {tool.name for tool in tools}
    for name in named:
        if not any(name in (tool.name, sanitized(tool.name)) for tool in tools) and not _open_ended(crew):
            raise EffectPolicyError(
                f"an effect policy of crew {crew_id!r} names the tool {name!r}; "
                f"the crew's tools are: {', '.join(sorted(known)) or 'none'}"
            )
    for tool in tools:
        if (found := policy_of(tool)) is not None:
            guarding, _ = found
            guarding.check_arguments(tool.name, list(getattr(tool.args_schema, "model_fields", ())))
            if guarding.reconcile is not None:
                policies.reference(guarding.reconcile)


def any_guarded(crew: Any) -> bool:
    """Whether the session or a tool of ``crew`` has a policy."""
    here = session.known()
    return bool(here and here.policies) or any(policy_of(tool) is not None for tool in _tools(crew))


def _agents(crew: Any) -> Iterator[Any]:
    yield from getattr(crew, "agents", None) or ()
    yield getattr(crew, "manager_agent", None)
    for task in getattr(crew, "tasks", None) or ():
        yield getattr(task, "agent", None)


def _tools(crew: Any) -> Iterator[Any]:
    for owner in (*_agents(crew), *(getattr(crew, "tasks", None) or ())):
        for tool in getattr(owner, "tools", None) or ():
            if is_tool(tool):
                yield tool


def _open_ended(crew: Any) -> bool:
    if not loaded.is_crewai_crew(crew):
        return loaded.module("crewai.crew") is not None
    return any(getattr(agent, "mcps", None) or getattr(agent, "apps", None) for agent in _agents(crew))
