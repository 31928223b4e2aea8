"""The supervisor's end of a pipe: non-blocking, with back pressure in both directions."""

from __future__ import annotations

import array
import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from protocol import frames, pipe
from protocol.errors import ProtocolViolation

T = TypeVar("T")
READ_BYTES = 65_536
#: Reads taken in one turn of the event loop, so that one flooding worker cannot hold it: what the worker sends while
#: one is taken is left to the next turn. More of them cost the others their time and bring no more events.
READS_PER_TURN = 1
#: A socket buffer never holds more than this many reads; a dead peer's pipe is empty before.
READS_PER_DRAIN = 512


class Channel(Generic[T]):
    """Frames over one end of a stream socket.

    ``on_frame`` gets each frame. ``on_end`` is called once: with the ProtocolViolation that ended it, or with None at
    the end of the pipe, which may cut a frame when the peer was killed.
    """

    def __init__(
        self,
        sock: socket.socket,
        kinds: Any,
        *,
        on_frame: Callable[[T], None],
        on_end: Callable[[ProtocolViolation | None], None],
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._decoder: pipe.Decoder[T] = pipe.Decoder(kinds)
        self._on_frame = on_frame
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._outgoing: deque[tuple[memoryview, list[int]]] = deque()
        self._paused = False
        self.ended = False
        self._loop.add_reader(sock, self._on_readable)

    def send(self, frame: frames.Frame, descriptors: list[int] | None = None) -> None:
        """Queue one frame; ``descriptors`` go with its first byte and must stay open until the peer has answered.

        A pipe that is gone swallows the frame: its end is reported by ``on_end``.
        """
        if self.ended:
            return
        idle = not self._outgoing
        self._outgoing.append((memoryview(pipe.encode(frame)), descriptors or []))
        if idle:
            self._flush()

    def _flush(self) -> None:
        while self._outgoing:
            data, descriptors = self._outgoing[0]
            try:
                if descriptors:
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
                    sent = self._sock.sendmsg([data], rights)
                else:
                    sent = self._sock.send(data)
            except BlockingIOError:
                self._loop.add_writer(self._sock, self._flush)
                return
            except OSError:
                self._outgoing.clear()
                break
            if sent == len(data):
                self._outgoing.popleft()
            else:
                self._outgoing[0] = (data[sent:], [])
        self._loop.remove_writer(self._sock)

    def pause(self) -> None:
        """Stop reading; the peer's sends will block once the socket buffer is full."""
        if not self._paused and not self.ended:
            self._paused = True
            self._loop.remove_reader(self._sock)

    def resume(self) -> None:
        """Read again."""
        if self._paused and not self.ended:
            self._paused = False
            self._loop.add_reader(self._sock, self._on_readable)

    def drain(self) -> None:
        """Read what is in the pipe now, paused or not: until it is empty or ended, or a live flooder had its share."""
        for _ in range(READS_PER_DRAIN):
            if self.ended or not self._read_once():
                return

    def _on_readable(self) -> None:
        for _ in range(READS_PER_TURN):
            if self.ended or self._paused or not self._read_once():
                return

    def _read_once(self) -> bool:
        try:
            data = self._sock.recv(READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._end(None)
            return False
        try:
            for frame in self._decoder.feed(data):
                self._on_frame(frame)
        except ProtocolViolation as violation:
            self._end(violation)
            return False
        return len(data) == READ_BYTES

    def _end(self, why: ProtocolViolation | None) -> None:
        if not self.ended:
            self.ended = True
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
            self._on_end(why)

    def close(self) -> None:
        """Close without reporting an end."""
        self.ended = True
        with contextlib.suppress(ValueError, OSError):
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
        self._sock.close()
