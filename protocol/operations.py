"""The seven operations and the shape of their inputs (wire contract, section 6)."""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import StrEnum
from typing import Any

from protocol.errors import InputInvalid


class Operation(StrEnum):
    """An operation that can be started."""

    RUN = "run"
    BATCH_RUN = "batch_run"
    REPLAY = "replay"
    TRAIN = "train"
    TEST = "test"
    KNOWLEDGE_QUERY = "knowledge_query"
    MEMORY_RESET = "memory_reset"


#: Operations about a job rather than of a crew; always available, never startable.
CONTROL_OPERATIONS = frozenset({"status", "events", "cancel"})
#: Operations without effects: a failure of theirs is never uncertain.
READ_OPERATIONS = frozenset({Operation.KNOWLEDGE_QUERY})

MAX_BATCH_ITEMS = 100
MAX_ITERATIONS = 100
MAX_QUERIES = 100
MAX_QUERY_BYTES = 4096
MAX_TEXT_BYTES = 256
MAX_FEEDBACK_BYTES = 65_536
ARTIFACT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
MEMORY_KINDS = ("memory", "knowledge", "agent_knowledge", "kickoff_outputs", "all")

Rule = Callable[[str, Any], None]


def _refuse(field: str, rule: str) -> None:
    raise InputInvalid(f"input.{field} {rule}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _text(limit_bytes: int) -> Rule:
    def check(field: str, value: Any) -> None:
        if not isinstance(value, str) or not value:
            _refuse(field, "must be a non-empty string")
        if len(value.encode("utf-8")) > limit_bytes:
            _refuse(field, f"must be at most {limit_bytes} bytes of UTF-8")
        if any(char < " " for char in value):
            _refuse(field, "must not contain control characters")

    return check


def _object(field: str, value: Any) -> None:
    if not isinstance(value, dict):
        _refuse(field, "must be an object")


def _boolean(field: str, value: Any) -> None:
    if not isinstance(value, bool):
        _refuse(field, "must be true or false")


def _integer(low: int, high: int) -> Rule:
    def check(field: str, value: Any) -> None:
        if not _is_int(value) or not low <= value <= high:
            _refuse(field, f"must be an integer from {low} to {high}")

    return check


def _threshold(field: str, value: Any) -> None:
    if not (_is_int(value) or isinstance(value, float)) or not 0 <= value <= 1:
        _refuse(field, "must be a number from 0 to 1")


def _batch(field: str, value: Any) -> None:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_BATCH_ITEMS:
        _refuse(field, f"must be an array of 1 to {MAX_BATCH_ITEMS} objects")
    for index, item in enumerate(value):
        _object(f"{field}[{index}]", item)


def _queries(field: str, value: Any) -> None:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_QUERIES:
        _refuse(field, f"must be an array of 1 to {MAX_QUERIES} strings")
    for index, item in enumerate(value):
        _text(MAX_QUERY_BYTES)(f"{field}[{index}]", item)


def _artifact(field: str, value: Any) -> None:
    if not isinstance(value, str) or not ARTIFACT_NAME.fullmatch(value):
        _refuse(field, f"must match {ARTIFACT_NAME.pattern}")


def _memory_kind(field: str, value: Any) -> None:
    if not isinstance(value, str) or value not in MEMORY_KINDS:
        _refuse(field, "must be one of " + ", ".join(MEMORY_KINDS))


def _feedback(field: str, value: Any) -> None:
    items = value if isinstance(value, list) else [value]
    if not 1 <= len(items) <= MAX_ITERATIONS:
        _refuse(field, f"must be a string or an array of 1 to {MAX_ITERATIONS} strings")
    for item in items:
        if not isinstance(item, str) or not item.strip() or len(item.encode("utf-8")) > MAX_FEEDBACK_BYTES:
            _refuse(field, f"must be non-blank text of at most {MAX_FEEDBACK_BYTES} bytes (or an array of such)")


#: Per operation: required fields, then optional ones. ``run`` takes any object; ``feedback``, ``overwrite`` are ours.
RULES: dict[Operation, tuple[dict[str, Rule], dict[str, Rule]]] = {
    Operation.BATCH_RUN: ({"inputs": _batch}, {}),
    Operation.REPLAY: ({"task_id": _text(MAX_TEXT_BYTES)}, {"inputs": _object}),
    Operation.TRAIN: (
        {"n_iterations": _integer(1, MAX_ITERATIONS), "artifact_name": _artifact},
        {"inputs": _object, "feedback": _feedback, "overwrite": _boolean},
    ),
    Operation.TEST: (
        {"n_iterations": _integer(1, MAX_ITERATIONS), "eval_llm": _text(MAX_TEXT_BYTES)},
        {"inputs": _object},
    ),
    Operation.KNOWLEDGE_QUERY: (
        {"query": _queries},
        {"results_limit": _integer(1, 100), "score_threshold": _threshold},
    ),
    Operation.MEMORY_RESET: ({"command_type": _memory_kind}, {}),
}


def check_input(operation: Operation, value: dict[str, Any]) -> None:
    """Check ``value`` against the rules of ``operation``. Raises InputInvalid, missing fields before unknown ones."""
    if operation not in RULES:
        return
    required, optional = RULES[operation]
    missing = sorted(required.keys() - value.keys())
    if missing:
        raise InputInvalid(f"input of {operation.value} lacks {', '.join(missing)}")
    unknown = sorted(value.keys() - required.keys() - optional.keys())
    if unknown:
        raise InputInvalid(f"input of {operation.value} has unknown fields {', '.join(unknown)}")
    for field, rule in (required | optional).items():
        if field in value:
            rule(field, value[field])
