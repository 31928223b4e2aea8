"""Server-sent events as the contract has them: bytes in, validated events out. Pure."""

from __future__ import annotations

from collections import deque
from typing import Any

from protocol import canonical
from protocol.errors import BadJson
from protocol.states import TERMINAL
from supervisor.client.answers import Event

#: Bound of one frame and of what is not yet terminated.
MAX_FRAME_BYTES = 1 << 20
MAX_EVENTS = 100_000
#: Nesting that is read in an answer; inputs are bounded more tightly by the server.
MAX_DEPTH = 127
TERMINAL_EVENTS = frozenset(status.value for status in TERMINAL)
_ENDED = "an event came after the terminal one"


class Malformed(Exception):
    """The bytes break the contract."""


class AboveBound(Exception):
    """There are more bytes or events than a bound allows."""


def parse(data: bytes) -> Any:
    """One strict JSON document. Raises Malformed."""
    try:
        return canonical.parse(data, max_depth=MAX_DEPTH)
    except BadJson as error:
        raise Malformed(error.detail) from None


class EventReader:
    """Takes a stream in pieces of any size and appends its events to ``events``.

    Sequences begin at ``first`` and grow by one, over every connection that ``reconnected`` joins together;
    ``max_bytes`` bounds all that is read. ``retry_ms`` is what the server asked for, None if it did not ask.
    """

    def __init__(self, *, first: int, max_bytes: int) -> None:
        self.events: deque[Event] = deque()
        self.next_sequence = first
        #: The terminal event was read.
        self.ended = False
        #: The server keeps silent streams alive: it has sent a comment or a delay for reconnecting.
        self.kept_alive = False
        self.retry_ms: int | None = None
        self._left = max_bytes
        self._count = 0
        self._reset()

    def _reset(self) -> None:
        self._rest = bytearray()
        self._searched = 0
        self._frame_bytes = 0
        self._name: bytes | None = None
        self._data: list[bytes] = []

    def reconnected(self) -> None:
        """What was not terminated on the last connection comes again, whole."""
        self._reset()

    def feed(self, piece: bytes) -> None:
        """Read on. Raises Malformed, AboveBound; events that came before the fault are in ``events``."""
        self._left -= len(piece)
        if self._left < 0:
            raise AboveBound("the stream is longer than the bound of a response")
        self._rest += piece
        start = 0
        try:
            while (end := self._rest.find(b"\n", max(start, self._searched))) >= 0:
                self._frame_bytes += end + 1 - start
                line = bytes(self._rest[start:end]).removesuffix(b"\r")
                start = end + 1
                if line:
                    self._bound(self._frame_bytes - 1)
                    self._line(line)
                else:
                    self._dispatch()
        finally:
            del self._rest[:start]
            self._searched = len(self._rest)
        self._bound(self._frame_bytes + len(self._rest))

    def finish(self) -> None:
        """The body has ended. Raises Malformed if something follows the terminal event."""
        begun = self._data or self._name is not None or self._rest.startswith((b"data", b"event"))
        if self.ended and begun:
            raise Malformed(_ENDED)

    def _bound(self, size: int) -> None:
        if size > MAX_FRAME_BYTES:
            raise AboveBound(f"a frame of the stream is above {MAX_FRAME_BYTES} bytes")

    def _line(self, line: bytes) -> None:
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        match field:
            case b"":
                self.kept_alive = True
            case b"event":
                self._name = value
            case b"data":
                self._data.append(value)
            case b"retry" if value.isdigit() and len(value) <= 7:
                self.kept_alive = True
                self.retry_ms = int(value)

    def _dispatch(self) -> None:
        name, data = self._name, self._data
        self._name, self._data, self._frame_bytes = None, [], 0
        if not data:
            return
        if self.ended:
            raise Malformed(_ENDED)
        event = self._event(name, parse(b"\n".join(data)))
        self._count += 1
        if self._count > MAX_EVENTS:
            raise AboveBound(f"the stream has more than {MAX_EVENTS} events")
        self.next_sequence += 1
        self.ended = event.event in TERMINAL_EVENTS
        self.events.append(event)

    def _event(self, name: bytes | None, document: Any) -> Event:
        if not isinstance(document, dict):
            raise Malformed("the data of an event is no object")
        sequence = document.get("sequence")
        if type(sequence) is not int or sequence < 0:
            raise Malformed("an event has no sequence number")
        if sequence != self.next_sequence:
            raise Malformed(f"event {sequence} came where {self.next_sequence} belongs")
        try:
            called = name.decode("utf-8") if name else document.get("event")
        except UnicodeDecodeError:
            raise Malformed(f"the name of event {sequence} is not UTF-8") from None
        if not isinstance(called, str) or not called:
            raise Malformed(f"event {sequence} has no name")
        return Event(event=called, sequence=sequence, data=document.get("data"))
