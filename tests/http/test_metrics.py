"""A scrape of a real server: what it counts is what the journal has, and no id gets into it."""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client import Metric, openmetrics
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families

from supervisor.journal.reading import reading
from supervisor.metrics.table import LABELS, METRICS, Kind
from tests.support import procs, scripts
from tests.support.client import Client
from tests.support.effects import key_of
from tests.support.server import Server, ServerFactory
from tests.unit.test_metrics import PROCESS

REGISTRY = "tests.crews.fake_crews:CREWS"
READ_TOKEN = "a-token-that-may-read"
#: In every id and key of the run, and in nothing else.
NEEDLE = "f00dfeed"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

Samples = dict[str, dict[tuple[tuple[str, str], ...], float]]


@pytest.fixture
def server(start_server: ServerFactory, tmp_path: Path) -> Server:
    read_token = tmp_path / "read-token"
    read_token.touch(mode=0o600)
    read_token.write_text(READ_TOKEN, encoding="utf-8")
    settings = {"max_concurrency": 2, "grace_s": 0.0, "read_token_files": [str(read_token)]}
    return start_server(registry=REGISTRY, settings=settings)


def exposition(client: Client) -> str:
    """The text of a scrape, in the plain format."""
    answer = client.request("GET", "/metrics")
    assert answer.status == 200, answer.body
    return answer.body.decode("utf-8")


def scraped(client: Client) -> Samples:
    """Name to label pairs to value, in the text format, with names as they are sent."""
    return samples(text_string_to_metric_families(exposition(client)))


def samples(families: Any) -> Samples:
    found: Samples = {}
    for family in families:
        for sample in family.samples:
            key = tuple(sorted(sample.labels.items()))
            of_name = found.setdefault(sample.name, {})
            assert key not in of_name, f"{sample.name}{key} is there twice"
            of_name[key] = sample.value
    return found


def total(found: Samples, name: str, **labels: str) -> float:
    """Sum of the samples that have these labels."""
    return sum(value for key, value in found[name].items() if labels.items() <= dict(key).items())


def job_id(name: str) -> str:
    return f"{NEEDLE}-{name}"


def run_through(client: Client) -> None:
    """Jobs of every ending that needs no broken part, repeats, a conflict and refusals."""
    for number in range(3):
        client.start(job_id(f"done-{number}"), "instant").expect(200)
    client.start(job_id("done-0"), "instant").expect(200)
    client.start(job_id("done-0"), "instant", key="another").expect(409)
    client.start(job_id("nobody"), "nobody").expect(404)
    client.request("POST", "/jobs", body=b"{", headers={"Idempotency-Key": NEEDLE}).expect(422)
    client.start(job_id("failed"), "failing").expect(502)
    client.start(job_id("late"), "sleeper", timeout_ms=50).expect(504)
    client.start(job_id("crashed"), "crash").expect(502)
    client.stream(job_id("streamed"), "streaming", input={"chunks": 5}).rest()


def stored(server: Server) -> list[tuple[Any, ...]]:
    """(crew, status, reason, method, confirmed, started, events) of every job, from the journal's file itself."""
    evidence = ", ".join(f"json_extract(CAST(stop AS TEXT), '$.{name}')" for name in ("reason", "method", "confirmed"))
    columns = f"crew_id, status, {evidence}, started_at IS NOT NULL, event_count"
    with reading(server.state_file) as connection:
        return connection.execute(f"SELECT {columns} FROM jobs").fetchall()


