"""``crew-supervisor fleet``: who is in the fleet, writing off a machine that is gone, making the tables."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import click

from protocol.errors import ConfigError, CrewError
from supervisor import config
from supervisor.cli.calling import Caller, calling
from supervisor.cli.exits import Exit
from supervisor.cli.shared import (
    cell,
    config_option,
    plain_table,
    print_fields,
    print_json,
    print_table,
    say,
    say_refusal,
    time_text,
)
from supervisor.client import Replica


@click.group("fleet")
def fleet_group() -> None:
    """Look after supervisors that share a PostgreSQL database."""


@fleet_group.command("status")
@calling
def status(caller: Caller) -> None:
    """List every replica, as the database has it.

    Any replica can be asked; what it knows of itself goes to stderr, or into the JSON document.
    """
    found = caller.ask(lambda client: client.fleet())
    if caller.as_json:
        print_json(found)
        return
    table = plain_table("replica", "state", "lease", "epoch", "running", "queued", "unfinished", "url", "version")
    for one in found.replicas:
        lease = "-" if one.retired_at is not None else f"{one.lease_left_s:.1f} s"
        row = (one.replica_id, state_of(one), lease, one.epoch, one.running, one.queued, one.unfinished, one.url)
        table.add_row(*map(cell, row), cell(one.version))
    print_table(table)
    lease = "valid" if found.lease_valid else f"not valid: {found.why}"
    say(f"answered by {found.replica_id}, whose lease is {lease}; {found.outbox} endings not told yet")


def state_of(replica: Replica) -> str:
    """One word for how it stands."""
    if replica.retired_at is not None:
        return f"retired {time_text(replica.retired_at)}"
    if not replica.lease_valid:
        return "away"
    return "draining" if replica.draining else "ready"


@fleet_group.command("retire")
@click.argument("replica_id")
@click.option("--actor", required=True, help="Who says so.")
@click.option("--evidence", required=True, help="How it is known that the machine is off, and stays off.")
@calling
def retire(caller: Caller, replica_id: str, actor: str, evidence: str) -> None:
    """Write off a replica whose machine is off for good.

    Its unfinished Actions become failed, their outcomes uncertain, and its id is never given again. Refused while its
    lease is valid. The database cannot know that the machine is off, only that nothing was heard of it: whoever
    retires a replica that still runs lets it go on with work that the fleet has written off.
    """
    found = caller.ask(lambda client: client.retire(replica_id, actor=actor, evidence=evidence))
    if caller.as_json:
        print_json(found)
    else:
        print_fields({name: getattr(found, name) for name in found.__struct_fields__})


@fleet_group.command("init")
@config_option
def init(config_path: Path | None) -> None:
    """Make the tables in the configured database, or bring them forward.

    A supervisor does that by itself where its role may create schemas. Exit status: 0 done, 1 the database is away or
    refuses, 2 configuration refused.
    """
    try:
        settings = config.load(config_path, os.environ)
        if settings.fleet is None:
            raise ConfigError("fleet is not set; set fleet.database, fleet.replica and fleet.url")
        from supervisor.fleet import VERSION, make_schema

        before = asyncio.run(make_schema(settings.fleet.database))
    except ConfigError as error:
        say_refusal("configuration refused", error)
        sys.exit(Exit.USAGE)
    except CrewError as error:
        say_refusal("not done", error)
        sys.exit(Exit.FAILED)
    except ImportError as error:
        say(f"not done: {error}; install crew-supervisor[fleet]")
        sys.exit(Exit.FAILED)
    click.echo(f"version {VERSION}" + ("" if before == VERSION else f", was {before}"))
