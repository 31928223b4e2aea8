"""What is sent: one Call for each request, checked before anything leaves. Pure."""

from __future__ import annotations

import re
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from protocol import canonical
from protocol.api import MAX_BODY_BYTES, MAX_INPUT_BYTES, MAX_KEY_BYTES, MAX_TIMEOUT_MS
from protocol.errors import BadJson
from supervisor.client.action import STARTABLE, Action
from supervisor.client.failures import ClientFailure, InvalidRequest

F = TypeVar("F", bound=ClientFailure)

MAX_ID_BYTES = 256
MAX_REASON_BYTES = 2048
ACTION_ID = re.compile(r"[A-Za-z0-9._:~-]{1,256}")
EVENT_STREAM = "text/event-stream"


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One request. ``path`` is encoded already. ``mutation``: a failure of it may leave something behind.

    ``admitted``: the Action is known to be admitted, so whatever goes wrong now says nothing about its effects.
    ``endless``: its answer takes as long as it takes.
    """

    method: str
    path: str
    body: bytes | None = None
    headers: dict[str, str] = msgspec.field(default_factory=dict)
    action: Action | None = None
    action_id: str | None = None
    mutation: bool = False
    admitted: bool = False
    endless: bool = False

    @property
    def about(self) -> dict[str, Any]:
        """What a failure of it says beside its text."""
        about: dict[str, Any] = {"action": self.action, "action_id": self.action_id, "mutation": self.mutation}
        return about | {"doubt": True} if self.admitted else about

    def failed(self, kind: type[F], detail: str, *, doubt: bool | None = None) -> F:
        """A failure of this request."""
        about = self.about if doubt is None or self.admitted else self.about | {"doubt": doubt}
        return kind(f"{self.method} {self.path.partition('?')[0]}: {detail}", **about)


def check_id(what: str, value: Any, *, action: Action | None = None) -> str:
    """``value`` as one segment of a path. Raises InvalidRequest for what cannot be one."""
    if not isinstance(value, str) or not value or value in (".", ".."):
        raise InvalidRequest(f"{what} {value!r} cannot be addressed", action=action)
    try:
        size = len(value.encode("utf-8"))
    except UnicodeEncodeError:
        size = MAX_ID_BYTES + 1
    if size > MAX_ID_BYTES or _has_control(value):
        raise InvalidRequest(
            f"{what} must have at most {MAX_ID_BYTES} bytes and no control characters", action=action
        )
    return quote(value, safe="")


def job_path(action_id: str, rest: str = "", *, action: Action | None = None, **query: Any) -> str:
    """Path of a job, percent-encoded; parameters that are None stay out."""
    return f"/jobs/{check_id('action_id', action_id, action=action)}{rest}{query_text(**query)}"


def query_text(**query: Any) -> str:
    """``?name=value&…`` of what is not None."""
    given = {name: value for name, value in query.items() if value is not None}
    return f"?{urlencode(given)}" if given else ""


def _has_control(text: str) -> bool:
    return any(char < " " or "\x7f" <= char <= "\x9f" for char in text)


def keyed(action: Action) -> dict[str, str]:
    """The headers of an Action that is sent as one. Raises InvalidRequest."""
    if not ACTION_ID.fullmatch(action.action_id) or action.action_id in (".", ".."):
        raise InvalidRequest(f"action_id {action.action_id!r} is not 1..256 of A-Z a-z 0-9 . _ : ~ -", action=action)
    key = action.key
    if not key.strip() or len(key.encode("utf-8", "replace")) > MAX_KEY_BYTES or _has_control(key):
        raise InvalidRequest(
            f"the idempotency key must have 1..{MAX_KEY_BYTES} bytes and no control characters", action=action
        )
    return {"Idempotency-Key": key, "X-AIP-Action-ID": action.action_id}


def start(action: Action, path: str, **headers: str) -> Call:
    """The request that starts an Action, or repeats it exactly. Raises InvalidRequest."""
    if action.operation not in STARTABLE:
        raise InvalidRequest(f"operation {action.operation!r} cannot be started", action=action)
    check_id("crew_id", action.crew_id, action=action)
    sent = {**keyed(action), **headers}
    if action.timeout_ms is not None and not (
        type(action.timeout_ms) is int and 1 <= action.timeout_ms <= MAX_TIMEOUT_MS
    ):
        raise InvalidRequest(f"timeout_ms must be an integer from 1 to {MAX_TIMEOUT_MS}", action=action)
    document: dict[str, Any] = {
        "crew_id": action.crew_id,
        "action_id": action.action_id,
        "operation": action.operation,
        "input": action.input,
    }
    if action.timeout_ms is not None:
        document["timeout_ms"] = action.timeout_ms
    return Call(
        method="POST",
        path=path,
        body=_start_body(action, document),
        headers=sent,
        action=action,
        mutation=action.mutates,
    )


def _start_body(action: Action, document: dict[str, Any]) -> bytes:
    """The body, with the bounds and the strictness that the server applies."""
    if not isinstance(action.input, dict):
        raise InvalidRequest("input must be an object", action=action)
    try:
        size = len(canonical.compact(action.input))
        body = canonical.compact(document)
        canonical.parse(body)
    except (BadJson, TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"input is not strict JSON: {error}", action=action) from None
    if size > MAX_INPUT_BYTES or len(body) > MAX_BODY_BYTES:
        raise InvalidRequest(f"input has {size} bytes in ASCII form, above {MAX_INPUT_BYTES}", action=action)
    return body


def check_reason(reason: Any, *, action: Action | None = None) -> None:
    """Raises InvalidRequest for a reason that the server would refuse."""
    if reason is None:
        return
    text = reason if isinstance(reason, str) else "\0"
    if len(text.encode("utf-8", "replace")) > MAX_REASON_BYTES or _has_control(text):
        raise InvalidRequest(
            f"a reason is text of at most {MAX_REASON_BYTES} bytes without control characters", action=action
        )


def cancel(
    crew_id: str, target: str, *, reason: str | None, wait_s: int | None = None, action: Action | None = None
) -> Call:
    """The request that cancels ``target``; with ``action`` it is an Action of its own. Raises InvalidRequest."""
    check_reason(reason, action=action)
    headers = {} if action is None else keyed(action)
    if wait_s is not None:
        headers["Prefer"] = f"wait={wait_s}"
    document = {"crew_id": crew_id, "action_id": target} | ({} if reason is None else {"reason": reason})
    return Call(
        method="POST",
        path=job_path(target, "/cancel", action=action),
        body=canonical.compact(document),
        headers=headers,
        action=action,
        action_id=target,
        mutation=True,
    )


def events(action_id: str, cursor: int, *, stream: bool, crew_id: str | None = None) -> Call:
    """The request for events from ``cursor`` on. Raises InvalidRequest."""
    if type(cursor) is not int or cursor < 0:
        raise InvalidRequest(f"cursor {cursor!r} is no sequence number", action_id=action_id)
    headers = {} if crew_id is None else {"X-AIP-Crew-ID": crew_id}
    if stream:
        headers["Accept"] = EVENT_STREAM
        if cursor:
            headers["Last-Event-ID"] = str(cursor - 1)
    path = job_path(action_id, "/events", cursor=cursor or None)
    return Call(method="GET", path=path, headers=headers, action_id=action_id)


def show(action_id: str, *, crew_id: str | None = None) -> Call:
    """The request for a record. Raises InvalidRequest."""
    headers = {} if crew_id is None else {"X-AIP-Crew-ID": crew_id}
    return Call(method="GET", path=job_path(action_id), headers=headers, action_id=action_id)
