"""What a host advertises for its crews: the catalogue of operations, capability ids, the manifest. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from protocol import canonical
from protocol.errors import BadJson
from protocol.operations import CONTROL_OPERATIONS
from supervisor.client.action import CANCEL, EVENTS, STARTABLE, STATUS
from supervisor.client.answers import Health
from supervisor.client.failures import InvalidRequest

PREFIX = "cap:crewai:"
MAX_CREWS = 1000
MAX_CREWS_BYTES = 4 << 20
MAX_ID_BYTES = 256
MAX_NAME_BYTES = 512
MAX_DESCRIPTION_BYTES = 16_384
APPROVAL_TTL_S = 900
IDEMPOTENCY_TTL_S = 86_400
#: Advertised, and enforced by nobody: what an Action may take, wait for a slot, and how often it is served.
SLA = {"timeout_ms": 600_000, "max_queue_delay_ms": 10_000, "availability_percent": 99.5}


class Traits(NamedTuple):
    """What a host has to know of an operation.

    ``kind``: agent, tool or workflow. ``risk``: low, medium or high. ``effect``: mutation or read. ``key``: it takes an
    idempotency key. ``stream``: it has chunks. ``cancel``: a host may cancel it on any server of the contract; this
    project's stops all seven.
    """

    kind: str
    risk: str
    effect: str
    key: bool
    stream: bool
    cancel: bool


CATALOGUE: dict[str, Traits] = {
    "run": Traits("agent", "medium", "mutation", key=True, stream=True, cancel=True),
    "status": Traits("tool", "low", "read", key=False, stream=False, cancel=False),
    "events": Traits("tool", "low", "read", key=False, stream=True, cancel=False),
    "cancel": Traits("tool", "medium", "mutation", key=True, stream=False, cancel=False),
    "batch_run": Traits("agent", "medium", "mutation", key=True, stream=True, cancel=True),
    "replay": Traits("agent", "medium", "mutation", key=True, stream=True, cancel=False),
    "train": Traits("workflow", "high", "mutation", key=True, stream=True, cancel=False),
    "test": Traits("workflow", "medium", "mutation", key=True, stream=True, cancel=False),
    "knowledge_query": Traits("tool", "low", "read", key=True, stream=False, cancel=False),
    "memory_reset": Traits("tool", "high", "mutation", key=True, stream=False, cancel=False),
}
DEFAULT_OPERATIONS = ("run", STATUS, EVENTS, CANCEL)


class Crew(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A crew that a host offers; ``id`` at most 256 bytes, ``name`` 512, ``description`` 16 KiB."""

    id: str
    name: str
    description: str
    allowed_operations: tuple[str, ...] = DEFAULT_OPERATIONS


class Capability(msgspec.Struct, frozen=True, kw_only=True):
    """One operation of one crew under the id that callers use."""

    id: str
    crew_id: str
    operation: str


def read_crews(document: bytes) -> tuple[Crew, ...]:
    """The crews of a JSON array of 1 to 1000, at most 4 MiB. Raises InvalidRequest."""
    if len(document) > MAX_CREWS_BYTES:
        raise InvalidRequest(f"the crews have more than {MAX_CREWS_BYTES} bytes")
    try:
        crews = msgspec.convert(canonical.parse(document), tuple[Crew, ...])
    except BadJson as error:
        raise InvalidRequest(f"the crews are no strict JSON: {error.detail}") from None
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the crews cannot be read: {error}") from None
    check_crews(crews)
    return crews


def check_crews(crews: Sequence[Crew]) -> None:
    """Raises InvalidRequest for a crew out of bounds, an unknown operation, or an id given twice."""
    if not 1 <= len(crews) <= MAX_CREWS:
        raise InvalidRequest(f"there must be 1 to {MAX_CREWS} crews, not {len(crews)}")
    seen: set[str] = set()
    for crew in crews:
        _check_text("id", crew.id, MAX_ID_BYTES)
        _check_text("name", crew.name, MAX_NAME_BYTES)
        _check_text("description", crew.description, MAX_DESCRIPTION_BYTES)
        unknown = sorted(set(crew.allowed_operations) - CATALOGUE.keys())
        if unknown or not crew.allowed_operations:
            raise InvalidRequest(f"crew {crew.id!r} allows {', '.join(unknown) or 'no operation'}")
        if crew.id in seen:
            raise InvalidRequest(f"crew {crew.id!r} is there twice")
        seen.add(crew.id)


