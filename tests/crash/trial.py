"""A server that is killed and started again, and the checks of what it says afterwards."""

from __future__ import annotations

import os
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from protocol import canonical
from protocol.operations import READ_OPERATIONS
from tests.crash.load import Action
from tests.support import procs
from tests.support.client import TERMINAL_EVENTS, Answer, Client
from tests.support.server import MARK, Server, cgroup_branches

RESTARTED = "SupervisorRestart"
#: Repeats sent after one restart; each is one request.
REPEATS = 12
#: What the answer of a start or repeat says about the record.
STATUS_OF_ANSWER = {200: "completed", 409: "cancelled", 502: "failed", 504: "failed"}

Event = tuple[int, str, Any]


class Record(NamedTuple):
    """One job as the journal's file has it; ``events`` hold parsed data."""

    status: str
    phase: str
    operation: str
    event_count: int
    uncertain: bool | None
    events: tuple[Event, ...]

    @property
    def last(self) -> Any:
        """Data of the last event."""
        return self.events[-1][2] if self.events else {}


def read_journal(path: Path) -> dict[str, Record]:
    """Every job by its Action id, straight from the file. Only for a journal that has an owner."""
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection:
        connection.execute("BEGIN")
        events: dict[int, list[Event]] = {}
        for row, seq, name, data in connection.execute("SELECT job, seq, name, data FROM events ORDER BY job, seq"):
            events.setdefault(row, []).append((seq, name, canonical.parse(data, max_depth=canonical.MAX_DATA_DEPTH)))
        jobs = connection.execute("SELECT row, action_id, status, phase, operation, event_count, uncertain FROM jobs")
        return {
            action_id: Record(
                status, phase, operation, count, None if unsure is None else bool(unsure), tuple(events.get(row, ()))
            )
            for row, action_id, status, phase, operation, count, unsure in jobs
        }


