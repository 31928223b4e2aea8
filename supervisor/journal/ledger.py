"""The effect ledger as the supervisor uses it: each answer is durable before it is given.

Requests return futures, so that many of them share one commit without a task for each. What they raise:
JournalUnavailable, EffectQuarantined, and the refusals of ``protocol.effects``; nothing is changed then.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from protocol import effects
from protocol.effects import Claim, EffectRecord, Granted, Reconciliation, Replayed, Scope
from protocol.errors import CrewError, EffectMalformed, EffectNotFound, EffectNotOpen, EffectStale
from protocol.states import EffectState
from supervisor.journal import effects as table
from supervisor.journal import transactions
from supervisor.journal.effects import EffectPage
from supervisor.journal.records import AuditEntry
from supervisor.journal.writer import Tally

if TYPE_CHECKING:
    from supervisor.journal.journal import Journal

Step = Callable[[EffectRecord | None], EffectRecord | None]
PAGE_BYTES = 8 << 20
#: Actor of what a worker said of itself.
WORKER = "worker"


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """The job that speaks of effects; ``row`` is the journal's."""

    action_id: str
    crew_id: str
    row: int


class Seen(msgspec.Struct, frozen=True):
    """An effect, and whether it comes from what several journals share."""

    record: EffectRecord
    shared: bool = False


class _Note(msgspec.Struct, frozen=True, omit_defaults=True):
    key_id: str
    decision: str = ""
    version: int | None = None
    by: str = ""
    code: str = ""


