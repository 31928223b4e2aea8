"""Cases 36 to 40, 44 and 47 to 55: execution and events. The other cases about streams are in test_cases_streams."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.crash.trial import read_journal
from tests.crews.fake_crews import LLM_ANSWER
from tests.support import procs, world
from tests.support.cases import (
    REGISTRY,
    RESPOND_ASYNC,
    SLACK,
    WAIT_S,
    events_of,
    names_of,
    wait_for_phase,
    wait_for_status,
    witnessed,
)
from tests.support.client import Client, Stream
from tests.support.gates import Gate
from tests.support.pulse import Pulse, percentile
from tests.support.server import Server, ServerFactory

#: A silent stream has a comment after this many seconds.
KEEPALIVE_S = 15.0
FACTORY_BLOCK_S = 2.0
HEALTH_P99_MS = 50.0
ADMISSION_MS = 100.0
DEAD_WITHIN_S = 2.0
SETTINGS: dict[str, Any] = {
    "max_concurrency": 10,
    "linger_s": 0.2,
    "grace_s": 0.1,
    "stream_checkpoint_events": 2,
    "crews": {"narrow": {"max_concurrency": 1}},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for the module."""
    directory = tmp_path_factory.mktemp("server")
    environment: dict[str, str | None] = {
        "WITNESS_FILE": str(directory / "witness"),
        "FACTORY_BLOCK_S": str(FACTORY_BLOCK_S),
    }
    with Server(directory, registry=REGISTRY, settings=SETTINGS, environment=environment) as running:
        yield running


class Silence:
    """A job that says nothing, and a reader of it."""

    def __init__(self, server: Server, directory: Path, pool: ThreadPoolExecutor) -> None:
        self.gate = Gate(directory, "silent")
        self.client = server.client(timeout_s=KEEPALIVE_S * SLACK)
        self.stream: Stream = self.client.stream("silent", "turnstile", input=self.gate.input)
        self.began = self.stream.next().received_ns
        self._rest: Future[Any] = pool.submit(self._read)

    def _read(self) -> tuple[float, list[str]]:
        """Seconds to the first comment, and the names of all events; the job is released in between."""
        # The comment is no event, so the response is read here line by line until it comes.
        while not (line := self.stream._response.readline()).startswith(b":"):
            assert line, "the stream ended without a comment"
        silent_s = (time.monotonic_ns() - self.began) / 1e9
        self.gate.release()
        return silent_s, [event.event for event in self.stream.rest()]

    def result(self) -> tuple[float, list[str]]:
        """Wait for the reader."""
        found: tuple[float, list[str]] = self._rest.result(KEEPALIVE_S * SLACK)
        return found


@pytest.fixture(scope="module", autouse=True)
def silence(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Silence]:
    """Silent from the first test of the module on; the last one looks at it."""
    with ThreadPoolExecutor(1) as pool:
        silence = Silence(server, tmp_path_factory.mktemp("silence"), pool)
        yield silence
        silence.gate.release()


@pytest.mark.case(36)
def test_events_come_in_order_from_0(client: Client) -> None:
    with client.stream("order", "streaming") as stream:
        events = stream.rest()
    assert [(event.event, event.sequence) for event in events] == [
        ("started", 0), ("chunk", 1), ("chunk", 2), ("completed", 3),
    ]  # fmt: skip
    assert events[0].data == {"status": "running", "operation": "run"}
    assert [event.data["content"] for event in events[1:3]] == ["chunk 0", "chunk 1"]


OPERATIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "run": ({"n": 1}, LLM_ANSWER),
    "batch_run": ({"inputs": [{"n": 1}]}, {"results": [LLM_ANSWER | {"raw": "{'n': 1}"}], "count": 1}),
    "replay": ({"task_id": "t-1"}, LLM_ANSWER | {"raw": "replayed"}),
    "train": (
        {"n_iterations": 2, "artifact_name": "every.pkl"},
        {"status": "completed", "artifact_name": "every.pkl", "n_iterations": 2},
    ),
    "test": (
        {"n_iterations": 1, "eval_llm": "judge"},
        {"status": "completed", "n_iterations": 1, "eval_llm": "judge"},
    ),
    "knowledge_query": ({"query": ["bees"]}, {"results": [{"content": "bees"}]}),
    "memory_reset": ({"command_type": "all"}, {"status": "completed", "command_type": "all"}),
}


