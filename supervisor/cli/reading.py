"""Reading on while a job runs: its events, its captured output."""

from __future__ import annotations

import codecs
import json
import sys
from collections.abc import Callable, Iterator

import click
import msgspec

from supervisor.cli.calling import Caller, calling
from supervisor.cli.jobs import id_argument
from supervisor.cli.shared import print_json, print_line, printable
from supervisor.client import Client, Event, EventPage

#: Characters of an event's data that a line of text has.
SHOWN = 200
FOLLOW_HELP = "Go on with what comes, to the end of the job."


class LogLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of captured output; ``stream`` is stdout, stderr or, for what was dropped, supervisor."""

    stream: str
    line: str


class LogDocument(msgspec.Struct, frozen=True, kw_only=True):
    """``logs --json``: captured output."""

    action_id: str
    lines: list[LogLine]


@click.command("events")
@id_argument
@click.option("--cursor", type=click.IntRange(0), default=0, show_default=True, help="The first sequence wanted.")
@click.option("--follow", "-f", is_flag=True, help=FOLLOW_HELP)
@calling
def events(caller: Caller, action_id: str, cursor: int, follow: bool) -> None:
    """Print the events of a job."""
    if follow:
        caller.in_lines = caller.as_json
        show = print_line if caller.as_json else _print_event
        caller.ask(lambda client: _follow(client, action_id, cursor, show=show))
        return
    page: EventPage = caller.ask(lambda client: client.events(action_id, cursor=cursor))
    if caller.as_json:
        print_json(page)
        return
    for event in page.events:
        _print_event(event)


async def _follow(client: Client, action_id: str, cursor: int, *, show: Callable[[Event], None]) -> None:
    # First of all: a stream would try for a while to reach a server that is not there.
    await client.status(action_id)
    async with client.follow(action_id, cursor=cursor) as stream:
        async for event in stream:
            show(event)


def _print_event(event: Event) -> None:
    text = json.dumps(event.data, ensure_ascii=False)
    click.echo(f"{event.sequence} {event.event} {printable(text if len(text) <= SHOWN else text[:SHOWN] + '…')}")


@click.command("logs")
@id_argument
@click.option("--tail", type=click.IntRange(0), metavar="BYTES", help="The last bytes only.")
@click.option("--follow", "-f", is_flag=True, help=FOLLOW_HELP)
@calling
def logs(caller: Caller, action_id: str, tail: int | None, follow: bool) -> None:
    """Print what a job has written to stdout and stderr, each line with its stream before it.

    On a terminal control characters are shown instead of obeyed; otherwise the bytes are as they were captured.
    """
    if caller.as_json:
        caller.in_lines = follow
        lines = _Lines(print_line if follow else None)
        caller.ask(lambda client: _read(client, action_id, tail, follow=follow, take=lines.take))
        lines.end()
        if not follow:
            print_json(LogDocument(action_id=action_id, lines=lines.found))
        return
    take = _terminal_writer() if sys.stdout.isatty() else _write
    caller.ask(lambda client: _read(client, action_id, tail, follow=follow, take=take))


async def _read(
    client: Client, action_id: str, tail: int | None, *, follow: bool, take: Callable[[bytes], None]
) -> None:
    async for piece in client.log(action_id, tail=tail, follow=follow):
        take(piece)


def _write(piece: bytes) -> None:
    click.echo(piece, nl=False)


def _terminal_writer() -> Callable[[bytes], None]:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return lambda piece: click.echo(printable(decoder.decode(piece)), nl=False)


class _Lines:
    """Makes LogLines of pieces; hands them to ``show`` or keeps them in ``found``."""

    def __init__(self, show: Callable[[LogLine], None] | None) -> None:
        self.found: list[LogLine] = []
        self._show = show or self.found.append
        self._rest = b""

    def take(self, piece: bytes) -> None:
        *whole, self._rest = (self._rest + piece).split(b"\n")
        for line in _parsed(whole):
            self._show(line)

    def end(self) -> None:
        """A last line without its end."""
        for line in _parsed([self._rest] if self._rest else []):
            self._show(line)


def _parsed(lines: list[bytes]) -> Iterator[LogLine]:
    for line in lines:
        stream, _, text = line.decode("utf-8", "replace").partition(" ")
        yield LogLine(stream=stream, line=text)
