"""What a worker says, checked against the protocol and the bounds, becomes events and causes."""

from __future__ import annotations

import asyncio

from protocol import canonical, frames
from protocol.api import MAX_OUTPUT_BYTES
from protocol.errors import BadJson, ProtocolViolation
from supervisor.channel import Channel
from supervisor.config import Settings
from supervisor.effects import Desk
from supervisor.run.ending import Finished, Raised, Violated
from supervisor.run.mailbox import Mailbox
from supervisor.run.recorder import Recorder


class Listener:
    """Takes the frames of one job's workers. After a violation nothing more is taken."""

    def __init__(self, mailbox: Mailbox, recorder: Recorder, desk: Desk, settings: Settings) -> None:
        self._mailbox = mailbox
        self._recorder = recorder
        self._settings = settings
        self._violated = False
        self._pressing: set[str] = set()
        #: Where the worker's effects are claimed and reported.
        self.desk = desk
        self.channel: Channel[frames.FromWorker] | None = None
        #: The worker stands in its leaf and waits.
        self.hello = asyncio.Event()
        #: The worker has answered a cancel, and whether it is closing something.
        self.cancel_answer = asyncio.Event()
        self.closing = False
        self.go_sent = False
        #: The worker's end of the pipe is closed.
        self.ended = asyncio.Event()

    def press(self, why: str, pressed: bool) -> None:
        """Pause the worker's pipe for a reason, or resume it once there is none."""
        (self._pressing.add if pressed else self._pressing.discard)(why)
        if self.channel is not None:
            (self.channel.pause if self._pressing else self.channel.resume)()

    def send(self, frame: frames.Frame) -> None:
        """Send to the worker, if it is still there."""
        if self.channel is not None:
            self.channel.send(frame)

    def on_end(self, why: ProtocolViolation | None) -> None:
        """The pipe ended: with a violation, or by the worker's exit, which tells more."""
        if why is not None:
            self._violation("ProtocolViolation", "the worker broke the pipe protocol")
        self.ended.set()

    def on_frame(self, frame: frames.FromWorker) -> None:
        """Take one frame."""
        if self._violated:
            return
        try:
            self._take(frame)
        except BadJson:
            self._violation("ProtocolViolation", "the worker sent something that is no JSON object")

    def _violation(self, error_type: str, detail: str) -> None:
        if not self._violated:
            self._violated = True
            self._mailbox.put(Violated(error_type=error_type, detail=detail))
            self.press("violation", True)

    def _take(self, frame: frames.FromWorker) -> None:
        if isinstance(frame, frames.Hello):
            if frame.version != frames.PROTOCOL_VERSION:
                self._violation("ProtocolViolation", "the worker speaks another protocol version")
            self.hello.set()
            return
        if not self.go_sent:
            self._violation("ProtocolViolation", "the worker spoke before it was told to go")
            return
        match frame:
            case frames.Chunk(data=data):
                self._take_chunk(data)
            case frames.Result(output=output, task_ids=task_ids):
                self._take_result(output, task_ids)
            case frames.Failure(error_type=error_type, dispatched=dispatched):
                self._mailbox.put(Raised(error_type=error_type, dispatched=dispatched))
            case frames.CancelAnswer(closing=closing):
                self.closing = closing
                self.cancel_answer.set()
            case _:
                self.desk.take(frame)

    def _take_chunk(self, data: bytes) -> None:
        settings = self._settings
        canonical.check_object(data)
        if len(data) > settings.max_event_bytes:
            self._violation("RegistryError", f"an event is above max_event_bytes = {settings.max_event_bytes}")
        elif self._recorder.total >= settings.max_events_per_run - 1:
            self._violation("RegistryError", f"more than max_events_per_run = {settings.max_events_per_run} events")
        else:
            self._recorder.add("chunk", data)

    def _take_result(self, output: bytes, task_ids: tuple[str, ...]) -> None:
        canonical.check_object(output)
        if len(output) > MAX_OUTPUT_BYTES:
            self._violation("RegistryError", f"the output is above {MAX_OUTPUT_BYTES} bytes")
        else:
            self._mailbox.put(Finished(output=output, task_ids=task_ids))
