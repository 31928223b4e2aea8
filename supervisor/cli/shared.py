"""What every command has in common: exit statuses, the configuration's option, how a refusal is said."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from protocol.errors import CrewError
from supervisor.config.table import CONFIG_VARIABLE

#: What was asked for failed, or something was found.
EXIT_FAILED = 1
#: Wrong usage, or a configuration that a server would refuse.
EXIT_USAGE = 2
#: There is no such thing.
EXIT_NOT_FOUND = 3
#: Another process owns what the command needs, or it is no more what the command was about.
EXIT_CONFLICT = 4
#: The server does not answer.
EXIT_UNREACHABLE = 6

#: No line of a table is longer, in characters.
WIDEST = 100_000

config_option = click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    help=f"TOML file with the settings; else the one that {CONFIG_VARIABLE} names.",
)


def print_table(table: Table) -> None:
    """Print a table whose cells are never cut nor wrapped, however narrow the window: ids must stay whole."""
    console = Console()
    measured = Measurement.get(console, console.options.update(max_width=WIDEST), table).maximum
    Console(width=max(console.width, measured)).print(table)


def say_refusal(what: str, error: CrewError, *, as_json: bool = False) -> None:
    """Print why ``what`` was refused: one line on stderr, or one JSON document on stdout."""
    if as_json:
        click.echo(json.dumps({"ok": False, "error": {"code": error.code, "detail": error.detail}}, indent=2))
    else:
        text = Text(f"{what}: ", style="bold red") + Text(error.detail, style="default")
        Console(stderr=True).print(text, soft_wrap=True)
