"""The effect ledger of a replica: keys of scope ``crew`` and ``global`` are decided in PostgreSQL, the rest here.

A claim is committed there, then copied into the journal, and only then heard by its worker: a crash in between leaves
a claim that was never granted, which the next start makes unknown. A report is committed in the journal first, which
nothing can take back, and told to the database from there; while that is away the key stays claimed for all others.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Collection, Coroutine, Mapping
from functools import partial
from typing import Any, TypeVar

from protocol.effects import (
    SHARED_SCOPES,
    Claim,
    EffectRecord,
    Granted,
    Reconciliation,
    Replayed,
    Scope,
    key_id_of,
    parse_preimage,
)
from protocol.errors import (
    CrewError,
    EffectLedgerUnavailable,
    EffectMalformed,
    EffectNotFound,
    FleetUnavailable,
    LeaseInvalid,
)
from protocol.states import EffectState
from supervisor.fleet import effect_rows, effect_steps
from supervisor.fleet.conversation import Conversation, ignore
from supervisor.fleet.database import Line
from supervisor.fleet.deciding import Request
from supervisor.fleet.effect_rows import Row
from supervisor.fleet.effect_steps import Repeated
from supervisor.fleet.lease import Lease
from supervisor.journal import Journal, Owner, Seen
from supervisor.journal.effects import EffectPage
from supervisor.journal.ledger import PAGE_BYTES

T = TypeVar("T")
Reported = asyncio.Future[EffectRecord | CrewError | None]


class SharedLedger:
    """``supervisor.ownership.EffectLedger`` of one replica; belongs to its event loop. ``run`` it."""

    def __init__(
        self,
        journal: Journal,
        lease: Lease,
        line: Line,
        reads: Line,
        *,
        replica_id: str,
        clock: Callable[[], float],
        patience_s: float,
    ) -> None:
        self._epoch = journal.epoch
        self._local = journal.effects
        self._mirror = journal.mirror
        self._reads = reads
        self._replica_id = replica_id
        self._talk = Conversation(journal, lease, line, replica_id=replica_id, clock=clock, patience_s=patience_s)
        self._tasks: set[asyncio.Task[Any]] = set()
        #: Decide and tell, until cancelled.
        self.run = self._talk.run
        #: Return once the database knows everything that this journal does.
        self.flush = self._talk.flush

    # --- what a job asks and says --------------------------------------------------------------------------------

    def claim(self, wanted: Claim) -> asyncio.Future[Granted | Replayed]:
        """Decide a claim. Raises as ``Ledger.claim`` does, and EffectLedgerUnavailable."""
        try:
            scope = parse_preimage(wanted.preimage).scope
        except EffectMalformed:
            scope = Scope.ACTION
        if scope not in SHARED_SCOPES:
            return self._local.claim(wanted)
        future: asyncio.Future[Granted | Replayed] = asyncio.get_running_loop().create_future()
        claim_id = uuid.uuid4().hex
        step = partial(
            effect_steps.claim,
            wanted=wanted,
            claim_id=claim_id,
            replica_id=self._replica_id,
            epoch=self._epoch,
            at=time.time(),
        )
        key_id = key_id_of(wanted.preimage)

        def given_up(error: CrewError) -> None:
            self._talk.doubt(claim_id, key_id)
            future.set_exception(_unavailable(error))

        self._talk.put(
            Request(key_id, step, guess=None),
            partial(self._decided, claim_id, future),
            given_up,
        )
        return future

    def _decided(self, claim_id: str, future: asyncio.Future[Granted | Replayed], answer: object) -> None:
        if isinstance(answer, CrewError):
            future.set_exception(answer)
        elif isinstance(answer, Repeated):
            if answer.row.replica_id == self._replica_id:
                self._talk.copy(answer.row, over_news=False)
            future.set_result(Replayed(answer.row.record))
        else:
            assert isinstance(answer, Granted)
            record = answer.record
            fault = self._talk.lease_fault()
            if fault is not None:
                # Whoever retires us now may believe that nothing is begun any more.
                self._talk.doubt(claim_id, record.key_id)
                future.set_exception(_unavailable(fault))
                return
            copied = self._mirror.keep(record)
            copied.add_done_callback(partial(self._copied, claim_id, answer, future))

    def _copied(
        self,
        claim_id: str,
        granted: Granted,
        future: asyncio.Future[Granted | Replayed],
        copied: asyncio.Future[None],
    ) -> None:
        """The copy's commit is over."""
        record = granted.record
        error = copied.exception()
        if error is not None:
            self._talk.doubt(claim_id, record.key_id)
            future.set_exception(error)
            return
        self._talk.hold(record, claim_id)
        future.set_result(granted)

    def settle(
        self, who: Owner, key_id: str, *, epoch: int, args_hash: str, receipt: bytes | None, audited: bool = True
    ) -> Reported:
        """As ``Ledger.settle``."""
        said = self._local.settle(who, key_id, epoch=epoch, args_hash=args_hash, receipt=receipt, audited=audited)
        return self._told(who, said, audited=audited)

    def not_applied(self, who: Owner, key_id: str, *, epoch: int, audited: bool = True) -> Reported:
        """As ``Ledger.not_applied``."""
        return self._told(who, self._local.not_applied(who, key_id, epoch=epoch, audited=audited), audited=audited)

    def lose(self, who: Owner, key_id: str, *, epoch: int, reason: str, audited: bool = True) -> Reported:
        """As ``Ledger.lose``."""
        said = self._local.lose(who, key_id, epoch=epoch, reason=reason, audited=audited)
        return self._told(who, said, audited=audited)

    def deliver(self, who: Owner, key_id: str) -> Reported:
        """As ``Ledger.deliver``."""
        said = self._local.deliver(who, key_id)
        said.add_done_callback(partial(self._delivered, who, key_id))
        return said

    def _delivered(self, who: Owner, key_id: str, said: Reported) -> None:
        """Nobody waits until the others know that, and it is worth no second attempt."""
        made = None if said.exception() is not None or self._talk.away else said.result()
        if isinstance(made, EffectRecord) and made.scope in SHARED_SCOPES:
            self._talk.tell(made, ignore)
        elif isinstance(made, CrewError):
            step = partial(effect_steps.deliver, who=who, at=time.time())
            self._talk.put(Request(key_id, step), lambda answer: None, lambda error: None)

    def refuse(self, who: Owner, key_id: str, error: CrewError, *, audited: bool = True) -> Reported:
        """As ``Ledger.refuse``."""
        return self._local.refuse(who, key_id, error, audited=audited)

    def found_out(
        self, who: Owner, key_id: str, *, version: int, found: Reconciliation, audited: bool = True
    ) -> Reported:
        """As ``Ledger.found_out``. Raises EffectLedgerUnavailable: whether it is recorded is not known."""
        return self._spawn(self._found_out(who, key_id, version, found, audited))

    async def _found_out(
        self, who: Owner, key_id: str, version: int, found: Reconciliation, audited: bool
    ) -> EffectRecord | CrewError | None:
        if await self._is_local(key_id):
            return await self._local.found_out(who, key_id, version=version, found=found, audited=audited)
        try:
            return await self._reconcile(key_id, found, {version}, by=f"worker of {who.action_id}", who=who)
        except (FleetUnavailable, LeaseInvalid) as error:
            raise _unavailable(error) from None
        except CrewError as error:
            return await self._local.refuse(who, key_id, error, audited=audited)

    def lose_all(self, who: Owner, lost: Mapping[str, tuple[int, str]]) -> asyncio.Future[int]:
        """As ``Ledger.lose_all``: durable here at once, and told as soon as can be."""
        future = self._local.lose_all(who, lost)
        future.add_done_callback(lambda done: self._talk.ring())
        return future

    def _told(self, who: Owner, said: Reported, *, audited: bool = True) -> Reported:
        """``said``, once the database knows it too, or is away."""
        future: Reported = asyncio.get_running_loop().create_future()
        said.add_done_callback(partial(self._said, who, audited, future))
        return future

    def _said(self, who: Owner, audited: bool, future: Reported, said: Reported) -> None:
        """The report's commit is over."""
        error = said.exception()
        if error is not None:
            future.set_exception(error)
            return
        made = said.result()
        if not isinstance(made, EffectRecord) or made.scope not in SHARED_SCOPES:
            future.set_result(made)
        elif self._talk.away:
            self._talk.ring()
            future.set_result(made)
        else:
            self._talk.tell(made, partial(self._heard, who, audited, future))

    def _heard(self, who: Owner, audited: bool, future: Reported, made: EffectRecord, error: CrewError | None) -> None:
        if error is None:
            future.set_result(made)
            return
        refused = self._local.refuse(who, made.key_id, error, audited=audited)
        refused.add_done_callback(lambda done: _pass_on(done, future))

    # --- operators -----------------------------------------------------------------------------------------------

    async def reconcile(
        self, key_id: str, found: Reconciliation, *, versions: Collection[int], by: str
    ) -> EffectRecord:
        """As ``Ledger.reconcile``, at the database for what is shared. Raises FleetUnavailable, LeaseInvalid too."""
        if await self._is_local(key_id):
            return await self._local.reconcile(key_id, found, versions=versions, by=by)
        return await self._reconcile(key_id, found, versions, by=by)

    async def _reconcile(
        self, key_id: str, found: Reconciliation, versions: Collection[int], *, by: str, who: Owner | None = None
    ) -> EffectRecord:
        step = partial(
            effect_steps.reconcile, key_id=key_id, found=found, versions=frozenset(versions), at=time.time(), who=who
        )
        row = await self._talk.ask(key_id, step)
        assert isinstance(row, Row)
        await self._local.note_reconciliation(row.record, found, by=by)
        if row.replica_id == self._replica_id:
            await self._mirror.keep(row.record)
        return row.record

    async def _is_local(self, key_id: str) -> bool:
        try:
            return (await self._local.get(key_id)).scope not in SHARED_SCOPES
        except EffectNotFound:
            return False

    # --- reading -------------------------------------------------------------------------------------------------

    async def look(self, key_id: str) -> Seen:
        """An effect as the database has it, or as the journal does for what is not shared or while it is away.

        Raises EffectNotFound, EffectQuarantined, FleetUnavailable.
        """
        try:
            here: EffectRecord | None = await self._local.get(key_id)
        except EffectNotFound:
            here = None
        if here is not None and here.scope not in SHARED_SCOPES:
            return Seen(here)
        try:
            rows = await self._reads.run(partial(effect_rows.load, key_ids=[key_id]))
        except FleetUnavailable:
            if here is None:
                raise
            return Seen(here)
        if key_id in rows:
            return Seen(rows[key_id].record, shared=True)
        return Seen(await self._local.get(key_id))

    async def page(
        self,
        *,
        state: EffectState | None = None,
        crew_id: str | None = None,
        scope: Scope | None = None,
        before: int | None = None,
        shared_before: int | None = None,
        limit: int = 100,
    ) -> EffectPage:
        """Effects of the scope ``crew`` or ``global`` from the database, everything else from the journal.

        While the database is away what the journal has of them. ``shared_before`` is of an earlier page of the
        database's. Raises FleetUnavailable where such a page cannot be continued.
        """
        if scope not in SHARED_SCOPES or before is not None:
            return await self._local.page(state=state, crew_id=crew_id, scope=scope, before=before, limit=limit)
        reading = partial(
            effect_rows.page,
            state=state,
            crew_id=crew_id,
            scope=scope,
            before=shared_before,
            limit=limit,
            limit_bytes=PAGE_BYTES,
        )
        try:
            rows, after = await self._reads.run(reading)
        except FleetUnavailable:
            if shared_before is not None:
                raise
            return await self._local.page(state=state, crew_id=crew_id, scope=scope, limit=limit)
        return EffectPage([row.record for row in rows], after, shared=True)

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _pass_on(done: asyncio.Future[T], future: asyncio.Future[T]) -> None:
    error = done.exception()
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(done.result())


def _unavailable(error: CrewError) -> EffectLedgerUnavailable:
    return EffectLedgerUnavailable(f"{error.detail}; nothing was granted")
