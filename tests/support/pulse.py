"""Latencies of ``GET /health`` over one kept connection, measured in a process that does nothing else.

As a program, ``python -m tests.support.pulse HOST PORT``: reads the token from its first line of stdin, says ``ready``
after the first answer, measures until stdin ends, then prints the latencies in nanoseconds as a JSON array.
"""

from __future__ import annotations

import http.client
import json
import select
import subprocess
import sys
import time
from types import TracebackType
from typing import Self

from tests.support.server import ROOT, Server

#: Pause between an answer and the next request, seconds.
INTERVAL_S = 0.005


class Pulse:
    """Measures from ``__enter__`` to ``stop``."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def __enter__(self) -> Self:
        server = self._server
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.pulse", server.host, str(server.port)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{server.token}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "ready\n", "the first /health was not answered"
        return self

    def stop(self) -> list[float]:
        """End and return every latency in milliseconds, in order."""
        out, _ = self._process.communicate(timeout=30)
        assert self._process.returncode == 0, "some /health was not answered"
        return [latency_ns / 1e6 for latency_ns in json.loads(out)]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


def percentile(values: list[float], share: float) -> float:
    """The value that ``share`` of all values do not exceed."""
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


def measure(host: str, port: int) -> list[int]:
    """Measure until stdin ends. Raises if an answer is not 200."""
    headers = {"Authorization": f"Bearer {sys.stdin.readline().strip()}"}
    connection = http.client.HTTPConnection(host, port, timeout=30)
    latencies: list[int] = []
    while True:
        began = time.monotonic_ns()
        connection.request("GET", "/health", headers=headers)
        response = connection.getresponse()
        response.read()
        latencies.append(time.monotonic_ns() - began)
        if response.status != 200:
            raise SystemExit(f"/health answered {response.status}")
        if len(latencies) == 1:
            sys.stdout.write("ready\n")
            sys.stdout.flush()
        if select.select([sys.stdin], [], [], INTERVAL_S)[0]:
            return latencies


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
