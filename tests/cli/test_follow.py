"""What is followed while it runs: lines as they come, an end by SIGINT, the live line of a terminal."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from protocol.api import EventView
from supervisor.cli.progress import Progress
from supervisor.client import Event
from tests.cli.conftest import Command, check, running
from tests.support.cases import RESPOND_ASYNC
from tests.support.gates import Gate
from tests.support.server import Server

WAIT_S = 30.0


@contextlib.contextmanager
def terminal() -> Iterator[tuple[int, int]]:
    """(ours, theirs) of a pseudo-terminal."""
    ours, theirs = pty.openpty()
    try:
        yield ours, theirs
    finally:
        os.close(ours)
        os.close(theirs)


def read_until(fd: int, *words: str) -> str:
    """What is written there, up to the moment when all the words were."""
    seen, give_up = "", time.monotonic() + WAIT_S
    while not all(word in seen for word in words):
        ready, _, _ = select.select([fd], [], [], max(0.0, give_up - time.monotonic()))
        assert ready, f"{words} not within {WAIT_S:g} s in {seen!r}"
        seen += os.read(fd, 65_536).decode("utf-8", "replace")
    return seen


@pytest.mark.parametrize(
    ("command", "first"),
    [
        (("events", "i-1", "--follow"), b"0 started"),
        (("events", "i-1", "--follow", "--json"), b'{"event":"started"'),
        (("logs", "i-1", "--follow"), b"std"),
        (("logs", "i-1", "--follow", "--json"), b'{"stream":"std'),
    ],
    ids=lambda part: " ".join(part) if isinstance(part, tuple) else "",
)
def test_sigint_ends_a_follower_and_the_job_goes_on(
    server: Server, gate: Gate, command: tuple[str, ...], first: bytes
) -> None:
    name = "".join(command)
    server.client().start(name, "talker", input=gate.input, headers=RESPOND_ASYNC).expect(202)
    gate.wait("began")
    with running(server, *[name if part == "i-1" else part for part in command]) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(first)
        process.send_signal(signal.SIGINT)
        _, talk = process.communicate(timeout=WAIT_S)
        assert (process.returncode, b"Traceback" in talk) == (130, False)
    assert server.client().get(name).expect(200)["status"] == "running"
    gate.release()


def test_sigint_ends_a_submit_that_follows_and_the_job_goes_on(server: Server, crew: Command, gate: Gate) -> None:
    given = json.dumps(gate.input)
    with running(server, "submit", "talker", "--action-id", "i-s", "--input", given, "--follow", "--json") as process:
        assert process.stdout is not None
        process.stdout.readline()
        gate.wait("began")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=WAIT_S)
        assert process.returncode == 130
    gate.release()
    assert crew("wait", "i-s").returncode == 0


def test_events_come_while_the_job_runs(server: Server, gate: Gate) -> None:
    given = {"release": gate.input["release"]}
    server.client().start("live", "reporter", input=given, headers=RESPOND_ASYNC).expect(202)
    with running(server, "events", "live", "--follow", "--json") as process:
        assert process.stdout is not None
        events: list[dict[str, Any]] = []
        while not events or events[-1]["data"].get("content") != "Dear bees,":
            events.append(check(json.loads(process.stdout.readline()), EventView))
        assert server.client().get("live").expect(200)["status"] == "running"
        gate.release()
        events += [check(json.loads(line), EventView) for line in process.stdout]
        process.communicate(timeout=WAIT_S)
    assert (process.returncode, events[-1]["event"]) == (0, "completed")
    assert [event["sequence"] for event in events] == list(range(len(events)))


@pytest.mark.parametrize("command", ["submit", "wait"])
def test_on_a_terminal_a_line_says_where_the_job_is(server: Server, gate: Gate, command: str) -> None:
    given, name = {"release": gate.input["release"]}, f"shown-{command}"
    arguments = ("wait", name)
    if command == "submit":
        arguments = ("submit", "reporter", "--action-id", name, "--input", json.dumps(given), "--follow")
    else:
        server.client().start(name, "reporter", input=given, headers=RESPOND_ASYNC).expect(202)
    environ = {"TERM": "xterm", "COLUMNS": "150"}
    with terminal() as (ours, theirs), running(server, *arguments, stderr=theirs, environ=environ) as process:
        read_until(ours, "running", "write the letter", "Writer", "1234 tokens", "0:")
        gate.release()
        said = read_until(ours, f"{name} completed")
        assert process.stdout is not None
        output = process.stdout.read()
        assert process.wait(WAIT_S) == 0
    assert b"tokens" not in output
    assert "\x1b[2K" in said, "the line is taken away"


def test_without_a_terminal_and_with_json_there_is_no_line(server: Server, crew: Command) -> None:
    done = crew("submit", "reporter", "--action-id", "unshown", "--follow")
    assert (done.returncode, "write the letter" in done.stderr) == (0, False)
    with terminal() as (ours, theirs), running(server, "wait", "unshown", "--json", stderr=theirs) as process:
        output, _ = process.communicate(timeout=WAIT_S)
        assert json.loads(output)["status"] == "completed"
        assert select.select([ours], [], [], 0)[0] == []


@pytest.mark.parametrize("no_color", [False, True])
def test_no_color_is_obeyed(server: Server, no_color: bool) -> None:
    environ = {"TERM": "xterm-256color"} | ({"NO_COLOR": "1"} if no_color else {})
    with terminal() as (ours, theirs), running(server, "show", "nobody", stderr=theirs, environ=environ) as process:
        said = read_until(ours, "action_unknown")
        assert process.wait(WAIT_S) == 3
    assert ("\x1b[1;31m" in said) is not no_color


def test_what_a_worker_wrote_does_not_command_the_terminal(server: Server) -> None:
    client = server.client()
    client.start("esc", "echo", input={"evil": "\x1b]0;owned\x07\u202e"}).expect(200)
    with terminal() as (ours, theirs), running(server, "events", "esc", stdout=theirs) as process:
        shown = read_until(ours, "1 completed", "owned")
        assert process.wait(WAIT_S) == 0
    assert "\x1b]0" not in shown
    assert "\u202e" not in shown


# --- the line itself -------------------------------------------------------------------------------------------------


def chunk(**data: Any) -> Event:
    return Event(event="chunk", sequence=1, data=data)


def test_the_line_has_task_agent_tool_tokens_and_time() -> None:
    line = Progress()
    assert line.line(0.0) == "queued · 0:00"
    line.take(Event(event="started", sequence=0))
    line.take(chunk(type="task_started", task_name="write the letter", agent_role="Writer"))
    line.take(chunk(type="tool_usage_started", tool_name="dictionary"))
    assert line.line(61.9) == "running · write the letter · Writer · tool dictionary · 1:01"
    line.take(chunk(type="tool_usage_finished", tool_name="dictionary"))
    for total in (1000, 234):
        line.take(chunk(type="llm_call_completed", usage={"total_tokens": total}))
    assert line.line(3600.0) == "running · write the letter · Writer · 1234 tokens · 60:00"
    line.take(chunk(type="task_started", task_name="x" * 100, agent_role="A\x1b[31m\nB"))
    assert line.line(0.0) == f"running · {'x' * 39}… · A\\x1b[31m B · 1234 tokens · 0:00"


def test_the_line_survives_what_is_no_report() -> None:
    line = Progress()
    for event in (
        Event(event="chunk", sequence=1, data=None),
        chunk(type=7, usage="many", task_name=["x"], tool_name=None),
        chunk(type="llm_call_completed", usage={"total_tokens": "many"}),
        chunk(type="tool_usage_started"),
    ):
        line.take(event)
    assert line.line(0.0) == "running · 0:00"
