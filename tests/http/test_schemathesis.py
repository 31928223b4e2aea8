"""Thousands of generated requests to a real server: every answer as declared, and the journal whole afterwards."""

from __future__ import annotations

import random
import sqlite3
import sys
import time
from collections import Counter
from contextlib import closing
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy
from schemathesis import Case, GenerationMode
from schemathesis.core.failures import FailureGroup
from schemathesis.core.result import Ok
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from supervisor.http.routes import FLEET, Routes
from tests.http.seasoning import KEYS, LONG, season
from tests.support.client import Client
from tests.support.scripts import claim, perform
from tests.support.server import TOKEN, Server, ServerFactory

CHECKS = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
#: The statuses from 500 up that the wire contract knows; all others are faults of ours.
EXPECTED_FAULTS = {502, 503, 504, 507}
SETTINGS: dict[str, Any] = {
    "dashboard": True,
    "max_concurrency": 8,
    "grace_s": 0.1,
    "linger_s": 0.2,
    "max_retained_runs": 300,
    "crews": {LONG: {"max_concurrency": 3}},
}
ANSWER_S = 60
MIN_REQUESTS = 3000
ROUNDS = 5
#: Generated requests a round and operation: well-formed ones, and ones that break the document.
COUNTS = {
    GenerationMode.POSITIVE: {"start": 54, "cancel": 24, "other": 18, "bare": 5},
    GenerationMode.NEGATIVE: {"start": 20, "cancel": 10, "other": 8, "bare": 4},
}
WALL_S = 240.0


