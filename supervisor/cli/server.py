"""About the server itself: drain, crews."""

from __future__ import annotations

import click
import msgspec

from supervisor.cli.calling import Caller, calling
from supervisor.cli.shared import print_json, printable


class CrewList(msgspec.Struct, frozen=True, kw_only=True):
    """``crews --json``: what can be started."""

    crews: list[str]
    operations: list[str]


@click.command("drain")
@click.option("--undo", is_flag=True, help="Admit again.")
@calling
def drain(caller: Caller, undo: bool) -> None:
    """Have the server admit nothing more; what was admitted goes on, and reads are served.

    It lasts until it is undone or the server's process ends.
    """
    found = caller.ask(lambda client: client.undrain() if undo else client.drain())
    if caller.as_json:
        print_json(found)
    else:
        does = "admits nothing" if found.draining else "admits"
        click.echo(f"{does}; {found.running} running, {found.queued} queued")


@click.command("crews")
@calling
def crews(caller: Caller) -> None:
    """List the crews of the server, an id a line."""
    health = caller.ask(lambda client: client.health())
    if caller.as_json:
        print_json(CrewList(crews=list(health.crews), operations=list(health.operations)))
        return
    for crew_id in health.crews:
        click.echo(printable(crew_id))
