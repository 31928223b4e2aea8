"""What becomes of an Action, and what a chunk of its stream is. Pure."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from protocol.api import StopEvidence
from protocol.states import Status
from supervisor.client.action import Action
from supervisor.client.answers import Event
from supervisor.client.failures import ClientFailure, ExecutionFailed

READ_ONLY = "read_only"


class ChunkKind(StrEnum):
    """What a chunk is for: a tool call, text, news of the work, its end, or its failure."""

    TOOL = "tool"
    DATA = "data"
    PROGRESS = "progress"
    DONE = "done"
    ERROR = "error"


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event as a host hands it on; ``text`` is its text part, None where it has none."""

    kind: ChunkKind
    text: str | None
    event: Event


class Completed(msgspec.Struct, frozen=True, kw_only=True):
    """The Action was executed; ``output`` is the operation's, a record for ``status`` and ``cancel``."""

    action: Action
    output: Any

    @property
    def uncertain(self) -> bool:
        """Never: its end is known."""
        return False


class Cancelled(msgspec.Struct, frozen=True, kw_only=True):
    """The Action was cancelled, or nobody waits for it any more.

    ``remote_stop_confirmed`` is true only where the server's evidence ``stop`` says so; an answer without evidence
    confirms nothing. ``uncertain``: what the work had done before its end is not known. ``data``: that of the terminal
    event. For reads that were only left: ``provider_effect`` is ``read_only``, with ``completion_unobserved`` or, where
    events had come, ``stream_detached``.
    """

    action: Action
    remote_stop_confirmed: bool
    uncertain: bool
    stop: StopEvidence | None = None
    data: Any = None
    provider_effect: str | None = None
    completion_unobserved: bool = False
    stream_detached: bool = False

    @property
    def output(self) -> dict[str, Any]:
        """The document that a host records: the event's data and what is known of the stop."""
        document = dict(self.data) if isinstance(self.data, dict) else {}
        document["remote_stop_confirmed"] = self.remote_stop_confirmed
        if self.provider_effect is not None:
            document["provider_effect"] = self.provider_effect
        for name in ("completion_unobserved", "stream_detached"):
            if getattr(self, name):
                document[name] = True
        return document


class Failed(msgspec.Struct, frozen=True, kw_only=True):
    """The Action failed, or its end could not be had; ``failure`` says which, and can be raised."""

    action: Action
    failure: ClientFailure

    @property
    def uncertain(self) -> bool:
        """Whether it may have had effects that nobody here knows of."""
        return self.failure.uncertain


Result = Completed | Cancelled | Failed


def chunk_of(event: Event) -> Chunk:
    """The chunk that an event stands for."""
    return Chunk(kind=_kind(event), text=_text(event.data), event=event)


def _kind(event: Event) -> ChunkKind:
    match event.event:
        case Status.COMPLETED | Status.CANCELLED:
            return ChunkKind.DONE
        case Status.FAILED:
            return ChunkKind.ERROR
        case "chunk":
            channel = event.data.get("channel") if isinstance(event.data, dict) else None
            if channel == "tools":
                return ChunkKind.TOOL
            return ChunkKind.DATA if channel in ("llm", "messages") else ChunkKind.PROGRESS
    return ChunkKind.PROGRESS


def _text(data: Any) -> str | None:
    if not isinstance(data, dict):
        return None
    inner = data.get("data")
    for found in (data.get("content"), inner.get("chunk") if isinstance(inner, dict) else None):
        if isinstance(found, str) and found:
            return found
    return None


def result_of(action: Action, event: Event, *, watched: bool = False) -> Result:
    """The result of a terminal event. ``watched``: it ends another Action, which ``action`` only reads.

    An ending of ours says whether its outcome is uncertain; where it does not, a mutation's is.
    """
    if event.event == Status.COMPLETED:
        return Completed(action=action, output=event.data)
    data = event.data if isinstance(event.data, dict) else {}
    told = data.get("uncertain_outcome")
    uncertain = told if isinstance(told, bool) else action.mutates or watched
    if event.event == Status.CANCELLED:
        return cancelled(action, data=event.data, uncertain=uncertain, stop=_evidence(data.get("stop")))
    said = data.get("error_type")
    failure = ExecutionFailed(
        f"Action {action.action_id} failed" + (f": {said}" if isinstance(said, str) else ""),
        details=event.data,
        action=action,
        mutation=True,
        doubt=uncertain,
    )
    return Failed(action=action, failure=failure)


def cancelled(action: Action, *, data: Any, uncertain: bool, stop: StopEvidence | None) -> Cancelled:
    """The end of a cancelled Action, with exactly what its evidence confirms."""
    confirmed = stop is not None and stop.confirmed
    return Cancelled(action=action, remote_stop_confirmed=confirmed, uncertain=uncertain, stop=stop, data=data)


def _evidence(document: Any) -> StopEvidence | None:
    """Evidence that can be read; what cannot be is none."""
    try:
        return msgspec.convert(document, StopEvidence)
    except msgspec.ValidationError:
        return None
