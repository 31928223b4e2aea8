"""Arguments of a call as plain JSON values, or a refusal before anything is claimed."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

from protocol import canonical, jcs
from protocol.errors import BadJson, NotCanonical

#: Kinds that a JSON writer would turn into text or into an array of no certain order.
_REFUSED = (bytes, bytearray, memoryview, set, frozenset, Iterator)
_PLAIN = (type(None), bool, int, float, str)


def plain(value: Any) -> Any:
    """``value`` made of None, bool, int, float, str, lists and dicts with text keys only.

    Models and dataclasses become objects; dates, decimals, UUIDs, paths and the like become the text that pydantic
    writes for them, enumerations their values. Raises NotCanonical with the path of anything else.
    """
    return _plain(value, "$", 0)


def _plain(value: Any, path: str, depth: int) -> Any:
    if type(value) in _PLAIN:
        return value
    if depth > jcs.MAX_DEPTH:
        raise NotCanonical(f"nesting is deeper than {jcs.MAX_DEPTH} levels")
    if isinstance(value, Mapping):
        return {_name(key, path): _plain(child, f"{path}[{key!r}]", depth + 1) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(child, f"{path}[{at}]", depth + 1) for at, child in enumerate(value)]
    if isinstance(value, _REFUSED):
        raise NotCanonical(f"{path}: a {type(value).__name__} has no canonical form")
    return _plain(_simpler(value, path), path, depth + 1)


def _name(key: Any, path: str) -> str:
    if isinstance(key, Enum):
        key = key.value
    if not isinstance(key, str):
        raise NotCanonical(f"{path}, a key: {type(key).__name__} is no text")
    return str.__str__(key)


def _simpler(value: Any, path: str) -> Any:
    """One step from a foreign kind towards JSON."""
    if isinstance(value, Enum):
        return value.value
    for kind in (str, float, int):
        if isinstance(value, kind):
            return kind.__str__(value) if kind is str else kind(value)
    if isinstance(value, PurePath):
        return str(value)
    if callable(secret := getattr(value, "get_secret_value", None)):
        return secret()
    if callable(dump := getattr(value, "model_dump", None)):
        return dump()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return _text_of(value, path)


def _text_of(value: Any, path: str) -> Any:
    from pydantic_core import to_jsonable_python

    try:
        made = to_jsonable_python(value)
    except Exception:  # noqa: BLE001 - a foreign kind's own serializer may raise anything
        made = value
    if type(made) not in (str, int, float):
        raise NotCanonical(f"{path}: a {type(value).__name__} has no canonical form")
    return made


def digest(arguments: Mapping[str, Any], *, volatile: tuple[str, ...]) -> str:
    """Lower-case hex SHA-256 of plain ``arguments`` without ``volatile``, in canonical form. Raises NotCanonical."""
    return jcs.digest({name: value for name, value in arguments.items() if name not in volatile})


def bind(function: Callable[..., Any], arguments: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
    """Names to values as ``function`` would see them, defaults included, ``self`` left out. Raises TypeError."""
    signature = inspect.signature(function)
    bound = signature.bind(*arguments, **named)
    bound.apply_defaults()
    made: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            made |= value
        elif name != "self" and not (kind is inspect.Parameter.VAR_POSITIONAL and not value):
            made[name] = value
    return made


def parse(text: str) -> Any:
    """The value of JSON text that a model wrote; text that is no JSON at all comes back as it is.

    Raises NotCanonical for duplicate keys, NaN, infinities and lone surrogates, which a lenient reader lets through;
    for duplicate keys in a Python literal too, which CrewAI also reads.
    """
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        _check_literal(text)
        return text
    try:
        return canonical.parse(text.encode("utf-8", "surrogatepass"))
    except BadJson as error:
        raise NotCanonical(f"arguments: {error}") from None


def leading(text: str) -> str | None:
    """The JSON object that ``text`` begins with, whatever comes after it; None if it begins otherwise."""
    text = text.strip().strip('"')
    if not text.startswith("{"):
        return None
    try:
        return text[: json.JSONDecoder().raw_decode(text)[1]]
    except (ValueError, RecursionError):
        return text


def _check_literal(text: str) -> None:
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
            if len(set(keys)) != len(keys):
                raise NotCanonical("arguments: duplicate key in one object; send each key once")
