"""A host changes one URL: the server is started on the runs.json that the reference left at its state file."""

from __future__ import annotations

from typing import Any

import pytest

from protocol import canonical
from tests.support.client import Answer
from tests.support.reference import encoded, event, record, running, write
from tests.support.server import Server, ServerFactory

CREW = "instant"


def request_hash(action_id: str) -> str:
    """The digest of what ``Client.start`` sends by default."""
    return canonical.request_hash(
        action_id=action_id,
        crew_id=CREW,
        operation="run",
        input={},
        timeout_ms=None,
        idempotency_key=f"key-{action_id}",
    )


def old(action_id: str, **changes: Any) -> dict[str, Any]:
    return record(action_id, crew_id=CREW, input_hash=request_hash(action_id), **changes)


@pytest.fixture
def server(make_server: ServerFactory) -> Server:
    """A server that has not been started; its journal's path is free."""
    return make_server(registry="tests.crews.fake_crews:CREWS")


@pytest.mark.case(67, 68, 70)
def test_the_server_answers_from_what_the_reference_left(server: Server) -> None:
    failed = [event("failed", 0, status="failed", error_type="ValueError", uncertain_outcome=True)]
    left = [
        old("done"),
        old("seed", events=[event("completed", 0, status="completed")]),
        old("broken", status="failed", output=None, events=failed),
        old("gone", status="cancelled", output=None, events=[event("cancelled", 0, status="cancelled")]),
        running("cut", crew_id=CREW, input_hash=request_hash("cut")),
        record("other", crew_id="no-longer-here", input_hash="qualification-seed"),
    ]
    write(server.state_file, left)
    server.start()
    client = server.client()
    assert server.state_file.with_name("journal.db.reference").read_bytes() == encoded(left)

    for item in left[:4] + left[5:]:
        view = client.get(item["action_id"]).expect(200)
        expected = {name: item[name] for name in ("action_id", "crew_id", "operation", "status", "output")}
        assert {name: view[name] for name in expected} == expected
        assert view["event_count"] == len(item["events"])
        assert client.events(item["action_id"]).expect(200)["events"] == item["events"]
    assert [(one.event, one.data) for one in client.follow("done").rest()] == [
        (one["event"], one["data"]) for one in left[0]["events"]
    ]

    assert replayed(client.start("done", CREW)).expect(200) == left[0]["output"]
    assert replayed(client.start("seed", CREW)).expect(200) == left[1]["output"]
    client.start("broken", CREW).expect(502)
    client.start("gone", CREW).expect(409)
    client.start("done", CREW, input={"other": 1}).expect(409)

    before = client.events("cut").expect(200)
    *events, fence = before["events"]
    assert events == left[4]["events"]
    assert (fence["event"], fence["sequence"], fence["data"]["uncertain_outcome"]) == ("failed", 2, True)
    client.start("cut", CREW).expect(502)
    assert client.cancel("cut", CREW).expect(200)["status"] == "failed"
    assert client.events("cut").expect(200) == before

    assert not [line for line in server.log_lines() if line.get("event") == "job_admitted"]
    server.restart()
    client = server.client()
    assert client.get("done").expect(200)["output"] == left[0]["output"]
    assert client.health().expect(200)["retained_runs"] == len(left)


def replayed(answer: Answer) -> Answer:
    assert answer.headers.get("idempotency-replayed") == "true"
    return answer


@pytest.mark.case(70)
def test_a_retained_limit_below_what_was_left_stops_new_work_only(server: Server) -> None:
    server.settings |= {"max_retained_runs": 2, "max_concurrency": 1}
    write(server.state_file, [old(f"a-{number}") for number in range(4)])
    client = server.start().client()
    client.start("a-3", CREW).expect(200)
    client.start("fresh", CREW).expect(507)


@pytest.mark.case(70)
def test_a_file_that_the_reference_would_refuse_stops_the_start(server: Server) -> None:
    content = [old("twice"), old("twice")]
    write(server.state_file, content)
    assert server.run_refused() == 3
    assert "'twice'" in server.wait_log("start_refused")["detail"]
    assert server.state_file.read_bytes() == encoded(content)
