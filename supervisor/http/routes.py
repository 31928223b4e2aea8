"""Every route, in one table, and the application made of it."""

from __future__ import annotations

import logging
from functools import partial
from types import MethodType
from typing import Annotated, Literal, Protocol

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from protocol.api import (
    Archived,
    CancelRequest,
    CrewId,
    Draining,
    EffectList,
    EffectView,
    EventSlice,
    JobEvidence,
    JobList,
    JobReconcileRequest,
    JobView,
    KeyId,
    Output,
    ReconcileRequest,
    StartRequest,
    StreamEvent,
)
from protocol.effects import Scope
from protocol.errors import (
    ActionArchived,
    ActionCancelled,
    ActionConflict,
    ActionFailed,
    ActionMismatch,
    ActionRetained,
    ActionRunning,
    ActionTimedOut,
    ConfirmationMissing,
    CursorInvalid,
    EffectChanged,
    EffectMalformed,
    EffectNotFound,
    EffectNotOpen,
    EffectsOpen,
    FleetUnavailable,
    IfMatchMissing,
    InputInvalid,
    JournalFull,
    KeyInvalid,
    KeyMissing,
    LeaseInvalid,
    LegacyRoute,
    NotAccepting,
    OperationDisabled,
    OutcomeCertain,
    OwnerRetired,
    ReplicaLive,
    ReplicaUnknown,
    RouteUnknown,
    StopUnconfirmed,
    UnknownAction,
    UnknownCrew,
)
from protocol.fleet import FleetView, HostReady, ReplicaId, Retirement, RetireRequest
from protocol.operations import Operation
from protocol.states import EffectState, Status
from supervisor.health import VERSION, Health, HealthReport, Probe, Readiness
from supervisor.http import openapi
from supervisor.http.declare import (
    ACTION,
    ACTION_HEADER,
    APPLIED,
    CURSOR,
    ELSEWHERE,
    EVENT_STREAM,
    JOURNAL,
    KEY,
    LAST_EVENT,
    LOCATION,
    PREFER,
    REPLAYED,
    UNCACHED,
    Answer,
    Document,
    Errors,
    Header,
    Parameter,
    Route,
)
from supervisor.http.edge import Edge, finish_headers, keep_garbage_quiet, unrouted
from supervisor.http.effects import EffectHandlers
from supervisor.http.fleet import FleetHandlers
from supervisor.http.ground import CREW_HEADER, Ground
from supervisor.http.handlers import CONFIRMATION_HEADER, Handlers
from supervisor.http.operating import OperatorHandlers
from supervisor.http.pages import MEDIA_TYPES, Pages
from supervisor.http.query import DEFAULT_LIMIT, MAX_LIMIT, MAX_TAIL_BYTES
from supervisor.jobs import Jobs
from supervisor.journal import RowQuarantined
from supervisor.journal.effects import EffectQuarantined
from supervisor.metrics.exposition import Exposition
from supervisor.ownership import Membership
from supervisor.run.means import Means

Limit = Annotated[int, msgspec.Meta(ge=1, le=MAX_LIMIT)]
TailBytes = Annotated[int, msgspec.Meta(ge=0, le=MAX_TAIL_BYTES)]

SHOWN: Errors = (UnknownAction, RowQuarantined, *ELSEWHERE, *JOURNAL)
RECORD: Errors = (*SHOWN, OwnerRetired)
ADMISSION: Errors = (
    KeyInvalid, OperationDisabled, UnknownCrew, ActionConflict, ActionArchived, KeyMissing, NotAccepting, LeaseInvalid,
    *ELSEWHERE, JournalFull, RowQuarantined, *JOURNAL,
)  # fmt: skip
EFFECT: Errors = (EffectNotFound, EffectQuarantined, FleetUnavailable, *JOURNAL)
#: How an Action ends that has no output, for a caller that waits and for exact repeats.
ENDINGS: Errors = (ActionCancelled, ActionFailed, StopUnconfirmed, ActionTimedOut)

