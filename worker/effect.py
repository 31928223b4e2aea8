"""What a crew's author uses: ``effect`` makes a tool take effect at most once.

    from worker.effect import effect, NotApplied

    @tool("send_payment")
    @effect(key=lambda invoice, **_: invoice, scope="global", volatile=("memo",))
    def send_payment(invoice: str, amount: float, memo: str) -> str: ...

    with effect.claim("charge", key=invoice, args={"amount": amount}) as call:
        if not call.replayed:
            call.settle(charge(idempotency_key=call.provider_key))

Under the supervisor the ledger is its journal. A plain script names a file: ``effect.use_ledger(path, action=...)``.
Without a ledger nothing is done. CrewAI is not imported here; where it is loaded, its tools are guarded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from protocol.effects import Decision, Policy
from protocol.errors import EffectNotOpen
from worker import guard, tools
from worker.guarding import arguments, calls, policies, receipts, session
from worker.guarding.asking import Finding
from worker.guarding.calls import Call, NotApplied
from worker.guarding.policies import EffectPolicyError, Guarding
from worker.guarding.session import Replayed, Session

__all__ = ["EffectPolicyError", "NotApplied", "effect", "not_applied", "settled", "unknown"]

F = TypeVar("F", bound=Callable[..., Any])
#: Methods that CrewAI calls; their tool has a name of its own.
_METHODS = ("_run", "_arun", "run", "arun")


def settled(receipt: Any = None, *, evidence: str = "") -> Finding:
    """For a ``reconcile`` function: the provider has the effect. ``receipt`` is what a repeat of the call returns."""
    return Finding(Decision.SETTLED, receipt, evidence)


def not_applied(*, evidence: str = "") -> Finding:
    """For a ``reconcile`` function: the provider never saw the call, and never will; it may be made again."""
    return Finding(Decision.NOT_APPLIED, None, evidence)


def unknown(*, evidence: str = "") -> Finding:
    """For a ``reconcile`` function: the provider cannot say. The call stays blocked."""
    return Finding(None, None, evidence)


class Handle:
    """What ``with effect.claim(...) as call`` gives.

    ``replayed``: the effect happened before, ``receipt`` is its stored result (None if it was not stored), and nothing
    may be done. ``provider_key``: the key id, 64 hexadecimal digits, to be passed on as an idempotency key.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._open = False
        #: The block was left without an outcome; a thread of its may still settle.
        self._lost = False
        self.replayed = False
        self.receipt: Any = None
        self.provider_key = call.key_id

    def _began(self, past: Replayed | None) -> None:
        self._open = past is None
        self.replayed = past is not None
        self.receipt = None if past is None or past.receipt is None else receipts.decode(past.receipt)

    def _close(self, *, late: bool = False) -> None:
        if not (self._open or (late and self._lost)):
            raise EffectNotOpen(f"effect {self.provider_key} is replayed or has its outcome already")
        self._open = self._lost = False

    def settle(self, result: Any = None) -> None:
        """It took effect: record ``result`` durably. Raises EffectOutcomeUnknown if that cannot be recorded.

        May come late, from a thread that goes on when the block was left and the outcome is unknown.
        """
        self._close(late=True)
        self._call.settle(result)

    def not_applied(self) -> None:
        """Nothing happened; the call may be made again."""
        self._close()
        self._call.not_apply()

    def _left(self, error: BaseException | None) -> None:
        if self._open:
            # In this order, so that a thread that settles meanwhile is not turned away.
            self._lost = not isinstance(error, NotApplied)
            self._open = False
            if error is None:
                self._call.lose("left without an outcome")
            else:
                self._call.fail(error)


class AsyncHandle(Handle):
    """What ``async with effect.claim(...) as call`` gives: the same, to be awaited."""

    async def settle(self, result: Any = None) -> None:  # type: ignore[override]
        """It took effect: record ``result`` durably. Raises EffectOutcomeUnknown if that cannot be recorded."""
        self._close(late=True)
        await calls.to_the_end(self._call.settle, result)

    async def not_applied(self) -> None:  # type: ignore[override]
        """Nothing happened; the call may be made again."""
        self._close()
        await calls.to_the_end(self._call.not_apply)