class Run:
    """What was sent and what came back; ``number`` decides all of it."""

    def __init__(self, server: Server, number: int) -> None:
        self._url = server.url
        self._session = requests.Session()
        self._number = number
        self._dice = random.Random(number)
        self.statuses: Counter[int] = Counter()
        self.wrong: list[str] = []

    def round(self, operations: list[APIOperation[Any, Any, Any, Any]], times: int) -> None:
        """Send requests of every operation, well-formed ones and ones that break the document."""
        for operation in operations:
            for mode, counts in COUNTS.items():
                if mode is GenerationMode.POSITIVE or "security" not in operation.definition.raw:
                    self._number += 1
                    self._generate(operation.as_strategy(generation_mode=mode), counts[_kind(operation)] * times)

    def _generate(self, cases: SearchStrategy[Case[Any]], count: int) -> None:
        @settings(
            max_examples=count, deadline=None, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @seed(self._number)
        @given(case=cases)
        def send(case: Case[Any]) -> None:
            if len(self.wrong) < 20:
                self._send(case)

        send()

    def _send(self, case: Case[Any]) -> None:
        season(case, self._dice)
        response = case.call(base_url=self._url, session=self._session, timeout=ANSWER_S)
        self.statuses[response.status_code] += 1
        if case.path == "/drain":
            headers = {"Authorization": f"Bearer {TOKEN}"}
            self._session.delete(f"{self._url}/drain", headers=headers, timeout=ANSWER_S).raise_for_status()
        try:
            if response.status_code >= 500:
                assert response.status_code in EXPECTED_FAULTS, f"{response.status_code}: {response.text[:500]}"
            case.validate_response(response, checks=CHECKS)
        except (AssertionError, FailureGroup) as error:
            self.wrong.append(f"{case.as_curl_command()[:1000]}\n{error!r:.1000}")

    @property
    def count(self) -> int:
        """Requests so far."""
        return self.statuses.total()

    def __str__(self) -> str:
        return f"{self.count} requests: " + ", ".join(f"{self.statuses[one]} x {one}" for one in sorted(self.statuses))


def _kind(operation: APIOperation[Any, Any, Any, Any]) -> str:
    if "requestBody" in operation.definition.raw:
        return "cancel" if operation.path.endswith(("/cancel", "/reconcile")) else "start"
    return "other" if "parameters" in operation.definition.raw else "bare"


@pytest.mark.timeout(2 * WALL_S)
def test_generated_requests_get_declared_answers_and_leave_the_journal_whole(start_server: ServerFactory) -> None:
    run = _run(start_server(registry="tests.crews.effect_crews:CREWS", settings=SETTINGS), 1, 3)
    assert run.count >= MIN_REQUESTS


@pytest.mark.stress
@pytest.mark.timeout(3600)
def test_generated_requests_with_a_new_seed(start_server: ServerFactory) -> None:
    number = time.time_ns() % 1_000_000_007
    sys.stdout.write(f"seed {number}\n")
    run = _run(start_server(registry="tests.crews.effect_crews:CREWS", settings=SETTINGS), 8, number)
    assert run.count >= 5 * MIN_REQUESTS


def _run(server: Server, times: int, number: int) -> Run:
    client = server.client()
    schema = schemathesis.openapi.from_dict(client.request("GET", "/openapi.json").expect(200))
    operations = [result.ok() for result in schema.get_all_operations() if isinstance(result, Ok)]
    assert len(operations) == len(Routes.table()) - len(FLEET)
    perform(client, "seasoned", *(claim(key) for key in KEYS), {"do": "die"}).expect(502)
    run, began = Run(server, number), time.monotonic()
    # Several rounds, so that operations meet the jobs that others have left running.
    for _ in range(ROUNDS):
        run.round(operations, times)
    took_s = time.monotonic() - began
    sys.stdout.write(f"{run}; {took_s:.1f} s\n")
    assert run.wrong == [], "\n\n".join(run.wrong)
    assert took_s < WALL_S * times
    # A good share gets past the checks, and every kind of ending is among them.
    assert sum(count for status, count in run.statuses.items() if status < 300) > run.count // 8
    assert {200, 202, 401, 404, 409, 410, 412, 416, 422, 428, 502, 504, 507} <= run.statuses.keys()
    _check_aftermath(server, client)
    return run


def _check_aftermath(server: Server, client: Client) -> None:
    shown = {view["action_id"]: (view["status"], view["event_count"]) for view in _all_jobs(client)}
    assert server.stop() == 0
    broken = [line for line in server.log_lines() if line["level"] in {"error", "critical"} or "places" in line]
    assert broken == []
    with closing(sqlite3.connect(f"{server.state_file.as_uri()}?mode=ro", uri=True)) as journal:
        assert journal.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert {state for (state,) in journal.execute("SELECT DISTINCT state FROM effects")} >= {
            "settled", "not_applied", "abandoned"
        }  # fmt: skip
        stored = journal.execute("SELECT action_id, status, event_count FROM jobs").fetchall()
        # Requests made up by chance archive jobs too.
        archived = journal.execute("SELECT DISTINCT status FROM tombstones").fetchall()
        counted = journal.execute(
            "SELECT action_id, count(seq), coalesce(max(seq) + 1, 0)"
            " FROM jobs LEFT JOIN events ON job = row GROUP BY row"
        ).fetchall()
    assert {action_id: (status, count) for action_id, status, count in stored} == shown
    assert {action_id: (count, count) for action_id, _, count in stored} == {
        action_id: (count, following) for action_id, count, following in counted
    }
    ended = {status for _, status, _ in stored} | {status for (status,) in archived}
    assert ended == {"completed", "failed", "cancelled"}


def _all_jobs(client: Client) -> list[dict[str, Any]]:
    """Every retained job, once those that still ran are cancelled."""
    for view in _pages(client, "status=running"):
        assert client.cancel(view["action_id"], view["crew_id"]).expect(200)["status"] != "running"
    return _pages(client, "limit=100")


def _pages(client: Client, query: str) -> list[dict[str, Any]]:
    views: list[dict[str, Any]] = []
    cursor = ""
    while True:
        page = client.request("GET", f"/jobs?{query}{cursor}").expect(200)
        views += page["jobs"]
        if page["next_cursor"] is None:
            return views
        cursor = f"&cursor={page['next_cursor']}"
