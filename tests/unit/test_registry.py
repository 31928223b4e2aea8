"""Loading a registry, reporting it without building, building one entry."""

from __future__ import annotations

import copy
import functools
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from worker import registry


class Crew:
    """A crew made by its class."""

    def kickoff(self, inputs: Any) -> None:
        """Nothing."""


class Project:
    """What CrewAI's ``@CrewBase`` makes of a class, as far as anyone can see from outside."""

    is_crew_class = True

    def crew(self) -> Crew:
        return Crew()


class Maker:
    """Has a bound method that makes a crew."""

    def make(self) -> Crew:
        return Crew()

    @staticmethod
    def make_plain() -> Crew:
        return Crew()


@pytest.fixture
def module(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Write a registry module and return a function that gives its ``module:attribute``."""
    name = f"registry_of_{request.node.name.split('[')[0]}"
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(source: str, attribute: str = "CREWS") -> str:
        (tmp_path / f"{name}.py").write_text(source)
        sys.modules.pop(name, None)
        return f"{name}:{attribute}"

    yield write
    sys.modules.pop(name, None)


def test_a_mapping_loads_and_keeps_its_order(module: Any) -> None:
    spec = module("CREWS = {'b': list, 'a': dict}")
    assert list(registry.load(spec, ("json",))) == ["b", "a"]


def test_a_callable_that_returns_a_mapping_loads(module: Any) -> None:
    spec = module("class Holder:\n  @staticmethod\n  def crews():\n    return {'a': list}", "Holder.crews")
    assert list(registry.load(spec, ())) == ["a"]


@pytest.mark.parametrize(
    ("source", "attribute", "message"),
    [
        ("CREWS = {}", "CREWS", "empty"),
        ("CREWS = [1]", "CREWS", "list"),
        ("CREWS = {' ': list}", "CREWS", "' '"),
        ("CREWS = {3: list}", "CREWS", "3"),
        ("CREWS = {'a': list}", "OTHER", "no attribute 'OTHER'"),
        ("raise ValueError('broken inside')", "CREWS", "ValueError: broken inside"),
        ("import sys; sys.exit(4)", "CREWS", "SystemExit: 4"),
        ("def CREWS(): raise KeyError('missing')", "CREWS", "KeyError"),
        ("def CREWS(needed): return {}", "CREWS", "TypeError"),
        ("import no_such_module_anywhere", "CREWS", "no_such_module_anywhere"),
    ],
)
def test_a_broken_registry_is_refused_with_its_fault(module: Any, source: str, attribute: str, message: str) -> None:
    with pytest.raises(registry.RegistryInvalid, match=message):
        registry.load(module(source, attribute), ())


@pytest.mark.parametrize("spec", ["module", "module:", ":attribute", ""])
def test_a_spec_names_module_and_attribute(spec: str) -> None:
    with pytest.raises(registry.RegistryInvalid, match="module:attribute"):
        registry.load(spec, ())


def test_a_preload_that_fails_is_named(module: Any) -> None:
    with pytest.raises(registry.RegistryInvalid, match="preloaded module 'no_such_preload'"):
        registry.load(module("CREWS = {'a': list}"), ("no_such_preload",))


def test_the_cause_of_a_failed_import_is_chained(module: Any) -> None:
    with pytest.raises(registry.RegistryInvalid) as caught:
        registry.load(module("1 / 0"), ())
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_evaluators_are_optional_and_must_be_named(module: Any) -> None:
    spec = module("CREWS = {'a': list}")
    registry.load(spec, ())
    assert registry.evaluators(spec) == {}
    spec = module("CREWS = {'a': list}\nEVALUATORS = {'judge': str}")
    registry.load(spec, ())
    assert registry.evaluators(spec) == {"judge": str}
    spec = module("CREWS = {'a': list}\nEVALUATORS = ['judge']")
    registry.load(spec, ())
    with pytest.raises(registry.RegistryInvalid, match="EVALUATORS"):
        registry.evaluators(spec)


def test_effect_policies_are_optional_and_must_be_ones(module: Any) -> None:
    crews = "CREWS = {'a': list}\n"
    spec = module(crews)
    assert registry.effects(spec, registry.load(spec, ())) == {}
    spec = module(crews + "EFFECTS = {'a': {'pay': {'key': 'invoice', 'scope': 'crew'}}}")
    found = registry.effects(spec, registry.load(spec, ()))
    assert found["a"]["pay"].key == ("invoice",)
    for wrong, fault in {
        "3": "mapping",
        "{'b': {}}": "'b'",
        "{'a': 3}": "EFFECTS\\['a'\\]",
        "{'a': {'pay': {'twice': True}}}": "'pay'.*twice",
        "{'a': {'pay': {'policy': 'twice'}}}": "'pay'.*twice",
        "{'a': {'pay': {'scope': 'global'}}}": "'pay'.*needs a key",
    }.items():
        spec = module(crews + f"EFFECTS = {wrong}")
        with pytest.raises(registry.RegistryInvalid, match=fault):
            registry.effects(spec, registry.load(spec, ()))


def test_the_digest_changes_with_the_source_the_spec_and_the_ids(module: Any) -> None:
    source = "CREWS = {'a': list}\nMORE = {'a': list, 'b': list}\nSAME = CREWS"
    seen = set()
    for text, attribute in ((source, "CREWS"), (source, "MORE"), (source, "SAME"), (source + "\n#", "CREWS")):
        spec = module(text, attribute)
        first = registry.digest(spec, registry.load(spec, ()))
        assert first == registry.digest(spec, registry.load(spec, ()))
        seen.add(first)
    assert len(seen) == 4


def test_entries_are_reported_without_being_built() -> None:
    def build() -> None:
        raise AssertionError("built")

    crews = {
        "class": Crew,
        "factory_class": Maker,
        "project": Project,
        "function": build,
        "partial": functools.partial(build),
        "method": Maker().make,
        "object": Crew(),
        "nothing": 3,
    }
    assert {one.crew_id: (one.kind, one.methods) for one in registry.report(crews)} == {
        "class": ("class", ("kickoff",)),
        "factory_class": ("class", None),
        "project": ("crew_base", None),
        "function": ("function", None),
        "partial": ("function", None),
        "method": ("method", None),
        "object": ("object", ("kickoff",)),
        "nothing": ("object", ()),
    }


@pytest.mark.parametrize(
    "entry", [Crew, Project, Project(), Maker().make, Maker.make_plain, functools.partial(Crew), Crew()]
)
def test_every_kind_of_entry_builds_a_crew(entry: object) -> None:
    assert isinstance(registry.build(entry), Crew)


@pytest.mark.parametrize("method", ["kickoff", "kickoff_async", "akickoff"])
def test_one_kickoff_method_makes_a_crew(method: str) -> None:
    assert registry.build(lambda: types.SimpleNamespace(**{method: print}))


@pytest.mark.parametrize("entry", [lambda: None, lambda: {"kickoff": print}, lambda: Crew, list, 3, Maker])
def test_anything_else_is_not_a_crew(entry: object) -> None:
    with pytest.raises(registry.NotACrew):
        registry.build(entry)


def test_what_a_factory_raises_is_raised() -> None:
    def build() -> None:
        raise LookupError("no crew today")

    with pytest.raises(LookupError, match="no crew today"):
        registry.build(build)


class Copied(Crew):
    """Notes how it was copied."""

    def __init__(self, how: str = "") -> None:
        self.how = how

    def __deepcopy__(self, memo: Any) -> Copied:
        return Copied("deepcopy")


class WithCopy(Copied):
    def copy(self) -> Copied:
        return Copied("copy")


class WithModelCopy(WithCopy):
    def model_copy(self, *, deep: bool) -> Copied:
        return Copied(f"model_copy {deep}")


class WithBrokenModelCopy(WithCopy):
    def model_copy(self, *, deep: bool) -> Copied:
        return copy.deepcopy(threading.Lock())  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("kind", "how"),
    [(Copied, "deepcopy"), (WithCopy, "copy"), (WithModelCopy, "model_copy True"), (WithBrokenModelCopy, "copy")],
)
def test_an_object_is_copied_by_the_first_way_that_works(kind: type[Copied], how: str) -> None:
    assert registry.build(kind()).how == how


def test_an_object_that_cannot_be_copied_is_refused() -> None:
    crew = Crew()
    crew.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(registry.NotACrew, match="cannot be copied"):
        registry.build(crew)
