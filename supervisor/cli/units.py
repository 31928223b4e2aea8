"""``crew-supervisor install-units``."""

from __future__ import annotations

import os
import sys
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

import click

from supervisor.cli.exits import Exit

#: Where the units that are shipped expect the program.
SHIPPED_PROGRAM = "/opt/crew-supervisor/bin/crew-supervisor"
SUFFIXES = (".service", ".socket")


def shipped() -> list[Traversable]:
    """Every file that is shipped for systemd, by name."""
    found = resources.files("supervisor") / "units"
    return sorted((entry for entry in found.iterdir() if entry.is_file()), key=lambda entry: entry.name)


@click.command("install-units")
@click.option(
    "--directory",
    type=click.Path(path_type=Path),
    default="/etc/systemd/system",
    show_default=True,
    help="Where the units go.",
)
@click.option("--program", type=click.Path(path_type=Path), help="What they start; else this very program.")
@click.option("--force", is_flag=True, help="Replace units that are there and differ.")
@click.option("--examples", type=click.Path(path_type=Path), help="Put the other files here: configuration, sysusers.")
def install_units(directory: Path, program: Path | None, force: bool, examples: Path | None) -> None:
    """Copy the units for systemd, with the path of the program put in.

    Enables and starts nothing. Exit status: 0 done, 1 a file could not be written, 4 another one is there.
    """
    path = os.path.abspath(program or _own_program())
    if any(char.isspace() or char in "%\\\"'$" for char in path):
        raise click.UsageError(f"{path} cannot be written into a unit; use a path without blanks, quotes, % and $")
    files = {
        directory / entry.name: entry.read_text(encoding="utf-8").replace(SHIPPED_PROGRAM, path)
        for entry in shipped()
        if entry.name.endswith(SUFFIXES)
    }
    if examples is not None:
        others = [entry for entry in shipped() if not entry.name.endswith(SUFFIXES)]
        files |= {examples / entry.name: entry.read_text(encoding="utf-8") for entry in others}
    foreign = [str(target) for target, text in files.items() if _differs(target, text)]
    if foreign and not force:
        click.echo(f"there already, and different: {', '.join(foreign)}; look at them, then use --force", err=True)
        sys.exit(Exit.CONFLICT)
    for target, text in files.items():
        _write(target, text)
        click.echo(str(target))
    click.echo("now: systemctl daemon-reload", err=True)


def _own_program() -> Path:
    """The script that runs, or the one beside the interpreter for ``python -m supervisor``."""
    beside = Path(sys.executable).with_name("crew-supervisor")
    running = Path(sys.argv[0])
    found = running if running.name == beside.name else beside
    if not os.access(found, os.X_OK):
        raise click.UsageError(f"there is no {beside}; name what the units are to start with --program")
    return found


def _differs(target: Path, text: str) -> bool:
    try:
        return target.read_text(encoding="utf-8", errors="replace") != text
    except FileNotFoundError:
        return False
    except OSError:
        return True


def _write(target: Path, text: str) -> None:
    """Put the whole file in place or nothing."""
    part = target.with_name(f".{target.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.chmod(0o644)
        part.replace(target)
    except OSError as error:
        click.echo(f"{target} cannot be written: {error.strerror}", err=True)
        sys.exit(Exit.FAILED)
