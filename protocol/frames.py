"""Messages on the pipes: supervisor and template, supervisor and worker. Encoded as tagged MessagePack structs.

Integers are bounded, JSON documents travel as ASCII bytes, and every decoder refuses unknown tags and fields, so that
what a hostile worker can say is small.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from protocol.effects import MAX_PREIMAGE_BYTES, MAX_RECEIPT_BYTES, Decision, Policy, ToolPolicy

#: Grows with every incompatible change of a frame; both sides refuse another version at hello.
PROTOCOL_VERSION = 2

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)]
Pid = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Name = Annotated[str, msgspec.Meta(max_length=512)]
Text = Annotated[str, msgspec.Meta(max_length=65_536)]
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
Preimage = Annotated[bytes, msgspec.Meta(max_length=MAX_PREIMAGE_BYTES)]
Receipt = Annotated[bytes, msgspec.Meta(max_length=MAX_RECEIPT_BYTES)]


class Frame(msgspec.Struct, frozen=True, tag_field="type", forbid_unknown_fields=True, kw_only=True):
    """Base of every message."""


# --- supervisor to template or standby ---------------------------------------------------------------------------


class User(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who workers run as: numeric ids."""

    uid: Count
    gid: Count
    groups: tuple[Count, ...] = ()


class Load(Frame, frozen=True, tag="load"):
    """First message to a template or standby: what to import. A ``standby`` becomes the worker of its one Launch.

    ``open_files``: the soft and hard RLIMIT_NOFILE that workers get. ``leaf``: a descriptor of the cgroup to join first
    comes along. ``user``: whom to become before anything is imported.
    """

    version: Count
    role: Name
    registry: str
    preload: tuple[str, ...]
    open_files: tuple[int, int]
    leaf: bool
    supervisor_pid: Pid
    user: User | None = None


