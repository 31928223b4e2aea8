"""The table of exit statuses: complete, documented, and what failures and records stand for."""

from __future__ import annotations

import re
from typing import Any

import click
import pytest

from docs import generate
from protocol.api import JobDecision, JobReconciliation, StopEvidence
from protocol.states import Status
from supervisor.cli import cli
from supervisor.cli.exits import BY_STATUS, MEANINGS, Exit, of_failure, of_job
from supervisor.client import (
    ClientFailure,
    InvalidCredential,
    InvalidRequest,
    InvalidStream,
    Job,
    Refusal,
    TransportFailed,
)
from supervisor.client.failures import of_refusal
from supervisor.http.routes import Routes
from tests.cli.test_commands import COMMANDS, name_of
from tests.unit.test_cli import run


def test_every_status_has_a_meaning_and_a_number_of_its_own() -> None:
    assert list(MEANINGS) == list(Exit)
    assert {status.name: status.value for status in Exit} == {
        "OK": 0, "FAILED": 1, "USAGE": 2, "NOT_FOUND": 3, "CONFLICT": 4, "UNCERTAIN": 5, "UNREACHABLE": 6,
        "TIMED_OUT": 124, "INTERRUPTED": 130,
    }  # fmt: skip


def refused(status: int, code: str, *, mutation: bool) -> ClientFailure:
    return of_refusal(Refusal(status=status, code=code), mutation=mutation)


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (InvalidRequest("x"), Exit.USAGE),
        (InvalidCredential("x"), Exit.USAGE),
        (TransportFailed("x"), Exit.UNREACHABLE),
        (TransportFailed("x", mutation=True, doubt=False), Exit.UNREACHABLE),
        (TransportFailed("x", mutation=True), Exit.UNCERTAIN),
        (InvalidStream("x"), Exit.UNREACHABLE),
        (refused(503, "stop_unconfirmed", mutation=True), Exit.UNCERTAIN),
        (refused(503, "not_accepting", mutation=True), Exit.FAILED),
        (refused(507, "journal_full", mutation=True), Exit.FAILED),
        (refused(507, "journal_unavailable", mutation=False), Exit.FAILED),
        (refused(401, "unauthorized", mutation=True), Exit.FAILED),
        (refused(403, "operation_disabled", mutation=True), Exit.FAILED),
        (refused(404, "action_unknown", mutation=False), Exit.NOT_FOUND),
        (refused(412, "effect_changed", mutation=True), Exit.CONFLICT),
    ],
    ids=str,
)
def test_a_failure_has_the_status_of_its_kind(failure: ClientFailure, status: Exit) -> None:
    assert of_failure(failure) is status


def test_every_refusal_of_a_route_is_in_the_table_or_plainly_a_failure() -> None:
    refusals = {error.status for route in Routes.table() for error in route.all_errors if error.status < 500}
    # 408 and 417 are answers to what the client does not send; the other two are about the token.
    assert refusals - BY_STATUS.keys() == {401, 403, 408, 417}


DECIDED = JobReconciliation(at=1.0, decision=JobDecision.APPLIED, actor="ops", evidence="e")


@pytest.mark.parametrize(
    ("about", "status"),
    [
        ({"status": Status.COMPLETED, "uncertain_outcome": False}, Exit.OK),
        ({"status": Status.FAILED, "uncertain_outcome": False}, Exit.FAILED),
        ({"status": Status.FAILED, "uncertain_outcome": True}, Exit.UNCERTAIN),
        ({"status": Status.FAILED}, Exit.UNCERTAIN),
        ({"status": Status.CANCELLED, "uncertain_outcome": True}, Exit.UNCERTAIN),
        ({"status": Status.CANCELLED, "uncertain_outcome": False}, Exit.FAILED),
        ({"status": Status.FAILED, "uncertain_outcome": True, "reconciliation": DECIDED}, Exit.FAILED),
        ({"status": Status.FAILED, "uncertain_outcome": True, "reason": "timeout"}, Exit.TIMED_OUT),
        ({"status": Status.FAILED, "uncertain_outcome": True, "reason": "timeout: nobody looked"}, Exit.TIMED_OUT),
        ({"status": Status.FAILED, "uncertain_outcome": True, "reason": "failed: timeout"}, Exit.UNCERTAIN),
    ],
    ids=str,
)
def test_a_record_has_the_status_of_its_end(about: dict[str, Any], status: Exit) -> None:
    about = dict(about)
    reason = about.pop("reason", "completed")
    stop = StopEvidence(confirmed=True, method="cgroup", reason=reason, requested_at=1.0)
    job = Job(action_id="a", crew_id="c", operation="run", event_count=1, stop=stop, **about)
    assert of_job(job) is status


# --- the document ----------------------------------------------------------------------------------------------------


def test_the_document_is_what_the_commands_say() -> None:
    written = generate.CLI.read_text(encoding="utf-8")
    assert written == generate.cli_document(), "out of date; run python -m docs.generate"


def test_every_command_is_in_the_document_and_explained() -> None:
    written = generate.CLI.read_text(encoding="utf-8")
    named = set(re.findall(r"^### (.+)$", written, re.MULTILINE))
    found = dict(generate.commands(cli, ("crew-supervisor",)))
    assert named == {" ".join(path[1:]) for path in found}
    assert {"submit", "ps", "effects reconcile", "journal backup", "serve"} <= named
    assert all(command.help for command in found.values())


def test_every_command_that_talks_to_a_server_has_json_and_is_among_the_tested() -> None:
    talking = {path[1:] for path, command in generate.commands(cli, ("crew-supervisor",)) if takes(command, "server")}
    tested = set(map(name_of, COMMANDS))
    assert talking == tested
    assert talking <= {
        path[1:] for path, command in generate.commands(cli, ("crew-supervisor",)) if takes(command, "as_json")
    }


def takes(command: click.Command, name: str) -> bool:
    return name in {param.name for param in command.params}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_click_s_own(shell: str) -> None:
    written = generate.CLI.read_text(encoding="utf-8")
    assert f"_CREW_SUPERVISOR_COMPLETE={shell}_source crew-supervisor" in written
    script = run(_CREW_SUPERVISOR_COMPLETE=f"{shell}_source")
    assert "_CREW_SUPERVISOR_COMPLETE" in script.stdout
    word = "rec" if shell == "fish" else "1"
    completed = run(_CREW_SUPERVISOR_COMPLETE=f"{shell}_complete", COMP_WORDS="crew-supervisor rec", COMP_CWORD=word)
    assert "reconcile" in completed.stdout
