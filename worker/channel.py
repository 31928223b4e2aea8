"""The worker's and the template's end of a pipe: blocking, safe for several sending threads."""

from __future__ import annotations

import array
import socket
import threading
from typing import Any, Generic, TypeVar

from protocol import frames, pipe
from protocol.errors import ProtocolViolation

T = TypeVar("T")
#: Most descriptors that come with one message.
MAX_DESCRIPTORS = 8


class PipeClosed(Exception):
    """The other side is gone."""


class Channel(Generic[T]):
    """One end of a stream socket that carries frames, and descriptors beside them (SCM_RIGHTS in unix(7))."""

    def __init__(self, sock: socket.socket, kinds: Any) -> None:
        self.sock = sock
        self._decoder: pipe.Decoder[T] = pipe.Decoder(kinds)
        self._lock = threading.Lock()

    def send(self, frame: frames.Frame) -> None:
        """Send one frame, waiting for room. Raises PipeClosed, or ProtocolViolation for one that is too large."""
        data = pipe.encode(frame)
        with self._lock:
            try:
                self.sock.sendall(data)
            except OSError as error:
                raise PipeClosed(str(error)) from None

    def receive(self) -> tuple[T, list[int]]:
        """Wait for one frame; returns it and the descriptors that came with its first byte. Raises PipeClosed."""
        try:
            header, descriptors = self._receive_header()
            size = int.from_bytes(header, "big")
            if not 0 < size <= pipe.MAX_FRAME_BYTES:
                raise ProtocolViolation(f"frame length {size} is outside 1..{pipe.MAX_FRAME_BYTES}")
            return self._decoder.decode_body(self._exactly(size)), descriptors
        except OSError as error:
            # ECONNRESET: the other side died with something of ours unread (unix(7)).
            raise PipeClosed(str(error)) from None

    def _receive_header(self) -> tuple[bytes, list[int]]:
        room = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
        data, ancillary, _, _ = self.sock.recvmsg(pipe.HEADER_BYTES, room, socket.MSG_CMSG_CLOEXEC)
        if not data:
            raise PipeClosed("end of pipe")
        descriptors = array.array("i")
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(payload[: len(payload) - len(payload) % descriptors.itemsize])
        if len(data) < pipe.HEADER_BYTES:
            data += self._exactly(pipe.HEADER_BYTES - len(data))
        return data, list(descriptors)

    def _exactly(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            data = self.sock.recv(min(size - len(parts), 1 << 20))
            if not data:
                raise PipeClosed("end of pipe inside a frame")
            parts += data
        return bytes(parts)
