"""HTTP bodies, and the stored structs that appear in them."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, TypeVar

import msgspec

from protocol import canonical
from protocol.effects import MAX_TEXT, Decision, EffectRecord, Policy, Scope
from protocol.errors import InputInvalid
from protocol.operations import CONTROL_OPERATIONS, Operation
from protocol.states import EffectState, Phase, Status

MAX_TIMEOUT_MS = 3_600_000
DEFAULT_TIMEOUT_MS = 600_000
#: Bound of an operation's input in its canonical ASCII form.
MAX_INPUT_BYTES = 1_048_576
#: Bound of a whole request body: the input and 64 KiB of envelope.
MAX_BODY_BYTES = MAX_INPUT_BYTES + 65_536
MAX_OUTPUT_BYTES = 4_194_304
MAX_KEY_BYTES = 512

CrewId = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
ActionId = Annotated[str, msgspec.Meta(min_length=1, max_length=256, pattern="^[A-Za-z0-9._:~-]+$")]
Reason = Annotated[str, msgspec.Meta(max_length=2048)]
Count = Annotated[int, msgspec.Meta(ge=0)]
#: Checked by the struct itself, so that the names of control operations get an answer of their own.
OperationName = Annotated[
    str,
    msgspec.Meta(
        description="An operation that can be started; the names of control operations are answered with 403.",
        extra_json_schema={"enum": [*Operation, *sorted(CONTROL_OPERATIONS)]},
    ),
]
TimeoutMs = Annotated[
    int | float | str | None,
    msgspec.Meta(
        description=f"Integer from 1 to {MAX_TIMEOUT_MS}; `600000.0` and `\"600000\"` are taken for 600000.",
        examples=[DEFAULT_TIMEOUT_MS],
    ),
]
#: JSON that is passed on as it is stored.
Output = Annotated[
    msgspec.Raw,
    msgspec.Meta(
        description="The operation's output object; null before completion and in lists.",
        extra_json_schema={"type": ["object", "null"]},
    ),
]
EventData = Annotated[
    msgspec.Raw, msgspec.Meta(description="The event's data object.", extra_json_schema={"type": "object"})
]
#: JSON of a tool's result, passed on as it is stored.
Receipt = Annotated[
    msgspec.Raw,
    msgspec.Meta(description="The tool's result; null before the settlement, and where it was not stored."),
]
AuditDetail = Annotated[msgspec.Raw, msgspec.Meta(extra_json_schema={"type": ["object", "null"]})]
KeyId = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
ActorName = Annotated[str, msgspec.Meta(max_length=512, pattern=r"\S")]
Evidence = Annotated[str, msgspec.Meta(max_length=MAX_TEXT, pattern=r"\S")]
EventText = Annotated[
    str,
    msgspec.Meta(
        extra_json_schema={
            "contentMediaType": "application/json",
            "contentSchema": {"$ref": "#/components/schemas/EventView"},
        }
    ),
]


def check_action_id(action_id: str) -> None:
    """Refuse what no URL path can carry. Raises InputInvalid."""
    if action_id in (".", "..") or action_id.endswith("\n"):
        raise InputInvalid(f"action_id {action_id!r} cannot be addressed in a URL; use other characters")


class StartRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of a start. ``timeout_ms`` counts milliseconds from the moment the work begins."""

    crew_id: CrewId
    action_id: ActionId
    operation: OperationName = Operation.RUN.value
    input: dict[str, Any] = msgspec.field(default_factory=dict)
    timeout_ms: TimeoutMs = None

    def __post_init__(self) -> None:
        check_action_id(self.action_id)
        if self.operation not in CONTROL_OPERATIONS and self.operation not in set(Operation):
            raise InputInvalid(f"operation {self.operation[:64]!r} is not known", action_id=self.action_id)

    @property
    def timeout(self) -> int | None:
        """``timeout_ms`` as an integer: ``"600000"`` and ``600000.0`` are taken. Raises InputInvalid."""
        value = self.timeout_ms
        if value is None:
            return None
        if isinstance(value, str):
            text = value.strip()
            value = int(text) if text.isascii() and text.isdigit() and len(text) <= 10 else -1
        if value != int(value) or not 1 <= value <= MAX_TIMEOUT_MS:
            raise InputInvalid(f"timeout_ms must be an integer from 1 to {MAX_TIMEOUT_MS}", action_id=self.action_id)
        return int(value)


class CancelRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of a cancel; ``reason`` is kept in the audit."""

    crew_id: CrewId
    action_id: ActionId
    reason: Reason | None = None


class ReconcileRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of a reconciliation: who found out what, and how. ``receipt`` is for ``settled``, required there."""

    actor: ActorName
    decision: Decision
    evidence: Evidence
    receipt: Any | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        given = self.receipt is not msgspec.UNSET
        if given != (self.decision is Decision.SETTLED):
            raise InputInvalid("a receipt goes with the decision settled, and with that one only; null is one too")


class JobDecision(StrEnum):
    """What became of a job's work: all of it took effect, some of it, none of it; or nobody will find out."""

    APPLIED = "applied"
    PARTLY_APPLIED = "partly_applied"
    NOT_APPLIED = "not_applied"
    ABANDONED = "abandoned"


class JobReconcileRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of a job's reconciliation: who found out what became of its work, and how."""

    actor: ActorName
    decision: JobDecision
    evidence: Evidence


T = TypeVar("T")


def convert(document: Any, kind: type[T]) -> T:
    """Make a request struct of a parsed document. Raises InputInvalid with the path of the fault."""
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        raise InputInvalid(str(error)) from None


class WorkerExit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """A worker's identity and its wait status; ``exit_code`` and ``exit_signal`` are None while it is not in hand.

    ``started_at``: Unix seconds, from the kernel's start ticks. ``oom``: killed by the kernel's out-of-memory killer,
    None where that cannot be known.
    """

    pid: int
    started_at: float | None = None
    exit_code: int | None = None
    exit_signal: str | None = None
    oom: bool | None = None


class Stray(msgspec.Struct, frozen=True, kw_only=True):
    """A process found outside its job's leaf and killed; ``started_at`` in Unix seconds."""

    pid: int
    started_at: float | None = None
    command: str = ""


class LateResult(msgspec.Struct, frozen=True, kw_only=True):
    """A result that was read only after the ending was decided; the state is unchanged by it."""

    sha256: str
    bytes: int


class StopEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """What was done to end a job's work and what the kernel said about it.

    ``confirmed`` is true only if the kernel said that nothing is left and the worker's wait status was in hand, both
    at ``confirmed_at``. Times are Unix seconds, ``elapsed_ms`` from ``requested_at`` to ``confirmed_at``.
    ``processes_killed`` counts processes seen in the leaf when the kill began, ``processes_left`` those that could
    still be seen at the last look (None: cannot look).
    """

    confirmed: bool
    method: str
    reason: str
    requested_at: float
    confirmed_at: float | None = None
    elapsed_ms: float | None = None
    worker: WorkerExit | None = None
    processes_killed: int = 0
    strays: tuple[Stray, ...] = ()
    processes_left: int | None = None
    late_result: LateResult | None = None
    boot_id: str = ""


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """The live worker of a job."""

    pid: int
    started_at: float
    cgroup: str | None
    memory_bytes: int | None = None


class EffectCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of a job's effects by state."""

    claimed: Count = 0
    settled: Count = 0
    not_applied: Count = 0
    unknown: Count = 0
    abandoned: Count = 0


