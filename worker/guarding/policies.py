"""How a tool is guarded: as its author says it, as the registry says it, or as the configuration says it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from protocol.effects import Policy, Scope, ToolPolicy

Key = Callable[..., Any] | tuple[str, ...]


class EffectPolicyError(Exception):
    """A policy names a tool or an argument that there is not, or contradicts itself; nothing runs."""

    error_type = "EffectPolicyError"


@dataclass(frozen=True, kw_only=True)
class Guarding:
    """The policy of one tool. ``key``: a function of the arguments, or names of arguments; none for a key per call.

    ``tool``: the name in the key, None for the tool's own. The other fields are those of ToolPolicy; ``reconcile``
    may be a function.
    """

    tool: str | None = None
    policy: Policy = Policy.ONCE
    scope: Scope = Scope.ACTION
    key: Key = ()
    volatile: tuple[str, ...] = ()
    reconcile: Callable[..., Any] | str | None = None
    pass_key_as: str | None = None

    def __post_init__(self) -> None:
        if self.scope is not Scope.ACTION and not self.key:
            raise EffectPolicyError(
                f"an effect of scope {self.scope.value!r} needs a key: without one, equal calls of different Actions "
                "would be taken for repeats of one another"
            )

    @property
    def left_out(self) -> tuple[str, ...]:
        """Arguments that are not part of the hash."""
        return self.volatile if self.pass_key_as is None else (*self.volatile, self.pass_key_as)

    def check_arguments(self, tool: str, names: Collection[str]) -> None:
        """Raise EffectPolicyError unless every argument that the policy names is one of ``names``."""
        wanted = (*(() if callable(self.key) else self.key), *self.left_out)
        if missing := sorted(set(wanted) - set(names)):
            raise EffectPolicyError(
                f"the effect policy of tool {tool!r} names {', '.join(map(repr, missing))}; "
                f"its arguments are: {', '.join(sorted(names)) or 'none'}"
            )


def make(
    *,
    tool: str | None = None,
    policy: str = "once",
    scope: str = "action",
    key: Any = None,
    volatile: Collection[str] = (),
    reconcile: Callable[..., Any] | str | None = None,
    pass_key_as: str | None = None,
) -> Guarding:
    """A policy from what an author writes. Raises EffectPolicyError for values that are none."""
    if isinstance(key, str):
        key = (key,)
    if isinstance(volatile, str):
        volatile = (volatile,)
    try:
        return Guarding(
            tool=tool,
            policy=Policy(policy),
            scope=Scope(scope),
            key=key if callable(key) else tuple(key or ()),
            volatile=tuple(volatile),
            reconcile=reconcile,
            pass_key_as=pass_key_as,
        )
    except (TypeError, ValueError) as error:
        raise EffectPolicyError(f"an effect policy cannot be used: {error}") from None


def configured(policies: Mapping[str, ToolPolicy]) -> dict[str, Guarding]:
    """Policies of the configuration by tool name. Raises EffectPolicyError."""
    return {tool: make(**msgspec.structs.asdict(policy)) for tool, policy in policies.items()}


def registered(policies: Any, where: str) -> dict[str, Guarding]:
    """Policies of one crew in the registry's ``EFFECTS``, by tool name. Raises EffectPolicyError naming ``where``."""
    if not isinstance(policies, Mapping):
        raise EffectPolicyError(f"{where} must be a mapping of tool names to policies")
    made = {}
    for tool, fields in policies.items():
        if not isinstance(tool, str) or not isinstance(fields, Mapping):
            raise EffectPolicyError(f"{where} must be a mapping of tool names to policies")
        try:
            made[tool] = make(**fields)
        except (TypeError, EffectPolicyError) as error:
            raise EffectPolicyError(f"{where}[{tool!r}]: {error}") from None
    return made


def reference(reconcile: Callable[..., Any] | str) -> tuple[Callable[..., Any], str]:
    """The function that asks the provider, and its name as ``module:function``. Raises EffectPolicyError."""
    if not isinstance(reconcile, str):
        return reconcile, f"{reconcile.__module__}:{getattr(reconcile, '__qualname__', type(reconcile).__name__)}"
    module, _, path = reconcile.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:
        raise EffectPolicyError(f"reconcile {reconcile!r} cannot be used: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise EffectPolicyError(f"reconcile {reconcile!r} is no function")
    return found, reconcile
