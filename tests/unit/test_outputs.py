"""Foreign objects as bounded ASCII JSON, and chunks within a job's bounds."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import json
import types
import uuid
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from protocol import canonical, frames
from worker import outputs
from worker.stream import Stream, Violation

LIMIT = 4_194_304


def clean(value: Any) -> Any:
    data = outputs.to_json(value, LIMIT)
    assert data.isascii()
    return canonical.parse(data)


class Colour(enum.Enum):
    RED = "red"


class Point(BaseModel):
    x: float
    tags: list[str] = []


@dataclasses.dataclass
class Plain:
    name: str
    lock: Any


class Unspeakable:
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (float("nan"), None),
        ([float("inf"), -float("inf"), 1.5, -0.0], [None, None, 1.5, -0.0]),
        ("a\ud800b", "a\ufffdb"),
        ("\ud83d\ude00", "\U0001f600"),
        ({"k\udfff": 1}, {"k\ufffd": 1}),
        ({1: "a", None: "b", Colour.RED: "c"}, {"1": "a", "None": "b", "red": "c"}),
        (Colour.RED, "red"),
        ((1, [2], {3}), [1, [2], [3]]),
        (b"\xff\x41", "\ufffdA"),
        (datetime.datetime(2024, 1, 2, 3, 4), "2024-01-02T03:04:00"),
        (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (Point(x=float("nan"), tags=["\udc00"]), {"x": None, "tags": ["\ufffd"]}),
        (Plain("n", Unspeakable()), {"name": "n", "lock": "<Unspeakable>"}),
        (True, True),
        (None, None),
    ],
)
def test_values_become_strict_json(value: Any, expected: Any) -> None:
    assert clean(value) == expected


def test_an_integer_beyond_what_cpython_prints_becomes_text() -> None:
    assert clean(10**5000) == hex(10**5000)
    assert clean(2**70) == 2**70


def test_nesting_ends_at_the_depth_that_requests_may_have() -> None:
    deep: Any = "bottom"
    for _ in range(canonical.MAX_DATA_DEPTH):
        deep = [deep]
    assert clean(deep) == deep
    assert str(clean([deep])).count("[") > 1
    shallow = clean([deep])
    for _ in range(canonical.MAX_DATA_DEPTH):
        (shallow,) = shallow
    assert shallow == "['bottom']"


def test_cycles_end() -> None:
    looped: dict[str, Any] = {"a": 1}
    looped["self"] = [looped, looped]
    assert clean(looped) == {"a": 1, "self": ["<cycle>", "<cycle>"]}


def test_a_small_object_with_an_enormous_expansion_stops_at_the_bound() -> None:
    bomb: list[Any] = ["x"]
    for _ in range(60):
        bomb = [bomb, bomb]
    with pytest.raises(outputs.TooLarge):
        outputs.to_json(bomb, 100_000)


@given(size=st.integers(min_value=0, max_value=300))
def test_the_bound_is_exact(size: int) -> None:
    value = "x" * size
    if size + 2 <= 200:
        assert len(outputs.to_json(value, 200)) == size + 2
    else:
        with pytest.raises(outputs.TooLarge):
            outputs.to_json(value, 200)


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=())), inner),
    max_leaves=30,
)


@given(json_like)
def test_anything_json_like_can_be_parsed_strictly_afterwards(value: Any) -> None:
    clean({"value": value})


# --- outputs of crews ------------------------------------------------------------------------------------------------


class TaskLike(BaseModel):
    raw: str
    pydantic: BaseModel | None = None
    messages: list[dict[str, str]] = []


class OutputLike(BaseModel):
    """Typed as CrewAI's output is, so that its dump loses the model in ``pydantic``."""

    raw: str = ""
    pydantic: BaseModel | None = None
    tasks_output: list[TaskLike] = []


def document(output: Any, limit: int = LIMIT, task_ids: dict[int, str] | None = None) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(outputs.crew_output(output, task_ids or {}, limit))
    return made


def test_a_mapping_is_copied_and_completed() -> None:
    assert document({"answer": 1}) == {"answer": 1, "raw": "{'answer': 1}", "token_usage": {}, "tasks_output": []}
    given = {"raw": "r", "token_usage": {"total_tokens": 5}, "tasks_output": [{"raw": "t"}]}
    assert document(given) == given


def test_any_other_object_is_its_text() -> None:
    assert document("done") == {"raw": "done", "token_usage": {}, "tasks_output": []}
    assert document(None)["raw"] == "None"


def test_usage_metrics_fill_the_token_usage_of_a_model() -> None:
    class Usage(BaseModel):
        raw: str = "r"

        @property
        def usage_metrics(self) -> dict[str, int]:
            return {"total_tokens": 5}

    assert document(Usage())["token_usage"] == {"total_tokens": 5}


def test_pydantic_outputs_are_dumped_themselves() -> None:
    point = Point(x=1.0)
    assert OutputLike(pydantic=point).model_dump()["pydantic"] == {}
    made = document(OutputLike(raw="r", pydantic=point, tasks_output=[TaskLike(raw="t", pydantic=point)]))
    assert made["pydantic"] == made["tasks_output"][0]["pydantic"] == {"x": 1.0, "tags": []}


def test_known_task_ids_are_added_to_their_tasks() -> None:
    output = OutputLike(raw="r", tasks_output=[TaskLike(raw="a"), TaskLike(raw="b")])
    made = document(output, task_ids={id(output.tasks_output[1]): "id-b"})
    assert [task.get("task_id") for task in made["tasks_output"]] == [None, "id-b"]


