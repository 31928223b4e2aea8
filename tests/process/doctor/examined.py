"""``crew-supervisor doctor`` run on the configuration of a server, and what it said."""

from __future__ import annotations

from typing import Any

import msgspec

from supervisor.doctor import CHECKS, Finding, Report
from tests.support import procs
from tests.support.server import MARK, Server

NAMES = [check.name for check in CHECKS]
GENERAL = [check.name for check in CHECKS if check.alone is not None]


class Examined(msgspec.Struct, frozen=True):
    """What one run said."""

    status: int
    findings: dict[str, Finding]

    def verdict(self, name: str) -> str:
        return self.findings[name].verdict.value

    @property
    def failures(self) -> list[str]:
        return [name for name in self.findings if self.verdict(name) == "failure"]


def examine(server: Server, **options: Any) -> Examined:
    """Run the doctor with this server's configuration; whatever it started is gone afterwards."""
    done = server.run_command("doctor", "--json", **options)
    assert done.stderr == ""
    report = msgspec.json.decode(done.stdout, type=Report)
    assert report.ok == (done.returncode == 0)
    for finding in report.findings:
        assert bool(finding.advice) == (finding.verdict.value != "ok"), finding
    ours = {server.pid, *procs.descendants(server.pid)} if runs(server) else set()
    assert set(procs.with_environment(f"{MARK}={server.mark}")) <= ours
    return Examined(done.returncode, {finding.name: finding for finding in report.findings})


def runs(server: Server) -> bool:
    return server._process is not None and server.process.poll() is None
