"""The effect ledger at the other end of the worker's pipe: the supervisor's."""

from __future__ import annotations

import itertools
import os
import queue
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

from protocol import errors, frames
from protocol.effects import Claim, Reconciliation, key_id_of
from protocol.errors import CrewError, EffectLedgerUnavailable, EffectOutcomeUnknown
from worker.channel import PipeClosed
from worker.guarding.session import Granted, Replayed

_GONE = "the supervisor cannot be reached, so nothing was done"
_FORKED = "a process that a worker forked has no effect ledger, so nothing was done; call the tool in the worker itself"


def _kinds(kind: type[CrewError]) -> Iterator[type[CrewError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _kinds(below)


def _by_code() -> dict[str, type[CrewError]]:
    return {kind.code: kind for kind in _kinds(errors.CrewError) if kind.code.startswith("effect")}


class PipeLedger:
    """Questions of many threads on one pipe; ``answered`` is called by the thread that reads it.

    ``send`` blocks until a frame is on its way. Raises PipeClosed. Of no use in a forked process: the answers to its
    questions would come to its parent, who may have asked something else under the same number.
    """

    def __init__(self, send: Callable[[frames.Frame], None]) -> None:
        self._send = send
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        #: None once the pipe is closed.
        self._waiting: dict[int, queue.SimpleQueue[frames.EffectAnswer | None]] | None = {}

    def claim(self, wanted: Claim) -> Granted | Replayed:
        """May this call be made?"""
        answer = self._ask(
            lambda call: frames.EffectClaim(
                call=call, preimage=wanted.preimage, args_hash=wanted.args_hash, policy=wanted.policy
            )
        )
        if isinstance(answer, frames.EffectGranted):
            return Granted(epoch=answer.epoch, attempt=answer.attempt)
        if isinstance(answer, frames.EffectReplayed):
            return Replayed(receipt=answer.receipt, settled_at=answer.settled_at)
        raise EffectLedgerUnavailable(f"the claim of effect {key_id_of(wanted.preimage)} was not answered as one")

    def settle(self, key_id: str, *, epoch: int, args_hash: str, receipt: bytes | None) -> None:
        """It took effect."""
        self._ask(
            lambda call: frames.EffectSettled(
                call=call, key_id=key_id, epoch=epoch, args_hash=args_hash, receipt=receipt
            )
        )

    def not_applied(self, key_id: str, *, epoch: int) -> None:
        """The tool says that nothing happened."""
        self._ask(lambda call: frames.EffectNotApplied(call=call, key_id=key_id, epoch=epoch))

    def lose(self, key_id: str, *, epoch: int, reason: str) -> None:
        """Nobody knows."""
        self._ask(lambda call: frames.EffectLost(call=call, key_id=key_id, epoch=epoch, reason=reason))

    def deliver(self, key_id: str) -> None:
        """The caller has the receipt."""
        try:
            self._send(frames.EffectDelivered(key_id=key_id))
        except PipeClosed:
            self.close()

    def reconcile(self, key_id: str, found: Reconciliation, *, version: int) -> None:
        """The provider was asked and knows."""
        self._ask(
            lambda call: frames.EffectReconciled(
                call=call,
                key_id=key_id,
                version=version,
                decision=found.decision,
                actor=found.actor,
                evidence=found.evidence,
                receipt=found.receipt,
            )
        )

    def _ask(self, make: Callable[[int], frames.Frame]) -> frames.EffectAnswer:
        if os.getpid() != self._pid:
            raise EffectLedgerUnavailable(_FORKED)
        answers: queue.SimpleQueue[frames.EffectAnswer | None] = queue.SimpleQueue()
        with self._lock:
            if self._waiting is None:
                raise EffectLedgerUnavailable(_GONE)
            call = next(self._numbers)
            self._waiting[call] = answers
        try:
            self._send(make(call))
        except PipeClosed:
            self.close()
        answer = answers.get()
        if answer is None:
            raise EffectLedgerUnavailable(_GONE)
        if isinstance(answer, frames.EffectRefused):
            _raise(answer)
        return answer

    def answered(self, answer: frames.EffectAnswer) -> None:
        """Hand an answer to the thread that asked. Raises ProtocolViolation for one that nobody waits for."""
        with self._lock:
            answers = self._waiting.pop(answer.call, None) if self._waiting is not None else None
        if answers is None:
            raise errors.ProtocolViolation(f"the answer to call {answer.call} was not asked for")
        answers.put(answer)

    def close(self) -> None:
        """The pipe is gone: every question in flight fails, and every later one."""
        with self._lock:
            waiting, self._waiting = self._waiting, None
        for answers in (waiting or {}).values():
            answers.put(None)


def _raise(refused: frames.EffectRefused) -> NoReturn:
    kind = _by_code().get(refused.code, EffectLedgerUnavailable)
    if kind is EffectOutcomeUnknown:
        raise EffectOutcomeUnknown(refused.detail, version=refused.version)
    raise kind(refused.detail)
