"""What the journal stores and gives back: frozen structs, and how a row becomes one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import msgspec

from protocol.api import StopEvidence
from protocol.errors import CrewError
from protocol.states import TERMINAL, Phase, Status
from supervisor.processes import Identity

#: One event to append: its name and its data, an ASCII JSON object.
Item = tuple[str, bytes]
Count = Annotated[int, msgspec.Meta(ge=0)]


class RowQuarantined(CrewError):
    """A stored row breaks a bound, so nothing is claimed about its job; its Action id stays a fence."""

    code = "row_quarantined"
    status = 409
    title = "Journal row quarantined"
    retryable: ClassVar[bool] = False

    def __init__(self, row: int, action_id: str, why: str) -> None:
        super().__init__(
            f"the journal's row {row} (Action {action_id}) cannot be read: {why}; "
            "nothing of it will run or change, and an operator must look at it",
            action_id=action_id,
        )
        self.row = row
        self.why = why


class NewJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job to admit. ``admitted_at``: Unix seconds. ``client``: who asked, for the audit. No input, no key: a hash."""

    action_id: str
    crew_id: str
    operation: str
    request_hash: str
    timeout_ms: int | None
    admitted_at: float
    registry_digest: str = ""
    config_digest: str = ""
    client: str = ""


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A job as it is stored. ``row`` is never used twice. Times are Unix seconds."""

    row: int
    action_id: str
    crew_id: str
    operation: str
    request_hash: str
    timeout_ms: int | None
    status: Status
    phase: Phase
    event_count: Count
    admitted_at: float
    started_at: float | None
    ended_at: float | None
    uncertain: bool | None
    stop: StopEvidence | None
    registry_digest: str
    config_digest: str
    client: str


class Admission(msgspec.Struct, frozen=True):
    """``fresh`` is false for an exact repeat: the record is the one that was there."""

    record: JobRecord
    fresh: bool


class WorkerIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """A worker process of a job. ``attempt`` counts launches of one job from 1.

    ``started_at`` (from the kernel's start ticks) and ``launched_at`` are Unix seconds, ``leaf`` the path of its leaf
    cgroup, ``method`` how it was made (``protocol.frames.Launched``). ``keeper_pid`` and ``keeper_ticks`` identify its
    keeper where it has one.
    """

    attempt: int = 1
    pid: int
    start_ticks: int
    started_at: float
    boot_id: str
    pid_ns: int
    leaf: str | None
    method: str
    launched_at: float
    keeper_pid: int | None = None
    keeper_ticks: int | None = None

    @property
    def keeper(self) -> Identity | None:
        """The keeper's identity."""
        if self.keeper_pid is None or self.keeper_ticks is None:
            return None
        return Identity(
            pid=self.keeper_pid, start_ticks=self.keeper_ticks, boot_id=self.boot_id, pid_ns=self.pid_ns
        )

    @property
    def identity(self) -> Identity:
        """The same process for ``supervisor.processes``."""
        return Identity(pid=self.pid, start_ticks=self.start_ticks, boot_id=self.boot_id, pid_ns=self.pid_ns)


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """A terminal record in the making.

    ``first_seq``: sequence of the first of ``pending``, or of the terminal event when nothing is pending.
    ``event_data``: data of the terminal event, which is named after ``status``. ``task_ids``: what can be replayed.
    ``lost``: why what is still claimed becomes unknown; ``lost_keys`` has other reasons by key id.
    """

    status: Status
    first_seq: int
    event_data: bytes
    ended_at: float
    uncertain: bool | None
    stop: StopEvidence | None
    pending: tuple[Item, ...] = ()
    task_ids: tuple[str, ...] = ()
    actor: str = "supervisor"
    detail: str = ""
    lost: str = "job_ended"
    lost_keys: dict[str, str] = {}

    def __post_init__(self) -> None:
        if self.status not in TERMINAL:
            raise ValueError(f"{self.status.value} ends nothing")


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """A terminal record as it was written.

    ``event_data``: the terminal event's, with the counts of the job's effects where it failed or was cancelled.
    ``lost``: number of effects that became unknown with it.
    """

    record: JobRecord
    event_data: bytes
    lost: int


class StoredEvent(msgspec.Struct, frozen=True):
    """One event; ``data`` is the ASCII JSON object as it was appended, ``at`` Unix seconds."""

    seq: int
    name: str
    data: bytes
    at: float


class Unfinished(msgspec.Struct, frozen=True):
    """A job without a terminal record. ``dispatched``: ``started`` is durable, so ``go`` may have been sent."""

    record: JobRecord
    worker: WorkerIdentity | None
    dispatched: bool


class Quarantined(msgspec.Struct, frozen=True):
    """A row that breaks a bound, why, and the last worker recorded for it, which must still be killed."""

    row: int
    action_id: str
    why: str
    worker: WorkerIdentity | None


class JobPage(msgspec.Struct, frozen=True):
    """Jobs, newest first. ``before`` is the argument for the next page, None after the last."""

    records: list[JobRecord]
    before: int | None


class Tombstone(msgspec.Struct, frozen=True, kw_only=True):
    """What stays of an archived job; its Action id is never executed again. ``archived_at``: Unix seconds."""

    action_id: str
    request_hash: str
    crew_id: str
    operation: str
    status: str
    archived_at: float


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Who did what to which Action. ``detail`` is JSON without inputs, outputs or secrets; ``at`` Unix seconds."""

    at: float
    action_id: str | None
    actor: str
    act: str
    detail: bytes | None = None


JOB_FIELDS = JobRecord.__struct_fields__
JOB_COLUMNS = ", ".join(JOB_FIELDS)
WORKER_FIELDS = WorkerIdentity.__struct_fields__
WORKER_COLUMNS = ", ".join(WORKER_FIELDS)

_FLAGS = {None: None, 0: False, 1: True}


def job_of(values: Sequence[Any]) -> JobRecord:
    """Decode a row of ``JOB_COLUMNS``. Raises RowQuarantined."""
    fields = dict(zip(JOB_FIELDS, values, strict=True))
    try:
        if fields["stop"] is not None:
            fields["stop"] = msgspec.json.decode(fields["stop"], type=StopEvidence)
        fields["uncertain"] = _FLAGS[fields["uncertain"]]
        record = msgspec.convert(fields, JobRecord)
    except (msgspec.MsgspecError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise RowQuarantined(values[0], str(values[1]), str(error)) from None
    if (record.status in TERMINAL) != (record.phase is Phase.DONE):
        why = f"status {record.status.value} does not go with phase {record.phase.value}"
        raise RowQuarantined(record.row, record.action_id, why)
    return record


def worker_of(values: Sequence[Any]) -> WorkerIdentity:
    """Decode a row of ``WORKER_COLUMNS``. Raises msgspec.ValidationError."""
    return msgspec.convert(dict(zip(WORKER_FIELDS, values, strict=True)), WorkerIdentity)


def stop_bytes(stop: StopEvidence | None) -> bytes | None:
    """The stored form of stop evidence."""
    return None if stop is None else msgspec.json.encode(stop)
