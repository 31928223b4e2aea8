"""One replica's part in the fleet: its lease, its claim to Actions, its outbox and its relay, put together."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from protocol.errors import FleetUnavailable, JournalUnavailable
from protocol.fleet import FleetView, Retirement
from supervisor.config import FleetSettings
from supervisor.fleet import registration, roster
from supervisor.fleet.database import Line, patience_s
from supervisor.fleet.effects import SharedLedger
from supervisor.fleet.heart import Heart, boot_clock
from supervisor.fleet.lease import Lease, Payload
from supervisor.fleet.outbox import Teller
from supervisor.fleet.ownership import FleetOwnership
from supervisor.fleet.registration import Beat
from supervisor.fleet.relay import Relay
from supervisor.health import HealthReport
from supervisor.jobs import Jobs
from supervisor.journal import Journal
from supervisor.log import get_log
from supervisor.ownership import LeaseState

log = get_log(__name__)
#: How long the end of the supervisor waits for the last endings to be told, seconds.
LAST_WORDS_S = 2.0
#: Pause before a part that broke is run again, seconds.
BROKEN_S = 5.0


class Fleet:
    """One replica. ``enable`` before the recovery, ``begin`` once jobs can be admitted, ``close`` at the end."""

    def __init__(self, settings: FleetSettings, journal: Journal, *, version: str) -> None:
        self.replica_id = settings.replica
        self._journal = journal
        self._settings = settings
        patience = patience_s(settings.lease_s)
        self._lines = {
            name: Line(settings.database, f"{settings.replica} {name}", patience_s=patience)
            for name in ("lease", "claims", "reads", "outbox", "effects")
        }
        payload = Payload(
            replica_id=settings.replica,
            url=settings.url,
            instance_id=journal.instance_id,
            journal_epoch=journal.epoch,
            lease_s=settings.lease_s,
            version=version,
        )
        self.lease = Lease(payload, lambda: uuid.uuid4().hex)
        self.ownership = FleetOwnership(
            self.lease,
            replica_id=settings.replica,
            claims=self._lines["claims"],
            reads=self._lines["reads"],
            clock=boot_clock,
            patience_s=patience,
        )
        self.effects = SharedLedger(
            journal,
            self.lease,
            self._lines["effects"],
            self._lines["reads"],
            replica_id=settings.replica,
            clock=boot_clock,
            patience_s=patience,
        )
        self.relay = Relay(self.ownership, journal, replica_id=settings.replica)
        self._teller = Teller(
            journal.outbox, self.lease, self._lines["outbox"], replica_id=settings.replica, clock=boot_clock
        )
        self._heart: Heart | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def enable(self) -> None:
        """From now on the journal keeps endings and effects for the fleet. Raises JournalUnavailable."""
        await self._journal.outbox.enable()
        await self._journal.mirror.enable()

    def attend(self, jobs: Jobs, health: HealthReport) -> None:
        """``begin`` for these jobs, with signs of life for as long as their machine is well."""
        self.relay.attend(jobs)

        def beat() -> Beat:
            return Beat(draining=jobs.draining, running=jobs.running, queued=jobs.queued)

        self.begin(beat=beat, faults=health.local_faults)

    def begin(self, *, beat: Callable[[], Beat], faults: Callable[[], Sequence[str]]) -> None:
        """Register, and do what a replica does until ``close``."""
        self._heart = Heart(
            self.lease,
            self._lines["lease"],
            replica_id=self.replica_id,
            lease_s=self._settings.lease_s,
            beat=beat,
            faults=faults,
        )
        loop = asyncio.get_running_loop()
        parts = (self._heart.run, self.ownership.run, self._teller.run, self.effects.run)
        self._tasks = [loop.create_task(_keep(run)) for run in parts]

    # --- supervisor.ownership.Membership -------------------------------------------------------------------------

    def lease_state(self) -> LeaseState:
        """The lease as this machine sees it."""
        lease = self.lease
        return LeaseState(
            valid=lease.valid(boot_clock()),
            why=lease.why,
            recovered_at=None if self._heart is None else self._heart.recovered_at,
            heartbeat_failures=lease.heartbeat_failures,
            recovery_attempts=lease.recovery_attempts,
            recoveries=lease.recoveries,
        )

    async def view(self) -> FleetView:
        """The fleet as the database has it. Raises FleetUnavailable."""
        replicas = await self._lines["reads"].run(roster.replicas)
        lease = self.lease_state()
        return FleetView(
            replica_id=self.replica_id,
            epoch=self.lease.epoch,
            lease_valid=lease.valid,
            why=None if lease.valid else lease.why,
            outbox=self._journal.outbox.waiting,
            heartbeat_failures=lease.heartbeat_failures,
            lease_recovery_attempts=lease.recovery_attempts,
            lease_recoveries=lease.recoveries,
            replicas=replicas,
        )

    async def retire(self, replica_id: str, *, actor: str, evidence: str) -> Retirement:
        """Write off a replica whose machine is gone. Raises ReplicaUnknown, ReplicaLive, FleetUnavailable."""
        retiring = partial(roster.retire, replica_id=replica_id, actor=actor, evidence=evidence)
        found = await self._lines["reads"].run(retiring)
        log.warning("replica_retired", replica=replica_id, actor=actor, actions=found.actions)
        return found

    async def close(self) -> None:
        """Tell what can still be told, give the lease back, end everything. The database may be away for all that."""
        with contextlib.suppress(TimeoutError, FleetUnavailable, JournalUnavailable):
            async with asyncio.timeout(LAST_WORDS_S):
                if self.lease.valid(boot_clock()):
                    await self.effects.flush()
                while self._journal.outbox.waiting > 0 and self.lease.valid(boot_clock()):
                    self._journal.outbox.bell.set()
                    await asyncio.sleep(0.02)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        epoch, had = self.lease.epoch, self.lease.valid(boot_clock())
        self.lease.release()
        if had:
            releasing = partial(registration.release, replica_id=self.replica_id, epoch=epoch)
            with contextlib.suppress(TimeoutError, FleetUnavailable):
                async with asyncio.timeout(LAST_WORDS_S):
                    await self._lines["lease"].run(releasing)
        await self.relay.close()
        for line in self._lines.values():
            await line.close()


async def _keep(run: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run to its end; a fault of ours is logged and tried again, since nothing else would bring it back."""
    while True:
        try:
            await run()
            return
        except Exception as error:  # noqa: BLE001 - the boundary of what runs in the background
            log.failure("fleet_task_broke", error)
            await asyncio.sleep(BROKEN_S)
