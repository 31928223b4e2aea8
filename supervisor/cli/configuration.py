"""``crew-supervisor config``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from protocol.errors import ConfigError
from supervisor import config
from supervisor.cli.exits import Exit
from supervisor.cli.shared import config_option, say_refusal


@click.group("config")
def config_group() -> None:
    """Look at the configuration."""


@config_group.command("check")
@config_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def check(config_path: Path | None, as_json: bool) -> None:
    """Check the configuration and print the settings in force, without secrets.

    Exit status 0 if a server would accept them, 2 if not.
    """
    try:
        settings = config.load(config_path, os.environ)
    except ConfigError as error:
        say_refusal("configuration refused", error, as_json=as_json)
        sys.exit(Exit.USAGE)
    if as_json:
        document = {"ok": True, "digest": settings.digest, "settings": settings.public()}
        click.echo(json.dumps(document, indent=2))
    else:
        _print_settings(settings)


def _print_settings(settings: config.Settings) -> None:
    table = Table("setting", "value", box=None, header_style="bold")
    for name, value in _flat(settings.public()):
        table.add_row(Text(name), Text("-" if value is None else json.dumps(value) if value != str(value) else value))
    console = Console()
    console.print(table)
    accepted = Text("accepted", style="bold green") + Text(f", digest {settings.digest}", style="default")
    console.print(accepted, soft_wrap=True)


def _flat(document: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for name, value in document.items():
        rows += _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]
    return rows
