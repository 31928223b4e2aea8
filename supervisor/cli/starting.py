"""``submit`` and ``wait``: start a job, and stay until it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import uuid
from pathlib import Path
from typing import Any

import click

from protocol import canonical
from protocol.api import MAX_TIMEOUT_MS
from protocol.errors import BadJson
from protocol.operations import Operation
from supervisor.cli import progress
from supervisor.cli.calling import Caller, calling
from supervisor.cli.exits import Exit, of_job
from supervisor.cli.shared import choice, print_json, print_line, printable, say
from supervisor.client import Action, Client, EventStream, InvalidStream, Job, ResponseTooLarge


@click.command("submit")
@click.argument("crew_id", metavar="CREW")
@click.option("--input", "given", default="{}", help="The input, a JSON object: text, @FILE, or - for stdin.")
@click.option("--action-id", metavar="ID", help="Names the Action; a new one unless said.")
@click.option("--key", help="The idempotency key; the Action id unless said.")
@click.option("--operation", type=choice(Operation), default=Operation.RUN.value, show_default=True)
@click.option("--timeout-ms", type=click.IntRange(1, MAX_TIMEOUT_MS), help="How long its work may take.")
@click.option("--follow", "-f", is_flag=True, help="Stay to its end, and print its output; with --json its events.")
@calling
def submit(
    caller: Caller,
    crew_id: str,
    given: str,
    action_id: str | None,
    key: str | None,
    operation: str,
    timeout_ms: int | None,
    follow: bool,
) -> None:
    """Start an operation of CREW; print its Action id once it is durable.

    The same command with the same --action-id is a repeat, which executes nothing. The exit status says how it ended
    if --follow has waited for that, or if a repeat finds it ended; else that it was admitted. SIGINT ends the command
    and leaves the job alone.
    """
    action = Action(
        action_id=action_id or f"cli-{uuid.uuid4().hex}",
        crew_id=crew_id,
        operation=operation,
        input=_input(given),
        timeout_ms=timeout_ms,
        idempotency_key=key,
    )
    if action_id is None:
        say(f"Action {action.action_id}")  # before it is sent: whoever loses the answer needs it
    if follow:
        caller.in_lines = caller.as_json
        job = caller.ask(lambda client: _start_and_follow(client, action, caller))
        _print_end(job, caller)
        sys.exit(of_job(job))
    job = caller.ask(lambda client: client.submit(action))
    if caller.as_json:
        print_json(job)
    else:
        click.echo(job.action_id)
    sys.exit(of_job(job) if job.ended else Exit.OK)


def _input(given: str) -> dict[str, Any]:
    try:
        if given == "-":
            body = sys.stdin.buffer.read()
        elif given.startswith("@"):
            body = Path(given[1:]).read_bytes()
        else:
            body = given.encode("utf-8", "surrogateescape")
        document = canonical.parse(body)
    except OSError as error:
        raise click.UsageError(f"--input cannot be read: {error.strerror}") from None
    except BadJson as error:
        raise click.UsageError(f"--input is no strict JSON: {error.detail}") from None
    if not isinstance(document, dict):
        raise click.UsageError("--input must be a JSON object")
    return document


async def _start_and_follow(client: Client, action: Action, caller: Caller) -> Job:
    async with client.stream(action) as events:
        await _follow(events, caller)
    return await client.status(action.action_id)


async def _follow(events: EventStream, caller: Caller) -> None:
    """Read to the end, and show what is wanted of it."""
    line = progress.Progress()
    with progress.shown(line) if progress.wanted(as_json=caller.as_json) else contextlib.nullcontext():
        async for event in events:
            line.take(event)
            if caller.in_lines:
                print_line(event)


@click.command("wait")
@click.argument("action_id", metavar="ID")
@click.option("--timeout", "timeout_s", type=click.FloatRange(0), metavar="S", help="Give up after so many seconds.")
@calling
def wait(caller: Caller, action_id: str, timeout_s: float | None) -> None:
    """Wait for the end of a job; print its output.

    The exit status says how it ended, 124 also that --timeout has passed. With --json the record is printed.
    """
    try:
        job = caller.ask(lambda client: _wait(client, action_id, timeout_s, caller))
    except TimeoutError:
        caller.fail(Exit.TIMED_OUT, "wait_timed_out", f"Action {action_id} has not ended within {timeout_s:g} s")
    if caller.as_json:
        print_json(job)
    else:
        _print_end(job, caller)
    sys.exit(of_job(job))


async def _wait(client: Client, action_id: str, timeout_s: float | None, caller: Caller) -> Job:
    async with asyncio.timeout(timeout_s):
        job = await client.status(action_id)
        if not job.ended and progress.wanted(as_json=caller.as_json):
            # From the first event on, to know where it is; what is too much for one stream is only waited for.
            with contextlib.suppress(ResponseTooLarge, InvalidStream):
                async with client.follow(action_id) as events:
                    await _follow(events, caller)
        return await client.wait(action_id)


def _print_end(job: Job, caller: Caller) -> None:
    """The output on stdout, the rest as talk."""
    if not caller.as_json and isinstance(job.output, dict):
        raw = job.output.get("raw")
        text = raw if isinstance(raw, str) else json.dumps(job.output, indent=2)
        click.echo(printable(text) if sys.stdout.isatty() else text)
    say(ending_line(job))


def ending_line(job: Job) -> str:
    """How a job ended, in a line."""
    parts = [f"{job.action_id} {job.status.value}"]
    if job.stop is not None:
        proved = "confirmed" if job.stop.confirmed else "not confirmed"
        parts.append(f"stop {proved} ({job.stop.method}, {job.stop.reason})")
    if job.uncertain_outcome:
        decided = job.reconciliation
        parts.append("outcome uncertain" + (f", decided: {decided.decision.value}" if decided is not None else ""))
    return "; ".join(parts)
