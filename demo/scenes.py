"""The four scenes. Each shows something, then checks in code that it was really so."""

from __future__ import annotations

import http.client
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from demo import kernel
from demo.client import TERMINAL, Answer, Client, Event
from demo.kernel import Beat, Process
from demo.screen import Screen
from demo.server import Server

#: How long a heartbeat is watched after its end was claimed, seconds: many times its interval.
WATCH_S = 0.4


def run_and_stream(screen: Screen, server: Server) -> None:
    """Scene 1: chunks come while the crew works."""
    screen.title("1. Run a crew and watch it work")
    screen.say("POST /jobs/stream starts the crew in a process of its own and answers with its events as they come.")
    body = {"crew_id": "newsroom", "action_id": "story-1", "operation": "run", "input": {"topic": "bees"}}
    began = time.monotonic()
    events = []
    speaker = None
    for event in server.client.stream(body):
        events.append(event)
        if event.data.get("channel") == "messages":
            if event.data["agent_role"] != speaker:
                speaker = event.data["agent_role"]
                screen.write(f"\n     {screen.paint(f'{speaker:<10}', 'cyan')}{event.at - began:5.2f} s  ")
            screen.write(event.data["content"].replace("\n", "\n" + " " * 24))
    screen.write("\n\n")
    last = events[-1]
    view = server.client.get("/jobs/story-1").document
    screen.fact("answer", last.data.get("raw"))
    words = [event for event in events if event.data.get("channel") == "messages"]
    spread_s = words[-1].at - words[0].at if words else 0.0
    screen.claim(
        f"{len(words)} chunks came one by one over {spread_s:.1f} s, {len(events)} events in all",
        len(words) > 20 and spread_s > 0.5 and [event.sequence for event in events] == list(range(len(events))),
    )
    screen.claim("the last event is `completed` and holds the answer", last.name == "completed" and _told(events))
    screen.claim("and the crew's process is gone: stop.confirmed is true", view["stop"]["confirmed"] is True)


def _told(events: list[Event]) -> bool:
    """Whether the chunks, put together, say what the answer says."""
    said = "".join(event.data["content"] for event in events if event.data.get("channel") == "messages")
    return str(events[-1].data["raw"]) in said


def cancel_a_training(screen: Screen, server: Server) -> None:
    """Scene 2: the stop is proved while a model call blocks in a thread and a child has left the process tree."""
    screen.title("2. Cancel a training in the middle of a model call")
    screen.say(
        "A tool of this crew starts a child process that leaves its session and its parent, and writes a heartbeat. "
        "Then the model call blocks in a thread for 60 s. Cancelling a Python task would end neither."
    )
    heartbeat = server.home / "heartbeat-2"
    body = {
        "crew_id": "lookout",
        "action_id": "training-1",
        "operation": "train",
        "input": {
            "n_iterations": 1,
            "artifact_name": "lookout.pkl",
            "feedback": "look harder",
            "inputs": {"heartbeat": str(heartbeat)},
        },
    }
    stream = server.client.stream(body)
    worker, child = _until_blocked(screen, server, stream, "training-1", heartbeat)
    _watch(screen, heartbeat)
    screen.note("POST /jobs/training-1/cancel ...")
    began = time.monotonic()
    answer = server.client.cancel("training-1", "lookout", "the demo has seen enough")
    answered_ms = (time.monotonic() - began) * 1000
    last = list(stream)[-1]
    _show_stop(screen, answer.document)
    _claim_stopped(screen, answer, answered_ms, last, worker, child, heartbeat)


