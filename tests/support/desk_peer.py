"""A job's desk at the effect ledger, and a peer that speaks to it as a worker does."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from protocol import frames
from protocol.errors import ProtocolViolation
from protocol.states import EffectState
from supervisor.channel import Channel
from supervisor.config import Settings
from supervisor.effects import WORKER_DIED, Desk
from supervisor.events import Feed
from supervisor.journal import Journal, Owner
from supervisor.journal.writer import Faults
from supervisor.run.listen import Listener
from supervisor.run.mailbox import Mailbox
from supervisor.run.recorder import Recorder
from tests.support.effects import claim_frame, key_of
from tests.support.journals import opened

#: Waits of a test for what must come, seconds.
PATIENCE_S = 10.0


class Peer:
    """A job's desk behind the supervisor's channel, and the worker's end of the pipe."""

    def __init__(self, journal: Journal, *, row: int = 1, limit: int = 100) -> None:
        self.journal = journal
        self.action_id = f"a-{row}"
        owner = Owner(action_id=self.action_id, crew_id="crew", row=row)
        self.desk = Desk(owner, journal.effects, limit=limit, facts={"action_id": self.action_id})
        self.mailbox = Mailbox()
        recorder = Recorder(journal, row, Feed(), on_failure=lambda: None)
        self.listener = Listener(self.mailbox, recorder, self.desk, Settings(registry="x:y"))
        self.listener.go_sent = True
        self.desk.send = self.listener.send
        self.desk.on_pressure = self._press
        self.presses: list[bool] = []
        self.pressed = asyncio.Event()
        ours, theirs = socket.socketpair()
        self.channel: Channel[frames.FromWorker] = Channel(
            ours, frames.FromWorker, on_frame=self.listener.on_frame, on_end=self.listener.on_end
        )
        self.listener.channel = self.channel
        self._heard: asyncio.Queue[Any] = asyncio.Queue()
        self._far: Channel[frames.ToWorker] = Channel(
            theirs, frames.ToWorker, on_frame=self._heard.put_nowait, on_end=self._ended
        )

    def _press(self, pressed: bool) -> None:
        self.presses.append(pressed)
        self.pressed.set()
        self.listener.press("effects", pressed)

    def _ended(self, why: ProtocolViolation | None) -> None:
        self._heard.put_nowait(why)

    def say(self, *said: frames.Frame) -> None:
        """Send frames as the worker."""
        for frame in said:
            self._far.send(frame)

    async def hear(self) -> Any:
        """The next answer."""
        async with asyncio.timeout(PATIENCE_S):
            return await self._heard.get()

    async def ask(self, frame: frames.Frame) -> Any:
        """Send a frame and wait for the next answer."""
        self.say(frame)
        return await self.hear()

    async def claim(self, call: int = 1, name: str = "invoice-1", **changes: Any) -> frames.EffectGranted:
        """Claim a key that is free."""
        answer = await self.ask(claim_frame(call, name, **changes))
        assert isinstance(answer, frames.EffectGranted), answer
        return answer

    async def taken(self) -> None:
        """Wait until the desk has handed a request to the journal, which nothing announces."""
        async with asyncio.timeout(PATIENCE_S):
            while not self.desk._requests:  # noqa: ASYNC110
                await asyncio.sleep(0)

    def die(self, why: str = WORKER_DIED) -> None:
        """What the watch of a worker's exit does."""
        self.desk.close_claims(WORKER_DIED)
        self.channel.drain()
        self.desk.lose_open(why)

    def close(self) -> None:
        """Close both ends."""
        self.channel.close()
        self._far.close()

    async def state(self, name: str = "invoice-1") -> tuple[EffectState, str]:
        """State and reason that the journal has."""
        record = await self.journal.effects.get(key_of(name).key_id)
        return record.state, record.reason

    async def until(self, state: EffectState, name: str = "invoice-1") -> str:
        """Wait until the journal has the effect in ``state``, which nothing announces; returns the reason."""
        async with asyncio.timeout(PATIENCE_S):
            while (found := await self.state(name))[0] is not state:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        return found[1]


@asynccontextmanager
async def at_work(path: Path, *, faults: Faults | None = None, **options: Any) -> AsyncIterator[Peer]:
    """A desk on a journal of its own."""
    async with opened(path, faults=faults) as journal:
        peer = Peer(journal, **options)
        try:
            yield peer
        finally:
            peer.close()
