"""The command line. Only this module imports click and rich; ``serve`` does without it (``supervisor.__main__``)."""

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
from supervisor.config.table import CONFIG_VARIABLE

EXIT_CONFIG = 2

_config_option = click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    help=f"TOML file with the settings; else the one that {CONFIG_VARIABLE} names.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="crew-supervisor")
def cli() -> None:
    """Run CrewAI jobs in processes of their own, and stop them for certain."""


@cli.command()
@_config_option
def serve(config_path: Path | None) -> None:
    """Serve until SIGTERM."""
    from supervisor.__main__ import serve as run

    sys.exit(run(config_path))


@cli.group("config")
def config_group() -> None:
    """Look at the configuration."""


@config_group.command("check")
@_config_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def check(config_path: Path | None, as_json: bool) -> None:
    """Check the configuration and print the settings in force, without secrets.

    Exit status 0 if a server would accept them, 2 if not.
    """
    try:
        settings = config.load(config_path, os.environ)
    except ConfigError as error:
        _refuse(error, as_json)
        sys.exit(EXIT_CONFIG)
    if as_json:
        document = {"ok": True, "digest": settings.digest, "settings": settings.public()}
        click.echo(json.dumps(document, indent=2))
    else:
        _print_settings(settings)


def _refuse(error: ConfigError, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"ok": False, "error": {"code": error.code, "detail": error.detail}}, indent=2))
    else:
        text = Text("configuration refused: ", style="bold red") + Text(error.detail, style="default")
        Console(stderr=True).print(text, soft_wrap=True)


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


def main() -> None:
    """Entry point of every command but ``serve``."""
    cli(prog_name="crew-supervisor")