START_PARAMETERS = (KEY, ACTION_HEADER, PREFER)
VIEW = Answer(200, "The record.", JobView)
OUTPUT = Answer(200, "The operation's output.", Output, headers=(REPLAYED,))
ADMITTED = Answer(202, "Admitted; nobody waits.", JobView, headers=(LOCATION, APPLIED))
STREAM = Answer(
    200, "Server-sent events from the first to the terminal one; `id` is the sequence, comments keep it alive.",
    StreamEvent, EVENT_STREAM, (REPLAYED, UNCACHED),
)  # fmt: skip
FOLLOWED = Answer(200, "With `Accept: text/event-stream`: the same as server-sent events.", StreamEvent, EVENT_STREAM)
PROVED = Answer(200, "The terminal record: the stop is proved, or the job had ended before.", JobView)
STOPPING = Answer(202, "`wait=N` has passed without a proof; the stop goes on.", JobView, headers=(LOCATION, APPLIED))
PAGE = (
    Parameter("cursor", "query", str, "`next_cursor` of the page before."),
    Parameter("limit", "query", Limit, f"Entries on a page; {DEFAULT_LIMIT} unless said."),
)
FILTERS = (
    Parameter("status", "query", Status, "Jobs of this status only."),
    Parameter("crew_id", "query", CrewId, "Jobs of this crew only."),
    Parameter("operation", "query", Operation, "Jobs of this operation only."),
    *PAGE,
)
EFFECT_FILTERS = (
    Parameter("state", "query", EffectState, "Effects in this state only."),
    Parameter("crew_id", "query", CrewId, "Effects of this crew only."),
    Parameter(
        "scope", "query", Scope, "Effects of this scope only; of crew and global a replica lists those of its fleet."
    ),
    *PAGE,
)
KEY_ID = Parameter("key_id", "path", KeyId, "The effect's key id.", required=True)
REPLICA = Parameter("replica_id", "path", ReplicaId, "The replica's id.", required=True)
IF_MATCH = Parameter("If-Match", "header", str, "The ETag of the effect as it was looked at.", required=True)
ETAG = Header("ETag", str, "The effect's version in quotes.", required=True)
THE_EFFECT = Answer(200, "The effect.", EffectView, headers=(ETAG,))
EFFECTS = Answer(200, "A page of them.", EffectList)
CONFIRMATION = Parameter(CONFIRMATION_HEADER, "header", str, "The Action's id once more.", required=True)
EXPOSITION = (
    Answer(200, "Every metric of docs/metrics.md.", str, "text/plain"),
    Answer(200, "The same, where OpenMetrics is accepted.", str, "application/openmetrics-text"),
)
POLICY = (Header("Content-Security-Policy", str, "What the page may load.", required=True),)
FILE = Parameter("file", "path", str, "Its name, as the page has it.", required=True)
ACCEPT = Parameter("Accept", "header", str, "The exposition format, as scrapers send it.")
TAIL = Parameter("tail", "query", TailBytes, "The last bytes only; they may begin in the middle of a line.")
FOLLOW = Parameter("follow", "query", Literal[0, 1], "1: go on with what is added, to the end of the job.")
LOG = Answer(200, "Lines, `stdout` or `stderr` before each; empty where nothing was captured.", str, "text/plain")
DRAINING = Answer(200, "What holds now.", Draining)
CREW = Parameter(CREW_HEADER, "header", str, "The crew that the reader means; another crew's record is unknown then.")

