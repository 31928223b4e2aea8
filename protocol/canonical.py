"""Strict JSON in, canonical bytes and digests out.

The request hash is the one of the wire contract: SHA-256 over CPython's ``json.dumps`` with sorted keys, no spaces and
ASCII escapes, of exactly six fields.
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any, NoReturn

import msgspec

from protocol.errors import BadJson

#: Deepest nesting admitted; deeper documents break common JSON readers downstream.
MAX_DEPTH = 100
#: Deepest nesting of an event's data or an output, so that an input fits into it. The documents that carry it add a few
#: levels more; the wire's client reads 127.
MAX_DATA_DEPTH = 112


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        repeated = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise BadJson(f"duplicate key {_quote(repeated)} in one object; send each key once")
    return made


def _constant(text: str) -> NoReturn:
    raise BadJson(f"{text} is not a JSON number; send a finite number or null")


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise BadJson(f"number {text[:40]} is beyond the range of a double; send a finite number")
    return value


#: ``json.dumps`` with arguments makes a new encoder for every call, which takes longer than most documents do.
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"))
_COMPACT = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant, parse_float=_float)


def parse(body: bytes, *, max_depth: int = MAX_DEPTH) -> Any:
    """Parse ``body`` (UTF-8 JSON text) strictly.

    Raises BadJson, with the position or the path of the fault, for anything that is not RFC 8259 JSON and for
    duplicate keys, non-finite numbers, lone surrogates, nesting deeper than ``max_depth`` and integers above CPython's
    4300 digits.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadJson(f"body is not UTF-8 at byte {error.start}") from None
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise BadJson(f"{error.msg} at line {error.lineno} column {error.colno} (character {error.pos})") from None
    except RecursionError:
        raise BadJson(f"nesting is deeper than {max_depth} levels") from None
    except ValueError:
        raise BadJson("an integer has more digits than can be read; send it as a string") from None
    if text.count("[") + text.count("{") > max_depth:
        _check_depth(value, max_depth)
    if "\\u" in text:
        _check_surrogates(value)
    return value


def _quote(key: str) -> str:
    return json.dumps(key)[:80]


def _check_depth(value: Any, limit: int) -> None:
    level: list[Any] = [value]
    for _ in range(limit):
        level = [child for item in level for child in _children(item)]
        if not level:
            return
    if any(isinstance(item, dict | list) for item in level):
        raise BadJson(f"nesting is deeper than {limit} levels")


def _children(item: Any) -> list[Any]:
    if isinstance(item, dict):
        return list(item.values())
    return item if isinstance(item, list) else []


def _check_surrogates(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        path = _surrogate_path(value, "$")
        raise BadJson(f"lone surrogate in the text at {path}; send well-formed Unicode") from None


def _surrogate_path(value: Any, path: str) -> str | None:
    if isinstance(value, str):
        return path if any("\ud800" <= char <= "\udfff" for char in value) else None
    items: list[tuple[Any, Any]] = list(value.items()) if isinstance(value, dict) else []
    if isinstance(value, list):
        items = list(enumerate(value))
    for key, child in items:
        below = f"{path}[{_quote(key) if isinstance(key, str) else key}]"
        if isinstance(key, str) and _surrogate_path(key, below):
            return f"{path} (a key)"
        found = _surrogate_path(child, below)
        if found:
            return found
    return None


def canonical_bytes(value: Any) -> bytes:
    """ASCII canonical form: keys sorted by code point, no spaces, ``\\uXXXX`` escapes, floats as ``repr``."""
    return _CANONICAL.encode(value).encode("ascii")


def compact(value: Any) -> bytes:
    """ASCII JSON without spaces, keys in insertion order: the form of event data."""
    return _COMPACT.encode(value).encode("ascii")


def check_object(data: bytes) -> None:
    """Check that ``data`` is one strict ASCII JSON object on one line, at most MAX_DATA_DEPTH deep. Raises BadJson."""
    if not data.isascii() or not data.startswith(b"{") or b"\n" in data or b"\r" in data:
        raise BadJson("not an ASCII JSON object on one line")
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadJson(f"not a JSON object: {error}") from None
    if data.count(b"[") + data.count(b"{") > MAX_DATA_DEPTH:
        _check_depth(value, MAX_DATA_DEPTH)
    # The decoder keeps the last of equal keys: then fewer colons come back. It may also be a matter of spaces.
    if data.count(b'":') != msgspec.json.encode(value).count(b'":'):
        parse(data, max_depth=MAX_DATA_DEPTH)


def with_fields(document: bytes, fields: dict[str, Any]) -> bytes:
    """The JSON object ``document`` with ``fields`` set in it."""
    return compact(json.loads(document) | fields)


def request_hash(
    *, action_id: str, crew_id: str, operation: str, input: dict[str, Any], timeout_ms: int | None, idempotency_key: str
) -> str:
    """Lower-case hex SHA-256 of a start request; ``idempotency_key`` is the latin-1 view of the header."""
    preimage = {
        "action_id": action_id,
        "crew_id": crew_id,
        "idempotency_key": idempotency_key,
        "input": input,
        "operation": operation,
        "timeout_ms": timeout_ms,
    }
    return hashlib.sha256(canonical_bytes(preimage)).hexdigest()


def digest(data: bytes) -> str:
    """Lower-case hex SHA-256 of ``data``."""
    return hashlib.sha256(data).hexdigest()