class Claim:
    """One effect inside a tool or a script. Entering it claims; leaving it without an outcome makes that unknown.

    Entering raises the CrewError of a refusal: EffectInFlight, EffectConflict, EffectOutcomeUnknown and so on.
    """

    def __init__(self, guarding: Guarding, tool: str, args: dict[str, Any]) -> None:
        self._guarding, self._tool, self._args = guarding, tool, args
        self._handle: Handle | None = None

    def _make(self, kind: type[Handle]) -> Handle:
        if self._handle is not None:
            raise RuntimeError("a claim is entered once; make another one")
        self._handle = kind(Call(self._guarding, self._tool, self._args))
        return self._handle

    def __enter__(self) -> Handle:
        handle = self._make(Handle)
        handle._began(handle._call.begin())
        return handle

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        assert self._handle is not None
        self._handle._left(error)

    async def __aenter__(self) -> AsyncHandle:
        handle = self._make(AsyncHandle)
        assert isinstance(handle, AsyncHandle)
        handle._began(await calls.begin_async(handle._call))
        return handle

    async def __aexit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        assert self._handle is not None
        await calls.to_the_end(self._handle._left, error)


class _Effect:
    """The decorator, and what else belongs to it."""

    def __call__(
        self,
        function: Any = None,
        /,
        *,
        key: Callable[..., Any] | str | tuple[str, ...] | None = None,
        scope: str = "action",
        volatile: tuple[str, ...] | str = (),
        policy: str = "once",
        tool: str | None = None,
        reconcile: Callable[..., Any] | str | None = None,
        pass_key_as: str | None = None,
    ) -> Any:
        """Guard a function, a method ``_run`` or ``_arun``, or an object that ``@tool`` made.

        ``key``: function of the call's arguments, or names of arguments, that give the business key; without one each
        call has a key of its own. ``scope``: ``action``, ``crew`` or ``global``. ``volatile``: arguments that may
        differ between repeats. ``policy``: ``once``, or ``provider`` if the provider tells repeats by the key id.
        ``tool``: name in the key, by default the function's. ``reconcile``: ``function(key_id, tool, args)`` or
        ``"module:function"``, asked about an unknown outcome; returns settled(), not_applied() or unknown().
        ``pass_key_as``: argument that gets the key id. Raises EffectPolicyError.
        """
        guarding = policies.make(
            tool=tool,
            policy=policy,
            scope=scope,
            key=key,
            volatile=volatile,
            reconcile=reconcile,
            pass_key_as=pass_key_as,
        )

        def decorate(target: Any) -> Any:
            guard.install_if_loaded()
            return _decorate_tool(target, guarding) if tools.is_tool(target) else _decorate(target, guarding)

        return decorate if function is None else decorate(function)

    def claim(
        self,
        tool: str,
        *,
        args: dict[str, Any],
        key: Any = None,
        scope: str = "action",
        policy: str = "once",
        volatile: tuple[str, ...] = (),
        reconcile: Callable[..., Any] | str | None = None,
    ) -> Claim:
        """One effect of several in a tool, or one of a script; use it with ``with`` or ``async with``.

        ``key``: the business key itself, any JSON value. ``args``: what must not change between repeats.
        """
        guarding = policies.make(
            policy=policy,
            scope=scope,
            key=None if key is None else lambda **_: key,
            volatile=volatile,
            reconcile=reconcile,
        )
        return Claim(guarding, tool, args)

    def provider_key(self) -> str | None:
        """Key id of the call whose body is running, None outside of any."""
        return calls.provider_key()

    def use_ledger(
        self,
        path: str | os.PathLike[str],
        *,
        action: str,
        crew: str = "",
        tools: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> Session:
        """Let this process report to the ledger file ``path``, on behalf of ``action``.

        The same ``action`` in another process means the same work: what it did is not done again. ``tools``: policies
        of tools that cannot be decorated, by tool name; their fields are the decorator's.
        Raises EffectLedgerUnavailable, EffectPolicyError.
        """
        made = _session(path, action, crew, tools)
        session.begin(made)
        return made

    @contextlib.contextmanager
    def ledger(
        self,
        path: str | os.PathLike[str],
        *,
        action: str,
        crew: str = "",
        tools: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> Iterator[Session]:
        """As ``use_ledger``, for the block and what is started in it."""
        made = _session(path, action, crew, tools)
        try:
            with session.using(made):
                yield made
        finally:
            made.ledger.close()

    def guard(self) -> None:
        """Import CrewAI and guard its tools; only needed where CrewAI is imported after everything else."""
        guard.install()


effect = _Effect()


def _session(
    path: str | os.PathLike[str], action: str, crew: str, named: Mapping[str, Mapping[str, Any]] | None
) -> Session:
    from worker.ledger import LocalLedger

    guard.install_if_loaded()
    return Session(
        ledger=LocalLedger(path), action_id=action, crew_id=crew, policies=policies.registered(named or {}, "tools")
    )


def _decorate_tool(tool: Any, guarding: Guarding) -> Any:
    """Guard an object of CrewAI: through its function where it has one, else by a mark that the guard looks for."""
    if callable(function := getattr(tool, "func", None)):
        named = guarding if guarding.tool is not None else _renamed(guarding, tool.name)
        tool.func = _decorate(function, named)
    else:
        object.__setattr__(tool, tools.MARK, guarding)
    return tool


def _renamed(guarding: Guarding, tool: str) -> Guarding:
    return dataclasses.replace(guarding, tool=tool)


def _decorate(function: Callable[..., Any], guarding: Guarding) -> Callable[..., Any]:
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise EffectPolicyError(f"{function.__qualname__} is a generator; guard the function that acts")
    if not callable(function) or isinstance(function, type):
        raise EffectPolicyError(f"{function!r} is no function; guard its _run")
    _check(function, guarding)
    if guarding.policy is Policy.READ:
        return function

    def made(values: tuple[Any, ...], named: dict[str, Any]) -> Call | None:
        """The call to be claimed, None for one that is part of another. Puts the key id into ``named``."""
        guard.install_if_loaded()
        tool = guarding.tool or _name(function, values)
        if calls.running(tool):
            return None
        if guarding.pass_key_as is not None:
            named[guarding.pass_key_as] = ""
        call = Call(guarding, tool, arguments.bind(function, values, named))
        if guarding.pass_key_as is not None:
            named[guarding.pass_key_as] = call.key_id
        return call

    @functools.wraps(function)
    def guarded(*values: Any, **named: Any) -> Any:
        call = made(values, named)
        if call is None:
            return function(*values, **named)
        return calls.perform(call, lambda: function(*values, **named), failed=tools.is_failure)

    @functools.wraps(function)
    async def guarded_async(*values: Any, **named: Any) -> Any:
        call = made(values, named)
        if call is None:
            return await function(*values, **named)
        return await calls.perform_async(call, lambda: function(*values, **named), failed=tools.is_failure)

    wrapper = guarded_async if inspect.iscoroutinefunction(function) else guarded
    setattr(wrapper, tools.MARK, guarding)
    return wrapper


def _name(function: Callable[..., Any], values: tuple[Any, ...]) -> str:
    if function.__name__ in _METHODS and values and isinstance(name := getattr(values[0], "name", None), str):
        return name
    return function.__name__


def _check(function: Callable[..., Any], guarding: Guarding) -> None:
    """Find a wrong name in the policy when the module is imported, not when money is moved."""
    parameters = inspect.signature(function).parameters
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        guarding.check_arguments(guarding.tool or function.__name__, [name for name in parameters if name != "self"])
