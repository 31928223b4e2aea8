"""Every route, in one table, and what each does."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import msgspec
from aiohttp import web

from protocol import points
from protocol.api import Archived, CancelRequest, EventSlice, EventView, JobView, convert
from protocol.errors import (
    ActionCancelled,
    ActionFailed,
    ActionMismatch,
    ActionTimedOut,
    ConfirmationMissing,
    CursorInvalid,
    InputInvalid,
    UnknownAction,
)
from protocol.states import Status
from supervisor.health import HealthReport
from supervisor.http import sse
from supervisor.http.edge import Edge, Handler, json_response, read_json, without_server_header
from supervisor.http.start import Start, actor, read_start
from supervisor.job import Job, view_of
from supervisor.jobs import Jobs
from supervisor.journal import JobRecord, Journal
from supervisor.run.ending import TimedOut
from supervisor.run.means import Means

CONFIRMATION_HEADER = "X-AIP-Archive-Confirmation"
SLICE_BYTES = 8 << 20


class Route(NamedTuple):
    """One line of the table."""

    method: str
    path: str
    handler: Handler


class Routes:
    """The handlers and what they work with."""

    def __init__(self, means: Means, jobs: Jobs, health: HealthReport) -> None:
        self._means = means
        self._jobs = jobs
        self._health = health
        self._streams: set[asyncio.Task[object]] = set()

    @property
    def _journal(self) -> Journal:
        return self._means.journal

    def table(self) -> list[Route]:
        """Every route of the server."""
        return [
            Route("GET", "/livez", self.live),
            Route("GET", "/readyz", self.ready),
            Route("GET", "/health", self.health),
            Route("POST", "/jobs", self.start),
            Route("POST", "/runs", self.start_legacy),
            Route("POST", "/jobs/stream", self.stream),
            Route("POST", "/runs/stream", self.stream_legacy),
            Route("GET", "/jobs/{action_id}", self.show),
            Route("GET", "/runs/{action_id}", self.show),
            Route("GET", "/jobs/{action_id}/events", self.events),
            Route("POST", "/jobs/{action_id}/cancel", self.cancel),
            Route("POST", "/runs/{action_id}/cancel", self.cancel),
            Route("DELETE", "/jobs/{action_id}", self.archive),
        ]

    def application(self, edge: Edge) -> web.Application:
        """The aiohttp application of the table."""
        app = web.Application(middlewares=[edge.middleware])
        app.on_response_prepare.append(without_server_header)
        for route in self.table():
            app.router.add_route(route.method, route.path, route.handler, expect_handler=edge.expect)
        return app

    def close_streams(self) -> None:
        """Cut the readers that are still there, for the end of the supervisor."""
        for task in self._streams:
            task.cancel()

    # --- health --------------------------------------------------------------------------------------------------

    async def live(self, request: web.Request) -> web.StreamResponse:
        """The event loop turns."""
        return json_response({"status": "ok"})

    async def ready(self, request: web.Request) -> web.StreamResponse:
        """Whether new work would be taken; the why is in /health."""
        ready = self._health.ready
        return json_response({"status": "ready" if ready else "not_ready"}, status=200 if ready else 503)

    async def health(self, request: web.Request) -> web.StreamResponse:
        """The contract's health document."""
        return json_response(self._health.document())

    # --- starts --------------------------------------------------------------------------------------------------

    async def start(self, request: web.Request) -> web.StreamResponse:
        """Start or repeat, and wait for the end."""
        return await self._start(request, legacy=False)

    async def start_legacy(self, request: web.Request) -> web.StreamResponse:
        """The same for ``run`` only."""
        return await self._start(request, legacy=True)

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Start or repeat, and stream every event from 0."""
        return await self._stream(request, legacy=False)

    async def stream_legacy(self, request: web.Request) -> web.StreamResponse:
        """The same for ``run`` only."""
        return await self._stream(request, legacy=True)

    async def _read_start(self, request: web.Request, *, legacy: bool) -> Start:
        report = self._means.launcher.report
        return await read_start(
            request,
            legacy=legacy,
            operations=self._means.settings.allowed_operations,
            crews=self._means.launcher.crew_ids,
            registry_digest=report.registry_digest,
            config_digest=self._means.config_digest,
        )

    async def _start(self, request: web.Request, *, legacy: bool) -> web.StreamResponse:
        start = await self._read_start(request, legacy=legacy)
        admission, job = await self._jobs.admit(start.new, start.input_json)
        if job is None:
            return await self._answer(admission.record, waited=False)
        outcome = await self._jobs.wait(job)
        return await self._answer(outcome.record, waited=True, timed_out=isinstance(outcome.cause, TimedOut))

    async def _answer(self, record: JobRecord, *, waited: bool, timed_out: bool = False) -> web.StreamResponse:
        action_id = record.action_id
        if record.status is Status.COMPLETED:
            return json_response(await self._journal.output(record.row) or b"null")
        if record.status is Status.CANCELLED:
            raise ActionCancelled(f"Action {action_id} was cancelled", action_id=action_id)
        if waited and timed_out:
            raise ActionTimedOut(f"Action {action_id} reached its timeout and was stopped", action_id=action_id)
        raise ActionFailed(f"Action {action_id} failed; its last event says how", action_id=action_id)

    async def _stream(self, request: web.Request, *, legacy: bool) -> web.StreamResponse:
        start = await self._read_start(request, legacy=legacy)
        admission, job = await self._jobs.admit(start.new, start.input_json)
        return await self._follow(request, admission.record, job, 0)

    async def _follow(
        self, request: web.Request, record: JobRecord, job: Job | None, cursor: int
    ) -> web.StreamResponse:
        feed = job.feed if job is not None else None
        events = sse.follow(self._journal, record.row, cursor, feed=feed, count=record.event_count)
        task = asyncio.current_task()
        assert task is not None
        self._streams.add(task)
        try:
            return await sse.respond(request, events, record.action_id)
        finally:
            self._streams.discard(task)

    # --- one job -------------------------------------------------------------------------------------------------

    async def _find(self, action_id: str) -> tuple[JobRecord, Job | None]:
        job = self._jobs.get(action_id)
        if job is not None and not job.ended.done():
            return job.record, job
        record = await self._journal.get(action_id)
        if record is None:
            raise UnknownAction(f"no retained job has Action id {action_id}", action_id=action_id)
        return record, None

    async def _view(self, record: JobRecord, job: Job | None) -> JobView:
        if job is not None:
            return job.view()
        output = await self._journal.output(record.row) if record.status is Status.COMPLETED else None
        return view_of(record, output=output)

    async def show(self, request: web.Request) -> web.StreamResponse:
        """The record of a job."""
        return json_response(await self._view(*await self._find(request.match_info["action_id"])))

    async def events(self, request: web.Request) -> web.StreamResponse:
        """The events from a cursor on, as a slice or, where SSE is accepted, as a stream."""
        record, job = await self._find(request.match_info["action_id"])
        count = job.feed.count if job is not None else record.event_count
        cursor = _cursor(request, count, record.action_id)
        if "text/event-stream" in request.headers.get("Accept", "").lower():
            return await self._follow(request, record, job, cursor)
        stored = await self._journal.events(
            record.row, cursor, limit=self._means.settings.max_events_per_run, limit_bytes=SLICE_BYTES
        )
        views = [EventView(event=event.name, sequence=event.seq, data=msgspec.Raw(event.data)) for event in stored]
        status = record.status
        if views and views[-1].event in (Status.COMPLETED, Status.FAILED, Status.CANCELLED):
            status = Status(views[-1].event)
        return json_response(
            EventSlice(
                action_id=record.action_id,
                cursor=cursor,
                next_cursor=cursor + len(views),
                status=status,
                events=views,
            )
        )

    async def cancel(self, request: web.Request) -> web.StreamResponse:
        """Stop a job; answers once the stop is proved and recorded."""
        body = convert(await read_json(request), CancelRequest)
        if body.action_id != request.match_info["action_id"]:
            raise ActionMismatch("the path and the body name different Actions", action_id=body.action_id)
        record, job = await self._find(body.action_id)
        if record.crew_id != body.crew_id:
            raise UnknownAction(f"crew {body.crew_id!r} has no Action {body.action_id}", action_id=body.action_id)
        if job is None:
            await self._jobs.note_late_cancel(record, reason=body.reason, actor=actor(request))
        else:
            record = await self._jobs.cancel(job, reason=body.reason, actor=actor(request))
        return json_response(await self._view(record, None))

    async def archive(self, request: web.Request) -> web.StreamResponse:
        """Remove a finished job and leave a tombstone."""
        action_id = request.match_info["action_id"]
        if request.headers.get(CONFIRMATION_HEADER) != action_id:
            raise ConfirmationMissing(f"{CONFIRMATION_HEADER} must repeat the Action id", action_id=action_id)
        row = await self._journal.archive(action_id, actor=actor(request))
        points.reach("archive.recorded")
        await asyncio.to_thread(self._means.workspace.forget, row)
        return json_response(Archived(archived=True, action_id=action_id))


def _cursor(request: web.Request, count: int, action_id: str) -> int:
    values = request.query.getall("cursor", ["0"])
    try:
        cursor = int(values[-1])
    except ValueError:
        raise InputInvalid(f"cursor {values[-1][:40]!r} is not an integer", action_id=action_id) from None
    if not 0 <= cursor <= count:
        raise CursorInvalid(f"cursor {cursor} is outside of 0..{count}", action_id=action_id)
    return cursor