class Ledger:
    """Effects of one journal. Times are Unix seconds."""

    def __init__(self, journal: Journal, tally: Tally) -> None:
        self._journal = journal
        self._tally = tally

    @property
    def unknown(self) -> int:
        """Number of effects whose outcome is unknown."""
        return self._tally.committed.effects[EffectState.UNKNOWN]

    @property
    def totals(self) -> dict[str, int]:
        """Numbers of all effects by state, without a look into the journal."""
        return effects.counts(self._tally.committed.effects)

    # --- what a job asks and says --------------------------------------------------------------------------------

    def claim(self, wanted: Claim) -> asyncio.Future[Granted | Replayed]:
        """Decide a claim of this epoch. Raises as ``effects.claim``, EffectMalformed for another's scope."""
        op = partial(_claim, wanted=wanted, epoch=self._journal.epoch, at=time.time(), tally=self._tally)
        return self._journal.submit(op)

    def settle(
        self, who: Owner, key_id: str, *, epoch: int, args_hash: str, receipt: bytes | None, audited: bool = True
    ) -> asyncio.Future[EffectRecord | CrewError | None]:
        """Record that the effect happened. A refusal is audited, and the future's value. *Terminal.*"""
        step = partial(effects.settle, epoch=epoch, args_hash=args_hash, receipt=receipt, at=time.time())
        return self._report(who, key_id, _claimed_by(who, step), audited=audited)

    def not_applied(
        self, who: Owner, key_id: str, *, epoch: int, audited: bool = True
    ) -> asyncio.Future[EffectRecord | CrewError | None]:
        """Record that nothing happened; else as ``settle``. *Terminal.*"""
        return self._report(who, key_id, _claimed_by(who, partial(effects.not_applied, epoch=epoch)), audited=audited)

    def lose(
        self, who: Owner, key_id: str, *, epoch: int, reason: str, audited: bool = True
    ) -> asyncio.Future[EffectRecord | CrewError | None]:
        """Record that nobody will say what happened; else as ``settle``. *Terminal.*"""
        step = partial(effects.lose, epoch=epoch, reason=reason)
        return self._report(who, key_id, _claimed_by(who, step), audited=audited)

    def deliver(self, who: Owner, key_id: str) -> asyncio.Future[EffectRecord | CrewError | None]:
        """Record that the caller of the tool has the receipt. *Terminal.*"""
        step = partial(effects.deliver, at=time.time())
        return self._report(who, key_id, _within_reach(who, step), audited=False)

    def found_out(
        self, who: Owner, key_id: str, *, version: int, found: Reconciliation, audited: bool = True
    ) -> asyncio.Future[EffectRecord | CrewError | None]:
        """Record what a job learned from the provider; else as ``settle``. *Terminal.*"""

        def step(record: EffectRecord | None) -> EffectRecord | None:
            return None if record is None else effects.reconcile(record, found, version=version, at=time.time())

        op = partial(
            _found_out, who=who, key_id=key_id, step=_within_reach(who, step), found=found, tally=self._tally
        )
        return self._journal.submit(partial(_reported, op=op, who=who, key_id=key_id, audited=audited), terminal=True)

    def refuse(
        self, who: Owner, key_id: str, error: CrewError, *, audited: bool = True
    ) -> asyncio.Future[EffectRecord | CrewError | None]:
        """Record a report that is no use, for the reason ``error``, which is the future's value. *Terminal.*"""

        def step(record: EffectRecord | None) -> EffectRecord | None:
            raise error

        return self._report(who, key_id, step, audited=audited)

    def lose_all(self, who: Owner, lost: Mapping[str, tuple[int, str]]) -> asyncio.Future[int]:
        """Make claims of the job unknown: epoch and reason by key id. Gives how many were still claimed. *Terminal.*"""
        return self._journal.submit(partial(_lose_all, who=who, lost=dict(lost), tally=self._tally), terminal=True)

    def _report(
        self, who: Owner, key_id: str, step: Step, *, audited: bool
    ) -> asyncio.Future[EffectRecord | CrewError | None]:
        op = partial(table.change, key_id=key_id, step=step, tally=self._tally)
        return self._journal.submit(partial(_reported, op=op, who=who, key_id=key_id, audited=audited), terminal=True)

    # --- operators -----------------------------------------------------------------------------------------------

    async def reconcile(
        self, key_id: str, found: Reconciliation, *, versions: Collection[int], by: str
    ) -> EffectRecord:
        """Record an operator's decision on one of ``versions``; ``by`` is who sent it, for the audit. *Terminal.*

        Raises EffectNotFound, EffectChanged, EffectNotOpen, EffectQuarantined.
        """
        op = partial(_reconcile, key_id=key_id, found=found, versions=versions, by=by, tally=self._tally)
        return await self._journal.submit(op, terminal=True)

    def note_reconciliation(self, record: EffectRecord, found: Reconciliation, *, by: str) -> asyncio.Future[None]:
        """Audit a decision that was taken elsewhere. *Terminal.*"""
        return self._journal.submit(
            lambda connection: _audit_reconciliation(connection, record, found, by=by), terminal=True
        )

    # --- reading -------------------------------------------------------------------------------------------------

    async def get(self, key_id: str) -> EffectRecord:
        """The effect of a key. Raises EffectNotFound, EffectQuarantined."""
        record = await self._journal.read(lambda connection: table.load(connection, key_id))
        if record is None:
            raise not_found(key_id)
        return record

    async def look(self, key_id: str) -> Seen:
        """``get``, with where it was found."""
        return Seen(await self.get(key_id))

    async def page(
        self,
        *,
        job: int | None = None,
        state: EffectState | None = None,
        crew_id: str | None = None,
        scope: Scope | None = None,
        before: int | None = None,
        shared_before: int | None = None,
        limit: int = 100,
    ) -> EffectPage:
        """Effects that match every filter given, newest key first, below ``before``; unreadable ones left out.

        Of what is shared there are no pages here, and so nothing is below ``shared_before``.
        """
        if shared_before is not None:
            return EffectPage([], None)
        return await self._journal.read(
            partial(
                table.page,
                job=job,
                state=state,
                crew_id=crew_id,
                scope=scope,
                before=before,
                limit=limit,
                limit_bytes=PAGE_BYTES,
            )
        )

    async def counts(self, jobs: Sequence[int]) -> dict[int, dict[str, int]]:
        """Numbers of effects by state, for those of ``jobs``, a page of rows, that have any."""
        return await self._journal.read(lambda connection: table.counts_of_jobs(connection, jobs)) if jobs else {}

    async def open_keys(self, job: int) -> tuple[int, list[str]]:
        """How many effects of a job are not ended, and the first few key ids."""
        return await self._journal.read(lambda connection: table.open_keys(connection, job))


def not_found(key_id: str) -> EffectNotFound:
    """Nothing was ever claimed under the key."""
    return EffectNotFound(f"the ledger has no effect of the key {key_id[:64]!r}; see /effects")


# --- transactions, in the writer's thread -------------------------------------------------------------------------


