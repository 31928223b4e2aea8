"""The registry: ``module:attribute`` names a mapping of crew ids to what makes a crew."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from protocol import frames
from worker import guard
from worker.guarding import policies
from worker.guarding.policies import EffectPolicyError, Guarding

#: A crew has at least one of these.
KICKOFF_METHODS = ("kickoff", "kickoff_async", "akickoff")
#: Every crew method that an operation may use, as reported to the supervisor.
CREW_METHODS = (
    *KICKOFF_METHODS,
    "kickoff_for_each",
    "kickoff_for_each_async",
    "akickoff_for_each",
    "replay",
    "train",
    "test",
    "query_knowledge",
    "aquery_knowledge",
    "reset_memories",
)
#: Optional attribute of the registry's module: evaluator name to LLM object or zero-argument callable.
EVALUATORS = "EVALUATORS"
#: Optional attribute of the registry's module: crew id to tool name to the fields of an effect policy.
EFFECTS = "EFFECTS"

#: Policies by crew id and tool name.
Policies = Mapping[str, Mapping[str, Guarding]]


class RegistryInvalid(Exception):
    """The registry cannot be used; the message names the part that is wrong, the cause is chained."""


class NotACrew(Exception):
    """A registry entry made something that has none of KICKOFF_METHODS, or cannot be copied."""

    error_type = "RegistryError"


def load(spec: str, preload: Sequence[str]) -> Mapping[str, object]:
    """Import ``preload``, then the registry, and return its entries without building any.

    ``spec``: ``module:attribute``; the attribute is a mapping or a zero-argument callable that returns one.
    Raises RegistryInvalid.
    """
    for name in preload:
        _import(name, f"preloaded module {name!r}")
    module_name, attribute = _split(spec)
    value: Any = _import(module_name, f"registry module {module_name!r}")
    for part in attribute.split("."):
        try:
            value = getattr(value, part)
        except AttributeError:
            raise RegistryInvalid(f"registry {spec!r}: {module_name} has no attribute {attribute!r}") from None
    if callable(value) and not isinstance(value, Mapping):
        value = _call(value, spec)
    if not isinstance(value, Mapping):
        raise RegistryInvalid(f"registry {spec!r} is a {type(value).__name__}, not a mapping of crew ids")
    if not value:
        raise RegistryInvalid(f"registry {spec!r} is empty; it needs at least one crew")
    for crew_id in value:
        if not isinstance(crew_id, str) or not crew_id.strip():
            raise RegistryInvalid(f"registry {spec!r} has the id {crew_id!r}; ids are non-blank strings")
    # It imports what CrewAI itself imports late: here once, in a forked worker for every job. What cannot be guarded
    # is said of the crew that has something to guard.
    with contextlib.suppress(EffectPolicyError):
        guard.install_if_loaded()
    return value


def _split(spec: str) -> tuple[str, str]:
    module_name, separator, attribute = spec.partition(":")
    if not separator or not module_name.strip() or not attribute.strip():
        raise RegistryInvalid(f"registry {spec!r} is not of the form module:attribute")
    return module_name.strip(), attribute.strip()


def _import(name: str, what: str) -> types.ModuleType:
    # sys.exit() in a module is a broken module, not a wish of ours to leave.
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise RegistryInvalid(f"{what} cannot be imported: {type(error).__name__}: {error}") from error


def _call(factory: Callable[[], object], spec: str) -> object:
    try:
        return factory()
    except (Exception, SystemExit) as error:
        raise RegistryInvalid(f"registry {spec!r} raised {type(error).__name__}: {error}") from error


def evaluators(spec: str) -> Mapping[str, object]:
    """The evaluators that the loaded registry module names; empty without ``EVALUATORS``. Raises RegistryInvalid."""
    found = getattr(sys.modules.get(_split(spec)[0]), EVALUATORS, {})
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        raise RegistryInvalid(f"registry {spec!r}: {EVALUATORS} must be a mapping with string names")
    return found


def effects(spec: str, crews: Mapping[str, object]) -> Policies:
    """The effect policies that the loaded registry module names; empty without ``EFFECTS``. Raises RegistryInvalid."""
    found = getattr(sys.modules.get(_split(spec)[0]), EFFECTS, {})
    if not isinstance(found, Mapping):
        raise RegistryInvalid(f"registry {spec!r}: {EFFECTS} must be a mapping of crew ids")
    if unknown := [crew_id for crew_id in found if crew_id not in crews]:
        raise RegistryInvalid(f"registry {spec!r}: {EFFECTS} names the crew {unknown[0]!r}, which is not in it")
    try:
        return {
            crew_id: policies.registered(tools, f"{EFFECTS}[{crew_id!r}]") for crew_id, tools in found.items()
        }
    except EffectPolicyError as error:
        raise RegistryInvalid(f"registry {spec!r}: {error}") from error


def digest(spec: str, crews: Mapping[str, object]) -> str:
    """Lower-case hex SHA-256 over ``spec``, the crew ids and the bytes of the registry module's source file."""
    found = hashlib.sha256("\n".join((spec, *sorted(crews))).encode("utf-8", "surrogatepass") + b"\0")
    source = getattr(sys.modules.get(_split(spec)[0]), "__file__", None)
    if source is not None:
        found.update(Path(source).read_bytes())
    return found.hexdigest()


