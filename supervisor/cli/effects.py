"""``crew-supervisor effects``: list, show, reconcile. They ask a running server."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from protocol import canonical
from protocol.effects import Decision, Scope
from protocol.errors import BadJson
from protocol.states import EffectState
from supervisor.cli.calling import Caller, calling
from supervisor.cli.shared import (
    cell,
    choice,
    plain_table,
    print_answer,
    print_json,
    print_table,
    say,
    time_text,
)
from supervisor.client import Client, Effect


@click.group("effects")
def effects_group() -> None:
    """Look at effects of tools, and say what became of those whose outcome is unknown."""


@effects_group.command("list")
@click.option("--state", type=choice(EffectState), help="Effects in this state only.")
@click.option("--crew", "crew_id", help="Effects of this crew only.")
@click.option("--scope", type=choice(Scope), help="Effects of this scope only; crew and global: of the whole fleet.")
@click.option("--cursor", help="Where the page before ended.")
@click.option("--limit", type=click.IntRange(1, 500), help="Effects on a page.")
@calling
def list_command(
    caller: Caller, state: str | None, crew_id: str | None, scope: str | None, cursor: str | None, limit: int | None
) -> None:
    """List effects, the newest key first."""
    wanted = None if state is None else EffectState(state)
    reach = None if scope is None else Scope(scope)
    page = caller.ask(
        lambda client: client.list_effects(state=wanted, crew_id=crew_id, scope=reach, cursor=cursor, limit=limit)
    )
    if caller.as_json:
        print_json(page)
        return
    table = plain_table("key", "state", "tool", "crew", "action", "claimed", "reason")
    for effect in page.effects:
        row = (effect.key_id, effect.state.value, effect.tool, effect.crew_id, effect.action_id)
        table.add_row(*map(cell, row), time_text(effect.claimed_at), cell(effect.reason))
    print_table(table)
    if page.next_cursor is not None:
        say(f"more with --cursor {page.next_cursor}")


@effects_group.command("show")
@click.argument("key_id")
@calling
def show_command(caller: Caller, key_id: str) -> None:
    """Show one effect."""
    print_answer(caller.ask(lambda client: client.effect(key_id)), as_json=caller.as_json)


@effects_group.command("reconcile")
@click.argument("key_id")
@click.option("--decision", type=choice(Decision), required=True, help="What became of it.")
@click.option("--actor", required=True, help="Who found out.")
@click.option("--evidence", required=True, help="What the decision rests on.")
@click.option("--receipt", metavar="JSON", help="The tool's result, for --decision settled.")
@click.option("--version", type=click.IntRange(1), help="The version that was looked at; else the one there is now.")
@calling
def reconcile_command(
    caller: Caller,
    key_id: str,
    decision: str,
    actor: str,
    evidence: str,
    receipt: str | None,
    version: int | None,
) -> None:
    """Record what became of an effect whose outcome is unknown."""
    decided, result = Decision(decision), _receipt(receipt)
    if (decided is Decision.SETTLED) != (receipt is not None):
        raise click.UsageError("--receipt goes with --decision settled, and with that one only; null is one too")

    async def work(client: Client) -> Effect:
        effect = await client.effect(key_id)
        if version is not None:
            effect = msgspec.structs.replace(effect, etag=f'"{version}"')
        return await client.reconcile_effect(effect, decided, actor=actor, evidence=evidence, receipt=result)

    print_answer(caller.ask(work), as_json=caller.as_json)


def _receipt(text: str | None) -> Any:
    if text is None:
        return msgspec.UNSET
    try:
        return canonical.parse(text.encode("utf-8", "surrogateescape"))
    except BadJson as error:
        raise click.UsageError(f"--receipt is no strict JSON: {error.detail}") from None
