"""The feed of committed events: bounded tail, waiting readers, frames encoded once, large data omitted (case 42)."""

from __future__ import annotations

import asyncio
import hashlib
import json

from supervisor.events import SSE_DATA_BYTES, TAIL_BYTES, CommittedEvent, Feed


def _items(count: int, size: int = 10) -> list[tuple[str, bytes]]:
    return [("chunk", b'{"x":"' + b"y" * size + b'"}') for _ in range(count)]


def test_a_reader_gets_what_is_at_its_cursor_and_after() -> None:
    feed = Feed()
    feed.publish(_items(3))
    assert [event.sequence for event in feed.since(1) or []] == [1, 2]
    assert feed.since(3) == []


def test_a_reader_behind_the_tail_is_sent_to_the_journal() -> None:
    feed = Feed()
    feed.publish(_items(12, TAIL_BYTES // 8))
    assert feed.since(0) is None
    tail = feed.since(feed.count - 1)
    assert tail is not None
    assert len(tail) == 1


def test_events_of_the_process_before_us_are_in_the_journal_only() -> None:
    feed = Feed(first=5)
    assert feed.since(2) is None
    assert feed.since(5) == []


async def test_a_reader_waits_for_the_next_event_and_for_the_end() -> None:
    feed = Feed()
    waiting = asyncio.create_task(feed.wait(0))
    await asyncio.sleep(0)
    assert not waiting.done()
    feed.publish(_items(1))
    await asyncio.wait_for(waiting, 5)
    at_end = asyncio.create_task(feed.wait(1))
    await asyncio.sleep(0)
    feed.end()
    await asyncio.wait_for(at_end, 5)


def test_a_frame_is_encoded_once_for_all_readers() -> None:
    event = CommittedEvent(0, "chunk", b'{"a":1}')
    assert event.sse("act") is event.sse("act")
    assert event.sse("act") == b'id: 0\nevent: chunk\ndata: {"event":"chunk","sequence":0,"data":{"a":1}}\n\n'


def test_data_above_the_frame_bound_is_named_and_not_sent() -> None:
    data = b'{"raw":"' + b"z" * SSE_DATA_BYTES + b'"}'
    frame = CommittedEvent(4, "completed", data).sse("act")
    assert len(frame) < 1 << 20
    document = json.loads(frame.split(b"data: ", 1)[1])
    assert document["data"] == {
        "status": "completed",
        "output_omitted": True,
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "location": "/jobs/act/events?cursor=4",
    }