def _check_text(field: str, value: str, limit_bytes: int) -> None:
    if not value.strip() or len(value.encode("utf-8")) > limit_bytes or any(_is_control(char) for char in value):
        raise InvalidRequest(f"a crew's {field} must have 1 to {limit_bytes} bytes and no control characters")


def _is_control(char: str) -> bool:
    return char < " " or "\x7f" <= char <= "\x9f"


def capability_id(crew_id: str, operation: str) -> str:
    """``cap:crewai:<crew>`` for run, ``cap:crewai:<crew>:<operation>`` for the others."""
    return f"{PREFIX}{crew_id}" if operation == "run" else f"{PREFIX}{crew_id}:{operation}"


def resolve(capability: str, crews: Iterable[Crew]) -> Capability:
    """The operation that a capability id means.

    A crew whose id is the whole rest of it wins over one with an operation behind it; of several the longest id.
    Raises InvalidRequest for an id that means none, or one that its crew does not allow.
    """
    found = [
        (operation == "run", len(crew.id), crew, operation)
        for crew in crews
        for operation in CATALOGUE
        if capability_id(crew.id, operation) == capability
    ]
    if not found:
        raise InvalidRequest(f"no crew has the capability {capability[:300]!r}")
    _, _, crew, operation = max(found, key=lambda candidate: candidate[:2])
    if operation not in crew.allowed_operations:
        raise InvalidRequest(f"crew {crew.id!r} does not allow {operation}")
    return Capability(id=capability, crew_id=crew.id, operation=operation)


def manifest(crews: Sequence[Crew]) -> dict[str, Any]:
    """The document that advertises ``crews``, JSON-ready; a capability that another crew's id hides is left out.

    Raises InvalidRequest as ``check_crews``.
    """
    check_crews(crews)
    # An id may stand for a crew's run and for an operation of a shorter one: the crew's own wins, as in ``resolve``.
    own = {capability_id(crew.id, "run") for crew in crews}
    entries = [
        _entry(crew, operation)
        for crew in crews
        for operation in crew.allowed_operations
        if operation == "run" or capability_id(crew.id, operation) not in own
    ]
    return {"capabilities": entries}


def _entry(crew: Crew, operation: str) -> dict[str, Any]:
    traits = CATALOGUE[operation]
    mutation = traits.effect == "mutation"
    return {
        "id": capability_id(crew.id, operation),
        "crew_id": crew.id,
        "operation": operation,
        "name": crew.name,
        "description": crew.description,
        "kind": traits.kind,
        "risk": traits.risk,
        "effect": traits.effect,
        "approval": {"required": mutation, "ttl_s": APPROVAL_TTL_S if mutation else None},
        "idempotency": {"key_required": traits.key, "ttl_s": IDEMPOTENCY_TTL_S if traits.key else None},
        "streaming": traits.stream,
        "cancellable": traits.cancel,
        "sla": dict(SLA),
    }


def lacks(health: Health, crews: Sequence[Crew]) -> list[str]:
    """What a server's health lacks to serve ``crews``; nothing where it can."""
    missing = [] if health.status == "ready" else [f"status is {health.status}"]
    if not health.durable_journal:
        missing.append("the journal is not durable")
    missing += [f"crew {crew.id}" for crew in crews if crew.id not in health.crews]
    wanted = {operation for crew in crews for operation in crew.allowed_operations}
    return missing + [f"operation {operation}" for operation in sorted(wanted - set(health.operations))]


assert CATALOGUE.keys() == STARTABLE | CONTROL_OPERATIONS
