"""What a row of the route table says: the vocabulary, and the parts that several rows share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, NamedTuple

import msgspec
from aiohttp import web

from protocol.api import MAX_KEY_BYTES, ActionId, Count
from protocol.errors import (
    BadJson,
    BodyTimedOut,
    CrewError,
    ExpectationUnknown,
    FleetUnavailable,
    InputInvalid,
    InputTooLarge,
    JournalUnavailable,
    MethodNotAllowed,
    OwnerUnavailable,
    ReadOnlyToken,
    RequestUnreadable,
    RouteUnknown,
    Unauthorized,
)

JSON = "application/json"
EVENT_STREAM = "text/event-stream"
#: Methods that a read-only token may use.
READING_METHODS = frozenset({"GET", "HEAD"})

Errors = tuple[type[CrewError], ...]


class Parameter(NamedTuple):
    """A parameter of a request; ``where`` is path, query or header, ``kind`` a type that msgspec has a schema for."""

    name: str
    where: str
    kind: Any
    description: str
    required: bool = False


class Header(NamedTuple):
    """A header of an answer."""

    name: str
    kind: Any
    description: str
    required: bool = False


class Answer(NamedTuple):
    """An answer that is no error; ``body`` is a type that msgspec has a schema for."""

    status: int
    description: str
    body: Any
    media_type: str = JSON
    headers: tuple[Header, ...] = ()


class Route(NamedTuple):
    """One line of the table. ``handler`` is a group's method; ``errors`` leaves out what ``all_errors`` adds."""

    method: str
    path: str
    handler: Callable[[Any, web.Request], Awaitable[web.StreamResponse]]
    summary: str
    answers: tuple[Answer, ...]
    errors: Errors = ()
    parameters: tuple[Parameter, ...] = ()
    body: Any = None
    open: bool = False

    @property
    def all_errors(self) -> Errors:
        """Every error that a request to this row can be answered with."""
        added: Errors = EVERYWHERE
        if not self.open:
            added += (Unauthorized,)
            added += () if self.method in READING_METHODS else (ReadOnlyToken,)
        if self.body is not None:
            added += BODY
        return (*added, *(error for error in self.errors if error not in added))


#: The edge refuses these on any row.
EVERYWHERE: Errors = (ExpectationUnknown,)
#: Requests that meet no row.
UNROUTED: Errors = (RouteUnknown, MethodNotAllowed)
#: What is wrong with a body before its fields are looked at.
BODY: Errors = (RequestUnreadable, BodyTimedOut, InputTooLarge, BadJson, InputInvalid)
#: A journal that cannot be read, or takes no record.
JOURNAL: Errors = (JournalUnavailable,)
#: An Action that may be another replica's, where there are several.
ELSEWHERE: Errors = (FleetUnavailable, OwnerUnavailable)

Text = Annotated[str, msgspec.Meta(min_length=1)]
Key = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_KEY_BYTES, pattern="^[!-~][ -~]*$")]
#: Any JSON document whose shape is described elsewhere.
Document = Annotated[msgspec.Raw, msgspec.Meta(extra_json_schema={"type": "object"})]

ACTION = Parameter("action_id", "path", ActionId, "The Action's id.", required=True)
KEY = Parameter(
    "Idempotency-Key", "header", Key, f"Part of the request hash; at most {MAX_KEY_BYTES} bytes.", required=True
)
ACTION_HEADER = Parameter("X-AIP-Action-ID", "header", str, "Sent by the reference's client; ignored.")
PREFER = Parameter("Prefer", "header", str, "RFC 7240: `respond-async` on a start, `wait=N` (seconds) on a cancel.")
LAST_EVENT = Parameter("Last-Event-ID", "header", str, "The last sequence seen; with SSE it wins over `cursor`.")
CURSOR = Parameter("cursor", "query", Count, "Sequence of the first event wanted, 0 to the number of events.")

LOCATION = Header("Location", Text, "Where the record is.", required=True)
APPLIED = Header("Preference-Applied", Text, "The preference that was honoured.", required=True)
REPLAYED = Header("Idempotency-Replayed", Text, "`true` where the request repeats an admitted one exactly.")
UNCACHED = Header("Cache-Control", Text, "`no-cache`.", required=True)
