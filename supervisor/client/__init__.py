"""A client of the supervisor: start, stream, watch, cancel and reconcile Actions, and know what is known of them.

``Client`` has a method for each route. ``Client.invoke`` does an Action to its end and gives a Result: Completed,
Cancelled or Failed; its cancel says whether the stop was proved. Everything that goes wrong is a ClientFailure, with
``category``, ``retryable``, ``uncertain`` and the Action as it was given.
"""

from protocol.api import JobDecision
from protocol.effects import Decision
from supervisor.client.action import Action
from supervisor.client.answers import (
    Archived,
    AuditEntry,
    Draining,
    Effect,
    EffectPage,
    Event,
    EventPage,
    Fleet,
    Health,
    Job,
    JobEvidence,
    JobPage,
    Replica,
    Retirement,
)
from supervisor.client.capabilities import (
    CATALOGUE,
    Capability,
    Crew,
    capability_id,
    lacks,
    manifest,
    read_crews,
    resolve,
)
from supervisor.client.client import Client
from supervisor.client.failures import (
    AuthenticationFailed,
    CancelUnconfirmed,
    Category,
    ClientFailure,
    ExecutionFailed,
    InvalidCredential,
    InvalidRequest,
    InvalidStream,
    Refusal,
    RemoteRejected,
    RemoteTemporary,
    ResponseTooLarge,
    TransportFailed,
)
from supervisor.client.invocation import Invocation
from supervisor.client.results import Cancelled, Chunk, ChunkKind, Completed, Failed, Result
from supervisor.client.stream import EventStream, Retry

__all__ = [
    "Client",
    "Action",
    "Invocation",
    "EventStream",
    "Retry",
    "Result",
    "Completed",
    "Cancelled",
    "Failed",
    "Chunk",
    "ChunkKind",
    "Event",
    "EventPage",
    "Job",
    "JobPage",
    "JobEvidence",
    "AuditEntry",
    "JobDecision",
    "Archived",
    "Health",
    "Draining",
    "Fleet",
    "Replica",
    "Retirement",
    "Effect",
    "EffectPage",
    "Decision",
    "ClientFailure",
    "Category",
    "Refusal",
    "InvalidCredential",
    "InvalidRequest",
    "AuthenticationFailed",
    "RemoteTemporary",
    "RemoteRejected",
    "TransportFailed",
    "InvalidStream",
    "ResponseTooLarge",
    "CancelUnconfirmed",
    "ExecutionFailed",
    "CATALOGUE",
    "Crew",
    "Capability",
    "capability_id",
    "resolve",
    "read_crews",
    "manifest",
    "lacks",
]
