"""What leaves a crew, as JSON: outputs and chunks of any kind become bounded ASCII documents (contract, section 9)."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from protocol.canonical import MAX_DATA_DEPTH

#: Messages of one task kept in an output, in bytes of JSON; every task repeats what earlier ones said.
MAX_MESSAGES_BYTES = 65_536
#: Most of an output's bound that messages of all its tasks may take together, as 1/n.
MESSAGES_SHARE = 4
#: Longest text of a value cut off for its depth.
CUT_TEXT = 1024


#: ``json.dumps`` with arguments makes a new one for every call.
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


class TooLarge(Exception):
    """A document is above its bound; the rest of it was not even looked at."""


class Sanitizer:
    """Makes JSON-safe copies, one instance per document; stops with TooLarge once the copy must exceed ``limit_bytes``.

    Non-finite numbers become null, lone surrogates U+FFFD, values below MAX_DATA_DEPTH text, cycles ``"<cycle>"``,
    pydantic models their JSON dump, dataclasses and mappings objects, lists, tuples and sets arrays, all else text.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._left = limit_bytes
        self._path: set[int] = set()

    def clean(self, value: Any, depth: int = 0) -> Any:
        """A copy of ``value`` of None, bool, int, float, str, list and dict only. Raises TooLarge."""
        # What chunks mostly are, asked for by exact type: a subclass may be an enumeration or look like anything.
        if type(value) is str:
            return self._spend(value if value.isascii() else _text(value), len(value))
        if value is None or isinstance(value, bool):
            return self._spend(value, 1)
        if isinstance(value, enum.Enum):
            return self.clean(value.value, depth)
        if isinstance(value, str):
            return self._spend(_text(value), len(value))
        if isinstance(value, int):
            return self._spend(*_integer(value))
        if isinstance(value, float):
            return self._spend(float(value) if math.isfinite(value) else None, 1)
        return self._compound(value, depth)

    def _spend(self, value: Any, size: int) -> Any:
        self._left -= size
        if self._left < 0:
            raise TooLarge(f"the document is above its bound of {self._limit_bytes} bytes")
        return value

    def _compound(self, value: Any, depth: int) -> Any:
        if id(value) in self._path:
            return self._spend("<cycle>", 1)
        if depth >= MAX_DATA_DEPTH:
            text = text_of(value)[:CUT_TEXT]
            return self._spend(_text(text), len(text))
        self._spend(None, 2)
        self._path.add(id(value))
        try:
            return self._container(value, depth)
        finally:
            self._path.discard(id(value))

    def _container(self, value: Any, depth: int) -> Any:
        plain = _plain(value)
        if type(plain) is dict or isinstance(plain, Mapping):
            return {self.clean(_key(key), depth + 1): self.clean(item, depth + 1) for key, item in plain.items()}
        if isinstance(plain, list | tuple | set | frozenset):
            return [self.clean(item, depth + 1) for item in plain]
        # A model's dump may be a scalar (a pydantic RootModel), so it goes round once more, one level deeper.
        return self.clean(plain, depth + 1)


def _plain(value: Any) -> Any:
    """One step from a foreign object towards a mapping, an array or a text."""
    if type(value) is dict or isinstance(value, Mapping | list | tuple | set | frozenset):
        return value
    if (dumped := dump(value)) is not None:
        return dumped
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    if isinstance(value, bytes | bytearray):
        return bytes(value).decode("utf-8", "replace")
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return text_of(value)


def dump(value: object) -> Any | None:
    """``value.model_dump(mode="json")``, or the plain dump where that fails; None for what is no model."""
    model_dump = getattr(value, "model_dump", None)
    if isinstance(value, type) or not callable(model_dump):
        return None
    try:
        return model_dump(mode="json")
    except Exception:  # noqa: BLE001 - pydantic raises several kinds for one unserialisable leaf
        try:
            return model_dump()
        except Exception:  # noqa: BLE001 - then it is shown as text
            return None


def text_of(value: object) -> str:
    """``str(value)``, or the name of its type where even that fails."""
    try:
        return str(value)
    except Exception:  # noqa: BLE001 - a foreign __str__ may raise anything
        return f"<{type(value).__name__}>"


def _key(key: Any) -> str:
    if type(key) is str:
        return key
    if isinstance(key, enum.Enum):
        key = key.value
    return key if isinstance(key, str) else text_of(key)


