"""An effect ledger in memory that answers a worker's frames with the reducer, as the supervisor's does durably."""

from __future__ import annotations

import threading
import time

from protocol import effects, frames
from protocol.effects import EffectRecord, Reconciliation
from protocol.errors import CrewError, EffectOutcomeUnknown


class MemoryLedger:
    """One owner's incarnation. May be used by several threads."""

    def __init__(self, *, action_id: str = "operation", crew_id: str = "crew", epoch: int = 1) -> None:
        self.records: dict[str, EffectRecord] = {}
        self.epoch = epoch
        self._action_id, self._crew_id = action_id, crew_id
        self._lock = threading.Lock()

    def answer(self, frame: frames.AboutEffect) -> frames.EffectAnswer | None:
        """What a worker hears; None for a delivery, which is not answered."""
        with self._lock:
            if isinstance(frame, frames.EffectDelivered):
                self._put(effects.deliver(self.records.get(frame.key_id), at=time.time()))
                return None
            try:
                if isinstance(frame, frames.EffectClaim):
                    return self._claim(frame)
                self._put(self._step(frame))
                return frames.EffectNoted(call=frame.call)
            except CrewError as error:
                version = error.version if isinstance(error, EffectOutcomeUnknown) else None
                return frames.EffectRefused(call=frame.call, code=error.code, detail=error.detail, version=version)

    def _put(self, record: EffectRecord | None) -> None:
        if record is not None:
            self.records[record.key_id] = record

    def _claim(self, frame: frames.EffectClaim) -> frames.EffectAnswer:
        wanted = effects.Claim(
            preimage=frame.preimage,
            args_hash=frame.args_hash,
            policy=frame.policy,
            action_id=self._action_id,
            crew_id=self._crew_id,
        )
        known = self.records.get(effects.key_id_of(frame.preimage))
        answer = effects.claim(known, wanted, epoch=self.epoch, at=time.time())
        self._put(answer.record)
        if isinstance(answer, effects.Granted):
            return frames.EffectGranted(call=frame.call, epoch=self.epoch, attempt=answer.record.attempt)
        assert answer.record.settled_at is not None
        return frames.EffectReplayed(
            call=frame.call, receipt=answer.record.receipt, settled_at=answer.record.settled_at
        )

    def _step(
        self,
        frame: frames.EffectSettled | frames.EffectNotApplied | frames.EffectLost | frames.EffectReconciled,
    ) -> EffectRecord:
        known = self.records.get(frame.key_id)
        match frame:
            case frames.EffectSettled():
                return effects.settle(
                    known, epoch=frame.epoch, args_hash=frame.args_hash, receipt=frame.receipt, at=time.time()
                )
            case frames.EffectNotApplied():
                return effects.not_applied(known, epoch=frame.epoch)
            case frames.EffectLost():
                return effects.lose(known, epoch=frame.epoch, reason=frame.reason)
            case frames.EffectReconciled():
                found = Reconciliation(
                    decision=frame.decision, actor=frame.actor, evidence=frame.evidence, receipt=frame.receipt
                )
                assert known is not None
                return effects.reconcile(known, found, version=frame.version, at=time.time())
