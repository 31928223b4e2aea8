"""Arguments as plain values: what has a canonical form, and which texts of a model are refused."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import math
import pathlib
import types
import uuid
from typing import Any

import pydantic
import pytest

from protocol.errors import NotCanonical
from worker import loaded, tools
from worker.guarding import arguments, session
from worker.guarding.policies import EffectPolicyError, make
from worker.guarding.session import Session


class Colour(enum.StrEnum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Model(pydantic.BaseModel):
    day: datetime.date
    colour: Colour


@dataclasses.dataclass
class Data:
    rows: tuple[int, ...]


class Text(str):
    def __str__(self) -> str:
        return "another"


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Colour.RED, "red"),
        (Level.HIGH, 3),
        (Model(day=datetime.date(2026, 1, 2), colour=Colour.RED), {"day": "2026-01-02", "colour": "red"}),
        (Data((1, 2)), {"rows": [1, 2]}),
        (decimal.Decimal("1.10"), "1.10"),
        (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (pathlib.PurePosixPath("/a/b"), "/a/b"),
        (datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC), "2026-01-02T00:00:00Z"),
        (pydantic.SecretStr("secret"), "secret"),
        (Text("text"), "text"),
        ({Colour.RED: [(1,)]}, {"red": [[1]]}),
    ],
)
def test_foreign_kinds_become_plain_values(value: Any, plain: Any) -> None:
    made = arguments.plain(value)
    assert made == plain
    assert type(made) is type(plain)


@pytest.mark.parametrize(
    "value",
    [b"", bytearray(), memoryview(b""), set(), frozenset(), iter([]), {1: 2}, {None: 1}, object(), len, Data((b"",))],
    ids=lambda value: type(value).__name__,
)
def test_what_has_no_form_is_refused_where_it_stands(value: Any) -> None:
    with pytest.raises(NotCanonical, match=r"\$\['list'\]\[1\]"):
        arguments.plain({"list": [1, value]})


def test_endless_nesting_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(NotCanonical, match="deeper"):
        arguments.plain(endless)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "\ud800", 2**53, -(2**53)])
def test_numbers_and_text_without_a_canonical_form_are_refused_when_hashed(value: Any) -> None:
    with pytest.raises(NotCanonical):
        arguments.digest(arguments.plain({"value": value}), volatile=())


def test_the_hash_is_that_of_the_values_and_not_of_how_they_were_written() -> None:
    first = arguments.digest({"a": 1.0, "b": {"x": -0.0, "y": True}}, volatile=())
    assert arguments.digest({"b": {"y": True, "x": 0}, "a": 1}, volatile=()) == first
    assert arguments.digest({"a": True, "b": {"x": 0, "y": 1}}, volatile=()) != first
    assert arguments.digest({"a": 1, "b": {"x": 0, "y": True}, "memo": "m"}, volatile=("memo",)) == first


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, "a": 2}',
        '{"a": {"b": 1, "b": 1}}',
        '{"a": NaN}',
        '{"a": 1e999}',
        '{"a": "\\ud800"}',
        "{'a': 1, 'a': 2}",
    ],
)
def test_text_that_a_lenient_reader_would_change_is_refused(text: str) -> None:
    with pytest.raises(NotCanonical):
        arguments.parse(text)


@pytest.mark.parametrize("text", ["not json", "{'a': 1}", '{"a": 1', ""])
def test_text_that_is_no_json_is_left_to_crewai(text: str) -> None:
    assert arguments.parse(text) == text


@pytest.mark.parametrize(
    ("text", "object_"),
    [
        ('{"a": 1}\nObservation: none', '{"a": 1}'),
        ('"{"a": 1}"', '{"a": 1}'),
        ('{"a": 1', '{"a": 1'),
        ("a", None),
    ],
)
def test_the_object_that_a_text_begins_with_is_found(text: str, object_: str | None) -> None:
    assert arguments.leading(text) == object_


def test_a_policy_for_a_tool_that_only_a_running_agent_will_know_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded, "is_crewai_crew", lambda crew: True)
    agent = types.SimpleNamespace(tools=[], mcps=None, apps=None)
    crew = types.SimpleNamespace(agents=[agent], tasks=[])
    here = Session(ledger=None, action_id="a", crew_id="c", policies={"later": make()})  # type: ignore[arg-type]
    with session.using(here):
        with pytest.raises(EffectPolicyError, match="'later'"):
            tools.check(crew, "c")
        for later in ("mcps", "apps"):
            setattr(agent, later, ["something"])
            tools.check(crew, "c")
            setattr(agent, later, None)