@pytest.mark.case(37)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_starts_completes_and_answers(server: Server, client: Client, operation: str) -> None:
    given, expected = OPERATIONS[operation]
    output = client.start(f"every-{operation}", "witness", operation=operation, input=given).expect(200)
    events = events_of(client, f"every-{operation}")
    assert (events[0]["event"], events[-1]["event"]) == ("started", "completed")
    assert events[0]["data"]["operation"] == operation
    assert events[-1]["data"] == output
    assert expected.items() <= output.items()
    if operation == "train":
        assert (server.directory / "training" / "every.pkl").read_bytes() == b"trained 2 times"


ARGUMENTS: list[tuple[str, dict[str, Any], list[Any]]] = [
    ("knowledge_query", {"query": ["q1"]}, ["query_knowledge", ["q1"], 3, 0.35]),
    (
        "knowledge_query",
        {"query": ["q2"], "results_limit": 7, "score_threshold": 1},
        ["query_knowledge", ["q2"], 7, 1],
    ),
    ("replay", {"task_id": "t-2"}, ["replay", "t-2", None]),
    ("replay", {"task_id": "t-3", "inputs": {"a": 1}}, ["replay", "t-3", {"a": 1}]),
    ("test", {"n_iterations": 3, "eval_llm": "judge", "inputs": {"b": 2}}, ["test", 3, "the judge", {"b": 2}]),
    ("test", {"n_iterations": 4, "eval_llm": "a-model"}, ["test", 4, "a-model", None]),
    ("memory_reset", {"command_type": "knowledge"}, ["reset_memories", "knowledge"]),
]


@pytest.mark.case(38)
@pytest.mark.parametrize(("operation", "given", "call"), ARGUMENTS)
def test_the_crew_gets_the_arguments_as_given_or_the_defaults(
    server: Server, client: Client, operation: str, given: dict[str, Any], call: list[Any]
) -> None:
    action_id = f"arguments-{ARGUMENTS.index((operation, given, call))}"
    client.start(action_id, "witness", operation=operation, input=given).expect(200)
    assert witnessed(server.directory / "witness", lambda words: words == call) == [call]


@pytest.mark.case(39)
@pytest.mark.parametrize(
    ("crew_id", "method"),
    [
        ("batch_all", "kickoff_for_each_async"),
        ("batch_sync", "kickoff_for_each"),
        ("batch_last", "akickoff_for_each"),
    ],
)
def test_a_batch_answers_in_order_by_the_best_method_that_the_crew_has(
    client: Client, crew_id: str, method: str
) -> None:
    given = {"inputs": [{"n": number} for number in range(5)]}
    output = client.start(f"batch-{crew_id}", crew_id, operation="batch_run", input=given).expect(200)
    assert [result["raw"] for result in output["results"]] == [f"{method} {number}" for number in range(5)]
    assert output["count"] == 5


@pytest.mark.case(39)
def test_a_batch_of_a_crew_without_a_batch_method_fails_for_certain(client: Client) -> None:
    """B20: nothing was dispatched, so nothing is uncertain."""
    assert client.start("batch-none", "batch_of_one", operation="batch_run", input={"inputs": [{}]}).status == 502
    last = events_of(client, "batch-none")[-1]["data"]
    assert (last["status"], last["uncertain_outcome"]) == ("failed", False)


@pytest.mark.case(40)
def test_every_event_is_durable_before_a_reader_sees_it(server: Server, client: Client, tmp_path: Path) -> None:
    """B18. The reference writes every second chunk here (``stream_checkpoint_events`` 2), and shows them before."""
    with client.stream("durable", "stepping", input={"chunks": 2, "steps": str(tmp_path / "step")}) as stream:
        for number, name in enumerate(["started", "chunk", "chunk", "completed"]):
            event = stream.next()
            stored = read_journal(server.state_file)["durable"]
            assert (event.event, event.sequence) == (name, number)
            assert stored.events[number] == (number, name, event.data)
            assert (stored.status == "completed") is (name == "completed"), "a status without its event, or before it"
            (tmp_path / f"step{number}").touch()
    assert read_journal(server.state_file)["durable"].event_count == 4


@pytest.mark.case(47)
def test_the_text_of_an_exception_is_shown_and_kept_nowhere_but_in_the_jobs_own_log(
    server: Server, client: Client
) -> None:
    blocked = client.start("raises", "failing")
    assert blocked.expect(502)["code"] == "action_failed"
    with client.stream("raises-streamed", "failing") as stream:
        last = stream.rest()[-1]
    assert (last.event, last.data["error_type"], last.data["uncertain_outcome"]) == ("failed", "ValueError", True)
    assert [event["data"]["status"] for event in events_of(client, "raises")] == ["running", "failed"]
    view = client.get("raises").body
    journal = b"".join(path.read_bytes() for path in server.state_file.parent.glob(f"{server.state_file.name}*"))
    log = server.log_file.read_bytes()
    for kept in (blocked.body, json.dumps(last.data).encode(), client.events("raises").body, view, journal, log):
        assert b"the secret of the crew" not in kept
    assert b"ValueError" in journal, "this is the place where the text would be"


