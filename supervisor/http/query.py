"""The queries of lists: filters, page size, opaque cursor."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Collection
from enum import StrEnum
from typing import TypeVar

import msgspec
from aiohttp import web

from protocol.effects import Scope
from protocol.errors import InputInvalid
from protocol.states import EffectState, Status

DEFAULT_LIMIT = 50
MAX_LIMIT = 500
JOB_PARAMETERS = frozenset({"status", "crew_id", "operation", "cursor", "limit"})
EFFECT_PARAMETERS = frozenset({"state", "crew_id", "scope", "cursor", "limit"})
PAGE_PARAMETERS = frozenset({"cursor", "limit"})
LOG_PARAMETERS = frozenset({"tail", "follow"})
#: The longest end of a log that can be asked for, bytes.
MAX_TAIL_BYTES = 1 << 30
#: What a cursor counts.
JOB, EFFECT, SHARED_EFFECT = "row", "effect", "shared"
E = TypeVar("E", bound=StrEnum)


class JobQuery(msgspec.Struct, frozen=True, kw_only=True):
    """What to list; ``before`` is the row that the page stays below."""

    status: Status | None
    crew_id: str | None
    operation: str | None
    before: int | None
    limit: int


class EffectQuery(msgspec.Struct, frozen=True, kw_only=True):
    """What to list; ``before``, or ``shared_before`` among what replicas share, is what the page stays below."""

    state: EffectState | None
    crew_id: str | None
    scope: Scope | None
    before: int | None
    shared_before: int | None
    limit: int


class LogQuery(msgspec.Struct, frozen=True, kw_only=True):
    """What of a log: its last ``tail_bytes`` (None: all of it), and whether to the end of the job."""

    tail_bytes: int | None
    follow: bool


def read_query(request: web.Request) -> JobQuery:
    """Read the parameters of ``GET /jobs``; the last of a repeated one counts. Raises InputInvalid."""
    values = _values(request, JOB_PARAMETERS)
    return JobQuery(
        status=_one_of(Status, "status", values.get("status")),
        crew_id=values.get("crew_id"),
        operation=values.get("operation"),
        before=_decode_cursor(JOB, values.get("cursor")),
        limit=_limit(values.get("limit")),
    )


def read_effect_query(request: web.Request, *, of_job: bool = False) -> EffectQuery:
    """The same for lists of effects; those of one job have no filters. Raises InputInvalid."""
    values = _values(request, PAGE_PARAMETERS if of_job else EFFECT_PARAMETERS)
    cursor = values.get("cursor")
    kinds = (EFFECT,) if of_job else (EFFECT, SHARED_EFFECT)
    kind, number = (EFFECT, None) if cursor is None else _read_cursor(cursor, kinds)
    shared = kind == SHARED_EFFECT
    return EffectQuery(
        state=_one_of(EffectState, "state", values.get("state")),
        crew_id=values.get("crew_id"),
        scope=_one_of(Scope, "scope", values.get("scope")),
        before=None if shared else number,
        shared_before=number if shared else None,
        limit=_limit(values.get("limit")),
    )


def read_log_query(request: web.Request) -> LogQuery:
    """Read the parameters of a job's log. Raises InputInvalid."""
    values = _values(request, LOG_PARAMETERS)
    tail, follow = values.get("tail"), values.get("follow", "0")
    if follow not in ("0", "1"):
        raise InputInvalid(f"follow {follow[:40]!r} is neither 0 nor 1")
    tail_bytes = None if tail is None else _integer("tail", tail, low=0, high=MAX_TAIL_BYTES)
    return LogQuery(tail_bytes=tail_bytes, follow=follow == "1")


def _values(request: web.Request, known: Collection[str]) -> dict[str, str]:
    values = {name: request.query.getall(name)[-1] for name in request.query}
    unknown = sorted(values.keys() - known)
    if unknown:
        there = ", ".join(sorted(known))
        raise InputInvalid(f"unknown query parameters {', '.join(unknown)[:200]}; there are {there}")
    return values


def encode_cursor(kind: str, before: int | None) -> str | None:
    """The opaque form of a number, None for none."""
    if before is None:
        return None
    return base64.urlsafe_b64encode(f"{kind}:{before}".encode("ascii")).decode("ascii").rstrip("=")


def _decode_cursor(kind: str, text: str | None) -> int | None:
    return None if text is None else _read_cursor(text, (kind,))[1]


def _read_cursor(text: str, kinds: Collection[str]) -> tuple[str, int]:
    try:
        found, _, number = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode("ascii").partition(":")
    except (binascii.Error, ValueError):
        found, number = "", ""
    if found not in kinds or not number.isdigit() or len(number) > 18:
        raise InputInvalid(f"cursor {text[:60]!r} is not one that this list gave")
    return found, int(number)


def _one_of(kind: type[E], name: str, text: str | None) -> E | None:
    if text is None:
        return None
    try:
        return kind(text)
    except ValueError:
        raise InputInvalid(f"{name} {text[:60]!r} is not one of {', '.join(kind)}") from None


def _limit(text: str | None) -> int:
    if text is None:
        return DEFAULT_LIMIT
    return _integer("limit", text, low=1, high=MAX_LIMIT)


def _integer(name: str, text: str, *, low: int, high: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 12 and low <= int(text) <= high):
        raise InputInvalid(f"{name} {text[:40]!r} is not an integer from {low} to {high}")
    return int(text)
