"""What operators ask for: a job's captured output, a decision about its outcome, a drain."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

from aiohttp import web

from protocol.api import Draining, JobReconcileRequest, JobReconciliation, convert
from supervisor.capture import read_from, size_of
from supervisor.http import sse
from supervisor.http.edge import json_response, read_json
from supervisor.http.ground import Ground
from supervisor.http.query import read_log_query
from supervisor.http.start import actor
from supervisor.job import Job
from supervisor.jobs import settled
from supervisor.journal import AuditEntry
from supervisor.log import get_log
from supervisor.run.mailbox import first

log = get_log(__name__)
PIECE_BYTES = 65_536
#: A follower of a silent log is looked after this often, seconds: one that has gone away ends its request.
LOOK_S = 15.0
#: A worker's output is nothing that a browser may take for a page.
HEADERS = {"Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff"}


class OperatorHandlers(Ground):
    """Handlers of captured output, reconciliations and the drain."""

    async def log(self, request: web.Request) -> web.StreamResponse:
        """The captured output, from its end or its beginning on; with ``follow`` to the end of the job."""
        query = read_log_query(request)
        record, job = await self._read(request)
        path = self._means.workspace.log(record.row)
        size = await asyncio.to_thread(size_of, path)
        start = 0 if query.tail_bytes is None else max(0, size - query.tail_bytes)
        response = web.StreamResponse(headers=HEADERS)
        response.content_type, response.charset = "text/plain", "utf-8"
        pieces = _followed(path, start, job) if query.follow else _until(path, start, size)
        with self._streaming():
            try:
                await response.prepare(request)
                sse.bound_send_buffer(request)
                async for piece in pieces:
                    if piece:
                        await response.write(piece)
                    elif request.transport is None or request.transport.is_closing():
                        break
                await response.write_eof()
            except ConnectionError:
                pass
        return response

    async def reconcile_job(self, request: web.Request) -> web.StreamResponse:
        """Record what somebody found out about an uncertain outcome; the record stays as it is."""
        body = convert(await read_json(request), JobReconcileRequest)
        found = JobReconciliation(at=time.time(), decision=body.decision, actor=body.actor, evidence=body.evidence)
        record = await self._journal.reconcile(request.match_info["action_id"], found, by=actor(request))
        log.info("job_reconciled", action_id=record.action_id, decision=body.decision.value, actor=body.actor)
        return json_response(await self._view(record, None))

    async def drain(self, request: web.Request) -> web.StreamResponse:
        """Admit nothing more, and say so in the readiness."""
        return await self._drain(request, asked=True)

    async def undrain(self, request: web.Request) -> web.StreamResponse:
        """Admit again."""
        return await self._drain(request, asked=False)

    async def _drain(self, request: web.Request, *, asked: bool) -> web.StreamResponse:
        act = "drain_begun" if asked else "drain_ended"
        await self._journal.audit(
            AuditEntry(at=time.time(), action_id=None, actor=actor(request), act=act), terminal=True
        )
        self._jobs.drain_asked = asked
        log.info(act, running=self._jobs.running, queued=self._jobs.queued)
        return json_response(
            Draining(draining=self._jobs.draining, running=self._jobs.running, queued=self._jobs.queued)
        )


async def _until(path: Path, start: int, end: int) -> AsyncIterator[bytes]:
    """What is between two offsets."""
    while start < end:
        piece = await asyncio.to_thread(read_from, path, start, min(PIECE_BYTES, end - start))
        if not piece:
            return
        yield piece
        start += len(piece)


async def _followed(path: Path, start: int, job: Job | None) -> AsyncIterator[bytes]:
    """What is there from ``start`` on and what is added, to the end of the job; b"" after LOOK_S of silence."""
    while True:
        # Both before the read, so that nothing is missed that comes after it.
        grown = None if job is None else job.log_bell.next()
        over = job is None or job.ended.done()
        piece = await asyncio.to_thread(read_from, path, start, PIECE_BYTES)
        if piece:
            yield piece
            start += len(piece)
        elif over or job is None or grown is None:
            return
        else:
            try:
                async with asyncio.timeout(LOOK_S):
                    await first(grown.wait(), settled(job))
            except TimeoutError:
                yield b""