def test_the_latest_messages_of_a_task_are_kept_and_the_others_counted() -> None:
    messages = [{"content": f"{n}" + "x" * 20_000} for n in range(10)]
    (task,) = document(OutputLike(raw="r", tasks_output=[TaskLike(raw="t", messages=messages)]))["tasks_output"]
    assert task["messages"] == messages[7:]
    assert task["messages_omitted"] == 7
    assert len(json.dumps(task["messages"])) <= outputs.MAX_MESSAGES_BYTES


def test_messages_never_make_an_output_too_large() -> None:
    messages = [{"content": "x" * 900}]
    batch = [OutputLike(raw="y" * 900, tasks_output=[TaskLike(raw="t", messages=messages)]) for _ in range(100)]
    made = json.loads(outputs.batch_output(batch, 130_000))
    assert made["count"] == 100
    assert made["results"][99]["tasks_output"][0]["messages_omitted"] == 1
    with pytest.raises(outputs.TooLarge):
        outputs.batch_output(batch, 90_000)


# --- chunks ----------------------------------------------------------------------------------------------------------


class ChunkLike(BaseModel):
    chunk_type: str = "text"
    tool_call: dict[str, str] | None = None

    @property
    def content(self) -> str:
        return "from the attribute"


@pytest.mark.parametrize(
    ("chunk", "expected"),
    [
        ("hello", {"content": "hello", "channel": "messages"}),
        (7, {"content": "7", "channel": "messages"}),
        ({"content": "c", "channel": "custom"}, {"content": "c", "channel": "custom"}),
        ({"chunk_type": "tool_call"}, {"chunk_type": "tool_call", "channel": "tools"}),
        (
            ChunkLike(),
            {"chunk_type": "text", "tool_call": None, "content": "from the attribute", "channel": "messages"},
        ),
        (types.SimpleNamespace(content="c"), {"content": "c", "channel": "messages"}),
    ],
)
def test_a_chunk_of_any_kind_gets_content_and_a_channel(chunk: Any, expected: dict[str, Any]) -> None:
    assert outputs.chunk_document(chunk) == expected


class Sent:
    """A stream and what it sent."""

    def __init__(self, event_limit: int, limit_bytes: int = 1024) -> None:
        self.documents: list[dict[str, Any]] = []
        self.stream = Stream(self._take, event_limit=event_limit, event_limit_bytes=limit_bytes)
        self._limit_bytes = limit_bytes

    def _take(self, frame: frames.Frame) -> None:
        assert isinstance(frame, frames.Chunk)
        assert len(frame.data) <= self._limit_bytes
        self.documents.append(json.loads(frame.data))


def message(n: int) -> dict[str, Any]:
    return {"content": f"{n},", "channel": "messages"}


def note(n: int) -> dict[str, Any]:
    return {"channel": "progress", "type": f"note {n}"}


def test_messages_fill_the_bound_exactly_and_one_more_is_a_violation() -> None:
    sent = Sent(event_limit=6)
    for n in range(4):
        sent.stream.message(message(n))
    with pytest.raises(Violation):
        sent.stream.message(message(4))
    assert sent.documents == [message(n) for n in range(4)]


def test_a_message_above_the_byte_bound_is_a_violation() -> None:
    sent = Sent(event_limit=6, limit_bytes=100)
    with pytest.raises(Violation, match="event bound"):
        sent.stream.message({"content": "x" * 100})
    assert sent.documents == []


def test_progress_stops_at_half_of_the_bound_and_is_summed_up() -> None:
    sent = Sent(event_limit=12)
    for n in range(9):
        sent.stream.progress(note(n))
    assert sent.documents == [note(n) for n in range(5)]
    sent.stream.close()
    summary = {"channel": "progress", "type": "coalesced", "count": 4, "last": note(8)}
    assert sent.documents[5:] == [summary]
    sent.stream.progress(note(9))
    sent.stream.message(message(9))
    sent.stream.close()
    assert len(sent.documents) == 6


@given(st.lists(st.booleans(), max_size=60), st.integers(min_value=2, max_value=40))
def test_progress_neither_fails_a_job_nor_loses_a_message(is_message: list[bool], event_limit: int) -> None:
    sent = Sent(event_limit=event_limit)
    texts: list[str] = []
    for n, wanted in enumerate(is_message):
        if wanted and len(texts) < event_limit - 2:
            sent.stream.message(message(n))
            texts.append(message(n)["content"])
        elif not wanted:
            sent.stream.progress(note(n))
    sent.stream.close()
    assert len(sent.documents) <= event_limit - 2
    assert "".join(one["content"] for one in sent.documents if one["channel"] == "messages") == "".join(texts)


def test_progress_that_is_too_long_is_cut_to_the_bound() -> None:
    sent = Sent(event_limit=12, limit_bytes=1024)
    sent.stream.progress(note(0) | {"task_name": "\u20ac" * 2000})
    assert sent.documents[0]["type"] == "note 0"
    assert sent.documents[0]["truncated"] is True
    sent.stream.progress(note(1) | {"usage": {f"field {n}": n for n in range(200)}})
    assert sent.documents[1] == {"channel": "progress", "type": "omitted", "bytes": sent.documents[1]["bytes"]}
