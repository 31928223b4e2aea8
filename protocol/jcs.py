"""RFC 8785 (JCS): the canonical bytes of JSON values, and what has none is refused."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import rfc8785

from protocol.errors import NotCanonical

#: Deepest nesting; the encoder is recursive.
MAX_DEPTH = 100
_SCALARS = (type(None), bool, int, float, str)


def encode(value: Any) -> bytes:
    """UTF-8 canonical form: ``1.0`` is ``1``, ``-0.0`` is ``0``, ``true`` is not 1, text is not normalised.

    ``value``: None, bool, int within 2^53-1 of zero, finite float, well-formed str, list, tuple (an array), and dict
    with such keys. Raises NotCanonical with the path of anything else.
    """
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [child for item in level for child in _children(item)]
        if not level:
            break
    else:
        raise NotCanonical(f"nesting is deeper than {MAX_DEPTH} levels")
    try:
        return rfc8785.dumps(value)
    except (rfc8785.CanonicalizationError, UnicodeEncodeError) as error:
        raise NotCanonical(f"{_fault_path(value)}: {error}") from None


def digest(value: Any) -> str:
    """Lower-case hex SHA-256 of the canonical form. Raises NotCanonical."""
    return hashlib.sha256(encode(value)).hexdigest()


def _children(item: Any) -> Iterable[Any]:
    if isinstance(item, dict):
        return item.values()
    return item if isinstance(item, list | tuple) else ()


def _fault_path(value: Any, path: str = "$") -> str:
    """Where the first value is that has no canonical form."""
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list | tuple):
        items = list(enumerate(value))
    for key, child in items:
        if isinstance(value, dict) and not _encodes(key):
            return f"{path}, a key"
        if not isinstance(child, _SCALARS):
            found = _fault_path(child, f"{path}[{key!r}]")
            if found:
                return found
        elif not _encodes(child):
            return f"{path}[{key!r}]"
    return "" if _encodes(value) else path


def _encodes(value: Any) -> bool:
    try:
        rfc8785.dumps(value)
    except (rfc8785.CanonicalizationError, UnicodeEncodeError):
        return False
    return True
