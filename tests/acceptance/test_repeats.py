"""The same start sent by many at one moment: one execution, one answer for all (case 23, promise 3)."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.server import Server

CALLERS = 24
ROUNDS = 8


@pytest.mark.case(23)
def test_many_equal_starts_at_one_moment_execute_once(tmp_path: Path) -> None:
    with Server(tmp_path, registry="tests.crews.fake_crews:CREWS") as server, ThreadPoolExecutor(CALLERS) as pool:
        for number in range(ROUNDS):
            barrier = threading.Barrier(CALLERS)

            def start(barrier: threading.Barrier = barrier, action_id: str = f"same-{number}") -> tuple[int, bytes]:
                client = server.client()
                barrier.wait(30)
                answer = client.start(action_id, "instant", input={"n": 1})
                return answer.status, answer.body

            answers = {future.result() for future in [pool.submit(start) for _ in range(CALLERS)]}
            assert len(answers) == 1
            assert answers.pop()[0] == 200
        assert server.client().health().json()["retained_runs"] == ROUNDS
        admitted = [line for line in server.log_lines() if line.get("event") == "job_admitted"]
        assert len(admitted) == ROUNDS
        assert [line for line in server.log_lines() if line.get("event") == "request_broke"] == []