def _until_blocked(
    screen: Screen, server: Server, stream: Any, action_id: str, heartbeat: Path, seen: list[Event] | None = None
) -> tuple[Process, Process]:
    """Read events until the model call that blocks. Returns the worker and the child of its tool."""
    tool_done = False
    for event in stream:
        if seen is not None:
            seen.append(event)
        tool_done = tool_done or event.kind == "tool_usage_finished"
        if event.kind == "tool_usage_finished":
            screen.note(f"the tool {event.data.get('tool_name')} has returned")
        if event.name in TERMINAL:
            raise RuntimeError(f"{action_id} ended early: {event.data}")
        if tool_done and event.kind == "llm_call_started":
            screen.note("the next model call has started and blocks")
            break
    if kernel.wait_until(lambda: bool(kernel.beats(heartbeat)), 10) is None:
        raise RuntimeError("the child has no heartbeat")
    worker = kernel.identify(server.client.get(f"/jobs/{action_id}").document["worker"]["pid"])
    child = kernel.here(kernel.beats(heartbeat)[-1].process)
    if worker is None:
        raise RuntimeError("the worker is not running")
    above = kernel.parent(child.pid)
    tied = {server.pid: "the supervisor", worker.pid: "the worker"}.get(above or 0, f"pid {above}")
    screen.fact("worker", f"pid {worker.pid}")
    screen.fact("its tool's child", f"pid {child.pid}; its parent is now {tied}")
    return worker, child


def _watch(screen: Screen, heartbeat: Path) -> None:
    for _ in range(3):
        time.sleep(0.25)
        found = kernel.beats(heartbeat)
        screen.fact("heartbeat", f"{len(found)} beats, the last {_ago(found[-1])} ago")


def _ago(beat: Beat) -> str:
    return f"{(time.monotonic_ns() - beat.at_ns) / 1e6:.0f} ms"


def _show_stop(screen: Screen, view: dict[str, Any]) -> None:
    stop = view["stop"]
    screen.fact("status", view["status"])
    screen.fact("stop.confirmed", str(stop["confirmed"]).lower())
    screen.fact("stop.method", stop["method"])
    screen.fact("stop.worker", f"pid {stop['worker']['pid']}, ended by {stop['worker']['exit_signal']}")
    screen.fact("processes_killed", stop["processes_killed"])
    screen.fact("processes_left", stop["processes_left"])
    screen.fact("elapsed_ms", stop["elapsed_ms"])


def _claim_stopped(
    screen: Screen, answer: Answer, answered_ms: float, last: Event, worker: Process, child: Process, heartbeat: Path
) -> None:
    stop = answer.document["stop"]
    at_answer = kernel.beats(heartbeat)
    screen.claim(
        f"the answer came after {answered_ms:.0f} ms (grace included): cancelled, stop confirmed, the worker killed",
        answer.status == 200
        and answer.document["status"] == "cancelled"
        and stop["confirmed"] is True
        and stop["worker"]["exit_signal"] == "SIGKILL",
    )
    screen.claim(
        "the stream's last event is `cancelled`, with the same evidence",
        last.name == "cancelled" and last.data["stop"] == stop,
    )
    screen.claim("the worker and the child are gone", not kernel.alive(worker) and not kernel.alive(child))
    if stop["confirmed_at"] is None:
        return
    ahead_ms = (stop["confirmed_at"] - at_answer[-1].at_unix) * 1000
    screen.claim(f"the last heartbeat was written {ahead_ms:.1f} ms before the moment of the proof", ahead_ms > 0)
    time.sleep(WATCH_S)
    screen.claim(f"and in the {WATCH_S:g} s since then none was added", kernel.beats(heartbeat) == at_answer)


def kill_the_supervisor(screen: Screen, server: Server) -> None:
    """Scene 3: the journal says what can be known after a kill -9, and nothing runs twice."""
    screen.title("3. Kill the supervisor with SIGKILL under a running job")
    screen.say("The same crew again, this time as a run. Then kill -9: no handler runs, nobody is told.")
    heartbeat = server.home / "heartbeat-3"
    body = {"crew_id": "lookout", "action_id": "watch-1", "input": {"heartbeat": str(heartbeat)}}
    seen: list[Event] = []
    stream = server.client.stream(body)
    worker, child = _until_blocked(screen, server, stream, "watch-1", heartbeat, seen)
    screen.note(f"kill -9 {server.pid} ...")
    began = time.monotonic()
    server.kill()
    died = kernel.wait_until(lambda: not kernel.alive(worker), 5) is not None
    took_ms = (time.monotonic() - began) * 1000
    with suppress(http.client.HTTPException, OSError):
        seen += stream
    screen.claim(f"the worker died with its supervisor, within {took_ms:.0f} ms of the kill (PR_SET_PDEATHSIG)", died)
    time.sleep(WATCH_S)
    orphaned = kernel.alive(child)
    screen.note(
        "its tool's child knows no supervisor: it still beats."
        if orphaned
        else "its tool's child is gone too: the worker was the init of a PID namespace, and took all of it along."
    )
    server.start()
    screen.note(f"started again, pid {server.pid}, ready in {server.ready_s:.1f} s")
    if orphaned:
        screen.claim("before the restart listened, it had killed the child", not kernel.alive(child))
    _claim_fenced(screen, server.client, seen)
    _claim_not_repeated(screen, server.client, body, heartbeat, child)