@pytest.mark.case(48)
def test_the_failure_of_a_read_is_certain(client: Client) -> None:
    given = {"query": ["x"]}
    client.start("read-fails", "failing", operation="knowledge_query", input=given).expect(502)
    last = events_of(client, "read-fails")[-1]["data"]
    assert (last["status"], last["error_type"], last["uncertain_outcome"]) == ("failed", "LookupError", False)


@pytest.mark.case(49)
def test_a_timeout_is_final_and_leaves_nothing_alive(client: Client, tmp_path: Path) -> None:
    timeout_ms, beats = 1_500, tmp_path / "beats"
    given = {"task_id": "t", "inputs": {"heartbeat": str(beats)}}
    with client.stream("overdue", "beating", operation="replay", input=given, timeout_ms=timeout_ms) as stream:
        work = world.observe(client, "overdue", beats)
        last = stream.rest()[-1]
    view = client.get("overdue").expect(200)
    stop = last.data["stop"]
    assert (last.event, last.data["error_type"], last.data["uncertain_outcome"]) == ("failed", "TimeoutError", True)
    assert world.violations(work, stop) == []
    assert (stop["confirmed"], stop["worker"]["pid"], stop["worker"]["exit_signal"]) == (True, work.pid, "SIGKILL")
    assert stop["confirmed_at"] - view["started_at"] - timeout_ms / 1000 < DEAD_WITHIN_S * SLACK
    assert (view["status"], view["stop"]) == ("failed", stop)
    assert client.get("overdue").expect(200) == view
    assert names_of(client, "overdue") == ["started", "failed"]


@pytest.mark.case(50)
def test_a_caller_that_waits_gets_504_once_the_job_has_ended_and_a_repeat_502(client: Client) -> None:
    """B10: the caller's clock and the job's are one."""
    began = time.monotonic()
    answer = client.start("one-clock", "sleeper", timeout_ms=700)
    took_s = time.monotonic() - began
    view = client.get("one-clock").expect(200)
    assert answer.expect(504)["code"] == "action_timed_out"
    assert (view["status"], view["phase"], view["stop"]["confirmed"]) == ("failed", "done", True)
    assert events_of(client, "one-clock")[-1]["data"]["error_type"] == "TimeoutError"
    assert 0.7 <= took_s < 0.7 * SLACK + 1
    assert client.start("one-clock", "sleeper", timeout_ms=700).expect(502)["code"] == "action_failed"
    assert client.get("one-clock").expect(200) == view


