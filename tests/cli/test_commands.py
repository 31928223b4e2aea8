"""Every command that talks to a server, as a process against a real one: what it prints, and how it exits."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from protocol.api import (
    Archived,
    Draining,
    EffectList,
    EventSlice,
    EventView,
    JobEvidence,
    JobList,
    JobView,
)
from supervisor.cli.reading import LogDocument, LogLine
from supervisor.cli.server import CrewList
from tests.cli.conftest import Command, check, running
from tests.support.cases import RESPOND_ASYNC
from tests.support.gates import Gate
from tests.support.server import Server

DECISION = ("--decision", "not_applied", "--actor", "ops", "--evidence", "statement 7")
#: One of each: a command about one job needs a job.
COMMANDS = [
    ("submit", "instant"),
    ("submit", "instant", "--follow"),
    ("wait", "x"),
    ("ps",),
    ("show", "x"),
    ("events", "x"),
    ("events", "x", "--follow"),
    ("logs", "x"),
    ("logs", "x", "--follow"),
    ("cancel", "x"),
    ("archive", "x"),
    ("reconcile", "x", *DECISION),
    ("evidence", "x"),
    ("effects", "list"),
    ("effects", "show", "0" * 64),
    ("effects", "reconcile", "0" * 64, "--decision", "abandoned", "--actor", "ops", "--evidence", "e"),
    ("crews",),
    ("drain",),
    ("drain", "--undo"),
    ("fleet", "status"),
    ("fleet", "retire", "replica-9", "--actor", "ops", "--evidence", "e"),
]
ABOUT_ONE = [command for command in COMMANDS if "x" in command or "0" * 64 in command]


def document(done: subprocess.CompletedProcess[str], kind: Any, status: int = 0) -> Any:
    """The one document of a command that ended with that status."""
    assert done.returncode == status, done.stderr + done.stdout
    return check(json.loads(done.stdout), kind)


#: What every command with --json prints when it did not do what it was to do.
REFUSAL = {
    "type": "object",
    "additionalProperties": False,
    "required": ["ok", "error"],
    "properties": {
        "ok": {"const": False},
        "error": {
            "type": "object",
            "additionalProperties": False,
            "required": ["code", "detail"],
            "properties": {"code": {"type": "string", "minLength": 1}, "detail": {"type": "string", "minLength": 1}},
        },
    },
}


def name_of(words: tuple[str, ...]) -> tuple[str, ...]:
    """The words of a command line that name its command."""
    return words[:2] if words[0] in ("effects", "fleet") else words[:1]


def code_of(done: subprocess.CompletedProcess[str]) -> str:
    """The code of the refusal that a command printed as its last document."""
    refused = json.loads(done.stdout)
    jsonschema.validate(refused, REFUSAL)
    return str(refused["error"]["code"])


# --- submit, wait ----------------------------------------------------------------------------------------------------


def test_submit_prints_the_id_of_a_durable_job_and_a_repeat_executes_nothing(crew: Command) -> None:
    first = crew("submit", "instant", "--action-id", "s-1", "--input", '{"n": 1}')
    assert (first.returncode, first.stdout, first.stderr) == (0, "s-1\n", "")
    assert crew("wait", "s-1").returncode == 0
    again = document(crew("submit", "instant", "--action-id", "s-1", "--input", '{"n": 1}', "--json"), JobView)
    assert (again["status"], again["event_count"]) == ("completed", 2)
    other = crew("submit", "instant", "--action-id", "s-1", "--input", '{"n": 2}', "--json")
    assert (other.returncode, code_of(other)) == (4, "action_conflict")


def test_submit_makes_an_id_and_says_it_before_it_is_sent(server: Server, crew: Command) -> None:
    done = crew("submit", "instant")
    action_id = done.stdout.strip()
    assert done.stderr == f"Action {action_id}\n"
    assert server.client().get(action_id).expect(200)["crew_id"] == "instant"
    lost = crew("submit", "instant", CREW_SUPERVISOR_SERVER=nowhere())
    assert (lost.returncode, lost.stderr.startswith("Action cli-")) == (6, True)


def test_input_comes_from_the_command_a_file_or_stdin(server: Server, tmp_path: Path) -> None:
    text, path = '{"city": "Kraków", "n": 1.5}', tmp_path / "input.json"
    path.write_text(text, encoding="utf-8")
    for number, given in enumerate((text, f"@{path}", "-")):
        command = ("submit", "echo", "--action-id", f"in-{number}", "--follow", "--input", given)
        with path.open("rb") as file, running(server, *command, stdin=file) as process:
            process.communicate(timeout=60)
        assert process.returncode == 0
        assert server.client().get(f"in-{number}").expect(200)["output"]["echo"] == {"city": "Kraków", "n": 1.5}


@pytest.mark.parametrize("given", ["{", "[]", "1", '{"a": 1, "a": 2}', '{"a": NaN}', "@/there/is/no/such/file"])
def test_an_input_that_is_no_strict_json_object_is_wrong_usage(crew: Command, given: str) -> None:
    assert crew("submit", "instant", "--input", given).returncode == 2


def test_follow_prints_the_output_or_the_events(crew: Command) -> None:
    done = crew("submit", "talker", "--action-id", "f-1", "--follow")
    assert (done.returncode, done.stdout) == (0, "said\n")
    assert done.stderr.startswith("f-1 completed; stop confirmed (")
    streamed = crew("submit", "streaming", "--action-id", "f-2", "--follow", "--json")
    assert streamed.returncode == 0
    events = [check(json.loads(line), EventView) for line in streamed.stdout.splitlines()]
    assert [event["event"] for event in events] == ["started", "chunk", "chunk", "completed"]
    assert [event["sequence"] for event in events] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("crew_id", "more", "status", "said"),
    [
        ("instant", (), 0, "completed"),
        ("failing", (), 5, "outcome uncertain"),
        ("factory_raises", (), 1, "failed"),
        ("sleeper", ("--timeout-ms", "50"), 124, "timeout"),
        ("nobody", (), 3, "crew_unknown"),
    ],
)
def test_how_a_job_ended_is_the_exit_status_of_those_who_waited(
    crew: Command, crew_id: str, more: tuple[str, ...], status: int, said: str
) -> None:
    name = f"end-{crew_id}"
    done = crew("submit", crew_id, "--action-id", name, "--follow", *more)
    assert (done.returncode, said in done.stderr) == (status, True), done.stderr
    assert crew("submit", crew_id, "--action-id", name, "--follow", "--json", *more).returncode == status
    assert crew("wait", name).returncode == (3 if crew_id == "nobody" else status)
    assert crew("submit", crew_id, "--action-id", name, *more).returncode == status, "a repeat of what has ended"


def test_a_job_that_another_cancels_is_uncertain_for_whoever_waits(server: Server, crew: Command, gate: Gate) -> None:
    server.client().start("w-1", "turnstile", input=gate.input, headers=RESPOND_ASYNC).expect(202)
    gate.wait("began")
    late = crew("wait", "w-1", "--timeout", "0.3", "--json")
    assert (late.returncode, code_of(late)) == (124, "wait_timed_out")
    stopped = document(crew("cancel", "w-1", "--reason", "enough", "--json"), JobView)
    assert (stopped["status"], stopped["stop"]["confirmed"]) == ("cancelled", True)
    assert document(crew("wait", "w-1", "--json"), JobView, 5) == stopped
    assert crew("reconcile", "w-1", *DECISION).returncode == 0
    assert crew("wait", "w-1").returncode == 1, "reconciled, it is uncertain no more"


# --- looking ---------------------------------------------------------------------------------------------------------


def test_ps_lists_and_filters_and_goes_on_where_a_page_ended(server: Server, crew: Command) -> None:
    for number in range(3):
        server.client().start(f"ps-{number}", "batch_of_one", operation="batch_run", input={"inputs": [{}]})
    filters = ("--crew", "batch_of_one")
    page = document(crew("ps", *filters, "--limit", "2", "--json"), JobList)
    rest = document(crew("ps", *filters, "--cursor", page["next_cursor"], "--json"), JobList)
    names = [check(job, JobView)["action_id"] for job in page["jobs"] + rest["jobs"]]
    assert names == ["ps-2", "ps-1", "ps-0"]
    done = crew("ps", *filters, "--limit", "2", COLUMNS="30")
    assert page["next_cursor"] in done.stderr
    assert [line.split()[:3] for line in done.stdout.splitlines()] == [
        ["action", "crew", "operation"],
        ["ps-2", "batch_of_one", "batch_run"],
        ["ps-1", "batch_of_one", "batch_run"],
    ]
    assert document(crew("ps", "--status", "running", *filters, "--json"), JobList)["jobs"] == []
    assert document(crew("ps", "--operation", "train", *filters, "--json"), JobList)["jobs"] == []


def test_show_and_evidence_are_what_the_server_says(server: Server, crew: Command) -> None:
    server.client().start("look", "talker").expect(200)
    assert document(crew("show", "look", "--json"), JobView) == server.client().get("look").json()
    text = crew("show", "look").stdout
    assert {"action_id", "status", "stop", "reconciliation"} <= {line.split()[0] for line in text.splitlines()}
    served = server.client().request("GET", "/jobs/look/evidence").json()
    for arguments in ((), ("--json",)):
        assert document(crew("evidence", "look", *arguments), JobEvidence) == served


def test_events_are_printed_from_a_cursor_on(server: Server, crew: Command) -> None:
    server.client().start("ev", "streaming", input={"chunks": 3}).expect(200)
    done = crew("events", "ev")
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [
        ["0", "started"], ["1", "chunk"], ["2", "chunk"], ["3", "chunk"], ["4", "completed"]
    ]  # fmt: skip
    page = document(crew("events", "ev", "--cursor", "3", "--json"), EventSlice)
    assert [event["sequence"] for event in page["events"]] == [3, 4]
    followed = crew("events", "ev", "--cursor", "3", "--follow", "--json")
    assert [check(json.loads(line), EventView) for line in followed.stdout.splitlines()] == page["events"]
    assert crew("events", "ev", "--cursor", "99", "--json").returncode == 2


def test_logs_are_printed_as_they_were_captured(server: Server, crew: Command) -> None:
    server.client().start("lo", "talker").expect(200)
    text = server.client().request("GET", "/jobs/lo/log").body.decode()
    assert crew("logs", "lo").stdout == crew("logs", "lo", "--follow").stdout == text
    assert crew("logs", "lo", "--tail", "7").stdout == text[-7:]
    found = document(crew("logs", "lo", "--json"), LogDocument)
    lines = [check(json.loads(line), LogLine) for line in crew("logs", "lo", "-f", "--json").stdout.splitlines()]
    assert found["lines"] == lines
    assert {(line["stream"], line["line"]) for line in lines} == {
        ("stdout", "first words"), ("stderr", "a complaint"), ("stdout", "last words")
    }  # fmt: skip


def test_crews_are_those_of_the_server(server: Server, crew: Command) -> None:
    health = server.client().health().expect(200)
    assert crew("crews").stdout.splitlines() == health["crews"]
    assert document(crew("crews", "--json"), CrewList) == {
        "crews": health["crews"], "operations": health["operations"]
    }  # fmt: skip


# --- deciding --------------------------------------------------------------------------------------------------------


def test_cancel_says_whether_the_stop_is_proved(server: Server, crew: Command, gate: Gate) -> None:
    client = server.client()
    client.start("c-1", "turnstile", input=gate.input, headers=RESPOND_ASYNC).expect(202)
    gate.wait("began")
    done = crew("cancel", "c-1")
    assert (done.returncode, done.stdout.startswith("c-1 cancelled; stop confirmed (")) == (0, True)
    assert crew("cancel", "c-1").returncode == 0, "it had ended, and there is nothing left of it"
    entries = client.request("GET", "/jobs/c-1/evidence").json()["audit"]
    assert "stop_requested" in [entry["act"] for entry in entries]


def test_a_cancel_that_does_not_wait_has_not_seen_the_end(server: Server, crew: Command, tmp_path: Path) -> None:
    server.client().start("c-2", "closer", input=Gate(tmp_path, "c").input, headers=RESPOND_ASYNC).expect(202)
    Gate(tmp_path, "c").wait("began")
    hurried = crew("cancel", "c-2", "--wait", "0", "--json")
    view = check(json.loads(hurried.stdout), JobView)
    assert hurried.returncode == (124 if view["status"] == "running" else 0)
    assert crew("wait", "c-2").returncode == 5


def test_archive_removes_and_fences(crew: Command, server: Server, gate: Gate) -> None:
    server.client().start("a-1", "instant").expect(200)
    assert document(crew("archive", "a-1", "--json"), Archived) == {"archived": True, "action_id": "a-1"}
    assert crew("archive", "a-1").returncode == 3
    gone = crew("submit", "instant", "--action-id", "a-1", "--key", "key-a-1", "--json")
    assert (gone.returncode, code_of(gone)) == (4, "action_archived")
    server.client().start("a-2", "turnstile", input=gate.input, headers=RESPOND_ASYNC).expect(202)
    busy = crew("archive", "a-2", "--json")
    assert (busy.returncode, code_of(busy)) == (4, "action_running")


def test_reconcile_puts_a_decision_beside_the_record(crew: Command, server: Server) -> None:
    server.client().start("r-1", "failing").expect(502)
    view = document(crew("reconcile", "r-1", *DECISION, "--json"), JobView)
    decided = view["reconciliation"]
    assert (decided["decision"], decided["actor"], decided["evidence"]) == ("not_applied", "ops", "statement 7")
    assert "not_applied" in crew("ps", "--crew", "failing").stdout
    server.client().start("r-2", "instant").expect(200)
    sure = crew("reconcile", "r-2", *DECISION, "--json")
    assert (sure.returncode, code_of(sure)) == (4, "outcome_certain")
    assert crew("reconcile", "r-1", "--decision", "settled", "--actor", "a", "--evidence", "e").returncode == 2
    assert crew("reconcile", "r-1", "--decision", "applied").returncode == 2


def test_drain_refuses_work_until_it_is_undone(crew: Command) -> None:
    assert document(crew("drain", "--json"), Draining)["draining"] is True
    refused = crew("submit", "instant", "--json")
    assert (refused.returncode, code_of(refused)) == (1, "not_accepting"), "nothing was admitted: it is certain"
    assert crew("ps").returncode == 0
    done = crew("drain", "--undo")
    assert (done.returncode, done.stdout.startswith("admits; 0 running")) == (0, True)
    assert crew("submit", "instant", "--follow").returncode == 0


def test_lists_of_effects_are_documents_of_the_server(crew: Command) -> None:
    assert document(crew("effects", "list", "--json"), EffectList) == {"effects": [], "next_cursor": None}


# --- what goes wrong, for every command ------------------------------------------------------------------------------


def nowhere() -> str:
    """The URL of a port where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_server_that_is_not_there_is_unreachable(crew: Command, command: tuple[str, ...]) -> None:
    done = crew(*command, "--json", "--server", nowhere())
    assert (done.returncode, code_of(done)) == (6, "connector.crewai.transport")


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_wrong_token_is_refused_and_shown_to_nobody(
    server: Server, crew: Command, tmp_path: Path, command: tuple[str, ...]
) -> None:
    wrong = tmp_path / "token"
    wrong.touch(mode=0o600)
    wrong.write_text("another-token-entirely")
    done = crew(*command, "--token-file", str(wrong))
    assert (done.returncode, done.stdout) == (1, "")
    assert "401 unauthorized" in done.stderr
    assert "another-token-entirely" not in done.stderr


