"""The query of ``GET /jobs``: filters, page size, opaque cursor."""

from __future__ import annotations

import base64
import binascii

import msgspec
from aiohttp import web

from protocol.errors import InputInvalid
from protocol.states import Status

DEFAULT_LIMIT = 50
MAX_LIMIT = 500
PARAMETERS = frozenset({"status", "crew_id", "operation", "cursor", "limit"})


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """What to list; ``before`` is the row that the page stays below."""

    status: Status | None
    crew_id: str | None
    operation: str | None
    before: int | None
    limit: int


def read_query(request: web.Request) -> Query:
    """Read the parameters; the last of a repeated one counts. Raises InputInvalid."""
    values = {name: request.query.getall(name)[-1] for name in request.query}
    unknown = sorted(values.keys() - PARAMETERS)
    if unknown:
        known = ", ".join(sorted(PARAMETERS))
        raise InputInvalid(f"unknown query parameters {', '.join(unknown)[:200]}; there are {known}")
    return Query(
        status=_status(values.get("status")),
        crew_id=values.get("crew_id"),
        operation=values.get("operation"),
        before=None if "cursor" not in values else _decode_cursor(values["cursor"]),
        limit=_limit(values.get("limit")),
    )


def encode_cursor(before: int) -> str:
    """The opaque form of a row."""
    return base64.urlsafe_b64encode(b"row:%d" % before).decode("ascii").rstrip("=")


def _decode_cursor(text: str) -> int:
    try:
        kind, _, row = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode("ascii").partition(":")
    except (binascii.Error, ValueError):
        kind, row = "", ""
    if kind != "row" or not row.isdigit() or len(row) > 18:
        raise InputInvalid(f"cursor {text[:60]!r} is not one that this server gave")
    return int(row)


def _status(text: str | None) -> Status | None:
    if text is None:
        return None
    try:
        return Status(text)
    except ValueError:
        raise InputInvalid(f"status {text[:60]!r} is not one of {', '.join(Status)}") from None


def _limit(text: str | None) -> int:
    if text is None:
        return DEFAULT_LIMIT
    if not (text.isascii() and text.isdigit() and len(text) <= 6 and 1 <= int(text) <= MAX_LIMIT):
        raise InputInvalid(f"limit {text[:40]!r} is not an integer from 1 to {MAX_LIMIT}")
    return int(text)