def _claim(
    connection: sqlite3.Connection, *, wanted: Claim, epoch: int, at: float, tally: Tally
) -> Granted | Replayed:
    known = table.load(connection, effects.key_id_of(wanted.preimage))
    if known is not None:
        check_reach(known, action_id=wanted.action_id, crew_id=wanted.crew_id)
    decided = effects.claim(known, wanted, epoch=epoch, at=at)
    check_reach(decided.record, action_id=wanted.action_id, crew_id=wanted.crew_id)
    table.store(connection, decided.record, was=known, tally=tally)
    return decided


def check_reach(record: EffectRecord, *, action_id: str, crew_id: str) -> None:
    """A job may speak of its own Action, its own crew and the global scope. Raises EffectMalformed."""
    own = {Scope.ACTION: action_id, Scope.CREW: crew_id, Scope.GLOBAL: ""}[record.scope]
    if record.scope_id != own:
        raise EffectMalformed(f"effect {record.key_id} is in the scope of another {record.scope.value}")


def _claimed_by(who: Owner, step: Step) -> Step:
    """``step`` for the job that made the last claim only."""

    def checked(record: EffectRecord | None) -> EffectRecord | None:
        if record is not None and record.job != who.row:
            raise EffectStale(f"effect {record.key_id} was claimed by another job, of Action {record.action_id}")
        return step(record)

    return checked


def _within_reach(who: Owner, step: Step) -> Step:
    """``step`` for a job in the effect's scope."""

    def checked(record: EffectRecord | None) -> EffectRecord | None:
        if record is None:
            raise EffectStale("an effect was reported that nobody had claimed")
        check_reach(record, action_id=who.action_id, crew_id=who.crew_id)
        return step(record)

    return checked


def _reported(
    connection: sqlite3.Connection,
    *,
    op: Callable[[sqlite3.Connection], EffectRecord | None],
    who: Owner,
    key_id: str,
    audited: bool,
) -> EffectRecord | CrewError | None:
    """What ``op`` makes of a report; its refusal is recorded in the same transaction and returned."""
    try:
        return op(connection)
    except CrewError as error:
        if audited:
            note = _Note(key_id=key_id, code=error.code)
            transactions.audit(connection, _entry(who.action_id, WORKER, "effect_refused", note))
        return error


def _lose_all(
    connection: sqlite3.Connection, *, who: Owner, lost: Mapping[str, tuple[int, str]], tally: Tally
) -> int:
    count = 0
    for key_id, (epoch, reason) in lost.items():
        step = _claimed_by(who, partial(effects.lose, epoch=epoch, reason=reason))
        try:
            count += table.change(connection, key_id, step, tally=tally) is not None
        except (EffectStale, EffectNotOpen, table.EffectQuarantined):
            continue  # it was reported before, or it blocks its key in any case
    return count


def _found_out(
    connection: sqlite3.Connection, *, who: Owner, key_id: str, step: Step, found: Reconciliation, tally: Tally
) -> EffectRecord | None:
    record = table.change(connection, key_id, step, tally=tally)
    if record is not None:
        _audit_reconciliation(connection, record, found, by=f"{WORKER} of {who.action_id}")
    return record


def _reconcile(
    connection: sqlite3.Connection,
    *,
    key_id: str,
    found: Reconciliation,
    versions: Collection[int],
    by: str,
    tally: Tally,
) -> EffectRecord:
    known = table.load(connection, key_id)
    if known is None:
        raise not_found(key_id)
    seen = known.version if known.version in versions else min(versions, default=0)
    record = effects.reconcile(known, found, version=seen, at=time.time())
    table.store(connection, record, was=known, tally=tally)
    _audit_reconciliation(connection, record, found, by=by)
    return record


def _audit_reconciliation(
    connection: sqlite3.Connection, record: EffectRecord, found: Reconciliation, *, by: str
) -> None:
    note = _Note(key_id=record.key_id, decision=found.decision.value, version=record.version, by=by)
    transactions.audit(connection, _entry(record.action_id, found.actor, "effect_reconciled", note))


def _entry(action_id: str, actor: str, act: str, note: _Note) -> AuditEntry:
    return AuditEntry(at=time.time(), action_id=action_id, actor=actor, act=act, detail=msgspec.json.encode(note))
