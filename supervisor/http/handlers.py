"""What each route does."""

from __future__ import annotations

import asyncio

import msgspec
from aiohttp import web

from protocol.api import Archived, CancelRequest, EventSlice, EventView, JobList, convert
from protocol.errors import (
    ActionCancelled,
    ActionFailed,
    ActionMismatch,
    ActionTimedOut,
    ConfirmationMissing,
    CrewError,
    CursorInvalid,
    InputInvalid,
    StopUnconfirmed,
    UnknownAction,
)
from protocol.states import Status
from supervisor.archiving import Archiver
from supervisor.health import HealthReport, Probe
from supervisor.http import sse
from supervisor.http.edge import KEPT_BODY, MAY_READ, REPLAYED, json_response, read_json
from supervisor.http.ground import Ground, newest
from supervisor.http.prefer import APPLIED_HEADER, preferences
from supervisor.http.query import JOB, encode_cursor, read_query
from supervisor.http.start import Start, actor, read_start
from supervisor.job import Job, view_of
from supervisor.jobs import Jobs
from supervisor.journal import Admission, JobRecord
from supervisor.metrics.exposition import Exposition
from supervisor.ownership import OwnedElsewhere
from supervisor.run.ending import TimedOut
from supervisor.run.means import Means

CONFIRMATION_HEADER = "X-AIP-Archive-Confirmation"
SLICE_BYTES = 8 << 20


