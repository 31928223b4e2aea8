"""The HTTP tests against servers under every other supported Python of this machine (case 79 in a wider sense)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support import pythons
from tests.support.server import PYTHON_VARIABLE, ROOT

#: What is about HTTP and needs no CrewAI, which these environments do not have.
TESTS = (
    "tests/acceptance/test_cases_health.py",
    "tests/acceptance/test_cases_admission.py",
    "tests/acceptance/test_cases_requests.py",
    "tests/acceptance/test_cases_order.py",
    "tests/acceptance/test_cases_execution.py",
    "tests/acceptance/test_cases_streams.py",
    "tests/acceptance/test_cases_cancel.py",
    "tests/http/test_edge.py",
    "tests/http/test_openapi.py",
)
LIMIT_S = 600


@pytest.mark.timeout(2 * LIMIT_S)
def test_the_http_tests_pass_under_every_other_python(capsys: pytest.CaptureFixture[str]) -> None:
    found = pythons.found()
    others = {version: path for version, path in found.items() if version != pythons.running()}
    ran = [pythons.running()]
    if pythons.asked():
        with ThreadPoolExecutor() as pool:
            environments = [pythons.environment(version, others[version]) for version in others]
            summaries = list(pool.map(_run, environments))
        for version, summary in zip(others, summaries, strict=True):
            assert re.search(r"\b[1-9][0-9]* passed", summary), summary
            assert "failed" not in summary, summary
            ran.append(f"{version} ({summary.splitlines()[-1].strip('= ')})")
    with capsys.disabled():
        left = "" if pythons.asked() or not others else f"; {', '.join(others)} with {pythons.ASKED}=1"
        print(f"\nHTTP tests: ran on Python {', '.join(ran)}{left}")  # noqa: T201


def _run(python: Path) -> str:
    """Run TESTS with servers under ``python``; the end of what pytest said."""
    environment = {**os.environ, PYTHON_VARIABLE: str(python)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    return done.stdout[-4000:]