class Directories(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Absolute paths that a worker uses: ``job``, ``cwd``, ``tmp`` belong to the job, the others to its crew."""

    job: str
    cwd: str
    tmp: str
    home: str
    storage: str
    locks: str


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Resource limits in force before anything of the crew runs; None leaves the inherited one.

    ``cpu_weight``: share of the processor beside other jobs, 1..10000, 100 by default; by cgroup only.
    """

    memory_bytes: int | None = None
    cpu_weight: int | None = None
    open_files: int | None = None
    processes: int | None = None
    file_bytes: int | None = None


class Launch(Frame, frozen=True, tag="launch"):
    """Make one worker.

    Descriptors that come along, in this order: protocol socket, stdout, stderr and, if ``leaf``, the leaf cgroup.
    ``keeper``: no cgroup is writable; a keeper is made that makes the worker, and its control socket comes last.
    ``namespace``: in a PID namespace of its own, whose init it is, so that nothing it starts can outlive it.
    ``log_exceptions``: the texts of exceptions may go to the job's log, and not only their places.
    """

    launch_id: Count
    crew_id: str
    directories: Directories
    environment: dict[str, str]
    limits: Limits
    leaf: bool
    supervisor_pid: Pid
    namespace: bool = False
    keeper: bool = False
    log_exceptions: bool = False


# --- template or standby to supervisor ---------------------------------------------------------------------------


class CrewReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One registry entry as the template sees it, without building it.

    ``kind``: ``class``, ``crew_base``, ``function``, ``method`` or ``object``. ``methods``: the crew methods known
    without building it, None where only a build would tell.
    """

    crew_id: str
    kind: Name
    methods: tuple[Name, ...] | None = None


class Ready(Frame, frozen=True, tag="ready"):
    """The registry is imported. ``threads`` and ``descriptors`` name what makes forking unsafe; both empty: safe."""

    version: Count
    pid: Pid
    python: Name
    crewai: Name | None
    crews: tuple[CrewReport, ...]
    registry_digest: Name
    threads: tuple[str, ...]
    descriptors: tuple[str, ...]
    import_s: float


class LoadFailed(Frame, frozen=True, tag="load_failed"):
    """The registry could not be loaded; ``traceback`` is for the operator's eyes."""

    error_type: Name
    detail: Text
    traceback: Text


class Launched(Frame, frozen=True, tag="launched"):
    """The worker exists. ``method``: clone3, clone, fork (status is relayed) or standby."""

    launch_id: Count
    pid: Pid
    method: Name
    namespace: bool = False


class LaunchFailed(Frame, frozen=True, tag="launch_failed"):
    """The worker could not be made."""

    launch_id: Count
    detail: Text


class Exited(Frame, frozen=True, tag="exited"):
    """Relayed wait status (waitpid(2) encoding) of a worker that is the template's own child."""

    pid: Pid
    status: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


# --- supervisor to keeper and back ---------------------------------------------------------------------------------


class Sweep(Frame, frozen=True, tag="sweep"):
    """Kill everything below the keeper and answer with Empty."""


class Kept(Frame, frozen=True, tag="kept"):
    """The keeper has made the worker. ``start_ticks``: field 22 of its proc_pid_stat(5)."""

    pid: Pid
    start_ticks: Count


class Ended(Frame, frozen=True, tag="ended"):
    """The worker has ended; ``status`` as waitpid(2) gives it."""

    status: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class Empty(Frame, frozen=True, tag="empty"):
    """The kernel has said ECHILD: nothing is left below the keeper. ``killed`` counts processes that the sweep met."""

    status: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None
    killed: Count


# --- supervisor to worker ----------------------------------------------------------------------------------------


class Go(Frame, frozen=True, tag="go"):
    """Run the operation. Sent once, after the start is durable.

    ``input``: JSON text of the operation's input. ``event_limit``: events of this job at most, ``started`` and the
    terminal one included. ``replay_store``: this job's own copy of the store to replay from. ``artifact_path``: where
    ``train`` writes. ``effects``: policies of the configuration by tool name.
    """

    action_id: str
    crew_id: str
    operation: Name
    input: bytes
    output_limit_bytes: Count
    event_limit_bytes: Count
    event_limit: Count
    replay_store: str | None = None
    artifact_path: str | None = None
    tracing: bool = False
    effects: dict[str, ToolPolicy] = {}


class Cancel(Frame, frozen=True, tag="cancel"):
    """Close what can be closed; the kill follows after the grace."""

    reason: str | None = None


class EffectGranted(Frame, frozen=True, tag="effect_granted"):
    """The claim of ``call`` is durable: the tool's body may run. ``epoch`` comes back with its outcome."""

    call: Count
    epoch: Count
    attempt: Count


class EffectReplayed(Frame, frozen=True, tag="effect_replayed"):
    """The effect happened before. ``receipt``: JSON text, None for a result that was not stored."""

    call: Count
    receipt: Receipt | None
    settled_at: float


class EffectRefused(Frame, frozen=True, tag="effect_refused"):
    """Nothing was recorded for ``call``. ``code``: that of the error in ``protocol.errors``.

    ``version``: of the record whose outcome is unknown, for a reconciliation.
    """

    call: Count
    code: Name
    detail: Text
    version: Count | None = None


class EffectNoted(Frame, frozen=True, tag="effect_noted"):
    """What ``call`` said about an outcome is durable."""

    call: Count


# --- worker to supervisor ----------------------------------------------------------------------------------------


class Hello(Frame, frozen=True, tag="hello"):
    """The worker stands in its leaf and sandbox and waits for ``go``."""

    version: Count
    pid: Pid


class Chunk(Frame, frozen=True, tag="chunk"):
    """Data of one ``chunk`` event: an ASCII JSON object with a ``channel``."""

    data: bytes


class Result(Frame, frozen=True, tag="result"):
    """The operation returned.

    ``output``: an ASCII JSON object. ``task_ids``: the CrewAI tasks that can be replayed.
    """

    output: bytes
    task_ids: tuple[Name, ...] = ()


class Failure(Frame, frozen=True, tag="failure"):
    """The operation raised. ``dispatched`` is false when the crew was never called, so nothing can have happened."""

    error_type: Name
    dispatched: bool
    detail: Text = ""


class EffectClaim(Frame, frozen=True, tag="effect_claim"):
    """May this call be made? Answered by EffectGranted, EffectReplayed or EffectRefused.

    ``call``: a number of the worker's own that no other question of its has. ``args_hash``: JCS digest of the validated
    arguments without volatile ones.
    """

    call: Count
    preimage: Preimage
    args_hash: Digest
    policy: Policy


class EffectSettled(Frame, frozen=True, tag="effect_settled"):
    """The call took effect. Answered by EffectNoted or EffectRefused."""

    call: Count
    key_id: Digest
    epoch: Count
    args_hash: Digest
    receipt: Receipt | None


class EffectNotApplied(Frame, frozen=True, tag="effect_not_applied"):
    """The tool says that nothing happened. Answered by EffectNoted or EffectRefused."""

    call: Count
    key_id: Digest
    epoch: Count


class EffectLost(Frame, frozen=True, tag="effect_lost"):
    """The call ended without saying whether it took effect; ``reason`` names the exception's class.

    Answered by EffectNoted or EffectRefused.
    """

    call: Count
    key_id: Digest
    epoch: Count
    reason: Name


class EffectDelivered(Frame, frozen=True, tag="effect_delivered"):
    """The caller of the tool has the receipt. Not answered."""

    key_id: Digest


class EffectReconciled(Frame, frozen=True, tag="effect_reconciled"):
    """The provider was asked and knows. ``actor``: the ``module:function`` that asked.

    Answered by EffectNoted or EffectRefused.
    """

    call: Count
    key_id: Digest
    version: Count
    decision: Decision
    actor: Name
    evidence: Name
    receipt: Receipt | None


class CancelAnswer(Frame, frozen=True, tag="cancel_answer"):
    """Answer to Cancel: whether the worker is closing something worth the grace."""

    closing: bool


ToTemplate = Load | Launch
ToKeeper = Sweep
FromKeeper = Kept | Ended | Empty
FromTemplate = Ready | LoadFailed | Launched | LaunchFailed | Exited
#: What a worker says about effects, and what it hears.
AboutEffect = EffectClaim | EffectSettled | EffectNotApplied | EffectLost | EffectDelivered | EffectReconciled
EffectAnswer = EffectGranted | EffectReplayed | EffectRefused | EffectNoted
ToWorker = Go | Cancel | EffectAnswer
FromWorker = Hello | Chunk | Result | Failure | CancelAnswer | AboutEffect
