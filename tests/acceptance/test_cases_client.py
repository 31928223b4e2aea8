"""Cases 76 to 79: the whole way of the host's connector, as a strict client of ours goes it (section 16)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support import pythons
from tests.support.cases import REGISTRY, RESPOND_ASYNC, events_of, strict, wait_for_phase
from tests.support.gates import Gate
from tests.support.server import Server, ServerFactory
from tests.support.strict_client import Result, StrictClient

OPERATIONS: dict[str, dict[str, Any]] = {
    "run": {"text": "é 😀", "number": 1.5},
    "batch_run": {"inputs": [{}, {}]},
    "replay": {"task_id": "t"},
    "train": {"n_iterations": 1, "artifact_name": "client.pkl"},
    "test": {"n_iterations": 1, "eval_llm": "judge"},
    "knowledge_query": {"query": ["q"]},
    "memory_reset": {"command_type": "all"},
}
TIMEOUT_MS = 400


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for the module, with a crew that takes every operation."""
    directory = tmp_path_factory.mktemp("server")
    environment: dict[str, str | None] = {"WITNESS_FILE": str(directory / "witness")}
    with Server(directory, registry=REGISTRY, environment=environment) as running:
        yield running


@pytest.mark.case(76)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_goes_the_whole_way_of_the_connector(server: Server, operation: str) -> None:
    """Through POST /jobs, and those that the host streams through POST /jobs/stream as well, with the same output."""
    connector, given, key = strict(server), OPERATIONS[operation], f"Schlüssel-{operation}"
    plain = connector.invoke(operation, "witness", f"act_{operation}", given, key=key, legacy=True)
    assert (plain.kind, type(plain.output)) == ("completed", dict)
    status = connector.status(f"act_{operation}")
    assert (status.output["status"], status.output["output"]) == ("completed", plain.output)
    streamed = connector.invoke(operation, "witness", f"act_{operation}", given, key=key)
    assert (streamed.kind, streamed.output) == ("completed", plain.output)
    with connector.follow(f"act_{operation}") as stream:
        assert [event.kind for event in stream] == ["progress", "done"]
    assert connector.ready({"witness"}, {*OPERATIONS, "status", "events", "cancel"})


def said(result: Result) -> tuple[str | None, str | None, bool, bool]:
    """Cause, category, retryable, uncertain."""
    assert result.kind == "failed"
    assert result.code is not None
    return result.code.removeprefix("connector.crewai."), result.category, result.retryable, result.uncertain


@pytest.mark.case(77)
def test_a_503_is_retryable_for_a_read_and_uncertain_for_a_mutation(
    start_server: ServerFactory, tmp_path: Path
) -> None:
    gate = Gate(tmp_path, "gate")
    server = start_server(registry=REGISTRY, settings={"max_concurrency": 1, "max_queue": 1})
    client, connector = server.client(), strict(server)
    for number, phase in enumerate(("running", "queued")):
        client.start(f"a-{number}", "turnstile", input=gate.input, headers=RESPOND_ASYNC).expect(202)
        wait_for_phase(client, f"a-{number}", phase)
    assert said(connector.invoke("knowledge_query", "sleeper", "act_1", {"query": ["q"]})) == (
        "remote_temporary", "temporary", True, False,
    )  # fmt: skip
    for operation in ("run", "memory_reset"):
        assert said(connector.invoke(operation, "sleeper", f"act_{operation}", OPERATIONS[operation])) == (
            "remote_temporary", "temporary", False, True,
        )  # fmt: skip
    assert client.health().expect(200)["retained_runs"] == 2, "in truth nothing of them was admitted"
    gate.release()


@pytest.mark.case(77)
def test_a_4xx_is_permanent_and_certain(server: Server, start_server: ServerFactory) -> None:
    connector = strict(server)
    connector.invoke("run", "witness", "act_first", {"n": 1})
    wrong_token = StrictClient(server.host, server.port, "another-token")
    limited = strict(start_server(registry=REGISTRY, settings={"allowed_operations": ["run"]}))
    rejected = ("remote_rejected", "permanent", False, False)
    refused = ("authentication", "auth", False, False)
    expected = [
        (connector.invoke("run", "nobody", "act_404"), rejected),
        (connector.invoke("run", "witness", "act_first", {"n": 2}), rejected),
        (connector.invoke("run", "witness", "act/422"), rejected),
        (connector.invoke("memory_reset", "witness", "act_422", {"command_type": "everything"}), rejected),
        (connector.status("act_none"), rejected),
        (connector.cancel("nobody", "act_first", action_id="act_cancel", key="k"), rejected),
        (wrong_token.invoke("run", "witness", "act_401"), refused),
        (wrong_token.invoke("knowledge_query", "witness", "act_401", {"query": ["q"]}), refused),
        (limited.invoke("memory_reset", "witness", "act_403", {"command_type": "all"}), refused),
    ]
    assert [said(result) for result, _ in expected] == [meant for _, meant in expected]


