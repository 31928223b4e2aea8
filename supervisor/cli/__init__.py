"""The command line. Only this package imports click and rich; ``serve`` does without it (``supervisor.__main__``)."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from supervisor.cli import jobs, reading, server, starting
from supervisor.cli.configuration import config_group
from supervisor.cli.doctor import doctor
from supervisor.cli.effects import effects_group
from supervisor.cli.fleet import fleet_group
from supervisor.cli.journal import journal_group
from supervisor.cli.shared import config_option
from supervisor.cli.units import install_units

PROGRAM = "crew-supervisor"


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="crew-supervisor")
def cli() -> None:
    """Run CrewAI jobs in processes of their own, and stop them for certain."""


@cli.command()
@config_option
def serve(config_path: Path | None) -> None:
    """Serve until SIGTERM."""
    from supervisor.__main__ import serve as run

    sys.exit(run(config_path))


for command in (
    starting.submit, starting.wait, jobs.ps, jobs.show, reading.events, reading.logs, jobs.cancel, jobs.archive,
    jobs.reconcile, jobs.evidence, effects_group, server.crews, server.drain, fleet_group, config_group, journal_group,
    doctor, install_units,
):  # fmt: skip
    cli.add_command(command)


def main() -> None:
    """Entry point of every command but ``serve``."""
    cli(prog_name=PROGRAM)
