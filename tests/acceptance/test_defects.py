"""Defects of the reference (wire contract, section 21) that no numbered case is about; each test names its own."""

from __future__ import annotations

import hashlib
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from protocol.canonical import MAX_DATA_DEPTH
from tests.crash.trial import read_journal
from tests.support import procs
from tests.support.cases import (
    REGISTRY,
    RESPOND_ASYNC,
    WAIT_S,
    events_of,
    names_of,
    strict,
    wait_for_phase,
    wait_for_status,
    witnessed,
)
from tests.support.client import Client
from tests.support.gates import Gate
from tests.support.server import Server, ServerFactory
from tests.support.strict_stream import parse_json

SETTINGS: dict[str, Any] = {"linger_s": 0.2, "grace_s": 0.1, "crews": {"narrow": {"max_concurrency": 1}}}
CREW_HEADER = "X-AIP-Crew-ID"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for the module."""
    directory = tmp_path_factory.mktemp("server")
    environment: dict[str, str | None] = {"WITNESS_FILE": str(directory / "witness")}
    with Server(directory, registry=REGISTRY, settings=SETTINGS, environment=environment) as running:
        yield running


# --- B11: what is no JSON --------------------------------------------------------------------------------------------


def test_outputs_that_no_document_can_carry_reach_every_reader_in_one_form(server: Server, client: Client) -> None:
    """B11: NaN, infinities, lone surrogates, 400 levels; the reference's readers get other values, 500 or nothing."""
    output = client.start("odd", "odd").expect(200)
    assert (output["nan"], output["infinite"], output["half"]) == (None, None, "a \ufffd b")
    streamed = strict(server).invoke("run", "odd", "odd")
    assert (streamed.kind, streamed.output) == ("completed", output)
    assert strict(server).status("odd").output["output"] == output
    # The slice adds levels of its own to those that an output may have; the connector takes 127.
    whole = parse_json(client.events("odd").body)["events"]
    assert [event.data for event in streamed.events] == [event["data"] for event in whole]
    chunk = streamed.events[1].data
    assert (chunk["nan"], chunk["infinite"], chunk["half"]) == (None, None, "a \ufffd b")
    deep, levels = output["deep"], 0
    while isinstance(deep, list):
        deep, levels = deep[0], levels + 1
    assert 90 < levels < MAX_DATA_DEPTH
    assert isinstance(deep, str), "what is below is text"


# --- B15: records of another crew ------------------------------------------------------------------------------------


def test_a_caller_that_names_its_crew_reads_no_other_crews_records(client: Client) -> None:
    """B15: the check is optional, because the reference's own client does not send the header."""
    client.start("whose", "echo").expect(200)
    for path in ("/jobs/whose", "/runs/whose", "/jobs/whose/events"):
        for accept in ("application/json", "text/event-stream"):
            plain, own, other = (
                client.request("GET", path, headers={"Accept": accept} | named)
                for named in ({}, {CREW_HEADER: "echo"}, {CREW_HEADER: "instant"})
            )
            assert (plain.status, own.status, own.body) == (200, 200, plain.body)
            assert (other.status, other.json()["code"]) == (404, "action_unknown")
    unknown = client.request("GET", "/jobs/nobody", headers={CREW_HEADER: "instant"})
    assert (unknown.status, unknown.json()["code"]) == (404, "action_unknown"), "nothing tells the two apart"


# --- B19: the terminal write fails -----------------------------------------------------------------------------------


@pytest.fixture
def unwritable(start_server: ServerFactory) -> Iterator[Server]:
    """A server whose writes to files can be made to fail, with EFBIG, by ``limit_files``."""
    server = start_server(registry=REGISTRY, settings=SETTINGS)
    yield server
    if server.process.poll() is None:
        limit_files(server, resource.RLIM_INFINITY)


def limit_files(server: Server, size: int) -> None:
    """The largest file that the running supervisor may write to (RLIMIT_FSIZE)."""
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@pytest.mark.parametrize("restarted", [False, True])
def test_no_reader_sees_an_end_that_the_journal_does_not_have(
    unwritable: Server, pool: ThreadPoolExecutor, tmp_path: Path, restarted: bool
) -> None:
    """B19: the reference says completed from memory, and after a restart failed."""
    gate = Gate(tmp_path, "gate")
    client = unwritable.client()
    waiting = pool.submit(client.start, "unrecorded", "turnstile", input=gate.input)
    gate.wait("began")
    worker = client.get("unrecorded").expect(200)["worker"]["pid"]
    limit_files(unwritable, 0)
    gate.release()
    assert waiting.result().expect(507)["code"] == "journal_unavailable"
    procs.wait_until(lambda: not procs.alive(worker), WAIT_S, "the work has ended")
    view = client.get("unrecorded").expect(200)
    assert (view["status"], view["phase"], view["output"]) == ("running", "stopping", None)
    assert names_of(client, "unrecorded") == ["started"]
    assert client.cancel("unrecorded", "turnstile").status == 507
    assert client.health().expect(200)["status"] == "not_ready"
    assert read_journal(unwritable.state_file)["unrecorded"].status == "running"
    if restarted:
        client = unwritable.restart().client()
        expected, answer = ("failed", 502)
    else:
        limit_files(unwritable, resource.RLIM_INFINITY)
        expected, answer = ("completed", 200)
    assert wait_for_status(client, "unrecorded") == expected
    assert names_of(client, "unrecorded") == ["started", expected]
    assert client.start("unrecorded", "turnstile", input=gate.input).status == answer
    assert read_journal(unwritable.state_file)["unrecorded"].status == expected