@pytest.mark.parametrize("command", ABOUT_ONE, ids=" ".join)
def test_what_is_not_there_is_not_found(crew: Command, command: tuple[str, ...]) -> None:
    done = crew(*command, "--json")
    assert (done.returncode, code_of(done)) == (3, "effect_not_found" if command[0] == "effects" else "action_unknown")


@pytest.mark.parametrize(
    "command",
    [
        ("submit",), ("submit", "instant", "--operation", "status"), ("submit", "instant", "--timeout-ms", "0"),
        ("submit", "instant", "--action-id", "a b"), ("submit", "instant", "--key", " "), ("wait",),
        ("wait", "x", "--timeout", "-1"), ("ps", "--status", "lost"), ("ps", "--limit", "0"), ("ps", "--cursor", "x"),
        ("show", ".."), ("show", "x", "y"), ("events", "x", "--cursor", "-1"), ("logs", "x", "--tail", "-1"),
        ("cancel", "x", "--wait", "soon"), ("archive",), ("evidence", ""), ("drain", "now"), ("crews", "--all"),
        ("ps", "--server", "ftp://x"), ("ps", "--server", "http://192.0.2.1:1"), ("no-such-command",),
    ],
    ids=" ".join,
)  # fmt: skip
def test_misuse_is_said(crew: Command, command: tuple[str, ...]) -> None:
    done = crew(*command)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr


@pytest.mark.parametrize(
    ("command", "status"),
    [(("submit", "instant"), 5), (("drain",), 5), (("archive", "x"), 5), (("ps",), 6), (("show", "x"), 6)],
    ids=lambda part: " ".join(part) if isinstance(part, tuple) else str(part),
)
def test_a_request_that_may_have_arrived_leaves_doubt_where_it_changes_something(
    crew: Command, command: tuple[str, ...], status: int
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=hang_up, args=(listener,), daemon=True)
        thread.start()
        done = crew(*command, "--server", f"http://127.0.0.1:{listener.getsockname()[1]}")
        thread.join(10)
    assert done.returncode == status, done.stderr


def hang_up(listener: socket.socket) -> None:
    """Take one request and answer nothing."""
    connection, _ = listener.accept()
    with connection:
        connection.recv(65_536)
