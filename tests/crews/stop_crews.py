"""The fake crews, and some whose ends a test decides."""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.crews import fake_crews, heartbeat
from tests.crews.fake_crews import LLM_ANSWER

POLL_S = 0.002
PR_SET_DUMPABLE = 4
#: In case nobody makes the file that is waited for.
PATIENCE_S = 30.0


def _may_wait(path: str) -> bool:
    return not Path(path).exists()


class Turnstile:
    """Makes the file ``inputs.began``, then waits for the file ``inputs.release``."""

    def kickoff(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        Path(inputs["began"]).touch()
        give_up = time.monotonic() + PATIENCE_S
        while _may_wait(inputs["release"]) and time.monotonic() < give_up:
            time.sleep(POLL_S)
        return LLM_ANSWER


class Closer:
    """Asynchronous. Cancelled, it makes the file ``inputs.closing`` and waits for the file ``inputs.release``.

    Then it returns the answer all the same if ``inputs.answers``, else it lets itself be cancelled.
    """

    async def akickoff(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        Path(inputs["began"]).touch()
        try:
            await asyncio.sleep(PATIENCE_S)
        except asyncio.CancelledError:
            Path(inputs["closing"]).touch()
            while _may_wait(inputs["release"]):  # noqa: ASYNC110 - the file comes from another process
                await asyncio.sleep(POLL_S)
            if not inputs.get("answers"):
                raise
        return LLM_ANSWER


class Escapee:
    """The worker itself forks into a new session, twice, and beats there with all of the worker's descriptors open.

    ``inputs.then``: what the first process does, ``exit`` (without a word), ``return`` or ``block``. ``inputs.cgroup``:
    a cgroup directory to move the escaped one to. ``inputs.hidden``: no other process may trace it.
    """

    def kickoff(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        if inputs.get("hidden"):
            assert ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) == 0
        heartbeat.detach(str(inputs["heartbeat"]))
        if "cgroup" in inputs:
            escaped = Path(inputs["heartbeat"]).read_text(encoding="ascii").split()[0]
            (Path(inputs["cgroup"]) / "cgroup.procs").write_text(escaped, encoding="ascii")
            Path(inputs["moved"]).touch()
        if inputs["then"] == "exit":
            os._exit(0)
        if inputs["then"] == "block":
            time.sleep(PATIENCE_S)
        return LLM_ANSWER


CREWS: dict[str, Callable[[], Any]] = {
    **fake_crews.CREWS,
    "turnstile": Turnstile,
    "closer": Closer,
    "escapee": Escapee,
    "patient": fake_crews.Daemon,
}
