"""The guard at the one place that every tool call of CrewAI passes: six methods of its three tool classes.

Native calls come through ``BaseTool.run`` and ``Tool.run``, ReAct calls through ``CrewStructuredTool.invoke`` and
``ainvoke``, direct ones through ``arun``; crews, delegated agents and MCP tools all use these. Hooks are no place for a
guard: CrewAI runs the tool when a hook raises.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import inspect
import json
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from protocol.effects import Policy
from protocol.errors import CrewError, NotCanonical
from worker import loaded, replacements, tools
from worker.guarding import arguments, calls, places, session
from worker.guarding.calls import Call, NotApplied
from worker.guarding.places import ToolCall
from worker.guarding.policies import EffectPolicyError

#: Every error with such a code is one of the ledger's refusals.
_CODES = "effect_"

_lock = threading.Lock()
_installed = False


def install_if_loaded() -> None:
    """Guard CrewAI if this process has imported it."""
    if loaded.module(tools.MODULE) is not None:
        install()


def install() -> None:
    """Guard the tools of CrewAI in this process, once. Imports it.

    Raises EffectPolicyError for a CrewAI that has no such methods: a guard that is passed by would guard nothing.
    """
    global _installed
    with _lock:
        if not _installed:
            try:
                _install()
            except (ImportError, AttributeError, KeyError) as error:
                raise EffectPolicyError(
                    f"this CrewAI cannot be guarded: {type(error).__name__}: {error}; its tools must not run"
                ) from error
            _installed = True


def prepare(crew: Any, crew_id: str) -> None:
    """Guard CrewAI and check the policies of ``crew``, before it begins. Raises EffectPolicyError."""
    try:
        install_if_loaded()
    except EffectPolicyError:
        if tools.any_guarded(crew):
            raise
    tools.check(crew, crew_id)


def _install() -> None:
    base: Any = importlib.import_module(tools.MODULE)
    structured: Any = importlib.import_module("crewai.tools.structured_tool")
    wanted = [
        (base.BaseTool, "run", _guard(_called_by_name)),
        (base.BaseTool, "arun", _guard_async(_called_by_name)),
        (base.Tool, "run", _guard(_called_by_name)),
        (base.Tool, "arun", _guard_async(_called_by_name)),
        (structured.CrewStructuredTool, "invoke", _guard(_invoked)),
        (structured.CrewStructuredTool, "ainvoke", _guard_async(_invoked, in_thread="invoke")),
        *replacements.of_places(),
        *replacements.of_parsing(),
        *replacements.of_mcp(),
    ]
    originals = [vars(owner)[name] for owner, name, _ in wanted]
    for (owner, name, wrap), original in zip(wanted, originals, strict=True):
        setattr(owner, name, functools.wraps(original)(wrap(original)))


# --- one call -----------------------------------------------------------------------------------------------------

_PLACEHOLDER = "0" * 64


class _Limited(NotApplied):
    """The tool may not be used any more, so its body did not run."""


@dataclass(frozen=True)
class _Form:
    """How one of the methods takes arguments.

    ``read``: the validated arguments, with ``extra`` among those given. ``add``: the call with one argument more.
    """

    read: Callable[[Any, tuple[Any, ...], dict[str, Any], dict[str, str]], dict[str, Any]]
    add: Callable[[Any, tuple[Any, ...], dict[str, Any], dict[str, str]], tuple[tuple[Any, ...], dict[str, Any]]]


def _read_named(tool: Any, values: tuple[Any, ...], named: dict[str, Any], extra: dict[str, str]) -> dict[str, Any]:
    if not values:
        return dict(tool._validate_kwargs(named | extra))
    # CrewAI does not validate positional arguments; here they must be good, or there is no key for them.
    body = getattr(tool, "func", None) or tool._run
    try:
        return dict(tool._validate_kwargs(arguments.bind(body, values, named | extra)))
    except (TypeError, ValueError) as error:
        raise NotCanonical(f"the arguments of tool {tool.name!r} cannot be read: {error}") from error


def _add_named(
    tool: Any, values: tuple[Any, ...], named: dict[str, Any], extra: dict[str, str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return values, named | extra


def _input(values: tuple[Any, ...], named: dict[str, Any]) -> Any:
    return values[0] if values else named["input"]


def _read_input(tool: Any, values: tuple[Any, ...], named: dict[str, Any], extra: dict[str, str]) -> dict[str, Any]:
    given = _input(values, named)
    if isinstance(given, str):
        given = arguments.parse(given)
    if isinstance(given, Mapping):
        given = {**given, **extra}
    rest = {name: value for name, value in named.items() if name not in ("input", "config")}
    return dict(tool._parse_args(given)) | rest


def _add_input(
    tool: Any, values: tuple[Any, ...], named: dict[str, Any], extra: dict[str, str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    given = _input(values, named)
    if isinstance(given, str):
        given = json.loads(given)
    return values[1:], {**named, "input": {**given, **extra}}


_called_by_name = _Form(_read_named, _add_named)
_invoked = _Form(_read_input, _add_input)


class _Passing:
    """One call that passes the guard: whose policy applies, and what is to be done."""

    def __init__(self, form: _Form, tool: Any, values: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.tool, self.values, self.named = tool, values, named
        self._form = form
        self._policy = tools.policy_of(tool)
        #: Nothing is claimed: no policy, one that says so, or a part of a call that is claimed already.
        self.name = None if self._policy is None else self._policy[1]
        self.part = self.name is not None and calls.running(self.name)
        self.free = self._policy is None or self._policy[0].policy is Policy.READ

    def call(self) -> Call:
        """The call to be claimed. Raises CrewError, and what CrewAI raises for arguments that are none."""
        assert self._policy is not None
        guarding, name = self._policy
        replacements.check_text(self.tool)
        extra = {} if guarding.pass_key_as is None else {guarding.pass_key_as: _PLACEHOLDER}
        call = Call(guarding, name, self._form.read(self.tool, self.values, self.named, extra))
        if guarding.pass_key_as is not None:
            extra = {guarding.pass_key_as: call.key_id}
            self.values, self.named = self._form.add(self.tool, self.values, self.named, extra)
        return call

    @contextlib.contextmanager
    def unclaimed(self) -> Iterator[None]:
        """The context of a call that is not claimed; what it does inside has a place of its own."""
        here = session.known()
        if here is None:
            yield
            return
        inner = ToolCall(places.current(here.root), self.tool.name, self._tag)
        try:
            with self._passed(), places.inside(inner.place):
                yield
        except BaseException:
            inner.raised()
            raise

    def _passed(self) -> contextlib.AbstractContextManager[None]:
        """A decorated body lets a call pass that the configuration does not want claimed."""
        return contextlib.nullcontext() if self.name is None else calls.part_of(self.name)

    def _tag(self) -> str:
        try:
            read = self._form.read(self.tool, self.values, self.named, {})
            return arguments.digest(arguments.plain(read), volatile=())
        except Exception:  # noqa: BLE001 - arguments without a canonical form: then only the order tells calls apart
            return "-"

    def check_limit(self) -> None:
        """Raise _Limited for a tool that CrewAI will not run any more: that is no unknown outcome."""
        limit = getattr(self.tool, "max_usage_count", None)
        if limit is not None and self.tool.current_usage_count >= limit:
            raise _Limited(f"tool {self.tool.name!r} has reached its usage limit of {limit}")

    def limited(self, error: _Limited) -> Any:
        """What the agent hears then."""
        module: Any = importlib.import_module("crewai.tools.tool_failure")
        return module.ToolFailure(message=str(error), reason=module.ToolFailureReason.USAGE_LIMIT)


def _guard(form: _Form) -> Callable[[Any], Any]:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(tool: Any, *values: Any, **named: Any) -> Any:
            passing = _Passing(form, tool, values, named)
            if passing.part:
                return original(tool, *values, **named)
            try:
                if passing.free:
                    with passing.unclaimed():
                        return original(tool, *values, **named)
                call = passing.call()

                def body() -> Any:
                    passing.check_limit()
                    return original(tool, *passing.values, **passing.named)

                return calls.perform(call, body, failed=tools.is_failure)
            except _Limited as error:
                return passing.limited(error)
            except CrewError as error:
                return _heard(error)

        return method

    return wrap


def _guard_async(form: _Form, *, in_thread: str | None = None) -> Callable[[Any], Any]:
    """``in_thread``: the method that does the same in a thread, for a function that is no coroutine.

    CrewAI runs it in a thread without its context, so that it would not know that it is claimed.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        async def method(tool: Any, *values: Any, **named: Any) -> Any:
            if in_thread is not None and not inspect.iscoroutinefunction(tool.func):
                return await asyncio.to_thread(getattr(tool, in_thread), *values, **named)
            passing = _Passing(form, tool, values, named)
            if passing.part:
                return await original(tool, *values, **named)
            try:
                if passing.free:
                    with passing.unclaimed():
                        return await original(tool, *values, **named)
                call = passing.call()

                def body() -> Awaitable[Any]:
                    passing.check_limit()
                    started: Awaitable[Any] = original(tool, *passing.values, **passing.named)
                    return started

                return await calls.perform_async(call, body, failed=tools.is_failure)
            except _Limited as error:
                return passing.limited(error)
            except CrewError as error:
                return _heard(error)

        return method

    return wrap


def _heard(error: CrewError) -> Any:
    if not error.code.startswith(_CODES):
        raise error
    return tools.failure(error)
