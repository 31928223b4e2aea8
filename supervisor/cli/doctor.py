"""``crew-supervisor doctor``."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from supervisor.cli.exits import Exit
from supervisor.cli.shared import config_option
from supervisor.doctor import Finding, Report, Verdict, examine

STYLES = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.FAILURE: "bold red"}
WORD = max(len(verdict.value) for verdict in Verdict)


@click.command("doctor")
@config_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def doctor(config_path: Path | None, as_json: bool) -> None:
    """Look for what would keep a supervisor from starting or from keeping its promises here.

    Run it as the supervisor's user and, where that matters, in its environment: another user has other rights, another
    cgroup has other limits. Nothing is changed, and a running supervisor is not disturbed. Exit status 0 if there is no
    failure, 1 if there is.
    """
    # What the parts that are tried out here would log is in the findings.
    logging.getLogger("supervisor").addHandler(logging.NullHandler())
    logging.getLogger("supervisor").propagate = False
    findings = tuple(examine(config_path, os.environ))
    report = Report(ok=all(finding.verdict is not Verdict.FAILURE for finding in findings), findings=findings)
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(report), indent=2))
    elif sys.stdout.isatty():
        Console().print(_table(findings))
    else:
        _print_lines(findings)
    sys.exit(Exit.OK if report.ok else Exit.FAILED)


def _table(findings: Sequence[Finding]) -> Table:
    table = Table("", "check", "finding", box=None, header_style="bold", padding=(0, 1))
    for finding in findings:
        text = Text(finding.detail)
        if finding.advice:
            text.append(f"\n{finding.advice}", style="italic")
        table.add_row(Text(finding.verdict.value, style=STYLES[finding.verdict]), Text(finding.name), text)
    return table


def _print_lines(findings: Sequence[Finding]) -> None:
    for finding in findings:
        advice = f" -- {finding.advice}" if finding.advice else ""
        click.echo(f"{finding.verdict.value:<{WORD}}  {finding.name}: {finding.detail}{advice}")
