"""Framing and frames: what a hostile worker may send, and what it may not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import frames
from protocol.errors import ProtocolViolation
from protocol.pipe import HEADER_BYTES, MAX_FRAME_BYTES, Decoder, encode

SAMPLES: list[frames.Frame] = [
    frames.Hello(version=frames.PROTOCOL_VERSION, pid=7),
    frames.Chunk(data=b'{"content":"a","channel":"messages"}'),
    frames.Result(output=b"{}", task_ids=("t1", "t2")),
    frames.Failure(error_type="ValueError", dispatched=True, detail="line"),
    frames.CancelAnswer(closing=False),
]


def decoder() -> Decoder[Any]:
    """A decoder of what workers may send."""
    return Decoder(frames.FromWorker)


def framed(body: bytes, size: int | None = None) -> bytes:
    """A frame with that body, under a true or a false length."""
    return (len(body) if size is None else size).to_bytes(HEADER_BYTES, "big") + body


def packed(document: Any) -> bytes:
    """A frame of any MessagePack document."""
    return framed(msgspec.msgpack.encode(document))


@given(st.lists(st.sampled_from(SAMPLES), max_size=8), st.data())
def test_frames_survive_any_cut_of_the_bytes(sent: list[frames.Frame], data: st.DataObject) -> None:
    wire = b"".join(encode(frame) for frame in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=12)))
    reader, got = decoder(), []
    for start, end in zip([0, *cuts], [*cuts, len(wire)], strict=True):
        got += list(reader.feed(wire[start:end]))
    assert got == sent
    assert reader.pending_bytes == 0


@pytest.mark.parametrize("frame", SAMPLES)
def test_a_truncated_frame_is_pending_and_never_delivered(frame: frames.Frame) -> None:
    wire = encode(frame)
    for length in range(1, len(wire)):
        reader = decoder()
        assert list(reader.feed(wire[:length])) == []
        assert reader.pending_bytes == length


@pytest.mark.parametrize("size", [0, MAX_FRAME_BYTES + 1, 2**31, 2**32 - 1])
def test_a_length_out_of_bounds_is_refused_before_its_body(size: int) -> None:
    with pytest.raises(ProtocolViolation, match=str(size)):
        list(decoder().feed(framed(b"", size)))


def test_the_largest_frame_passes_and_one_more_byte_does_not() -> None:
    overhead = len(encode(frames.Chunk(data=bytes(100_000)))) - HEADER_BYTES - 100_000
    largest = frames.Chunk(data=bytes(MAX_FRAME_BYTES - overhead))
    wire = encode(largest)
    assert len(wire) == HEADER_BYTES + MAX_FRAME_BYTES
    assert list(decoder().feed(wire)) == [largest]
    with pytest.raises(ProtocolViolation, match=str(MAX_FRAME_BYTES)):
        encode(frames.Chunk(data=bytes(MAX_FRAME_BYTES - overhead + 1)))


def test_good_frames_before_a_bad_one_are_delivered() -> None:
    reader = decoder()
    feed = reader.feed(encode(SAMPLES[0]) + framed(b"\xc1"))
    assert next(feed) == SAMPLES[0]
    with pytest.raises(ProtocolViolation):
        next(feed)


HOSTILE = {
    "a print": b"Tracing Preference Saved\n",
    "garbage": framed(b"\xc1\xff\x00"),
    "a number": packed(1),
    "nothing": packed(None),
    "an array": packed(["hello", 1, 2]),
    "no tag": packed({"version": 1, "pid": 2}),
    "unknown tag": packed({"type": "launch", "launch_id": 1}),
    "tag of a wrong type": packed({"type": 1}),
    "unknown field": packed({"type": "hello", "version": 1, "pid": 2, "more": 3}),
    "missing field": packed({"type": "hello", "version": 1}),
    "wrong type": packed({"type": "hello", "version": 1, "pid": "2"}),
    "pid zero": packed({"type": "hello", "version": 1, "pid": 0}),
    "pid negative": packed({"type": "hello", "version": 1, "pid": -1}),
    "pid above 31 bits": packed({"type": "hello", "version": 1, "pid": 2**31}),
    "an integer above 53 bits": packed({"type": "hello", "version": 2**53, "pid": 1}),
    "an integer above 63 bits": packed({"type": "hello", "version": 2**64 - 1, "pid": 1}),
    "a boolean for a number": packed({"type": "hello", "version": True, "pid": 1}),
    "a long name": packed({"type": "failure", "error_type": "x" * 513, "dispatched": True}),
    "text that is not UTF-8": framed(b"\x82\xa4type\xa5hello\xa7version\xa2\xff\xfe"),
    "trailing bytes": framed(msgspec.msgpack.encode({"type": "cancel_answer", "closing": True}) + b"\x00"),
    "an array of four thousand million": framed(b"\xdd\xff\xff\xff\xff"),
    "a map of four thousand million": framed(b"\xdf\xff\xff\xff\xff"),
    "bytes of four thousand million": framed(b"\x82\xa4type\xa5chunk\xa4data\xc6\xff\xff\xff\xff"),
    "deep nesting": framed(b"\x91" * 900_000 + b"\xc0"),
    "deep nesting in an unknown field": framed(b"\x83\xa4type\xa5hello\xa4more" + b"\x91" * 900_000 + b"\xc0"),
}


@pytest.mark.parametrize("wire", HOSTILE.values(), ids=HOSTILE)
def test_what_is_no_frame_is_refused(wire: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        list(decoder().feed(wire))


@given(st.binary(max_size=200))
def test_random_bytes_are_a_violation_or_nothing_more(body: bytes) -> None:
    reader = decoder()
    try:
        got = list(reader.feed(framed(body)))
    except ProtocolViolation:
        return
    assert all(isinstance(frame, frames.Frame) for frame in got)


def test_each_direction_has_its_own_frames() -> None:
    with pytest.raises(ProtocolViolation):
        list(Decoder[Any](frames.ToWorker).feed(encode(SAMPLES[0])))
    with pytest.raises(ProtocolViolation):
        list(decoder().feed(encode(frames.Cancel())))


@pytest.mark.parametrize(
    ("name", "length", "fine"),
    [("error_type", 512, True), ("error_type", 513, False), ("detail", 65_536, True), ("detail", 65_537, False)],
)
def test_text_has_its_bound(name: str, length: int, fine: bool) -> None:
    wire = packed({"type": "failure", "error_type": "E", "dispatched": False} | {name: "x" * length})
    if fine:
        (frame,) = decoder().feed(wire)
        assert len(getattr(frame, name)) == length
    else:
        with pytest.raises(ProtocolViolation):
            list(decoder().feed(wire))
