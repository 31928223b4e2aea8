"""The order of checks that a start request passes before it is admitted (wire contract, section 5)."""

from __future__ import annotations

import time
from collections.abc import Collection

import msgspec
from aiohttp import web

from protocol import canonical
from protocol.api import MAX_INPUT_BYTES, MAX_KEY_BYTES, StartRequest, convert
from protocol.errors import InputTooLarge, KeyInvalid, KeyMissing, LegacyRoute, OperationDisabled, UnknownCrew
from protocol.operations import Operation, check_input
from supervisor.http.edge import raw_header, read_json
from supervisor.journal import NewJob

KEY_HEADER = "Idempotency-Key"
#: Set on a request that another replica has passed on: the key's bytes where they are no text, and who the caller was.
FORWARDED_KEY = "forwarded_key"
FORWARDED_CALLER = "forwarded_caller"


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """A start request that passed every check.

    ``input_json`` is what the worker gets, ``key_digest`` (SHA-256, lower-case hex) what the log says of the key.
    """

    new: NewJob
    input_json: bytes
    key_digest: str


async def read_start(
    request: web.Request,
    *,
    legacy: bool,
    operations: Collection[Operation],
    crews: Collection[str],
    registry_digest: str,
    config_digest: str,
) -> Start:
    """Read and check a start request in the contract's order. Raises the CrewError of the first rule it breaks."""
    body = convert(await read_json(request), StartRequest)
    timeout_ms = body.timeout
    if len(canonical.canonical_bytes(body.input)) > MAX_INPUT_BYTES:
        raise InputTooLarge(
            f"input is above {MAX_INPUT_BYTES} bytes in canonical ASCII form", action_id=body.action_id
        )
    if legacy and body.operation != Operation.RUN:
        raise LegacyRoute(f"this route starts run only; send {body.operation} to /jobs", action_id=body.action_id)
    if body.operation not in operations:
        raise OperationDisabled(f"operation {body.operation} is not enabled here", action_id=body.action_id)
    key = idempotency_key(request)
    check_input(Operation(body.operation), body.input)
    if body.crew_id not in crews:
        raise UnknownCrew(f"no crew {body.crew_id!r} in the registry; see /health", action_id=body.action_id)
    digest = canonical.request_hash(
        action_id=body.action_id,
        crew_id=body.crew_id,
        operation=body.operation,
        input=body.input,
        timeout_ms=timeout_ms,
        idempotency_key=key,
    )
    new = NewJob(
        action_id=body.action_id,
        crew_id=body.crew_id,
        operation=body.operation,
        request_hash=digest,
        timeout_ms=timeout_ms,
        admitted_at=time.time(),
        registry_digest=registry_digest,
        config_digest=config_digest,
        client=actor(request),
    )
    key_digest = canonical.digest(key.encode("latin-1"))
    return Start(new=new, input_json=canonical.compact(body.input), key_digest=key_digest)


def idempotency_key(request: web.Request) -> str:
    """The key as the request hash takes it: the latin-1 view of the header. Raises KeyMissing, KeyInvalid."""
    raw: bytes | None = request.get(FORWARDED_KEY, raw_header(request, KEY_HEADER))
    if raw is None or not raw.strip():
        raise KeyMissing(f"every start needs an {KEY_HEADER} header")
    if len(raw) > MAX_KEY_BYTES or any(byte < 0x20 for byte in raw):
        raise KeyInvalid(f"{KEY_HEADER} must have at most {MAX_KEY_BYTES} bytes and no control characters")
    return raw.decode("latin-1")


def actor(request: web.BaseRequest) -> str:
    """Who asks, for the audit."""
    return f"http:{request.get(FORWARDED_CALLER) or request.remote or 'unknown'}"