API: tuple[Route, ...] = (
    Route("GET", "/livez", Handlers.live, "Whether the process answers", (Answer(200, "It does.", Probe),), open=True),
    Route(
        "GET", "/readyz", Handlers.ready, "Whether new work would be taken",
        (Answer(200, "Yes.", Readiness), Answer(503, "No; with a token it says why.", Readiness)), open=True,
    ),
    Route("GET", "/health", Handlers.health, "State of the supervisor", (Answer(200, "The state.", Health),)),
    Route("GET", "/openapi.json", Handlers.openapi, "This document", (Answer(200, "The document.", Document),)),
    Route("GET", "/metrics", Handlers.metrics, "Metrics for Prometheus", EXPOSITION, (), (ACCEPT,)),
    Route(
        "GET", "/jobs", Handlers.list, "Retained jobs, newest first",
        (Answer(200, "A page of them.", JobList),), (InputInvalid, *JOURNAL), FILTERS,
    ),
    Route(
        "POST", "/jobs", Handlers.start, "Start an operation, or repeat the request exactly, and wait for its end",
        (OUTPUT, ADMITTED), (*ADMISSION, *ENDINGS), START_PARAMETERS, StartRequest,
    ),
    Route(
        "POST", "/runs", Handlers.start_legacy, "The same for `run` alone",
        (OUTPUT, ADMITTED), (LegacyRoute, *ADMISSION, *ENDINGS), START_PARAMETERS, StartRequest,
    ),
    Route(
        "POST", "/jobs/stream", Handlers.stream, "Start an operation, or repeat the request exactly, and stream it",
        (STREAM,), ADMISSION, (KEY, ACTION_HEADER), StartRequest,
    ),
    Route(
        "POST", "/runs/stream", Handlers.stream_legacy, "The same for `run` alone",
        (STREAM,), (LegacyRoute, *ADMISSION), (KEY, ACTION_HEADER), StartRequest,
    ),
    Route("GET", "/jobs/{action_id}", Handlers.show, "A job's record", (VIEW,), SHOWN, (ACTION, CREW)),
    Route("GET", "/runs/{action_id}", Handlers.show, "A job's record", (VIEW,), SHOWN, (ACTION, CREW)),
    Route(
        "GET", "/jobs/{action_id}/events", Handlers.events, "A job's events from a cursor on",
        (Answer(200, "A slice of them.", EventSlice), FOLLOWED), (*RECORD, InputInvalid, CursorInvalid),
        (ACTION, CREW, CURSOR, LAST_EVENT),
    ),
    Route(
        "POST", "/jobs/{action_id}/cancel", Handlers.cancel, "Stop a job and prove it",
        (PROVED, STOPPING), (*RECORD, ActionMismatch, StopUnconfirmed), (ACTION, PREFER), CancelRequest,
    ),
    Route(
        "POST", "/runs/{action_id}/cancel", Handlers.cancel, "Stop a job and prove it",
        (PROVED, STOPPING), (*RECORD, ActionMismatch, StopUnconfirmed), (ACTION, PREFER), CancelRequest,
    ),
    Route(
        "DELETE", "/jobs/{action_id}", Handlers.archive, "Archive a finished job; a tombstone stays",
        (Answer(200, "Archived.", Archived),),
        (*RECORD, ConfirmationMissing, ActionRunning, ActionRetained, EffectsOpen), (ACTION, CONFIRMATION),
    ),
    Route(
        "GET", "/jobs/{action_id}/effects", EffectHandlers.job_effects, "The effects that a job claimed, newest first",
        (EFFECTS,), (*RECORD, InputInvalid), (ACTION, CREW, *PAGE),
    ),
    Route(
        "GET", "/jobs/{action_id}/evidence", EffectHandlers.evidence, "What is known of a job, in one document",
        (Answer(200, "The document.", JobEvidence),), RECORD, (ACTION, CREW),
    ),
    Route(
        "GET", "/jobs/{action_id}/log", OperatorHandlers.log, "A job's captured output",
        (LOG,), (*RECORD, InputInvalid), (ACTION, CREW, TAIL, FOLLOW),
    ),
    Route(
        "POST", "/jobs/{action_id}/reconcile", OperatorHandlers.reconcile_job,
        "Record what was found out about an uncertain outcome; the record stays as it is",
        (VIEW,), (*RECORD, ActionRunning, OutcomeCertain), (ACTION,), JobReconcileRequest,
    ),
    Route("POST", "/drain", OperatorHandlers.drain, "Admit nothing more, until undone", (DRAINING,), JOURNAL),
    Route("DELETE", "/drain", OperatorHandlers.undrain, "Admit again", (DRAINING,), JOURNAL),
    Route(
        "GET", "/effects", EffectHandlers.list_effects, "Effects of all jobs, archived ones too, newest first",
        (EFFECTS,), (InputInvalid, FleetUnavailable, *JOURNAL), EFFECT_FILTERS,
    ),
    Route("GET", "/effects/{key_id}", EffectHandlers.show_effect, "One effect", (THE_EFFECT,), EFFECT, (KEY_ID,)),
    Route(
        "POST", "/effects/{key_id}/reconcile", EffectHandlers.reconcile_effect,
        "Record what was found out about an unknown outcome",
        (THE_EFFECT,), (*EFFECT, IfMatchMissing, EffectChanged, EffectNotOpen, EffectMalformed, LeaseInvalid),
        (KEY_ID, IF_MATCH), ReconcileRequest,
    ),
)  # fmt: skip

