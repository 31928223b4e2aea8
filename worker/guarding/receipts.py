"""Results of tools as stored JSON text, where they can be given back exactly."""

from __future__ import annotations

import json
from typing import Any

from protocol import canonical
from protocol.effects import MAX_RECEIPT_BYTES
from protocol.errors import BadJson

#: What a repeat hears when the result of the first call was not stored.
NOT_STORED = (
    "This call has taken effect before. Its result was not stored, so it cannot be shown again, "
    "and the call is not repeated."
)


def encode(result: Any) -> bytes | None:
    """JSON text of ``result``; None unless reading it back gives an equal value of the same kinds.

    Not stored: None, tuples, anything JSON has no form for, and more than MAX_RECEIPT_BYTES.
    """
    try:
        if result is None or not _exact(result):
            return None
        data = json.dumps(result, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8")
        if len(data) > MAX_RECEIPT_BYTES or canonical.parse(data) != result:
            return None
    except (BadJson, ValueError, RecursionError):
        return None
    return data


def decode(receipt: bytes | None) -> Any:
    """What ``encode`` was given, NOT_STORED for None."""
    return NOT_STORED if receipt is None else json.loads(receipt)


def _exact(value: Any) -> bool:
    if type(value) is dict:
        return all(type(key) is str and _exact(child) for key, child in value.items())
    if type(value) is list:
        return all(_exact(child) for child in value)
    return type(value) in (type(None), bool, int, float, str)