class Trial:
    """A server with the counted crews. Every check adds to ``violations``; an empty list is success."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.executions_file = server.directory / "executions"
        self.heartbeats = server.directory / "heartbeats"
        self.heartbeats.mkdir(parents=True, exist_ok=True)
        server.environment |= {"EXECUTIONS_FILE": str(self.executions_file), "FACTORY_BLOCK_S": "0.1"}
        self.violations: list[str] = []
        #: Jobs that restarts have ended: before and after ``started``.
        self.fenced: Counter[str] = Counter()
        self._known: dict[str, Record] = {}
        self._executed: Counter[str] = Counter()

    def client(self) -> Client:
        """A client of the server as it now runs."""
        return self.server.client()

    def executions(self) -> Counter[str]:
        """How often each Action was executed."""
        if not self.executions_file.exists():
            return Counter()
        return Counter(self.executions_file.read_text(encoding="ascii").split())

    def restart_and_check(self, actions: list[Action]) -> None:
        """Start again on the state of the killed server; check what ``actions`` were told, and everything else."""
        self.server.start()
        self.check(actions)

    def check(self, actions: list[Action]) -> None:
        """Check what ``actions`` were told, and everything else, of a server on which no job is live."""
        self._check_processes([action for action in actions if action.crew_id == "daemon"])
        found, executed = read_journal(self.server.state_file), self.executions()
        for action_id, record in found.items():
            self._check_record(action_id, record, executed[action_id])
        self._check_unchanged(found, executed)
        client = self.client()
        admitted = [action for action in actions if action.admitted]
        for action in admitted:
            self._check_told(action, found.get(action.action_id), client)
        for action in admitted[-REPEATS:]:
            self._check_answer(action, found.get(action.action_id), action.start(client), "the repeat")
        if self.executions() != executed:
            self._report("a repeat", f"executed again: {self.executions() - executed}")
        self._known, self._executed = found, executed

    def _report(self, action_id: str, what: str) -> None:
        self.violations.append(f"{action_id}: {what}")

    # --- what is left of the killed server -----------------------------------------------------------------------

    def _check_processes(self, daemons: list[Action]) -> None:
        ours = {self.server.pid, *procs.descendants(self.server.pid)}
        strangers = set(procs.with_environment(f"{MARK}={self.server.mark}")) - ours
        if strangers:
            self._report("processes", f"{strangers} outlived their supervisor")
        for action in daemons:
            beats = procs.read_beats(Path(action.input["heartbeat"]))
            alive = {(beat.pid, beat.start_ticks) for beat in beats if procs.alive(beat.pid, beat.start_ticks)}
            if alive:
                self._report(action.action_id, f"its daemons {alive} are alive")
        for branch in cgroup_branches(self.server.log_lines()):
            leaves = sorted(path.name for path in branch.iterdir() if path.name.startswith("job-"))
            if leaves:
                self._report("cgroups", f"leaves {leaves} are left")
        jobs = sorted(os.listdir(self.server.state_file.parent / "work" / "jobs"))
        if jobs:
            self._report("directories", f"of jobs {jobs} are left")

    # --- the records ---------------------------------------------------------------------------------------------

    def _check_record(self, action_id: str, record: Record, executions: int) -> None:
        names = [name for _, name, _ in record.events]
        started = names[:1] == ["started"]
        if [name for name in names if name in TERMINAL_EVENTS] != names[-1:] or names[-1:] != [record.status]:
            self._report(action_id, f"has status {record.status} and events {names[:3]}...{names[-3:]}")
        if [seq for seq, _, _ in record.events] != list(range(record.event_count)) or record.phase != "done":
            self._report(action_id, f"is {record.phase} and its {record.event_count} events are not numbered from 0")
        if executions > 1:
            self._report(action_id, f"was executed {executions} times")
        if executions and not started:
            self._report(action_id, "was executed without a durable start")
        fenced = record.last.get("error_type") == RESTARTED
        dispatched = bool(executions) and record.operation not in READ_OPERATIONS
        if record.status == "failed" and record.uncertain is not record.last.get("uncertain_outcome"):
            self._report(action_id, f"is uncertain {record.uncertain}, its event says {record.last}")
        if record.uncertain and not started:
            self._report(action_id, "is uncertain without a start")
        if fenced and dispatched and not record.uncertain:
            self._report(action_id, "was at work when its supervisor was killed, and is called certain")
        if fenced and action_id not in self._known:
            self.fenced["started" if started else "not started"] += 1

    def _check_unchanged(self, found: dict[str, Record], executed: Counter[str]) -> None:
        for action_id, before in self._known.items():
            if found.get(action_id) != before:
                self._report(action_id, f"has changed from {before} to {found.get(action_id)}")
            if executed[action_id] != self._executed[action_id]:
                self._report(action_id, "was executed after it had ended")

    # --- what clients were told ----------------------------------------------------------------------------------

    def _check_told(self, action: Action, record: Record | None, client: Client) -> None:
        if record is None:
            self._report(action.action_id, "was admitted and is lost")
            return
        shown = client.events(action.action_id).expect(200)["events"]
        events = [(event["sequence"], event["event"], event["data"]) for event in shown]
        if tuple(events) != record.events:
            self._report(action.action_id, f"shows {events}, the file has {record.events}")
        readers = [[(event.sequence, event.event, event.data) for event in stream] for stream in action.streams]
        readers += [[(e["sequence"], e["event"], e["data"]) for e in part] for part in action.slices]
        for seen in readers:
            if seen != events[: len(seen)]:
                self._report(action.action_id, f"a reader saw {seen[-3:]}, the journal has {events[-3:]}")
        for view in action.views:
            ended = view["status"] != "running"
            if view["event_count"] > len(events) or (ended and view["status"] != record.status):
                self._report(action.action_id, f"was shown as {view}, and is {record}")
        for answer in action.answers:
            self._check_answer(action, record, answer, "an answer")

    def _check_answer(self, action: Action, record: Record | None, answer: Answer, what: str) -> None:
        expected = STATUS_OF_ANSWER.get(answer.status)
        if record is None or expected != record.status:
            self._report(action.action_id, f"{what} was {answer.status} {answer.body[:200]!r}, the record is {record}")
        elif expected == "completed" and answer.json() != record.last:
            self._report(action.action_id, f"{what} was {answer.body[:200]!r}, the record has {record.last}")
