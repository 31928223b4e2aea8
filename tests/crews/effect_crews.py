"""Crews that speak of effects in frames of their own, so that a test says exactly what a worker says, and when.

They use the worker's own channel; answers to their calls are taken out of it before the worker sees them.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from protocol import frames
from protocol.effects import Decision, Policy
from tests.crews import fake_crews
from worker.channel import Channel

#: Calls of a guard never come up to here.
FIRST_CALL = 1 << 40
ANSWER_S = 30.0
WAIT_S = 60.0

_receive = Channel.receive
_answers: dict[int, queue.SimpleQueue[Any]] = {}
_channels: list[Channel[Any]] = []


def _take_ours(channel: Channel[Any]) -> tuple[Any, list[int]]:
    """``Channel.receive`` of the worker's listening thread, without the answers to our calls."""
    _channels[:] = [channel]
    while True:
        frame, descriptors = _receive(channel)
        call = getattr(frame, "call", 0)
        if call < FIRST_CALL:
            return frame, descriptors
        _answers[call].put(frame)


Channel.receive = _take_ours  # type: ignore[method-assign]


class Scripted:
    """Does ``inputs.steps`` one after the other: each has ``do``, the name of a method below, and its arguments.

    The output has ``answers``: the type and the fields of what the supervisor said to each call.
    """

    def __init__(self) -> None:
        self._calls = FIRST_CALL
        self._lock = threading.Lock()
        self._epoch = 0
        self._granted = False

    def kickoff(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        answers = []
        for step in inputs["steps"]:
            arguments = dict(step)
            answer = getattr(self, arguments.pop("do"))(**arguments)
            if answer is not None:
                answers.append(answer)
        return {"raw": "done", "answers": answers}

    def _ask(self, make: Callable[[int], frames.Frame]) -> dict[str, Any]:
        with self._lock:
            self._calls += 1
            call = self._calls
        answers = _answers[call] = queue.SimpleQueue()
        _channels[0].send(make(call))
        answer = answers.get(timeout=ANSWER_S)
        del _answers[call]
        receipt = getattr(answer, "receipt", None)
        shown = {name: value for name, value in msgspec.to_builtins(answer).items() if name not in ("call", "receipt")}
        return shown | ({} if receipt is None else {"receipt": receipt.decode()})

    def claim(self, preimage: str, args_hash: str, policy: str = Policy.ONCE) -> dict[str, Any]:
        answer = self._ask(
            lambda call: frames.EffectClaim(
                call=call, preimage=preimage.encode(), args_hash=args_hash, policy=Policy(policy)
            )
        )
        self._epoch = answer.get("epoch", self._epoch)
        self._granted = answer["type"] == "effect_granted"
        return answer

    def act(self, path: str, text: str) -> None:
        """The effect: a line in a file, only after a grant."""
        if self._granted:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.write(fd, f"{text}\n".encode("ascii"))
            os.close(fd)

    def settle(self, key_id: str, args_hash: str, receipt: str | None, epoch: int | None = None) -> dict[str, Any]:
        return self._ask(
            lambda call: frames.EffectSettled(
                call=call,
                key_id=key_id,
                epoch=self._epoch if epoch is None else epoch,
                args_hash=args_hash,
                receipt=None if receipt is None else receipt.encode(),
            )
        )

    def not_applied(self, key_id: str) -> dict[str, Any]:
        return self._ask(lambda call: frames.EffectNotApplied(call=call, key_id=key_id, epoch=self._epoch))

    def lose(self, key_id: str, reason: str) -> dict[str, Any]:
        return self._ask(lambda call: frames.EffectLost(call=call, key_id=key_id, epoch=self._epoch, reason=reason))

    def deliver(self, key_id: str) -> None:
        _channels[0].send(frames.EffectDelivered(key_id=key_id))

    def reconcile(self, key_id: str, version: int, decision: str, receipt: str | None = None) -> dict[str, Any]:
        return self._ask(
            lambda call: frames.EffectReconciled(
                call=call,
                key_id=key_id,
                version=version,
                decision=Decision(decision),
                actor="tests:lookup",
                evidence="the provider's answer",
                receipt=None if receipt is None else receipt.encode(),
            )
        )

    def say(self, text: str) -> None:
        """Write a line to the job's log."""
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

    def touch(self, path: str) -> None:
        Path(path).touch()

    def wait(self, path: str) -> None:
        """Wait until the test has made the file."""
        give_up = time.monotonic() + WAIT_S
        while not os.path.exists(path):
            if time.monotonic() > give_up:
                raise TimeoutError(path)
            time.sleep(0.002)

    def sleep(self) -> None:
        time.sleep(WAIT_S)

    def spawn(self) -> None:
        """Start a process that outlives this one."""
        subprocess.Popen(["sleep", str(WAIT_S)], start_new_session=True)

    def fail(self) -> None:
        raise ValueError("the crew fails")

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


CREWS: dict[str, Callable[[], Any]] = {**fake_crews.CREWS, "scripted": Scripted, "other": Scripted}
EVALUATORS = fake_crews.EVALUATORS
