"""The kind of setting that says how a crew's tools are guarded; file only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from protocol.effects import Policy, Scope, ToolPolicy
from supervisor.config.kinds import Choice, Kind, Refused, RegistrySpec, Text, strings, suggest

MAX_NAME_CHARS = 256
MAX_TOOLS = 1000


class Name(Text):
    """The name of an argument."""

    def check(self, text: str) -> str:
        """Refuse what no Python function can have."""
        if not text.isidentifier():
            raise Refused(f"is not the name of an argument ({text[:64]!r}); set one such as invoice")
        return text


class Names:
    """Names of arguments, each once."""

    def from_text(self, text: str, base: Path) -> tuple[str, ...]:
        """There is no variable for this setting."""
        raise Refused("cannot be set by an environment variable; use the configuration file")

    def from_toml(self, value: Any, base: Path) -> tuple[str, ...]:
        """Read a TOML array of strings."""
        names = tuple(Name().check(name) for name in strings(value))
        if len(set(names)) != len(names):
            raise Refused("names an argument twice; remove one")
        return names


#: What a tool's table may say.
_FIELDS: dict[str, Kind] = {
    "policy": Choice(*Policy),
    "scope": Choice(*Scope),
    "key": Names(),
    "volatile": Names(),
    "reconcile": RegistrySpec(),
    "pass_key_as": Name(),
}


class ToolPolicies:
    """A table of tables: tool name, then the fields of ToolPolicy."""

    def from_text(self, text: str, base: Path) -> dict[str, ToolPolicy]:
        """There is no variable for this setting."""
        raise Refused("cannot be set by an environment variable; use the configuration file")

    def from_toml(self, value: Any, base: Path) -> dict[str, ToolPolicy]:
        """Read it; a refusal names the tool and the field."""
        if not isinstance(value, dict) or len(value) > MAX_TOOLS:
            raise Refused(f"is not a table of at most {MAX_TOOLS} tools; write [crews.<id>.effects.<tool>]")
        return {tool: _policy(tool, table, base) for tool, table in value.items()}


def _policy(tool: str, table: Any, base: Path) -> ToolPolicy:
    shown = repr(tool[:64])
    if not tool.strip() or len(tool) > MAX_NAME_CHARS:
        raise Refused(f"has the tool name {shown}; use 1 to {MAX_NAME_CHARS} characters")
    if not isinstance(table, dict):
        raise Refused(f"has no table for {shown}; set for example policy = \"once\"")
    values: dict[str, Any] = {}
    for name, value in table.items():
        if name not in _FIELDS:
            hint = suggest(name, [*_FIELDS]) or "; remove it"
            raise Refused(f"has {shown} with the unknown field {name[:64]!r}{hint}")
        try:
            values[name] = _FIELDS[name].from_toml(value, base)
        except Refused as reason:
            raise Refused(f"has {shown} whose {name} {reason}") from None
    if "policy" in values:
        values["policy"] = Policy(values["policy"])
    if "scope" in values:
        values["scope"] = Scope(values["scope"])
    made = ToolPolicy(**values)
    _check(made, shown)
    return made


def _check(policy: ToolPolicy, shown: str) -> None:
    if policy.policy is Policy.READ and policy != ToolPolicy(policy=Policy.READ):
        raise Refused(f"has {shown} with the policy read, which claims nothing; remove its other fields")
    if policy.scope is not Scope.ACTION and not policy.key:
        # Without a business key the n-th call of every Action would be the same effect.
        raise Refused(f"has {shown} with the scope {policy.scope.value} and no key; name the arguments that make one")
    both = set(policy.key) & set(policy.volatile)
    if both:
        raise Refused(f"has {shown} with {sorted(both)[0]!r} in key and in volatile; keep one")
