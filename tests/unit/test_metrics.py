"""The list of metrics: well formed, written down as it is, and the only source of names for dashboard and alerts."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from docs import generate
from protocol.errors import ActionConflict, JournalUnavailable, NotAccepting
from protocol.states import Method, Status
from supervisor.journal import open_journal
from supervisor.metrics.meters import Meters
from supervisor.metrics.table import ENDINGS, LABELS, MAX_CREWS, METRICS, OTHER_CREWS, Kind, Metric
from supervisor.run.ending import (
    CancelAsked,
    Exited,
    Finished,
    JournalLost,
    LaunchLost,
    Raised,
    ShutDown,
    TimedOut,
    Violated,
    decide,
)
from tests.support.journals import admit, opened, sample_ending, start

MONITORING = Path(generate.__file__).with_name("monitoring")
PROCESS = {f"process_{name}" for name in (
    "virtual_memory_bytes", "resident_memory_bytes", "start_time_seconds", "cpu_seconds_total", "open_fds", "max_fds",
)}  # fmt: skip
#: Labels that Prometheus itself adds.
ADDED = {"job", "instance"}
#: A metric with its matchers and, outside of them, the labels of ``by (…)``.
SELECTOR = re.compile(r"\b((?:crew_supervisor|process)_\w+|up)(?:\{([^}]*)\})?")
MATCHER = re.compile(r"\s*(\w+)\s*(?:=~|!~|!=|=)\s*\"[^\"]*\"\s*(?:,|$)")
BY = re.compile(r"\bby \(([^)]*)\)")


def series() -> dict[str, set[str]]:
    """Name of every series that can be asked for, with its labels."""
    known = {name: set[str]() for name in PROCESS | {"up"}}
    for row in METRICS:
        if row.kind is Kind.HISTOGRAM:
            known |= {f"{row.name}_{part}": set(row.labels) for part in ("sum", "count")}
            known[f"{row.name}_bucket"] = {*row.labels, "le"}
        else:
            known[row.name] = set(row.labels)
    return known


def faults(expression: str) -> list[str]:
    """What a PromQL expression names that does not exist, and brackets that do not close."""
    known, found, labels = series(), [], set(ADDED)
    for name, matchers in SELECTOR.findall(expression):
        if name not in known:
            found.append(f"no metric {name}")
            continue
        labels |= known[name]
        used = MATCHER.findall(matchers)
        if MATCHER.sub("", matchers).strip():
            found.append(f"{name}{{{matchers}}} has no matchers")
        found += [f"{name} has no label {label}" for label in used if label not in known[name] | ADDED]
    for group in BY.findall(expression):
        found += [f"no label {label}" for label in group.split(", ") if label not in labels]
    if not SELECTOR.search(expression):
        found.append("no metric at all")
    return found + [pair for pair in ("()", "{}", "[]") if expression.count(pair[0]) != expression.count(pair[1])]


def samples(meters: Meters) -> dict[tuple[str, ...], float]:
    """(name, label values in the order of their names) to the value."""
    families = text_string_to_metric_families(generate_latest(meters.registry).decode())
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for found in families
        for sample in found.samples
    }


# --- the list --------------------------------------------------------------------------------------------------------


def test_names_are_unique_and_of_ours() -> None:
    names = [row.name for row in METRICS]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"crew_supervisor_[a-z_]+", name) for name in names)


@pytest.mark.parametrize("row", METRICS, ids=lambda row: row.name)
def test_a_name_tells_kind_and_unit(row: Metric) -> None:
    assert row.name.endswith("_total") == (row.kind is Kind.COUNTER)
    assert row.name.removesuffix("_total").endswith(f"_{row.unit}" if row.unit else "")
    assert row.unit in {"", "seconds", "bytes"}
    assert any(row.name.endswith(f"_{unit}") for unit in ("seconds", "bytes")) == bool(row.unit)
    assert bool(row.buckets) == (row.kind is Kind.HISTOGRAM)
    assert list(row.buckets) == sorted(set(row.buckets))
    assert row.help.endswith(".")


def test_every_label_is_described_and_used() -> None:
    assert {label for row in METRICS for label in row.labels} == set(LABELS)


def test_every_reason_that_a_job_can_end_with_is_listed() -> None:
    causes = [
        Finished(output=b"{}"), Raised(error_type="E", dispatched=True), CancelAsked(reason=None, at=0.0), TimedOut(),
        Exited(exit_code=1), Violated(error_type="E", detail=""), LaunchLost(error_type="E", detail=""), ShutDown(),
        JournalLost(),
    ]  # fmt: skip
    made = {decide(cause, operation="run", go_sent=True) for cause in causes}
    pairs = {(decision.status, decision.reason) for decision in made}
    assert pairs | {(Status.FAILED, "restart")} == set(ENDINGS)
    for _, reason in ENDINGS:
        assert f"`{reason}`" in LABELS["reason"]


def test_the_document_is_what_the_table_says() -> None:
    written = generate.METRICS_FILE.read_text(encoding="utf-8")
    assert written == generate.metrics_document(), "out of date; run python -m docs.generate"


# --- dashboard and alerts --------------------------------------------------------------------------------------------


def alerts() -> list[dict[str, Any]]:
    document = yaml.safe_load((MONITORING / "alerts.yml").read_text(encoding="utf-8"))
    return [rule for group in document["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))["panels"]
    return [panel for panel in found if panel["type"] != "row"]


def expressions() -> Iterator[Any]:
    for rule in alerts():
        yield pytest.param(rule["expr"], id=rule["alert"])
    for panel in panels():
        for target in panel["targets"]:
            yield pytest.param(target["expr"], id=f"{panel['title']} {target['refId']}")


@pytest.mark.parametrize("expression", list(expressions()))
def test_an_expression_names_only_what_exists(expression: str) -> None:
    assert faults(expression) == []


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ("crew_supervisor_reddy == 0", "no metric crew_supervisor_reddy"),
        ("rate(crew_supervisor_stop_seconds[5m])", "no metric crew_supervisor_stop_seconds"),
        ('crew_supervisor_jobs{fase="queued"}', "crew_supervisor_jobs has no label fase"),
        ('crew_supervisor_jobs{phase="queued}', 'crew_supervisor_jobs{phase="queued} has no matchers'),
        ("sum by (reason) (crew_supervisor_jobs)", "no label reason"),
        ("sum(crew_supervisor_jobs", "()"),
        ("1 > 2", "no metric at all"),
    ],
)
def test_a_fault_in_an_expression_is_found(expression: str, fault: str) -> None:
    assert fault in faults(expression)


def test_alerts_are_whole() -> None:
    rules = alerts()
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "1m"))
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert set(rule["annotations"]) == {"summary", "action"}
        named = re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values()))
        grouped = BY.findall(rule["expr"])
        kept = {label for group in grouped for label in group.split(", ")} if grouped else ADDED
        assert set(named) <= kept, f"{rule['alert']} names a label that its expression drops"


def test_every_metric_is_on_the_dashboard() -> None:
    text = " ".join(target["expr"] for panel in panels() for target in panel["targets"])
    assert [row.name for row in METRICS if not re.search(rf"\b{row.name}(_bucket|_sum)?\b", text)] == []


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        columns, rows = (range(place[axis], place[axis] + place[size]) for axis, size in (("x", "w"), ("y", "h")))
        cells = {(x, y) for x in columns for y in rows}
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells


# --- counting --------------------------------------------------------------------------------------------------------


def test_two_supervisors_in_one_process_count_apart() -> None:
    first, second = Meters(), Meters()
    first.admitted("crew", fresh=True)
    assert samples(first)["crew_supervisor_admissions_total", "", "fresh"] == 1
    assert samples(second)["crew_supervisor_admissions_total", "", "fresh"] == 0


def test_admissions_are_counted_by_result() -> None:
    meters = Meters()
    meters.admitted("crew", fresh=False)
    meters.refused(ActionConflict("x"))
    meters.refused(NotAccepting("x"))
    found = samples(meters)
    name = "crew_supervisor_admissions_total"
    assert found[name, "", "repeat"] == 1
    assert found[name, "action_conflict", "conflict"] == 1
    assert found[name, "not_accepting", "refused"] == 1


def test_what_alerts_look_for_is_there_with_0_before_it_happens() -> None:
    meters = Meters()
    meters.admitted("crew", fresh=True)
    found = samples(meters)
    for status, reason in ENDINGS:
        assert found["crew_supervisor_jobs_ended_total", "crew", reason, status.value] == 0
    for method in Method:
        assert found["crew_supervisor_stops_total", "false", method.value] == 0
    assert found["crew_supervisor_admissions_total", "journal_full", "refused"] == 0


def test_crews_beyond_the_bound_share_a_label() -> None:
    meters = Meters()
    labels = {meters.crew_label(f"crew-{number}") for number in range(MAX_CREWS * 2)}
    assert len(labels) == MAX_CREWS + 1
    assert meters.crew_label("crew-0") == "crew-0"
    assert meters.crew_label(f"crew-{MAX_CREWS}") == OTHER_CREWS


async def test_the_journal_tells_commits_events_and_endings(tmp_path: Path) -> None:
    meters = Meters()
    async with opened(tmp_path / "journal.db", watch=meters) as journal:
        row = await start(journal)
        await journal.append_events(row, 1, [("chunk", b"{}"), ("chunk", b"{}")], at=1.0)
        await journal.finish(row, sample_ending(first_seq=3, pending=(("chunk", b"{}"),), detail="completed"))
    found = samples(meters)
    assert found["crew_supervisor_events_total",] == 5
    assert found["crew_supervisor_jobs_ended_total", "crew", "completed", "completed"] == 1
    assert found["crew_supervisor_stops_total", "true", "cgroup"] == 1
    assert found["crew_supervisor_stop_seconds_sum", "cgroup"] == 0.5
    commits = found["crew_supervisor_journal_commit_seconds_count",]
    assert 1 <= commits <= found["crew_supervisor_journal_commit_operations_sum",] == 4
    assert found["crew_supervisor_journal_failures_total",] == 0


async def test_a_journal_that_fails_is_counted_and_what_it_refused(tmp_path: Path) -> None:
    meters, broken = Meters(), True

    def faults_of(point: str) -> None:
        if broken and point == "commit":
            raise sqlite3.OperationalError("disk I/O error")

    journal = open_journal(tmp_path / "journal.db", reserve_bytes=0, faults=faults_of, watch=meters)
    try:
        with pytest.raises(JournalUnavailable):
            await admit(journal, "a-1")
        broken = False
        await admit(journal, "a-1")
    finally:
        journal.close_sync()
    found = samples(meters)
    assert found["crew_supervisor_journal_failures_total",] >= 1
    assert found["crew_supervisor_journal_refused_operations_total",] == 1
