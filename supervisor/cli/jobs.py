"""Looking at jobs and deciding about them: ps, show, cancel, archive, reconcile, evidence."""

from __future__ import annotations

import sys

import click

from protocol.operations import Operation
from protocol.states import Status
from supervisor.cli.calling import Caller, calling
from supervisor.cli.exits import Exit
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
from supervisor.cli.starting import ending_line
from supervisor.client import Client, Job, JobDecision

id_argument = click.argument("action_id", metavar="ID")


@click.command("ps")
@click.option("--status", type=choice(Status), help="Jobs of this status only.")
@click.option("--crew", "crew_id", help="Jobs of this crew only.")
@click.option("--operation", type=choice(Operation), help="Jobs of this operation only.")
@click.option("--cursor", help="Where the page before ended.")
@click.option("--limit", type=click.IntRange(1, 500), help="Jobs on a page.")
@calling
def ps(
    caller: Caller,
    status: str | None,
    crew_id: str | None,
    operation: str | None,
    cursor: str | None,
    limit: int | None,
) -> None:
    """List the retained jobs, newest first."""
    wanted = None if status is None else Status(status)
    page = caller.ask(
        lambda client: client.list_jobs(
            status=wanted, crew_id=crew_id, operation=operation, cursor=cursor, limit=limit
        )
    )
    if caller.as_json:
        print_json(page)
        return
    table = plain_table("action", "crew", "operation", "status", "phase", "admitted", "outcome")
    for job in page.jobs:
        row = (job.action_id, job.crew_id, job.operation, job.status.value, job.phase)
        table.add_row(*map(cell, row), time_text(job.admitted_at), _outcome(job))
    print_table(table)
    if page.next_cursor is not None:
        say(f"more with --cursor {page.next_cursor}")


def _outcome(job: Job) -> str:
    if not job.uncertain_outcome:
        return "-"
    return "uncertain" if job.reconciliation is None else job.reconciliation.decision.value


@click.command("show")
@id_argument
@calling
def show(caller: Caller, action_id: str) -> None:
    """Show the record of a job."""
    print_answer(caller.ask(lambda client: client.status(action_id)), as_json=caller.as_json)


@click.command("cancel")
@id_argument
@click.option("--reason", help="Kept in the audit.")
@click.option("--wait", "wait_s", type=click.IntRange(0, 3600), metavar="S", help="Answer then, with or without proof.")
@calling
def cancel(caller: Caller, action_id: str, reason: str | None, wait_s: int | None) -> None:
    """Stop a job, and say so when it is proved.

    Exit status 0 when the job has ended, however, and its stop is confirmed; 5 when it is not, 124 when --wait has
    passed before.
    """
    job = caller.ask(lambda client: _cancel(client, action_id, reason, wait_s))
    if caller.as_json:
        print_json(job)
    else:
        click.echo(ending_line(job) if job.ended else f"{action_id} is being stopped")
    if not job.ended:
        sys.exit(Exit.TIMED_OUT)
    sys.exit(Exit.OK if job.stop is not None and job.stop.confirmed else Exit.UNCERTAIN)


async def _cancel(client: Client, action_id: str, reason: str | None, wait_s: int | None) -> Job:
    crew_id = (await client.status(action_id)).crew_id
    return await client.cancel(action_id, crew_id, reason=reason, wait_s=wait_s)


@click.command("archive")
@id_argument
@calling
def archive(caller: Caller, action_id: str) -> None:
    """Archive a job that has ended; its id is never executed again."""
    archived = caller.ask(lambda client: client.archive(action_id))
    if caller.as_json:
        print_json(archived)
    else:
        click.echo(f"{archived.action_id} archived")


@click.command("reconcile")
@id_argument
@click.option("--decision", type=choice(JobDecision), required=True, help="What became of its work.")
@click.option("--actor", required=True, help="Who found out.")
@click.option("--evidence", required=True, help="What the decision rests on.")
@calling
def reconcile(caller: Caller, action_id: str, decision: str, actor: str, evidence: str) -> None:
    """Record a decision beside the uncertain outcome of a job; the record itself stays as it is.

    The newest decision counts. Single effects of tools have their own: see `effects reconcile`.
    """
    decided = JobDecision(decision)
    job = caller.ask(lambda client: client.reconcile(action_id, decided, actor=actor, evidence=evidence))
    print_answer(job, as_json=caller.as_json)


@click.command("evidence")
@id_argument
@calling
def evidence(caller: Caller, action_id: str) -> None:
    """Print what is known of a job, in one JSON document: digests, record, stop, effects, end of the log, audit."""
    print_json(caller.ask(lambda client: client.evidence(action_id)))
