"""What every group of handlers stands on: the means, the jobs, and how a record is found and shown."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence

from aiohttp import web

from protocol.api import JobReconciliation, JobView
from protocol.errors import UnknownAction
from protocol.states import Status
from supervisor.job import Job, view_of
from supervisor.jobs import Jobs
from supervisor.journal import JobRecord, Journal
from supervisor.run.means import Means

#: Names the crew that a reader means; records of other crews are unknown to it then.
CREW_HEADER = "X-AIP-Crew-ID"


class Ground:
    """Base of the handlers."""

    def __init__(self, means: Means, jobs: Jobs) -> None:
        self._means = means
        self._jobs = jobs
        self._streams: set[asyncio.Task[object]] = set()

    @contextlib.contextmanager
    def _streaming(self) -> Iterator[None]:
        """Count the request among those that stay until a job's end."""
        task = asyncio.current_task()
        assert task is not None
        self._streams.add(task)
        try:
            with self._means.meters.streams.track_inprogress():
                yield
        finally:
            self._streams.discard(task)

    def close_streams(self) -> None:
        """Cut the readers that are still there, for the end of the supervisor."""
        for task in self._streams:
            task.cancel()

    @property
    def _journal(self) -> Journal:
        return self._means.journal

    # --- one job -------------------------------------------------------------------------------------------------

    async def _find(self, action_id: str) -> tuple[JobRecord, Job | None]:
        job = self._jobs.get(action_id)
        if job is not None and not job.ended.done():
            return job.record, job
        record = await self._journal.get(action_id)
        if record is None:
            raise _unknown(action_id)
        return record, None

    async def _read(self, request: web.Request) -> tuple[JobRecord, Job | None]:
        """The job of the path, if it is of the crew that the caller names, where it names one."""
        action_id = request.match_info["action_id"]
        record, job = await self._find(action_id)
        if request.headers.get(CREW_HEADER, record.crew_id) != record.crew_id:
            raise _unknown(action_id)
        return record, job

    async def _view(self, record: JobRecord, job: Job | None) -> JobView:
        effects = (await self._journal.effects.counts([record.row])).get(record.row)
        if job is not None:
            if not job.ended.done():
                return job.view(effects)
            record = job.record  # it ended while its effects were counted
        output = await self._journal.output(record.row) if record.status is Status.COMPLETED else None
        decisions = await self._journal.reconciliations([record])
        return view_of(record, effects, output=output, reconciliation=newest(decisions, record))


def newest(decisions: Mapping[int, Sequence[JobReconciliation]], record: JobRecord) -> JobReconciliation | None:
    """Of decisions by row the one about a job that counts."""
    found = decisions.get(record.row)
    return found[-1] if found else None


def _unknown(action_id: str) -> UnknownAction:
    return UnknownAction(f"no retained job has Action id {action_id}", action_id=action_id)