def _text(value: str) -> str:
    """``value`` as a plain str in which surrogates are paired or replaced."""
    text = str.__str__(value)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _integer(value: int) -> tuple[int | str, int]:
    """``value`` and its least size; as hexadecimal text where its decimal digits are more than CPython prints."""
    bits = value.bit_length()
    if bits > 14_000:
        return hex(value), bits // 4
    return int(value), max(1, bits // 4)


def encode(document: Any, limit_bytes: int) -> bytes:
    """Compact ASCII JSON of a sanitised ``document``, in insertion order. Raises TooLarge."""
    data = _ENCODER.encode(document).encode("ascii")
    if len(data) > limit_bytes:
        raise TooLarge(f"the document has {len(data)} bytes, above its bound of {limit_bytes}")
    return data


def to_json(value: Any, limit_bytes: int) -> bytes:
    """ASCII JSON of any ``value``. Raises TooLarge."""
    return encode(Sanitizer(limit_bytes).clean(value), limit_bytes)


# --- outputs of crews ------------------------------------------------------------------------------------------------


def crew_output(output: Any, task_ids: Mapping[int, str], limit_bytes: int) -> bytes:
    """The output document of one run or replay. Raises TooLarge.

    ``task_ids``: ``id()`` of a task's output object to the task's id, as far as known.
    """
    return _fit(lambda cap: _crew_document(output, task_ids, cap), _task_count(output), limit_bytes)


def batch_output(outputs: Iterable[Any], limit_bytes: int) -> bytes:
    """``{"results": [...], "count": n}`` of a batch. Raises TooLarge."""
    results = list(outputs)

    def document(cap: int) -> dict[str, Any]:
        return {"results": [_crew_document(output, {}, cap) for output in results], "count": len(results)}

    return _fit(document, sum(_task_count(output) for output in results), limit_bytes)


def _fit(document: Any, tasks: int, limit_bytes: int) -> bytes:
    """Encode with the messages cut to their share, and without any if that alone is in the way."""
    cap = min(MAX_MESSAGES_BYTES, limit_bytes // (MESSAGES_SHARE * max(1, tasks)))
    try:
        return to_json(document(cap), limit_bytes)
    except TooLarge:
        return to_json(document(0), limit_bytes)


def _task_count(output: Any) -> int:
    tasks = getattr(output, "tasks_output", None)
    return len(tasks) if isinstance(tasks, list | tuple) else 0


def _crew_document(output: Any, task_ids: Mapping[int, str], messages_cap: int) -> dict[str, Any]:
    dumped = dump(output)
    if isinstance(dumped, Mapping):
        document = dict(dumped)
    elif isinstance(output, Mapping):
        document = dict(output)
    else:
        document = {"raw": text_of(output), "token_usage": {}}
    _restore_pydantic(document, output)
    if "raw" not in document:
        document["raw"] = text_of(output)
    if "token_usage" not in document:
        document["token_usage"] = getattr(output, "usage_metrics", None) or {}
    document["tasks_output"] = _task_documents(document.get("tasks_output") or [], output, task_ids, messages_cap)
    return document


def _task_documents(dumped: Any, output: Any, task_ids: Mapping[int, str], messages_cap: int) -> Any:
    if not isinstance(dumped, list | tuple):
        return dumped
    originals = getattr(output, "tasks_output", None)
    known = originals if isinstance(originals, list | tuple) and len(originals) == len(dumped) else [None] * len(dumped)
    return [
        _task_document(task, original, task_ids, messages_cap) for task, original in zip(dumped, known, strict=True)
    ]


def _task_document(dumped: Any, original: Any, task_ids: Mapping[int, str], messages_cap: int) -> Any:
    if not isinstance(dumped, Mapping):
        return dumped
    document = dict(dumped)
    _restore_pydantic(document, original)
    if original is not None and id(original) in task_ids:
        document["task_id"] = task_ids[id(original)]
    if isinstance(messages := document.get("messages"), list | tuple):
        kept = _last_messages(messages, messages_cap)
        document["messages"] = kept
        if len(kept) < len(messages):
            document["messages_omitted"] = len(messages) - len(kept)
    return document


def _restore_pydantic(document: dict[str, Any], original: Any) -> None:
    """CrewAI types the field as BaseModel, so its own dump of it is ``{}``: dump the model itself."""
    if (model := getattr(original, "pydantic", None)) is not None and (dumped := dump(model)) is not None:
        document["pydantic"] = dumped


def _last_messages(messages: Iterable[Any], cap_bytes: int) -> list[Any]:
    """The latest messages that fit ``cap_bytes`` together; the earlier ones are prompts that repeat other outputs."""
    kept: list[Any] = []
    left = cap_bytes
    for message in reversed(list(messages)):
        try:
            clean = Sanitizer(left).clean(message)
            left -= len(encode(clean, left)) + 1
        except TooLarge:
            break
        kept.append(clean)
    return kept[::-1]


# --- chunks ----------------------------------------------------------------------------------------------------------


def chunk_document(chunk: Any) -> dict[str, Any]:
    """The data of a chunk that a crew streamed: its dump, a copy of the mapping or its text; and a channel."""
    dumped = dump(chunk)
    if isinstance(dumped, Mapping):
        document = dict(dumped)
    elif isinstance(chunk, Mapping):
        document = dict(chunk)
    else:
        document = {}
    if "content" not in document and isinstance(content := getattr(chunk, "content", None), str):
        document["content"] = content
    if not document:
        document["content"] = text_of(chunk)
    if not isinstance(document.get("channel"), str):
        is_tool = document.get("chunk_type") == "tool_call" or document.get("tool_call") is not None
        document["channel"] = "tools" if is_tool else "messages"
    return document
