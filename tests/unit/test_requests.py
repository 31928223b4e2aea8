"""Strict JSON, start requests and operation inputs, each bound on both sides."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import api, canonical
from protocol.errors import BadJson, InputInvalid
from protocol.operations import RULES, Operation, check_input

NOT_STRICT = {
    "duplicate key": b'{"a":1,"a":1}',
    "duplicate key below": b'[{"b":[{"a":1,"a":2}]}]',
    "duplicate key by escape": b'{"a":1,"\\u0061":2}',
    "NaN": b"[NaN]",
    "Infinity": b"[Infinity]",
    "minus Infinity": b"[-Infinity]",
    "beyond a double": b"[1e400]",
    "minus beyond a double": b"[-1e400]",
    "lone high surrogate": b'["\\ud800"]',
    "lone low surrogate": b'["\\udc00x"]',
    "surrogates in the wrong order": b'["\\udc00\\ud800"]',
    "lone surrogate as a key": b'{"a":{"\\udfff":1}}',
    "101 levels of arrays": b"[" * 101 + b"]" * 101,
    "101 levels of objects": b'{"a":' * 101 + b"1" + b"}" * 101,
    "a hundred thousand levels": b"[" * 100_000 + b"]" * 100_000,
    "not UTF-8": b'["\xff"]',
    "a surrogate in UTF-8": b'["\xed\xa0\x80"]',
    "UTF-16": '{"a":1}'.encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf{}",
    "4301 digits": b"[" + b"9" * 4301 + b"]",
    "nothing": b"",
    "half an object": b'{"a":',
    "two documents": b"{} {}",
    "a trailing comma": b"[1,]",
    "single quotes": b"{'a':1}",
    "a control character in text": b'["\x01"]',
    "a leading zero": b"[01]",
    "a comment": b"[1] // one",
}


@pytest.mark.case(32)
@pytest.mark.parametrize("body", NOT_STRICT.values(), ids=NOT_STRICT)
def test_what_is_not_strict_json_is_refused(body: bytes) -> None:
    with pytest.raises(BadJson) as caught:
        canonical.parse(body)
    assert caught.value.status == 422
    caught.value.detail.encode("utf-8")


@pytest.mark.case(32)
@pytest.mark.parametrize(
    ("body", "value"),
    [
        (b"[" * 100 + b"]" * 100, None),
        (b'{"a":' * 100 + b"1" + b"}" * 100, None),
        (b"[" + b"[]," * 500 + b"[]]", [[]] * 501),
        (b'["[[[' + b"{" * 300 + b'"]', ["[[[" + "{" * 300]),
        (b'["\\ud83d\\ude00"]', ["\U0001f600"]),
        (b"[1e308,-0.0,5e-324]", [1e308, -0.0, 5e-324]),
        (b"[" + b"9" * 4300 + b"]", [int("9" * 4300)]),
        (b' {"a" : [{"a":1},{"a":1}]} ', {"a": [{"a": 1}, {"a": 1}]}),
    ],
)
def test_strict_json_is_taken(body: bytes, value: Any) -> None:
    assert canonical.parse(body) == (value if value is not None else json.loads(body))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda below: st.lists(below, max_size=4) | st.dictionaries(st.text(), below, max_size=4),
)


@given(JSON)
def test_the_canonical_form_is_ascii_parses_back_and_is_stable(value: Any) -> None:
    made = canonical.canonical_bytes(value)
    assert made.isascii()
    assert canonical.parse(made) == value
    assert canonical.canonical_bytes(canonical.parse(made)) == made


def start(**changes: Any) -> api.StartRequest:
    """A start request with changes."""
    document = {"crew_id": "support", "action_id": "act_1"} | changes
    return api.convert(document, api.StartRequest)


@pytest.mark.case(29)
@pytest.mark.parametrize(
    "changes",
    [
        {"crew_id": ""}, {"crew_id": "x" * 257}, {"crew_id": 1}, {"crew_id": None}, {"input": None}, {"input": []},
        {"input": "x"}, {"operation": "Run"}, {"operation": None}, {"operation": 1}, {"more": 1},
    ],
)  # fmt: skip
def test_a_start_that_breaks_the_schema_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InputInvalid):
        start(**changes)


@pytest.mark.parametrize("missing", ["crew_id", "action_id"])
def test_the_two_ids_are_required(missing: str) -> None:
    document = {"crew_id": "support", "action_id": "act_1"}
    del document[missing]
    with pytest.raises(InputInvalid, match=missing):
        api.convert(document, api.StartRequest)


@pytest.mark.parametrize("document", [None, [], "x", 1, [["crew_id", "x"]]])
def test_a_start_is_an_object(document: Any) -> None:
    with pytest.raises(InputInvalid):
        api.convert(document, api.StartRequest)


@pytest.mark.case(29)
def test_ids_of_256_characters_are_taken() -> None:
    assert start(crew_id="é" * 256, action_id="x" * 256).action_id == "x" * 256


@pytest.mark.case(33)
@pytest.mark.parametrize(
    "action_id", ["", "x" * 257, "a/b", "a b", "a\n", "a%2f", "ü", "a?b", "a#b", "a\\b", ".", "..", "\n", 1, None]
)
def test_an_action_id_that_no_url_carries_is_refused(action_id: Any) -> None:
    with pytest.raises(InputInvalid):
        start(action_id=action_id)


@pytest.mark.case(33)
@pytest.mark.parametrize("action_id", ["act_01HZX", "...", "a.b", "~", "a:b-c_d~e.f", "-", "0"])
def test_other_action_ids_pass(action_id: str) -> None:
    assert start(action_id=action_id).action_id == action_id


@pytest.mark.case(29)
@pytest.mark.parametrize(
    ("given", "meant"),
    [(1, 1), (3_600_000, 3_600_000), ("600000", 600_000), (600_000.0, 600_000), (None, None), ("1", 1), (" 7 ", 7)],
)
def test_a_timeout_is_a_number_of_milliseconds(given: Any, meant: int | None) -> None:
    timeout = start(timeout_ms=given).timeout
    assert timeout == meant
    assert type(timeout) is type(meant)


@pytest.mark.case(32)
@pytest.mark.parametrize(
    "given",
    [0, -1, 3_600_001, 1000.5, True, False, "", "x", "1.0", "-1", "0x1", "٣", "1" * 5000, [], {}, 1e300, 10**30],
)
def test_any_other_timeout_is_refused(given: Any) -> None:
    with pytest.raises(InputInvalid):
        _ = start(timeout_ms=given).timeout


@pytest.mark.case(62)
def test_a_cancel_reason_has_2048_characters_at_most() -> None:
    ids = {"crew_id": "c", "action_id": "a"}
    assert api.convert(ids | {"reason": "é" * 2048}, api.CancelRequest).reason == "é" * 2048
    assert api.convert(ids | {"reason": None}, api.CancelRequest).reason is None
    for wrong in ({"reason": "x" * 2049}, {"reason": 1}, {"more": 1}, {"action_id": "a/b"}):
        with pytest.raises(InputInvalid):
            api.convert(ids | wrong, api.CancelRequest)


# --- operation inputs --------------------------------------------------------------------------------------------

#: A minimal valid input of each operation.
MINIMAL: dict[Operation, dict[str, Any]] = {
    Operation.RUN: {},
    Operation.BATCH_RUN: {"inputs": [{}]},
    Operation.REPLAY: {"task_id": "t"},
    Operation.TRAIN: {"n_iterations": 1, "artifact_name": "a"},
    Operation.TEST: {"n_iterations": 1, "eval_llm": "m"},
    Operation.KNOWLEDGE_QUERY: {"query": ["q"]},
    Operation.MEMORY_RESET: {"command_type": "all"},
}
TEXT_256 = (["x", "x" * 256, "é" * 128, "\x7f", "\x85"], ["", "x" * 257, "é" * 129, "a\x1f", "a\n", 1, None, ["x"]])
OBJECT: tuple[list[Any], list[Any]] = ([{}, {"a": 1}], [None, [], "x", 1])
ITERATIONS = ([1, 100], [0, 101, -1, True, 1.0, "1", None])
BOUNDS: list[tuple[Operation, str, list[Any], list[Any]]] = [
    (Operation.BATCH_RUN, "inputs", [[{}], [{}] * 100], [[], [{}] * 101, [1], [None], [[]], {}, "x", None]),
    (Operation.REPLAY, "task_id", *TEXT_256),
    (Operation.REPLAY, "inputs", *OBJECT),
    (Operation.TRAIN, "n_iterations", *ITERATIONS),
    (
        Operation.TRAIN,
        "artifact_name",
        ["a", "0", "a" * 128, "a.b_c-d", "Z.."],
        ["", "a" * 129, ".a", "_a", "-a", "a/b", "a b", "a\n", "é", "..", 1, None],
    ),
    (Operation.TRAIN, "inputs", *OBJECT),
    (
        Operation.TRAIN,
        "feedback",
        ["good", ["good"], ["x"] * 100, "x" * 65_536],
        ["", " ", [], ["x"] * 101, [""], [1], 1, None, "x" * 65_537, "é" * 32_769],
    ),
    (Operation.TRAIN, "overwrite", [True, False], [1, 0, "true", None]),
    (Operation.TEST, "n_iterations", *ITERATIONS),
    (Operation.TEST, "eval_llm", *TEXT_256),
    (Operation.TEST, "inputs", *OBJECT),
    (
        Operation.KNOWLEDGE_QUERY,
        "query",
        [["q"], ["q"] * 100, ["x" * 4096], ["é" * 2048]],
        [[], ["q"] * 101, ["x" * 4097], ["é" * 2049], [""], ["a\x00"], [1], "q", {}, None],
    ),
    (Operation.KNOWLEDGE_QUERY, "results_limit", [1, 100], [0, 101, True, 1.0, "3", None]),
    (
        Operation.KNOWLEDGE_QUERY,
        "score_threshold",
        [0, 1, 0.0, 1.0, 0.35, 5e-324],
        [-0.01, 1.01, 2, True, False, "0.5", None, float("nan"), float("inf")],
    ),
    (
        Operation.MEMORY_RESET,
        "command_type",
        ["memory", "knowledge", "agent_knowledge", "kickoff_outputs", "all"],
        ["", "All", "short", [], {}, ["all"], None, 1],
    ),
]


@pytest.mark.case(35)
@pytest.mark.parametrize(("operation", "field", "good", "bad"), BOUNDS, ids=[f"{row[0]}.{row[1]}" for row in BOUNDS])
def test_a_field_has_its_rule(operation: Operation, field: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        check_input(operation, MINIMAL[operation] | {field: value})
    for value in bad:
        with pytest.raises(InputInvalid, match=field):
            check_input(operation, MINIMAL[operation] | {field: value})


@pytest.mark.case(35)
def test_every_field_of_every_operation_has_a_test() -> None:
    fields = {(operation, field) for operation, rules in RULES.items() for part in rules for field in part}
    assert fields == {(operation, field) for operation, field, _, _ in BOUNDS}


@pytest.mark.case(35)
@pytest.mark.parametrize("operation", [operation for operation in Operation if operation is not Operation.RUN])
def test_missing_fields_are_named_before_unknown_ones_and_sorted(operation: Operation) -> None:
    names = ", ".join(sorted(MINIMAL[operation]))
    with pytest.raises(InputInvalid, match=f"lacks {names}$"):
        check_input(operation, {"zz": 1})
    with pytest.raises(InputInvalid, match=r"unknown fields aa, zz$"):
        check_input(operation, MINIMAL[operation] | {"zz": 1, "aa": 2})


def test_run_takes_any_object() -> None:
    check_input(Operation.RUN, {"anything": [None, {"at": "all"}], "inputs": 1})