class Handlers(Ground):
    """The handlers and what they work with; ``routes`` has the table that leads to them."""

    def __init__(
        self, means: Means, jobs: Jobs, health: HealthReport, *, exposition: Exposition, openapi: bytes
    ) -> None:
        super().__init__(means, jobs)
        self._health = health
        self._exposition = exposition
        self._openapi = openapi
        self._archiver = Archiver(
            means.journal, means.workspace, min_retention_s=means.settings.min_retention_s
        )
        self._asking: set[asyncio.Future[JobRecord]] = set()

    # --- health --------------------------------------------------------------------------------------------------

    async def live(self, request: web.Request) -> web.StreamResponse:
        """The event loop turns."""
        return json_response(Probe(status="ok"))

    async def ready(self, request: web.Request) -> web.StreamResponse:
        """Whether new work would be taken; the why is for those who have a token."""
        found = self._health.probe(details=bool(request.get(MAY_READ)))
        return json_response(found, status=200 if found.status == "ready" else 503)

    async def health(self, request: web.Request) -> web.StreamResponse:
        """The contract's health document."""
        return json_response(self._health.document())

    async def openapi(self, request: web.Request) -> web.StreamResponse:
        """The document of the route table."""
        return json_response(self._openapi)

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        """The metrics, in the format that the caller prefers."""
        body, content_type = self._exposition.render(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

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
        admission, job = await self._admit(request, legacy=legacy)
        if job is None:
            return await self._answer(admission.record, waited=False)
        if preferences(request).respond_async:
            headers = {"Location": f"/jobs/{job.action_id}", APPLIED_HEADER: "respond-async"}
            view = job.view(None) if admission.fresh else await self._view(admission.record, job)
            return json_response(view, status=202, headers=headers)
        outcome = await self._jobs.wait(job)
        return await self._answer(outcome.record, waited=True, timed_out=isinstance(outcome.cause, TimedOut))

    async def _admit(self, request: web.Request, *, legacy: bool) -> tuple[Admission, Job | None]:
        meters = self._means.meters
        try:
            start = await self._read_start(request, legacy=legacy)
            admission, job = await self._jobs.admit(start.new, start.input_json, key_digest=start.key_digest)
        except CrewError as error:
            meters.refused(error)
            raise
        except OwnedElsewhere:
            meters.passed_on()
            raise
        request.pop(KEPT_BODY, None)  # it is ours: nobody else will want the bytes
        meters.admitted(start.new.crew_id, fresh=admission.fresh)
        if not admission.fresh:
            request[REPLAYED] = True
        return admission, job

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
        admission, job = await self._admit(request, legacy=legacy)
        return await self._follow(request, admission.record, job, 0)

    async def _follow(
        self, request: web.Request, record: JobRecord, job: Job | None, cursor: int
    ) -> web.StreamResponse:
        feed = job.feed if job is not None else None
        events = sse.follow(self._journal, record.row, cursor, feed=feed, count=record.event_count)
        with self._streaming():
            return await sse.respond(request, events, record.action_id)

    # --- one job -------------------------------------------------------------------------------------------------

    async def list(self, request: web.Request) -> web.StreamResponse:
        """Jobs, newest first, a page at a time."""
        query = read_query(request)
        page = await self._journal.list_jobs(
            status=query.status,
            crew_id=query.crew_id,
            operation=query.operation,
            before=query.before,
            limit=query.limit,
        )
        counts = await self._journal.effects.counts([record.row for record in page.records])
        decisions = await self._journal.reconciliations(page.records)
        views = []
        for record in page.records:
            job, effects = self._jobs.get(record.action_id), counts.get(record.row)
            live = job is not None and record.status is Status.RUNNING
            if job is not None and live:
                views.append(job.view(effects))
            else:
                views.append(view_of(record, effects, reconciliation=newest(decisions, record)))
        return json_response(JobList(jobs=views, next_cursor=encode_cursor(JOB, page.before)))

    async def show(self, request: web.Request) -> web.StreamResponse:
        """The record of a job."""
        return json_response(await self._view(*await self._read(request)))

    async def events(self, request: web.Request) -> web.StreamResponse:
        """The events from a cursor on, as a slice or, where SSE is accepted, as a stream."""
        record, job = await self._read(request)
        count = job.feed.count if job is not None else record.event_count
        if "text/event-stream" in request.headers.get("Accept", "").lower():
            cursor = _cursor_after(request, count, record.action_id)
            return await self._follow(request, record, job, cursor)
        cursor = _cursor(request, count, record.action_id)
        stored = await self._journal.events(
            record.row, cursor, limit=max(count - cursor, 1), limit_bytes=SLICE_BYTES
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
            return json_response(await self._view(record, None))
        wait_s = preferences(request).wait_s
        # A task of its own: neither a short wait nor a caller that hangs up may take the request to stop back.
        asking = asyncio.ensure_future(self._jobs.cancel(job, reason=body.reason, actor=actor(request)))
        self._asking.add(asking)
        asking.add_done_callback(self._asked)
        await asyncio.wait({asking}, timeout=wait_s)
        try:
            if asking.done():
                return json_response(await self._view(asking.result(), None))
        except StopUnconfirmed:
            # Only a caller that asked for it gets a 2xx without proof: others take any 2xx for a confirmed stop.
            if wait_s is None:
                raise
        headers = {"Location": f"/jobs/{body.action_id}", APPLIED_HEADER: f"wait={wait_s:g}"}
        return json_response(await self._view(job.record, job), status=202, headers=headers)

    def _asked(self, asking: asyncio.Future[JobRecord]) -> None:
        self._asking.discard(asking)
        if not asking.cancelled():
            asking.exception()  # seen, though the caller may have got its answer before

    async def archive(self, request: web.Request) -> web.StreamResponse:
        """Remove a finished job and leave a tombstone."""
        action_id = request.match_info["action_id"]
        if request.headers.get(CONFIRMATION_HEADER) != action_id:
            raise ConfirmationMissing(f"{CONFIRMATION_HEADER} must repeat the Action id", action_id=action_id)
        await self._archiver.archive(action_id, actor=actor(request))
        return json_response(Archived(archived=True, action_id=action_id))


def _cursor_after(request: web.Request, count: int, action_id: str) -> int:
    """The cursor of a stream: behind Last-Event-ID where a reader comes back, else the parameter's."""
    last = request.headers.get("Last-Event-ID", "").strip()
    if not last:
        return _cursor(request, count, action_id)
    if not (last.isascii() and last.isdigit() and len(last) <= 15):
        raise InputInvalid(f"Last-Event-ID {last[:40]!r} is no sequence number", action_id=action_id)
    if int(last) >= count:
        raise CursorInvalid(f"Last-Event-ID {last} is outside of 0..{count - 1}", action_id=action_id)
    return int(last) + 1


def _cursor(request: web.Request, count: int, action_id: str) -> int:
    values = request.query.getall("cursor", ["0"])
    try:
        cursor = int(values[-1])
    except ValueError:
        raise InputInvalid(f"cursor {values[-1][:40]!r} is not an integer", action_id=action_id) from None
    if not 0 <= cursor <= count:
        raise CursorInvalid(f"cursor {values[-1][:40]} is outside of 0..{count}", action_id=action_id)
    return cursor