def report(crews: Mapping[str, object]) -> tuple[frames.CrewReport, ...]:
    """What can be said of every entry without building it, in the registry's order."""
    return tuple(
        frames.CrewReport(crew_id=crew_id, kind=_kind(entry), methods=_known_methods(entry))
        for crew_id, entry in crews.items()
    )


def _kind(entry: object) -> str:
    if isinstance(entry, type):
        return "crew_base" if _is_crew_base(entry) else "class"
    if inspect.ismethod(entry):
        return "method"
    return "function" if _is_factory(entry) else "object"


def _known_methods(entry: object) -> tuple[str, ...] | None:
    if not isinstance(entry, type) and _is_factory(entry):
        return None
    methods = tuple(name for name in CREW_METHODS if callable(getattr(entry, name, None)))
    return methods if is_crew(entry) or not isinstance(entry, type) else None


def _is_factory(entry: object) -> bool:
    """Classes, functions, bound methods and other callables that are not crews themselves."""
    return isinstance(entry, type) or (callable(entry) and not is_crew(entry))


def _is_crew_base(kind: type) -> bool:
    """Whether ``kind`` was decorated with CrewAI's ``@CrewBase``, which marks its classes."""
    return getattr(kind, "is_crew_class", False) is True


def is_crew(value: object) -> bool:
    """Whether ``value`` has a method that runs it."""
    return any(callable(getattr(value, name, None)) for name in KICKOFF_METHODS)


def build(entry: object) -> Any:
    """Make this job's crew: call a class, function or bound method, copy anything else.

    An instance of a ``@CrewBase`` class is asked for its ``crew()``. Raises NotACrew, and whatever a factory raises.
    """
    made: Any = entry() if _is_factory(entry) and callable(entry) else entry
    if not is_crew(made) and _is_crew_base(type(made)):
        made = made.crew()
    elif made is entry:
        made = _clone(entry)
    if not is_crew(made) or isinstance(made, type):
        raise NotACrew(f"the registry entry made a {type(made).__name__} without {', '.join(KICKOFF_METHODS)}")
    return made


def _clone(crew: object) -> object:
    """A copy by the first way that works: a CrewAI crew whose LLM holds a lock has only its own ``copy``."""
    ways: list[Callable[[], object]] = []
    if callable(model_copy := getattr(crew, "model_copy", None)):
        ways.append(lambda: model_copy(deep=True))
    if callable(own_copy := getattr(crew, "copy", None)):
        ways.append(own_copy)
    ways.append(lambda: copy.deepcopy(crew))
    faults: list[str] = []
    for way in ways:
        try:
            return way()
        except Exception as error:  # noqa: BLE001 - a foreign copy may raise anything; the next way is tried
            faults.append(f"{type(error).__name__}: {error}")
    raise NotACrew(f"the {type(crew).__name__} in the registry cannot be copied: {'; '.join(faults)}")