#: Served only with the setting ``dashboard``.
DASHBOARD: tuple[Route, ...] = (
    Route(
        "GET", "/", Pages.dashboard, "The dashboard",
        (Answer(200, "The page; it has no data.", str, "text/html", POLICY),), open=True,
    ),
    Route(
        "GET", "/dashboard/{file}", Pages.dashboard_file, "A file of the dashboard",
        tuple(Answer(200, "The file.", str, kind, POLICY) for kind in MEDIA_TYPES.values()), (RouteUnknown,), (FILE,),
        open=True,
    ),
)  # fmt: skip

#: Served only by a replica of a fleet.
FLEET: tuple[Route, ...] = (
    Route(
        "GET", "/ready", FleetHandlers.host_ready, "Whether new work would be taken, as the reference's host says it",
        (Answer(200, "Yes.", HostReady), Answer(503, "No; with a token it says why.", HostReady)), open=True,
    ),
    Route(
        "GET", "/fleet", FleetHandlers.fleet, "Every replica, and how the answering one does",
        (Answer(200, "The fleet.", FleetView),), (FleetUnavailable,),
    ),
    Route(
        "POST", "/fleet/{replica_id}/retire", FleetHandlers.retire, "Write off a replica that is gone for good",
        (Answer(200, "It is retired.", Retirement),), (ReplicaUnknown, ReplicaLive, FleetUnavailable, *JOURNAL),
        (REPLICA,), RetireRequest,
    ),
)  # fmt: skip

TABLE = (*API, *DASHBOARD, *FLEET)


class Relay(Protocol):
    """Stands between the check of the token and the handlers, and passes on what is about others' Actions."""

    @property
    def middleware(self) -> Middleware: ...

    def close_streams(self) -> None:
        """Cut what is still under way."""
        ...


class Member(Membership, Protocol):
    """A replica of a fleet."""

    @property
    def relay(self) -> Relay: ...


class Routes:
    """The table with its handlers at work."""

    def __init__(
        self, means: Means, jobs: Jobs, health: HealthReport, exposition: Exposition, *, fleet: Member | None = None
    ) -> None:
        """``fleet``: what makes this one of several, if it is."""
        self._relay = None if fleet is None else fleet.relay
        self._rows = (*API, *(DASHBOARD if means.settings.dashboard else ()), *(() if fleet is None else FLEET))
        document = openapi.document(self._rows, version=VERSION)
        handlers = Handlers(means, jobs, health, exposition=exposition, openapi=document)
        self._streaming: tuple[Ground, ...] = (handlers, EffectHandlers(means, jobs), OperatorHandlers(means, jobs))
        others = () if fleet is None else (FleetHandlers(means, jobs, health, fleet),)
        self._groups: tuple[object, ...] = (*self._streaming, Pages(), *others)

    @staticmethod
    def table() -> tuple[Route, ...]:
        """Every route that a server may have."""
        return TABLE

    def application(self, edge: Edge) -> web.Application:
        """The aiohttp application of the table."""
        relayed = () if self._relay is None else (self._relay.middleware,)
        app = web.Application(middlewares=[edge.middleware, *relayed])
        app.on_response_prepare.append(finish_headers)
        logging.getLogger("aiohttp.server").addFilter(keep_garbage_quiet)
        for route in self._rows:
            name = route.handler.__name__
            group = next(group for group in self._groups if getattr(type(group), name, None) is route.handler)
            handler = MethodType(route.handler, group)
            app.router.add_route(route.method, route.path, handler, expect_handler=edge.expect)
        # The router's own answer to an unknown path would ask for the body of a caller without credentials.
        rows = list(app.router.resources())
        app.router.add_route("*", "/{rest:(?s:.*)}", partial(unrouted, rows), expect_handler=edge.expect)
        return app

    def close_streams(self) -> None:
        """Cut the readers that are still there, for the end of the supervisor."""
        for group in self._streaming:
            group.close_streams()
        if self._relay is not None:
            self._relay.close_streams()