def _claim_fenced(screen: Screen, client: Client, seen: list[Event]) -> None:
    view = client.get("/jobs/watch-1").document
    stop = view["stop"]
    screen.fact("status", view["status"])
    screen.fact("uncertain_outcome", str(view["uncertain_outcome"]).lower())
    screen.fact("stop.confirmed", str(stop["confirmed"]).lower())
    screen.fact("stop.reason", stop["reason"])
    screen.fact("stop.method", stop["method"])
    screen.fact("processes_killed", stop["processes_killed"])
    screen.fact("processes_left", f"{stop['processes_left']} (in the job's cgroup)")
    if stop["reason"] == "escape_possible":
        screen.say(
            "Nothing of the job is left in its cgroup. But while no supervisor lived, a process of the same user "
            "could have moved itself out of that cgroup, so the record does not call this a proof."
        )
    about_stop = "that the stop is confirmed" if stop["confirmed"] else "why the stop is not called confirmed"
    screen.claim(
        f"the record says failed, with uncertain outcome, and {about_stop}",
        view["status"] == "failed" and view["uncertain_outcome"] is True and bool(stop["reason"]),
    )
    rest = list(client.follow("watch-1", len(seen)))
    whole = client.get("/jobs/watch-1/events").document["events"]
    kept = [(event["event"], event["data"]) for event in whole[: len(seen)]]
    screen.claim(
        f"the {len(seen)} events that the reader had are unchanged; it goes on at cursor {len(seen)} and gets `failed`",
        kept == [(event.name, event.data) for event in seen] and bool(rest) and rest[-1].name == "failed",
    )


def _claim_not_repeated(screen: Screen, client: Client, body: dict[str, Any], heartbeat: Path, child: Process) -> None:
    size = len(kernel.beats(heartbeat))
    answer = client.start(body)
    time.sleep(WATCH_S)
    # One writer, who started when the child did: a process in a PID namespace gives another pid of its own.
    one_writer = {beat.process.start_ticks for beat in kernel.beats(heartbeat)} == {child.start_ticks}
    screen.claim(
        f"the same request again answers {answer.status} ({answer.document.get('code')}) and executes nothing",
        answer.status == 502 and one_writer and len(kernel.beats(heartbeat)) == size,
    )


def send_it_twice(screen: Screen, server: Server) -> None:
    """Scene 4: an Action has one execution, whoever repeats it."""
    screen.title("4. Send the same Action twice")
    screen.say("This crew's tool charges a card: one line in a ledger for every execution.")
    ledger = server.home / "ledger"
    body = {"crew_id": "billing", "action_id": "charge-7", "input": {"invoice": "7", "ledger": str(ledger)}}
    answers: list[Answer] = []
    senders = [threading.Thread(target=lambda: answers.append(server.client.start(body))) for _ in range(2)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    answers.append(server.client.start(body))
    lines = ledger.read_text(encoding="utf-8").splitlines() if ledger.exists() else []
    for answer in answers:
        screen.fact("answer", f"{answer.status}  {answer.document.get('raw', answer.document.get('detail'))}")
    for line in lines:
        screen.fact("ledger", line)
    screen.claim(
        "sent twice at once and a third time later: the same answer three times, the card charged once",
        len(answers) == 3
        and all(answer == answers[0] and answer.status == 200 for answer in answers)
        and len(lines) == 1,
    )
    other = {**body, "input": {"invoice": "8", "ledger": str(ledger)}}
    refused = server.client.start(other)
    screen.fact("other material", f"{refused.status}  {refused.document.get('detail')}")
    screen.claim(
        "the same id with another invoice is refused with 409, and nothing is charged",
        refused.status == 409 and ledger.read_text(encoding="utf-8").splitlines() == lines,
    )
