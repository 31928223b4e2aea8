"""One job's desk at the effect ledger: takes what its worker says of effects, and answers after the commit.

A claim that is refused does not end the job. What was granted and is not reported when the worker ends becomes unknown
at once, without a timer: nobody else can say what became of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, assert_never

from protocol import canonical, frames, points
from protocol.effects import Claim, EffectRecord, Granted, Policy, Reconciliation, Replayed
from protocol.errors import (
    BadJson,
    CrewError,
    EffectLedgerUnavailable,
    EffectMalformed,
    EffectOutcomeUnknown,
    EffectStopping,
    JournalUnavailable,
)
from protocol.states import EffectState
from supervisor.journal import Owner
from supervisor.log import Field, get_log
from supervisor.ownership import EffectLedger, Reported

log = get_log(__name__)
#: Requests on their way through the journal at which the worker's pipe is paused, and below which it is read again.
PAUSE_REQUESTS = 256
RESUME_REQUESTS = 64
#: Refused reports of one job that are audited; a worker that goes on so does not fill the journal.
MAX_AUDITED = 100
#: Waits between attempts to record what was lost, seconds; the last repeats.
RECORD_DELAYS_S = (0.05, 0.2, 1.0, 2.0)
MAX_DETAIL = 2000
#: Reasons of an unknown outcome.
WORKER_DIED, WITHDRAWN = "worker_died", "claim_withdrawn"

#: What says something of an effect that was claimed before, and is answered.
Report = frames.EffectSettled | frames.EffectNotApplied | frames.EffectLost | frames.EffectReconciled


class Desk:
    """Belongs to one job and its event loop.

    ``limit``: claims that the job may have granted. ``facts``: which job it is, for the log.
    """

    def __init__(self, owner: Owner, ledger: EffectLedger, *, limit: int, facts: Mapping[str, Field]) -> None:
        self._owner = owner
        self._facts = facts
        self._ledger = ledger
        self._limit = limit
        #: Sends to the worker; swallows what one that is gone cannot hear.
        self.send: Callable[[frames.Frame], None] = lambda frame: None
        #: Told whether too many requests wait, so that the worker's pipe is paused.
        self.on_pressure: Callable[[bool], None] = lambda pressed: None
        self._pressed = False
        #: Why nothing more is claimed; None while claims are taken.
        self._closed: str | None = None
        self._granted = 0
        self._claiming = 0
        self._refused_reports = 0
        #: Calls that wait for an answer.
        self._asked: set[int] = set()
        self._requests: set[asyncio.Future[Any]] = set()
        #: Epoch of each claim that was granted and not reported yet, by key id.
        self._open: dict[str, int] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        #: Epoch and reason of claims that nobody will report any more, until the journal has them as unknown.
        self._lost: dict[str, tuple[int, str]] = {}
        self._losing: asyncio.Task[None] | None = None
        self._finishing = asyncio.Event()

    @property
    def open(self) -> int:
        """Claims that were granted and not reported."""
        return len(self._open)

    @property
    def lost(self) -> Mapping[str, str]:
        """Reasons, by key id, of lost claims that the journal has not taken yet."""
        return {key_id: reason for key_id, (_, reason) in self._lost.items()}

    # --- the worker's frames -------------------------------------------------------------------------------------

    def take(self, frame: frames.AboutEffect) -> None:
        """Take one frame."""
        if isinstance(frame, frames.EffectDelivered):
            self._track(self._ledger.deliver(self._owner, frame.key_id), self._delivered)
        elif frame.call in self._asked:
            self._refuse(frame.call, EffectMalformed(f"call {frame.call} asks while it waits for an answer"))
        elif isinstance(frame, frames.EffectClaim):
            self._claim(frame)
        else:
            self._report(frame)

    def _claim(self, frame: frames.EffectClaim) -> None:
        if self._closed is not None:
            self._refuse(frame.call, self._stopping())
        elif self._granted + self._claiming >= self._limit:
            self._refuse(frame.call, EffectMalformed(f"the job has max_effects_per_run = {self._limit} effects"))
        else:
            wanted = Claim(
                preimage=frame.preimage,
                args_hash=frame.args_hash,
                policy=frame.policy,
                action_id=self._owner.action_id,
                crew_id=self._owner.crew_id,
                job=self._owner.row,
            )
            self._asked.add(frame.call)
            self._claiming += 1
            self._track(self._ledger.claim(wanted), partial(self._decided, frame.call))

    def _stopping(self) -> EffectStopping:
        return EffectStopping(f"Action {self._owner.action_id} is being stopped ({self._closed}); nothing was claimed")

    def _decided(self, call: int, future: asyncio.Future[Granted | Replayed]) -> None:
        """The claim's commit is over."""
        points.reach("effect.claimed")
        self._asked.discard(call)
        self._claiming -= 1
        error = future.exception()
        if error is not None:
            self._refuse(call, error)
            return
        decided = future.result()
        record = decided.record
        if isinstance(decided, Replayed):
            settled_at = record.settled_at or record.claimed_at
            self.send(frames.EffectReplayed(call=call, receipt=record.receipt, settled_at=settled_at))
        elif self._closed is not None:
            self._withdraw(record)
            self._refuse(call, self._stopping())
        else:
            self._granted += 1
            self._open[record.key_id] = record.epoch
            self._idle.clear()
            self.send(frames.EffectGranted(call=call, epoch=record.epoch, attempt=record.attempt))

    def _withdraw(self, record: EffectRecord) -> None:
        """Take back a claim whose grant was never sent: nothing was done on it.

        Under the policy ``provider`` an earlier attempt of unknown outcome may stand behind it.
        """
        if record.policy is Policy.PROVIDER and record.attempt > 1:
            self._lose({record.key_id: record.epoch}, WITHDRAWN)
            return
        future = self._ledger.not_applied(self._owner, record.key_id, epoch=record.epoch, audited=False)
        self._track(future, partial(self._withdrawn, record))

    def _withdrawn(self, record: EffectRecord, future: Reported) -> None:
        if future.exception() is not None:
            self._lose({record.key_id: record.epoch}, WITHDRAWN)

    def _report(self, frame: Report) -> None:
        self._asked.add(frame.call)
        self._track(self._submit(frame), partial(self._recorded, frame))

    def _submit(self, frame: Report) -> Reported:
        ledger, who, key_id = self._ledger, self._owner, frame.key_id
        audited = self._refused_reports < MAX_AUDITED
        if isinstance(frame, frames.EffectSettled | frames.EffectReconciled):
            fault = _fault_of(frame.receipt)
            if fault is not None:
                return ledger.refuse(who, key_id, fault, audited=audited)
        match frame:
            case frames.EffectSettled(epoch=epoch, args_hash=args_hash, receipt=receipt):
                return ledger.settle(who, key_id, epoch=epoch, args_hash=args_hash, receipt=receipt, audited=audited)
            case frames.EffectNotApplied(epoch=epoch):
                return ledger.not_applied(who, key_id, epoch=epoch, audited=audited)
            case frames.EffectLost(epoch=epoch, reason=reason):
                return ledger.lose(who, key_id, epoch=epoch, reason=reason, audited=audited)
            case frames.EffectReconciled(version=version, decision=decision, actor=actor, evidence=evidence):
                found = Reconciliation(decision=decision, actor=actor, evidence=evidence, receipt=frame.receipt)
                return ledger.found_out(who, key_id, version=version, found=found, audited=audited)
            case _:
                assert_never(frame)

    def _recorded(self, frame: Report, future: Reported) -> None:
        """The report's commit is over."""
        points.reach("effect.reported")
        self._asked.discard(frame.call)
        error = future.exception()
        if error is not None:
            if not isinstance(frame, frames.EffectReconciled):
                self._lose({frame.key_id: frame.epoch}, _unrecorded(frame))
            self._refuse(frame.call, error)
            return
        made = future.result()
        if isinstance(made, CrewError):
            self._refused_reports += 1
            self._refuse(frame.call, made)
            return
        self._close(frame.key_id)
        if made is not None and made.state is EffectState.UNKNOWN:
            self._say_unknown(1, made.reason)
        if isinstance(frame, frames.EffectReconciled):
            said = {"key_id": frame.key_id, "decision": frame.decision.value, "actor": frame.actor}
            log.info("effect_reconciled", **self._facts, **said)
        self.send(frames.EffectNoted(call=frame.call))

    def _delivered(self, future: Reported) -> None:
        future.exception()  # seen; that a receipt arrived is worth no second attempt

    def _refuse(self, call: int, error: BaseException) -> None:
        if isinstance(error, JournalUnavailable):
            error = EffectLedgerUnavailable(error.detail)
        elif not isinstance(error, CrewError):
            log.failure("effect_broke", error, **self._facts)
            error = EffectLedgerUnavailable("the supervisor met a fault of its own; its log names the place")
        version = error.version if isinstance(error, EffectOutcomeUnknown) else None
        refusal = frames.EffectRefused(call=call, code=error.code, detail=error.detail[:MAX_DETAIL], version=version)
        self.send(refusal)

    def _track(self, future: asyncio.Future[Any], then: Callable[[asyncio.Future[Any]], None]) -> None:
        """Call ``then`` when the request's commit is over, in the order of the requests."""
        self._requests.add(future)
        future.add_done_callback(partial(self._done, then))
        self._press()

    def _done(self, then: Callable[[asyncio.Future[Any]], None], future: asyncio.Future[Any]) -> None:
        self._requests.discard(future)
        then(future)
        self._press()

    def _press(self) -> None:
        waiting = len(self._requests)
        if waiting <= RESUME_REQUESTS if self._pressed else waiting >= PAUSE_REQUESTS:
            self._pressed = not self._pressed
            self.on_pressure(self._pressed)

    def _close(self, key_id: str) -> None:
        self._open.pop(key_id, None)
        if not self._open:
            self._idle.set()

    # --- the job's end -------------------------------------------------------------------------------------------

    def close_claims(self, reason: str) -> None:
        """An ending is decided, for ``reason``: from here on nothing is claimed. The first reason counts."""
        if self._closed is None:
            self._closed = reason

    async def settled(self) -> None:
        """Wait until every claim that was granted is reported."""
        await self._idle.wait()

    def lose_open(self, why: str = WORKER_DIED) -> None:
        """The worker is gone and its pipe is read: what it has not reported becomes unknown.

        ``why``: the reason where its death came before any decision.
        """
        self._lose(self._open, why if self._closed in (None, WORKER_DIED) else self._closed)
        self._open.clear()
        self._idle.set()

    async def finish(self) -> None:
        """Wait for the answers of the journal that are under way. What it has not taken by then is in ``lost``."""
        while self._requests:
            await asyncio.wait(self._requests)
        self._finishing.set()
        if self._losing is not None:
            await self._losing

    def _lose(self, epochs: Mapping[str, int], reason: str) -> None:
        self._lost |= {key_id: (epoch, reason) for key_id, epoch in epochs.items()}
        if self._lost and (self._losing is None or self._losing.done()):
            self._losing = asyncio.get_running_loop().create_task(self._record_lost())

    async def _record_lost(self) -> None:
        """Make what was lost unknown, however long the journal refuses; the job's terminal record does it at last."""
        for attempt in itertools.count():
            batch = dict(self._lost)
            if not batch:
                return
            try:
                count = await self._ledger.lose_all(self._owner, batch)
            except JournalUnavailable:
                if self._finishing.is_set():
                    return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RECORD_DELAYS_S[min(attempt, len(RECORD_DELAYS_S) - 1)]):
                        await self._finishing.wait()
                continue
            self._lost = {key_id: lost for key_id, lost in self._lost.items() if batch.get(key_id) != lost}
            for key_id in batch:
                self._close(key_id)
            self._say_unknown(count, ", ".join(sorted({reason for _, reason in batch.values()})))

    def _say_unknown(self, count: int, reason: str) -> None:
        if count:
            log.warning("effect_unknown", **self._facts, count=count, reason=reason)


def _fault_of(receipt: bytes | None) -> EffectMalformed | None:
    """What is wrong with a receipt, which is passed on as it is stored."""
    try:
        if receipt is not None:
            canonical.parse(receipt)
    except BadJson as error:
        return EffectMalformed(f"the receipt is not strict JSON: {error.detail}")
    return None


def _unrecorded(frame: frames.EffectSettled | frames.EffectNotApplied | frames.EffectLost) -> str:
    """Why an outcome is unknown whose report the journal did not take."""
    match frame:
        case frames.EffectSettled():
            return "settle_not_recorded"
        case frames.EffectNotApplied():
            return "not_applied_not_recorded"
        case frames.EffectLost(reason=reason):
            return reason