@pytest.mark.case(77)
def test_a_failed_action_is_no_failure_of_the_connection(server: Server) -> None:
    result = strict(server).invoke("run", "failing", "act_fails")
    assert said(result) == ("execution_failed", "connector", False, False)
    assert (result.details["status"], result.details["uncertain_outcome"]) == ("failed", True)


@pytest.mark.case(77)
def test_a_connection_that_breaks_is_uncertain_for_a_mutation_only(start_server: ServerFactory, tmp_path: Path) -> None:
    gate = Gate(tmp_path, "gate")
    server = start_server(registry=REGISTRY)
    connector = strict(server)
    with ThreadPoolExecutor(2) as pool:
        mutation = pool.submit(connector.invoke, "run", "turnstile", "act_run", gate.input)
        gate.wait("began")
        read = pool.submit(connector.invoke, "knowledge_query", "sleeper", "act_read", {"query": ["q"]})
        wait_for_phase(server.client(), "act_read", "running")
        server.kill()
        assert said(mutation.result()) == ("transport", "transport", False, True)
        assert said(read.result()) == ("transport", "transport", True, False)
    assert said(connector.invoke("run", "turnstile", "act_run", gate.input)) == (
        "transport", "transport", False, False,
    ), "a connect error: surely nothing was sent"  # fmt: skip


@pytest.mark.case(78)
def test_the_real_crew_answers_by_run_stream_and_batch(start_server: ServerFactory) -> None:
    server = start_server(registry="tests.crews.real_crews:CREWS", settings={"template": {"preload": ["crewai"]}})
    connector, given = strict(server), {"case": "lamp"}
    run = connector.invoke("run", "support", "act_run", given, legacy=True)
    stream = connector.invoke("run", "support", "act_stream", given)
    batch = connector.invoke("batch_run", "support", "act_batch", {"inputs": [given]})
    outputs = [run.output, stream.output, *batch.output["results"]]
    assert [(output["raw"], output["token_usage"]["total_tokens"]) for output in outputs] == [("case triaged", 5)] * 3
    assert batch.output["count"] == 1
    texts = [event.text for event in stream.events if event.kind == "data"]
    assert "case triaged" in "".join(text or "" for text in texts)


@pytest.mark.case(79)
@pytest.mark.timeout(900)
def test_the_expiry_of_a_blocking_start_is_504_on_every_python(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case 79 (=, B29): 3.10, where the reference answers 500, is not supported; on the others it is 504."""
    found, ran = pythons.found(), {}
    for version, interpreter in found.items():
        if version != pythons.running() and not pythons.asked():
            continue
        python = pythons.environment(version, interpreter)
        settings = {"max_concurrency": 2}
        directory = tmp_path / f"server{version}"
        with Server(directory, registry=REGISTRY, settings=settings, prefix=pythons.instead(python)) as server:
            assert f"python{version}" in os.readlink(f"/proc/{server.pid}/exe")
            ran[version] = expiries(server)
    with capsys.disabled():
        left = [version for version in found if version not in ran]
        hint = f"; {', '.join(left)} with {pythons.ASKED}=1" if left else ""
        print(f"\ncase 79: ran on Python {', '.join(ran)}{hint}")  # noqa: T201
    assert pythons.running() in ran
    assert all(answers == EXPECTED for answers in ran.values()), ran


EXPECTED = [(504, "action_timed_out"), (502, "action_failed"), "TimeoutError", ["started", "failed"]]


def expiries(server: Server) -> list[Any]:
    """What a blocking start that expires comes to, its repeat, and the events."""
    client = server.client()
    first = client.start("expires", "sleeper", timeout_ms=TIMEOUT_MS)
    second = client.start("expires", "sleeper", timeout_ms=TIMEOUT_MS)
    events = events_of(client, "expires")
    answers: list[Any] = [(answer.status, answer.json()["code"]) for answer in (first, second)]
    return [*answers, events[-1]["data"]["error_type"], [event["event"] for event in events]]