def test_counts_are_those_of_the_journal(server: Server) -> None:
    client = server.client()
    run_through(client)
    with client.stream(job_id("killed"), "async_sleeper") as stream:
        stream.until("chunk")
        client.cancel(job_id("killed"), "async_sleeper", reason=NEEDLE).expect(200)
    found = scraped(client)
    rows = stored(server)
    assert len(rows) == 8
    by_ending = Counter((crew, status, reason) for crew, status, reason, *_ in rows)
    assert {reason for _, _, reason in by_ending} == {"completed", "failed", "timeout", "crashed", "cancelled"}
    counted = {
        (dict(key)["crew_id"], dict(key)["status"], dict(key)["reason"]): value
        for key, value in found["crew_supervisor_jobs_ended_total"].items()
    }
    assert {key: value for key, value in counted.items() if value} == by_ending
    by_method = Counter((method, confirmed) for _, _, _, method, confirmed, *_ in rows)
    for (method, confirmed), count in by_method.items():
        told = "true" if confirmed else "false"
        assert total(found, "crew_supervisor_stops_total", method=method, confirmed=told) == count
    assert total(found, "crew_supervisor_stops_total") == len(rows)
    assert total(found, "crew_supervisor_stop_seconds_count") == sum(bool(row[4]) for row in rows)
    started = sum(row[5] for row in rows)
    assert total(found, "crew_supervisor_start_seconds_count") == started
    assert total(found, "crew_supervisor_launch_seconds_count") == started
    assert total(found, "crew_supervisor_launch_seconds_sum") <= total(found, "crew_supervisor_start_seconds_sum")
    assert total(found, "crew_supervisor_events_total") == sum(row[6] for row in rows)
    assert total(found, "crew_supervisor_jobs_retained") == len(rows)
    assert total(found, "crew_supervisor_admissions_total", result="fresh") == len(rows)
    assert total(found, "crew_supervisor_admissions_total", result="repeat") == 1
    assert total(found, "crew_supervisor_admissions_total", code="action_conflict", result="conflict") == 1
    for code in ("crew_unknown", "json_invalid"):
        assert total(found, "crew_supervisor_admissions_total", code=code, result="refused") == 1
    assert total(found, "crew_supervisor_journal_commit_operations_sum") >= 2 * len(rows)
    assert total(found, "crew_supervisor_journal_failures_total") == 0


def test_what_goes_on_is_seen_while_it_does(server: Server) -> None:
    client = server.client()
    before = scraped(client)
    assert total(before, "crew_supervisor_jobs") == total(before, "crew_supervisor_queue_oldest_seconds") == 0
    streams = [client.stream(job_id(f"s-{number}"), "async_sleeper") for number in range(2)]
    for stream in streams:
        stream.until("chunk")
    client.start(job_id("waits"), "instant", headers={"Prefer": "respond-async"}).expect(202)
    found = scraped(client)
    assert total(found, "crew_supervisor_jobs", crew_id="async_sleeper", phase="running") == 2
    assert total(found, "crew_supervisor_jobs", crew_id="instant", phase="queued") == 1
    assert total(found, "crew_supervisor_jobs") == 3
    assert total(found, "crew_supervisor_queue_jobs") == 1
    assert 0 < total(found, "crew_supervisor_queue_oldest_seconds") < 60
    assert total(found, "crew_supervisor_workers") == total(found, "crew_supervisor_streams_open") == 2
    largest = total(found, "crew_supervisor_worker_memory_max_bytes")
    assert 1_000_000 < largest < total(found, "crew_supervisor_workers_memory_bytes") <= 2 * largest
    assert total(found, "crew_supervisor_slots") == total(found, "crew_supervisor_slots_usable") == 2
    for number, stream in enumerate(streams):
        client.cancel(job_id(f"s-{number}"), "async_sleeper").expect(200)
        stream.rest()
    client.start(job_id("waits"), "instant").expect(200)
    after = scraped(client)
    assert total(after, "crew_supervisor_jobs") == total(after, "crew_supervisor_workers") == 0
    procs.wait_until(lambda: total(scraped(client), "crew_supervisor_streams_open") == 0, 10, "both streams are closed")


def test_effects_are_counted_by_state_and_again_after_a_restart(start_server: ServerFactory) -> None:
    server = start_server(registry=scripts.REGISTRY)
    settled, unknown = key_of("settled"), key_of("unknown")
    scripts.perform(server.client(), "a-1", scripts.claim(settled), scripts.settle(settled)).expect(200)
    scripts.make_unknown(server.client(), unknown, action_id="a-2")
    expected = {"settled": 1, "unknown": 1, "claimed": 0, "not_applied": 0, "abandoned": 0}

    def counted() -> dict[str, float]:
        found = scraped(server.client())["crew_supervisor_effects"]
        return {dict(key)["state"]: value for key, value in found.items()}

    assert counted() == expected
    server.stop()
    server.start()
    assert counted() == expected
    scripts.reconcile(server.client(), unknown).expect(200)
    assert counted() == expected | {"unknown": 0, "abandoned": 1}


def test_everything_in_the_list_is_sent_and_nothing_else(server: Server) -> None:
    client = server.client()
    run_through(client)
    text = exposition(client)
    sent = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    listed = {row.name: row.kind.value for row in METRICS}
    assert {name: kind for name, kind in sent.items() if name not in PROCESS} == listed
    assert set(sent) >= PROCESS
    labels = {row.name: {*row.labels} for row in METRICS}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            row = next((row for row in METRICS if row.name in {sample.name, family.name}), None)
            if row is not None:
                extra = {"le"} if sample.name.endswith("_bucket") and row.kind is Kind.HISTOGRAM else set()
                assert set(sample.labels) == labels[row.name] | extra


