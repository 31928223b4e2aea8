"""``crew-supervisor effects``: list, show, reconcile. They ask a running server."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote, urlencode

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from protocol.effects import Decision
from protocol.states import EffectState
from supervisor.cli.calling import Answer, Server, Unreachable, server_option, token_option
from supervisor.cli.shared import EXIT_CONFLICT, EXIT_FAILED, EXIT_NOT_FOUND, EXIT_UNREACHABLE, EXIT_USAGE, print_table

_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
#: Exit statuses by HTTP status; any other failure is EXIT_FAILED.
STATUSES = {404: EXIT_NOT_FOUND, 409: EXIT_CONFLICT, 412: EXIT_CONFLICT, 422: EXIT_USAGE}


@click.group("effects")
def effects_group() -> None:
    """Look at effects of tools, and say what became of those whose outcome is unknown.

    Exit status: 0 done, 1 failed, 2 wrong usage, 3 no such effect, 4 the effect is not, or is no more, what the
    decision was about, 6 the server does not answer.
    """


@effects_group.command("list")
@click.option("--state", type=click.Choice([state.value for state in EffectState]), help="Effects in this state only.")
@click.option("--crew", "crew_id", help="Effects of this crew only.")
@click.option("--cursor", help="Where the page before ended.")
@click.option("--limit", type=click.IntRange(1, 500), help="Effects on a page.")
@server_option
@token_option
@_json_option
def list_command(
    state: str | None,
    crew_id: str | None,
    cursor: str | None,
    limit: int | None,
    server: str,
    token_file: Path | None,
    as_json: bool,
) -> None:
    """List effects, the newest key first."""
    given = {"state": state, "crew_id": crew_id, "cursor": cursor, "limit": limit}
    query = urlencode({name: value for name, value in given.items() if value is not None})
    answer = _ask(Server(server, token_file), "GET", f"/effects?{query}", as_json=as_json)
    if as_json:
        _print_json(answer.document)
        return
    table = Table("key", "state", "tool", "crew", "action", "claimed", "reason", box=None, header_style="bold")
    for effect in answer.document["effects"]:
        names = ("key_id", "state", "tool", "crew_id", "action_id")
        table.add_row(*(Text(effect[name]) for name in names), _time(effect["claimed_at"]), Text(effect["reason"]))
    print_table(table)
    if answer.document["next_cursor"] is not None:
        click.echo(f"more with --cursor {answer.document['next_cursor']}")


@effects_group.command("show")
@click.argument("key_id")
@server_option
@token_option
@_json_option
def show_command(key_id: str, server: str, token_file: Path | None, as_json: bool) -> None:
    """Show one effect."""
    answer = _ask(Server(server, token_file), "GET", _path(key_id), as_json=as_json)
    _print_effect(answer, as_json=as_json)


@effects_group.command("reconcile")
@click.argument("key_id")
@click.option(
    "--decision", type=click.Choice([decision.value for decision in Decision]), required=True, help="What became of it."
)
@click.option("--actor", required=True, help="Who found out.")
@click.option("--evidence", required=True, help="What the decision rests on.")
@click.option("--receipt", metavar="JSON", help="The tool's result, for --decision settled.")
@click.option("--version", type=click.IntRange(1), help="The version that was looked at; else the one there is now.")
@server_option
@token_option
@_json_option
def reconcile_command(
    key_id: str,
    decision: str,
    actor: str,
    evidence: str,
    receipt: str | None,
    version: int | None,
    server: str,
    token_file: Path | None,
    as_json: bool,
) -> None:
    """Record what became of an effect whose outcome is unknown."""
    body: dict[str, Any] = {"decision": decision, "actor": actor, "evidence": evidence}
    if receipt is not None:
        try:
            body["receipt"] = json.loads(receipt)
        except ValueError as error:
            raise click.UsageError(f"--receipt is no JSON: {error}") from None
    connection = Server(server, token_file)
    etag = f'"{version}"'
    if version is None:
        etag = _ask(connection, "GET", _path(key_id), as_json=as_json).etag or ""
    path, headers = f"{_path(key_id)}/reconcile", {"If-Match": etag}
    _print_effect(_ask(connection, "POST", path, body=body, headers=headers, as_json=as_json), as_json=as_json)


def _path(key_id: str) -> str:
    return f"/effects/{quote(key_id, safe='')}"


def _ask(server: Server, method: str, path: str, *, as_json: bool, **options: Any) -> Answer:
    """The answer to a request that was granted; anything else ends the command."""
    try:
        answer = server.ask(method, path, **options)
    except Unreachable as error:
        _fail("unreachable", str(error), EXIT_UNREACHABLE, as_json=as_json)
    if answer.status != 200:
        code, detail = str(answer.document.get("code")), str(answer.document.get("detail"))
        _fail(code, detail, STATUSES.get(answer.status, EXIT_FAILED), as_json=as_json)
    return answer


def _fail(code: str, detail: str, status: int, *, as_json: bool) -> NoReturn:
    if as_json:
        _print_json({"ok": False, "error": {"code": code, "detail": detail}})
    else:
        text = Text(f"{code}: ", style="bold red") + Text(detail, style="default")
        Console(stderr=True).print(text, soft_wrap=True)
    sys.exit(status)


def _print_effect(answer: Answer, *, as_json: bool) -> None:
    if as_json:
        _print_json(answer.document)
        return
    table = Table("field", "value", box=None, header_style="bold")
    for name, value in answer.document.items():
        shown = _time(value) if name.endswith("_at") else value if isinstance(value, str) else json.dumps(value)
        table.add_row(name, Text(shown))
    print_table(table)


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _print_json(document: object) -> None:
    click.echo(json.dumps(document, indent=2))
