"""Keeps one replica's lease: heartbeats while everything here works, registrations where there is no lease."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial

from protocol.errors import FleetUnavailable, LeaseInvalid
from supervisor.fleet import registration
from supervisor.fleet.database import Line
from supervisor.fleet.lease import Lease, Request, Standing
from supervisor.fleet.registration import Beat, Granted
from supervisor.log import get_log

log = get_log(__name__)
#: Heartbeats within a lease; after a failure they come more often.
BEATS_PER_LEASE = 3
TRIES_PER_LEASE = 10
#: Beyond the end of a lease that is waited for, seconds.
MARGIN_S = 0.05
#: How soon the others learn that this replica drains, seconds.
LOOK_S = 1.0


def boot_clock() -> float:
    """Seconds since the machine started, sleep included (clock_gettime(2), CLOCK_BOOTTIME): a lease goes on in it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Heart:
    """Beats until it is cancelled. ``faults``: why no sign of life may be sent now; empty while all is well."""

    def __init__(
        self,
        lease: Lease,
        line: Line,
        *,
        replica_id: str,
        lease_s: float,
        beat: Callable[[], Beat],
        faults: Callable[[], Sequence[str]],
    ) -> None:
        self._lease = lease
        self._line = line
        self._replica_id = replica_id
        self._every_s = lease_s / BEATS_PER_LEASE
        self._retry_s = lease_s / TRIES_PER_LEASE
        self._beat_of = beat
        self._faults = faults
        self._first_sent_at = 0.0
        self._said_draining = False
        #: Unix seconds of this machine's clock, for people: when the lease was last recovered; None if it never was.
        self.recovered_at: float | None = None

    async def run(self) -> None:
        """Beat. Ends by itself once the replica is retired."""
        while self._lease.standing not in (Standing.RETIRED, Standing.RELEASED):
            next_at = boot_clock() + await self._step()
            while (left_s := next_at - boot_clock()) > 0 and not self._drains_otherwise():  # noqa: ASYNC110 - a clock
                await asyncio.sleep(min(left_s, LOOK_S))
        log.error("replica_out", replica=self._replica_id, standing=self._lease.standing.value, why=self._lease.why)

    def _drains_otherwise(self) -> bool:
        """Whether the last heartbeat said something else about draining than what is so now."""
        return self._lease.standing is Standing.VALID and self._beat_of().draining is not self._said_draining

    async def _step(self) -> float:
        """One heartbeat or registration. Returns how long to wait for the next, seconds."""
        lease = self._lease
        valid = lease.valid(boot_clock())
        faults = self._faults()
        if faults:
            if lease.why != faults[0]:
                log.warning("heartbeat_withheld", replica=self._replica_id, why=faults[0])
            lease.withheld(faults[0])
            return self._retry_s
        try:
            return await (self._renew() if valid else self._register())
        except FleetUnavailable as error:
            lease.failed(error.detail)
            log.warning("heartbeat_failed", replica=self._replica_id, why=error.detail, left_s=self._left_s())
            return self._retry_s

    def _left_s(self) -> float:
        return round(self._lease.left_s(boot_clock()), 3)

    async def _renew(self) -> float:
        sent_at, epoch, beat = boot_clock(), self._lease.epoch, self._beat_of()
        self._said_draining = beat.draining
        try:
            await self._line.run(partial(registration.renew, replica_id=self._replica_id, epoch=epoch, beat=beat))
        except LeaseInvalid as error:
            self._lease.fenced(error.detail)
            log.error("lease_lost", replica=self._replica_id, epoch=epoch, why=error.detail)
            return 0.0
        if self._lease.valid(boot_clock()):
            self._lease.renewed(sent_at=sent_at)
        return self._every_s

    async def _register(self) -> float:
        sent_at = boot_clock()
        if self._lease.standing is not Standing.ASKING:
            self._first_sent_at = sent_at
        request = self._lease.ask()
        verdict = await self._line.run(partial(registration.register, request=request))
        if isinstance(verdict, Granted):
            # Granted before means: at any time since it was sent first.
            self._take(request, verdict, sent_at=self._first_sent_at if verdict.repeated else sent_at)
            return self._every_s
        self._lease.rejected(verdict.why, retired=verdict.retired)
        log.warning("registration_refused", replica=self._replica_id, why=verdict.why, retired=verdict.retired)
        if verdict.wait_s is None:
            return self._retry_s
        if self._lease.epoch:
            # It may be our own: a heartbeat whose answer came too late for us. Another epoch's is not touched.
            await self._line.run(
                partial(registration.release, replica_id=self._replica_id, epoch=self._lease.epoch)
            )
            return MARGIN_S
        return min(verdict.wait_s + MARGIN_S, self._every_s)

    def _take(self, request: Request, verdict: Granted, *, sent_at: float) -> None:
        if self._lease.epoch:
            self.recovered_at = time.time()
        self._lease.granted(verdict.epoch, sent_at=sent_at)
        self._said_draining = False
        log.info(
            "replica_registered",
            replica=self._replica_id,
            epoch=verdict.epoch,
            request_id=request.request_id,
            repeated=verdict.repeated,
            left_s=self._left_s(),
        )
