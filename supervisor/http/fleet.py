"""What a replica says of itself and of the others, and how one is written off."""

from __future__ import annotations

import time

import msgspec
from aiohttp import web

from protocol import canonical
from protocol.api import convert
from protocol.fleet import HostConnector, HostReady, HostRecovery, HostRuntime, RetireRequest
from supervisor.health import HealthReport
from supervisor.http.edge import MAY_READ, json_response, read_json
from supervisor.http.ground import Ground
from supervisor.http.start import actor
from supervisor.jobs import Jobs
from supervisor.journal import AuditEntry
from supervisor.ownership import Membership
from supervisor.run.means import Means

#: Bound of a detail in the reference's document.
MAX_DETAIL_BYTES = 1024


class FleetHandlers(Ground):
    """Handlers of the routes that only a replica has."""

    def __init__(self, means: Means, jobs: Jobs, health: HealthReport, fleet: Membership) -> None:
        super().__init__(means, jobs)
        self._health = health
        self._fleet = fleet

    async def host_ready(self, request: web.Request) -> web.StreamResponse:
        """Whether new work would be taken; from memory, for load balancers too."""
        found = self._document(details=bool(request.get(MAY_READ)))
        return json_response(found, status=200 if found.status == "ready" else 503)

    def _document(self, *, details: bool) -> HostReady:
        health, jobs, lease = self._health, self._jobs, self._fleet.lease_state()
        storage, workers = health.storage_fault, health.worker_fault
        ready = lease.valid and not jobs.draining and storage is None and workers is None

        def said(why: str | None) -> str:
            return (why or "").encode()[:MAX_DETAIL_BYTES].decode("utf-8", "ignore") if details else ""

        return HostReady(
            status="ready" if ready else "not_ready",
            lease_valid=lease.valid,
            draining=jobs.draining,
            runtime=HostRuntime(
                durability="ephemeral" if self._means.settings.ephemeral else "durable",
                ready=storage is None,
                # The reference's document has no other place for what is wrong with the lease.
                detail=said(storage or (None if lease.valid else lease.why)),
                recovery=HostRecovery(
                    recovered_at=lease.recovered_at,
                    recoverable_transactions=len({*jobs.unproved, *jobs.unrecorded}),
                    queued_results=self._journal.outbox.waiting,
                ),
            ),
            connector=HostConnector(ready=workers is None, detail=said(workers)),
        )

    async def fleet(self, request: web.Request) -> web.StreamResponse:
        """Every replica."""
        return json_response(await self._fleet.view())

    async def retire(self, request: web.Request) -> web.StreamResponse:
        """Write off a replica; whoever asks states that its machine is off."""
        body = convert(await read_json(request), RetireRequest)
        replica_id = request.match_info["replica_id"]
        found = await self._fleet.retire(replica_id, actor=body.actor, evidence=body.evidence)
        note = canonical.compact({"by": actor(request), **msgspec.to_builtins(found)})
        entry = AuditEntry(at=time.time(), action_id=None, actor=body.actor, act="replica_retired", detail=note)
        await self._journal.audit(entry, terminal=True)
        return json_response(found)