def test_no_id_is_in_a_scrape_and_label_values_are_of_the_known_sets(server: Server) -> None:
    client = server.client()
    run_through(client)
    text = exposition(client)
    assert leaks(text, server) == []
    # The check itself: it finds each of the ids when they are there.
    for value in (job_id("done-0"), str(server.pid)):
        assert leaks(text + f'\nleaking{{crew_id="{value}"}} 1', server) == [value]


def leaks(text: str, server: Server) -> list[str]:
    """Label values that look like an id of the run, or that belong to no set that is known beforehand."""
    health = server.client().health().json()
    crews = set(health["crews"])
    ids = {health["instance_id"], health["config_digest"], health["registry_digest"], str(server.pid)}
    found = []
    for label, value in re.findall(r'(\w+)="([^"]*)"', text):
        unknown = label not in LABELS and label != "le"
        if NEEDLE in value or value in ids or unknown or (label == "crew_id" and value not in crews):
            found.append(value)
    return found


def test_both_formats_say_the_same(server: Server) -> None:
    client = server.client()
    run_through(client)
    answer = client.request("GET", "/metrics", headers={"Accept": OPENMETRICS})
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    families: list[Metric] = list(openmetrics_parser.text_string_to_metric_families(answer.body.decode()))
    plain, ours = scraped(client), samples(families)
    moving = {name for name in plain if name.startswith("process_")}
    moving |= {"crew_supervisor_template_memory_bytes"}
    assert {name: plain[name] for name in plain.keys() - moving} == {name: ours[name] for name in ours.keys() - moving}
    units = {family.name: family.unit for family in families if family.name.startswith("crew_")}
    assert units == {row.name.removesuffix("_total"): row.unit for row in METRICS}


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (None, "text/plain; version=0.0.4"),
        ("*/*", "text/plain; version=0.0.4"),
        ("text/plain;version=1.0.0", "text/plain; version=1.0.0"),
        ("application/openmetrics-text", openmetrics.exposition.CONTENT_TYPE_LATEST),
        ("application/openmetrics-text; version=one", "text/plain; version=0.0.4"),
        ("application/openmetrics-text; version=", openmetrics.exposition.CONTENT_TYPE_LATEST),
        ("image/png", "text/plain; version=0.0.4"),
        (", ;;=,", "text/plain; version=0.0.4"),
    ],
)
def test_the_format_is_negotiated(shared: Server, accept: str | None, expected: str) -> None:
    headers = {} if accept is None else {"Accept": accept}
    answer = shared.client().request("GET", "/metrics", headers=headers)
    assert answer.status == 200
    assert answer.headers["content-type"].startswith(expected)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("server"), registry=REGISTRY) as server:
        yield server


def test_it_wants_a_token_and_a_reading_one_will_do(server: Server) -> None:
    for token, status in ((None, 401), ("wrong", 401), (READ_TOKEN, 200), (server.token, 200)):
        assert Client(server.host, server.port, token=token).request("GET", "/metrics").status == status
    assert server.client().request("POST", "/metrics").status == 405


def test_a_template_that_ends_is_counted(server: Server) -> None:
    client = server.client()
    found = scraped(client)
    assert total(found, "crew_supervisor_template_restarts_total") == 0
    assert total(found, "crew_supervisor_template_processes") == 1
    assert total(found, "crew_supervisor_template_memory_bytes") > 1_000_000
    (template,) = psutil.Process(server.pid).children()
    os.kill(template.pid, signal.SIGKILL)
    server.wait_log("template_lost")
    client.start(job_id("after"), "instant").expect(200)
    assert total(scraped(client), "crew_supervisor_template_restarts_total") == 1


def test_a_restart_counts_from_0_and_what_it_fenced(server: Server) -> None:
    client = server.client()
    client.start(job_id("done"), "instant").expect(200)
    with client.stream(job_id("cut"), "async_sleeper", complete=False) as stream:
        stream.until("chunk")
        server.kill()
    server.restart()
    found = scraped(server.client())
    assert total(found, "crew_supervisor_admissions_total") == 0
    ended = {key: value for key, value in found["crew_supervisor_jobs_ended_total"].items() if value}
    assert [dict(key) for key in ended] == [{"crew_id": "async_sleeper", "status": "failed", "reason": "restart"}]
    assert total(found, "crew_supervisor_stops_total") == 1
    assert total(found, "crew_supervisor_jobs_retained") == 2