# --- B20: nothing was dispatched -------------------------------------------------------------------------------------


@pytest.mark.parametrize("crew_id", ["factory_raises", "not_a_crew"])
def test_a_job_without_a_crew_fails_for_certain(client: Client, crew_id: str) -> None:
    """B20: the reference calls it uncertain."""
    client.start(crew_id, crew_id).expect(502)
    last = events_of(client, crew_id)[-1]["data"]
    assert (last["status"], last["uncertain_outcome"], last["stop"]["confirmed"]) == ("failed", False, True)


# --- B25: training artifacts -----------------------------------------------------------------------------------------


def train(client: Client, action_id: str, name: str, n: int, **more: Any) -> dict[str, Any]:
    """Train; returns the data of the last event."""
    given = {"n_iterations": n, "artifact_name": name, **more}
    client.start(action_id, "witness", operation="train", input=given)
    data: dict[str, Any] = events_of(client, action_id)[-1]["data"]
    return data


def test_an_artifact_is_replaced_only_where_that_is_asked_for(server: Server, client: Client) -> None:
    """B25: the reference overwrites in silence."""
    target = server.directory / "training" / "replaced.pkl"
    first = train(client, "train-1", "replaced.pkl", 1)
    assert target.read_bytes() == b"trained 1 times"
    assert first["sha256"] == hashlib.sha256(target.read_bytes()).hexdigest()
    again = train(client, "train-2", "replaced.pkl", 2)
    assert (again["status"], again["error_type"], again["uncertain_outcome"]) == ("failed", "ArtifactExists", False)
    assert witnessed(server.directory / "witness", lambda words: words[:2] == ["train", 2]) == []
    assert target.read_bytes() == b"trained 1 times"
    third = train(client, "train-3", "replaced.pkl", 3, overwrite=True)
    assert target.read_bytes() == b"trained 3 times"
    assert third["sha256"] == hashlib.sha256(b"trained 3 times").hexdigest()


def test_an_artifact_follows_no_link(server: Server, client: Client, tmp_path: Path) -> None:
    """B25: a link inside the training directory leads nowhere, even where the artifact may be replaced."""
    outside, link = tmp_path / "outside", server.directory / "training" / "link.pkl"
    outside.write_bytes(b"precious")
    for target in (outside, tmp_path / "nothing"):
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        refused = train(client, f"link-{target.name}", "link.pkl", 1)
        assert (refused["status"], refused["error_type"]) == ("failed", "ArtifactExists")
        assert train(client, f"link-over-{target.name}", "link.pkl", 1, overwrite=True)["status"] == "completed"
        assert not link.is_symlink()
        assert link.read_bytes() == b"trained 1 times"
    assert outside.read_bytes() == b"precious"
    assert not (tmp_path / "nothing").exists()


# --- B26: crews among themselves -------------------------------------------------------------------------------------


def test_one_crews_jobs_do_not_hold_up_another_crews(start_server: ServerFactory, tmp_path: Path) -> None:
    """B26: slots go round the crews, and in order within one; the reference's go to whoever asked first."""
    client = start_server(registry=REGISTRY, settings=SETTINGS | {"max_concurrency": 1}).client()
    gate = Gate(tmp_path, "gate")
    jobs = [(f"{crew_id}-{number}", crew_id) for crew_id in ("turnstile", "instant", "echo") for number in range(3)]
    for action_id, crew_id in jobs:
        given = gate.input if crew_id == "turnstile" else {}
        client.start(action_id, crew_id, input=given, headers=RESPOND_ASYNC).expect(202)
    wait_for_phase(client, "turnstile-0", "running")
    assert client.health().expect(200)["queued"] == len(jobs) - 1
    gate.release()
    views = [wait_for_phase(client, action_id, "done") for action_id, _ in jobs]
    order = [view["action_id"] for view in sorted(views, key=lambda view: float(view["started_at"]))]
    assert order == [
        "turnstile-0",
        *("turnstile-1", "instant-0", "echo-0"),
        *("turnstile-2", "instant-1", "echo-1"),
        *("instant-2", "echo-2"),
    ]


def test_a_crew_at_its_own_limit_leaves_the_other_slots_free(client: Client, tmp_path: Path) -> None:
    """B26: limits per crew."""
    gate = Gate(tmp_path, "gate")
    for number in range(2):
        client.start(f"narrow-{number}", "narrow", input=gate.input, headers=RESPOND_ASYNC).expect(202)
    wait_for_phase(client, "narrow-0", "running")
    wait_for_phase(client, "narrow-1", "queued")
    client.start("passes-by", "instant").expect(200)
    assert client.get("narrow-1").expect(200)["phase"] == "queued"
    gate.release()
    assert [wait_for_status(client, f"narrow-{number}") for number in range(2)] == ["completed"] * 2
