"""Length-prefixed framing: four bytes of big-endian length, then one MessagePack frame. Pure: bytes in, frames out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

from protocol import frames
from protocol.errors import ProtocolViolation

#: Largest frame body; an output may have 4 MiB of JSON, which leaves room for its envelope.
MAX_FRAME_BYTES = 8 * 1024 * 1024
HEADER_BYTES = 4

_ENCODER = msgspec.msgpack.Encoder()
T = TypeVar("T")


def encode(frame: frames.Frame) -> bytes:
    """Return the wire bytes of ``frame``. Raises ProtocolViolation if its body is above MAX_FRAME_BYTES."""
    body = _ENCODER.encode(frame)
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolViolation(f"frame of {len(body)} bytes is above the bound of {MAX_FRAME_BYTES}")
    return len(body).to_bytes(HEADER_BYTES, "big") + body


class Decoder(Generic[T]):
    """Incremental decoder. Memory is bounded by one frame plus what was fed at once."""

    def __init__(self, kinds: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kinds)
        self._buffer = bytearray()

    @property
    def pending_bytes(self) -> int:
        """Bytes of an unfinished frame; not zero at the end of the pipe means a truncated one."""
        return len(self._buffer)

    def feed(self, data: bytes | memoryview) -> Iterator[T]:
        """Yield each frame completed by ``data``. Raises ProtocolViolation on anything that is no frame."""
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= HEADER_BYTES:
                end = start + HEADER_BYTES
                size = int.from_bytes(self._buffer[start:end], "big")
                if not 0 < size <= MAX_FRAME_BYTES:
                    raise ProtocolViolation(f"frame length {size} is outside 1..{MAX_FRAME_BYTES}")
                if len(self._buffer) - end < size:
                    break
                start = end + size
                yield self._decode(bytes(self._buffer[end:start]))
        finally:
            del self._buffer[:start]

    def decode_body(self, body: bytes) -> T:
        """Decode one frame's body. Raises ProtocolViolation."""
        return self._decode(body)

    def _decode(self, body: bytes) -> T:
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise ProtocolViolation(f"not a frame: {type(error).__name__}: {str(error)[:200]}") from None