class JobReconciliation(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody decided beside a job's uncertain outcome, and when (Unix seconds)."""

    at: float
    decision: JobDecision
    actor: str
    evidence: str


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """A job's record. The first six fields are the wire contract's; times are Unix seconds.

    ``reconciliation``: the newest decision about an uncertain outcome; the record beside it never changes.
    """

    action_id: str
    crew_id: str
    operation: str
    status: Status
    event_count: Count
    output: Output
    phase: Phase
    uncertain_outcome: bool | None
    timeout_ms: int | None
    admitted_at: float
    started_at: float | None
    ended_at: float | None
    worker: WorkerView | None
    stop: StopEvidence | None
    effects: EffectCounts
    reconciliation: JobReconciliation | None


class EventView(msgspec.Struct, frozen=True, kw_only=True):
    """One event as the wire shows it; fields in the wire's order."""

    event: str
    sequence: Count
    data: EventData


class StreamEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One server-sent event as a client's library hands it over; ``data`` is the text of an EventView."""

    id: str
    event: str
    data: EventText


class EventSlice(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /jobs/{id}/events`` without SSE; ``next_cursor`` is the number of events known."""

    action_id: str
    cursor: Count
    next_cursor: Count
    status: Status
    events: list[EventView]


class JobList(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /jobs``: newest first, ``output`` left out (null). ``next_cursor`` is None after the last page."""

    jobs: list[JobView]
    next_cursor: str | None


class ReconciliationView(msgspec.Struct, frozen=True, kw_only=True):
    """The last reconciliation of an effect."""

    decision: Decision
    actor: str
    evidence: str


class EffectView(msgspec.Struct, frozen=True, kw_only=True):
    """One effect. ``key_id`` is the SHA-256, in lower-case hex, of the UTF-8 bytes of ``preimage``.

    ``identity``: ``["key", business key]`` or ``["call", task index, args hash, ordinal]``. ``action_id`` and
    ``crew_id`` are of the job that claimed it last, ``epoch`` is that claim's, ``attempt`` counts claims. Times are
    Unix seconds. ``receipt_stored`` is false for a result that was too long or no JSON. ``reason``: why the outcome is
    or was unknown.
    """

    key_id: KeyId
    scope: Scope
    scope_id: str
    tool: str
    identity: list[Any]
    preimage: str
    policy: Policy
    args_hash: str
    state: EffectState
    version: Count
    epoch: Count
    attempt: Count
    action_id: str
    crew_id: str
    claimed_at: float
    settled_at: float | None
    delivered_at: float | None
    receipt: Receipt
    receipt_stored: bool
    replays: Count
    reason: str
    reconciliation: ReconciliationView | None


def effect_view(record: EffectRecord) -> EffectView:
    """The public view of a stored effect."""
    reconciliation = None
    if record.decision:
        decision = Decision(record.decision)
        reconciliation = ReconciliationView(decision=decision, actor=record.actor, evidence=record.evidence)
    return EffectView(
        key_id=record.key_id,
        scope=record.scope,
        scope_id=record.scope_id,
        tool=record.tool,
        identity=canonical.parse(record.preimage)[4],
        preimage=record.preimage.decode("utf-8"),
        policy=record.policy,
        args_hash=record.args_hash,
        state=record.state,
        version=record.version,
        epoch=record.epoch,
        attempt=record.attempt,
        action_id=record.action_id,
        crew_id=record.crew_id,
        claimed_at=record.claimed_at,
        settled_at=record.settled_at,
        delivered_at=record.delivered_at,
        receipt=msgspec.Raw(b"null" if record.receipt is None else record.receipt),
        receipt_stored=record.receipt is not None,
        replays=record.replays,
        reason=record.reason,
        reconciliation=reconciliation,
    )


class EffectList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of effects, the newest key first. ``next_cursor`` is None after the last page."""

    effects: list[EffectView]
    next_cursor: str | None


class AuditView(msgspec.Struct, frozen=True, kw_only=True):
    """Who did what to a job, and when (Unix seconds)."""

    at: float
    actor: str
    act: str
    detail: AuditDetail


class JobEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /jobs/{id}/evidence``: what is known of a job, in one document.

    Digests are SHA-256 in lower-case hex. ``effects`` has the newest ones, ``effects_omitted`` says how many others
    there are. ``log_tail``: the end of the job's captured output. ``audit``: the newest entries, oldest first.
    ``reconciliations``: every decision about an uncertain outcome, oldest first.
    """

    action_id: str
    request_hash: str
    config_digest: str
    registry_digest: str
    record: JobView
    stop: StopEvidence | None
    reconciliations: list[JobReconciliation]
    effects: list[EffectView]
    effects_omitted: Count
    log_tail: str
    audit: list[AuditView]


class Archived(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to an archive."""

    archived: bool
    action_id: str


class Draining(msgspec.Struct, frozen=True, kw_only=True):
    """Whether new work is refused, and how many jobs run and wait for a slot."""

    draining: bool
    running: Count
    queued: Count


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """RFC 9457 problem document; ``code`` is stable, ``detail`` is for people."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    action_id: str | None = None
    retryable: bool | None = None
