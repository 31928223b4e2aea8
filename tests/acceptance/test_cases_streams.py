"""Cases 41 to 46 but for 44: what a stream of events, and a slice of them, looks like."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cases import REGISTRY, names_of, strict
from tests.support.client import Client
from tests.support.server import Server
from tests.support.strict_stream import MAX_FRAME_BYTES, StreamReader


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for the module."""
    with Server(tmp_path_factory.mktemp("server"), registry=REGISTRY) as running:
        yield running


def raw_stream(client: Client, action_id: str, accept: str = "text/event-stream") -> tuple[dict[str, str], bytes]:
    """Headers and body of an events stream, as they came."""
    answer = client.request("GET", f"/jobs/{action_id}/events", headers={"Accept": accept})
    assert answer.status == 200
    return answer.headers, answer.body


@pytest.mark.case(41)
def test_a_frame_has_its_name_and_one_line_of_data(client: Client) -> None:
    client.start("frames", "echo", input={"text": "é\n\u2028😀"}).expect(200)
    headers, body = raw_stream(client, "frames")
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert (headers["cache-control"], headers["x-accel-buffering"]) == ("no-cache", "no")
    assert (headers["transfer-encoding"], headers.get("content-length")) == ("chunked", None)
    assert body.isascii()
    frames = [frame.split(b"\n") for frame in body.split(b"\n\n") if b"data:" in frame]
    assert len(frames) == 2
    for frame in frames:
        (name,) = (line[7:] for line in frame if line.startswith(b"event: "))
        (data,) = (line[6:] for line in frame if line.startswith(b"data: "))
        document = json.loads(data)
        assert list(document) == ["event", "sequence", "data"]
        assert document["event"] == name.decode()
    reader = StreamReader()
    assert [event.event for event in reader.feed(body)] == ["started", "completed"]
    assert reader.events[-1].data["echo"] == {"text": "é\n\u2028😀"}


@pytest.mark.case(42)
def test_many_frames_at_once_are_fine_and_none_is_above_a_mebibyte(client: Client) -> None:
    client.start("many", "flood", input={"chunks": 15, "bytes": 100_000}).expect(200)
    _, body = raw_stream(client, "many")
    assert len(body) > MAX_FRAME_BYTES
    assert len(list(StreamReader().feed(body))) == 17


@pytest.mark.case(42)
def test_data_above_a_frame_is_left_out_of_the_stream_and_whole_in_json(server: Server, client: Client) -> None:
    """B4: an output above the event bound completes. The stream says where the whole of it is."""
    given = {"bytes": 2 * MAX_FRAME_BYTES}
    output = client.start("large", "big_output", input=given).expect(200)
    streamed = strict(server).invoke("run", "big_output", "large", given)
    assert streamed.kind == "completed"
    assert (streamed.output["status"], streamed.output["output_omitted"]) == ("completed", True)
    assert streamed.output["bytes"] > given["bytes"]
    whole = client.request("GET", streamed.output["location"]).expect(200)["events"][0]["data"]
    assert whole == output
    assert len(output["raw"]) == given["bytes"]


@pytest.mark.case(43)
def test_streams_begin_at_0_or_at_the_cursor_and_skip_nothing(server: Server, client: Client) -> None:
    connector = strict(server)
    live = connector.invoke("run", "streaming", "sequence", {"chunks": 9}).events
    assert [event.sequence for event in live] == list(range(11))
    assert connector.invoke("run", "streaming", "sequence", {"chunks": 9}).events == live
    for cursor in range(11):
        with connector.follow("sequence", cursor) as stream:
            assert stream.result().events == live[cursor:]
    with client.follow("sequence", cursor=11, complete=False) as stream:
        assert stream.rest() == []


@pytest.mark.case(43)
def test_a_stream_taken_up_in_the_middle_of_a_job_goes_on_at_its_cursor(
    server: Server, client: Client, tmp_path: Path
) -> None:
    connector, given = strict(server), {"chunks": 3, "steps": str(tmp_path / "step")}
    with connector.open("run", "stepping", "resumed", given) as first:
        (tmp_path / "step0").touch()
        seen = [first.until("started"), first.until("chunk")]
        with connector.follow("resumed", 1) as second, connector.follow("resumed", 2) as third:
            for number in (1, 2, 3):
                (tmp_path / f"step{number}").touch()
            whole = first.result().events
            assert whole[:2] == seen
            assert second.result().events == whole[1:]
            assert third.result().events == whole[2:]


@pytest.mark.case(45)
def test_a_slice_begins_at_its_cursor(client: Client) -> None:
    client.start("slice", "streaming").expect(200)
    whole = client.events("slice").expect(200)
    assert (whole["action_id"], whole["cursor"], whole["next_cursor"], whole["status"]) == ("slice", 0, 4, "completed")
    assert [list(event) for event in whole["events"]] == [["event", "sequence", "data"]] * 4
    part = client.events("slice", cursor=1).expect(200)
    assert (part["cursor"], part["next_cursor"], part["events"]) == (1, 4, whole["events"][1:])
    end = client.events("slice", cursor=4).expect(200)
    assert (end["cursor"], end["next_cursor"], end["events"]) == (4, 4, [])
    for cursor in ("5", "-1", "99999999999999999999"):
        assert client.request("GET", f"/jobs/slice/events?cursor={cursor}").status == 416
    for cursor in ("x", "1.0", ""):
        assert client.request("GET", f"/jobs/slice/events?cursor={cursor}").status == 422
    assert client.request("GET", "/jobs/slice/events?cursor=x&cursor=1").expect(200) == part


@pytest.mark.case(46)
@pytest.mark.parametrize("accept", ["text/event-stream", "text/plain, Text/Event-Stream;q=0.1", "TEXT/EVENT-STREAM "])
def test_events_are_streamed_where_the_header_has_it_anywhere(client: Client, accept: str) -> None:
    action_id = f"accept-{len(accept)}"
    client.start(action_id, "streaming").expect(200)
    headers, body = raw_stream(client, action_id, accept)
    assert headers["content-type"].startswith("text/event-stream")
    assert [event.event for event in StreamReader().feed(body)] == names_of(client, action_id)
    for other in ("application/json", "*/*", "text/*"):
        assert raw_stream(client, action_id, other)[0]["content-type"].startswith("application/json")
