"""What every command has in common: the configuration's option, how things are printed, how a refusal is said."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from protocol.errors import CrewError
from supervisor.config.table import CONFIG_VARIABLE

#: No line of a table is longer, in characters.
WIDEST = 100_000

config_option = click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    help=f"TOML file with the settings; else the one that {CONFIG_VARIABLE} names.",
)


def choice(kind: type[StrEnum]) -> click.Choice[str]:
    """A choice between the values; click's own of an enum takes their names."""
    return click.Choice([one.value for one in kind])


def document_of(answer: object) -> Any:
    """An answer of the server as JSON has it; an effect's ETag is no part of it."""
    document = msgspec.to_builtins(answer)
    if isinstance(document, dict):
        document.pop("etag", None)
        for effect in document.get("effects") or ():
            if isinstance(effect, dict):
                effect.pop("etag", None)
    return document


def print_json(document: object) -> None:
    """One JSON document over several lines."""
    click.echo(json.dumps(document_of(document), indent=2))


def print_answer(document: object, *, as_json: bool) -> None:
    """One document, as JSON or for people."""
    if as_json:
        print_json(document)
    else:
        print_fields(document_of(document))


def print_line(document: object) -> None:
    """One JSON document on a line, for a stream of them."""
    click.echo(json.dumps(document_of(document), separators=(",", ":")))


def printable(text: str) -> str:
    """Text without what a terminal would obey: workers, and whoever they talk to, have written it."""
    return "".join(char if char in "\n\t" or char.isprintable() else ascii(char)[1:-1] for char in text)


def plain_table(*headers: str) -> Table:
    """A table without lines."""
    return Table(*headers, box=None, header_style="bold")


def print_table(table: Table) -> None:
    """Print a table whose cells are never cut nor wrapped, however narrow the window: ids must stay whole."""
    console = Console()
    measured = Measurement.get(console, console.options.update(max_width=WIDEST), table).maximum
    Console(width=max(console.width, measured)).print(table)


def print_fields(document: Mapping[str, Any]) -> None:
    """Print a document as a table of its fields, times as people read them."""
    table = plain_table("field", "value")
    for name, value in document.items():
        if name.endswith("_at"):
            table.add_row(name, time_text(value))
        else:
            table.add_row(name, cell(value if isinstance(value, str) else json.dumps(value)))
    print_table(table)


def cell(value: object) -> Text:
    """A cell of a table, on one line and taken literally; "-" for None."""
    return Text("-" if value is None else printable(str(value)).replace("\n", "\\n"))


def time_text(seconds: float | None) -> str:
    """Unix seconds in ISO 8601."""
    return "-" if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def say(text: str) -> None:
    """Talk: a line on stderr."""
    click.echo(printable(text), err=True)


def say_refusal(what: str, error: CrewError, *, as_json: bool = False) -> None:
    """Print why ``what`` was refused: one line on stderr, or one JSON document on stdout."""
    if as_json:
        click.echo(json.dumps(refusal(error.code, error.detail), indent=2))
    else:
        say_problem(what, error.detail)


def refusal(code: str, detail: str) -> dict[str, Any]:
    """The JSON document of a command that did not do what it was to do."""
    return {"ok": False, "error": {"code": code, "detail": detail}}


def say_problem(what: str, detail: str) -> None:
    """One line on stderr."""
    text = Text(f"{what}: ", style="bold red") + Text(printable(detail), style="default")
    Console(stderr=True).print(text, soft_wrap=True)