@pytest.mark.case(51)
def test_a_job_that_waits_for_a_slot_is_running_on_the_wire_and_its_clock_stands(
    client: Client, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    timeout_ms = 700
    holder = Gate(tmp_path, "holder")
    held = pool.submit(client.start, "holds", "narrow", input=holder.input)
    holder.wait("began")
    free = {"began": str(tmp_path / "b"), "release": str(tmp_path / "holder-began")}
    waiting = pool.submit(client.start, "waits", "narrow", input=free, timeout_ms=timeout_ms)
    view = wait_for_phase(client, "waits", "queued")
    assert (view["status"], view["event_count"], view["worker"]) == ("running", 0, None)
    assert client.health().expect(200)["queued"] == 1
    assert client.events("waits").expect(200)["events"] == []
    over = view["admitted_at"] + 1.5 * timeout_ms / 1000
    procs.wait_until(lambda: time.time() > over, WAIT_S, "its timeout would be over")
    assert client.get("waits").expect(200)["phase"] == "queued"
    holder.release()
    held.result().expect(200)
    waiting.result().expect(200)


@pytest.mark.case(51)
def test_a_full_queue_refuses_before_admission_and_by_default_only_the_journal_can_be_full(
    start_server: ServerFactory, tmp_path: Path
) -> None:
    """B9: the queue has a bound; a host that sends what the journal takes never meets it."""
    gate = Gate(tmp_path, "gate")
    for settings, refusal in (
        ({"max_queue": 1, "max_retained_runs": 9}, (503, "not_accepting")),
        ({"max_retained_runs": 3}, (507, "journal_full")),
    ):
        server = start_server(registry=REGISTRY, settings={"max_concurrency": 1, **settings})
        client = server.client()
        admitted = 2 if "max_queue" in settings else 3
        for number in range(admitted):
            client.start(f"a-{number}", "turnstile", input=gate.input, headers=RESPOND_ASYNC).expect(202)
            if number == 0:
                wait_for_phase(client, "a-0", "running")
        refused = client.start("one-more", "turnstile", input=gate.input)
        assert (refused.status, refused.json()["code"]) == refusal
        assert int(refused.headers["retry-after"]) > 0
        assert client.get("one-more").status == 404
        assert client.health().expect(200)["retained_runs"] == admitted
        assert client.start("a-0", "turnstile", input=gate.input, headers=RESPOND_ASYNC).status == 202


@pytest.mark.case(52)
def test_a_job_may_have_its_bound_of_events_and_no_more(start_server: ServerFactory) -> None:
    client = start_server(registry=REGISTRY, settings={"max_events_per_run": 2}).client()
    assert client.start("too-many", "streaming").status == 502
    events = events_of(client, "too-many")
    assert [event["event"] for event in events] == ["started", "failed"]
    assert (events[1]["data"]["error_type"], events[1]["data"]["uncertain_outcome"]) == ("RegistryError", True)
    assert client.start("just-enough", "instant").status == 200


@pytest.mark.case(52)
def test_an_output_above_the_event_bound_completes(client: Client) -> None:
    """B4: outputs have a bound of their own, 4 MiB."""
    assert len(client.start("big", "big_output", input={"bytes": 1_000_000}).expect(200)["raw"]) == 1_000_000
    assert client.start("too-big", "big_output", input={"bytes": 4_194_304}).status == 502


@pytest.mark.case(53)
def test_health_does_not_wait_for_a_factory_that_blocks(
    server: Server, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    """B7: the factory runs in the worker."""
    with Pulse(server) as pulse:
        client.start("blocks", "factory_blocks").expect(200)
        latencies = pulse.stop()
    view = client.get("blocks").expect(200)
    assert view["ended_at"] - view["started_at"] >= FACTORY_BLOCK_S
    p99 = percentile(latencies, 0.99)
    with capsys.disabled():
        print(f"\ncase 53: /health p99 {p99:.2f} ms of {len(latencies)} while a factory blocks")  # noqa: T201
    assert p99 < HEALTH_P99_MS * SLACK


@pytest.mark.case(54)
def test_jobs_that_hang_and_time_out_keep_nobody_waiting(
    client: Client, pool: ThreadPoolExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    """B3: no provider code in the supervisor, and a writer thread of the journal's own."""
    given = {"task_id": "t"}
    hung = [
        pool.submit(client.start, f"hung-{n}", "sleeper", operation="replay", input=given, timeout_ms=1_500)
        for n in range(6)
    ]
    for number in range(6):
        wait_for_phase(client, f"hung-{number}", "running")
    took_ms = {}
    for when in ("while six hang", "after they timed out"):
        began = time.monotonic()
        client.start(f"next {when}".replace(" ", "-"), "instant", headers=RESPOND_ASYNC).expect(202)
        took_ms[when] = (time.monotonic() - began) * 1000
        if when == "while six hang":
            assert not any(call.done() for call in hung)
            assert [call.result().status for call in hung] == [504] * 6
    with capsys.disabled():
        print("\ncase 54: admission in " + ", ".join(f"{ms:.1f} ms {when}" for when, ms in took_ms.items()))  # noqa: T201
    assert max(took_ms.values()) < ADMISSION_MS * SLACK


@pytest.mark.case(55)
@pytest.mark.parametrize("path", ["/jobs", "/jobs/stream"])
def test_a_caller_that_hangs_up_stops_nothing(server: Server, client: Client, path: str, tmp_path: Path) -> None:
    action_id, gate = f"hangs-up{path.replace('/', '-')}", Gate(tmp_path, "gate")
    body = {"crew_id": "turnstile", "action_id": action_id, "input": gate.input}
    connection = http.client.HTTPConnection(server.host, server.port)
    headers = {"Authorization": f"Bearer {server.token}", "Idempotency-Key": f"key-{action_id}"}
    headers |= {"Content-Type": "application/json"}
    connection.request("POST", path, json.dumps(body), headers)
    gate.wait("began")
    connection.close()
    gate.release()
    assert wait_for_status(client, action_id) == "completed"
    again = client.start(action_id, "turnstile", input=gate.input, operation=None)
    assert again.expect(200) == client.get(action_id).expect(200)["output"]


@pytest.mark.case(44)
def test_a_silent_stream_has_a_comment_every_15_seconds(silence: Silence) -> None:
    """B23. The stream was opened when the module began."""
    silent_s, names = silence.result()
    assert KEEPALIVE_S - 1 < silent_s < KEEPALIVE_S * SLACK
    assert names == ["started", "completed"]
