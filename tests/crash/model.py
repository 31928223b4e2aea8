"""What the promises allow, as a pure model: for every Action the set of worlds that what was seen leaves possible.

A request that is sent adds worlds, an answer takes worlds away; one that takes the last away breaks a promise. It does
no IO and knows no clock: the machine that drives a server tells it what was sent and what was seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

#: Terminal error types of jobs that a supervisor's own end has ended.
RESTARTED, SHUT_DOWN = "SupervisorRestart", "SupervisorShutdown"
ACTION_CONFLICT, ACTION_RUNNING = (409, "action_conflict"), (409, "action_running")
ARCHIVED_ANSWER, UNKNOWN = (410, "action_archived"), (404, "action_unknown")
TERMINAL_EVENTS = frozenset({"completed", "failed", "cancelled"})

Reply = tuple[int, str | None]
Event = tuple[int, str, Any]


class State(Enum):
    """Where an Action can be. Each but the first fences its id for ever."""

    ABSENT = auto()
    LIVE = auto()
    ENDED = auto()
    ARCHIVED = auto()


class Ending(NamedTuple):
    """A terminal record."""

    status: str
    error_type: str | None
    uncertain: bool


class World(NamedTuple):
    """One thing that may be true of an Action; ``ending`` for what has ended, archived or not."""

    state: State
    ending: Ending | None = None


class Kind(NamedTuple):
    """A sort of job. ``natural``: how it ends when nobody ends it; None: it works until somebody does."""

    crew_id: str
    operation: str
    natural: Ending | None
    #: Its effects are none, so it is never uncertain.
    reads: bool = False
    timeout_ms: int | None = None
    #: Whether the crew notes its execution.
    counted: bool = True


COMPLETED = Ending("completed", None, False)
KINDS: Mapping[str, Kind] = {
    "instant": Kind("instant", "run", COMPLETED),
    "talking": Kind("talking", "run", COMPLETED),
    "failing": Kind("failing", "run", Ending("failed", "ValueError", True)),
    "dying": Kind("crash", "run", Ending("failed", "WorkerDied", True)),
    "unmade": Kind("unmade", "run", Ending("failed", "RuntimeError", False), counted=False),
    "reading": Kind("knowing", "knowledge_query", COMPLETED, reads=True),
    "timed": Kind("sleeper", "run", Ending("failed", "TimeoutError", True), timeout_ms=30),
    "sleeping": Kind("sleeper", "run", None),
    "reading on": Kind("sleeper", "knowledge_query", None, reads=True, counted=False),
}


class Broken(AssertionError):
    """A promise is broken; the message says what was seen and what would have been possible."""


@dataclass
class Known:
    """What is known of one Action."""

    kind: Kind
    worlds: frozenset[World] = frozenset({World(State.ABSENT)})
    #: The longest that a reader has seen, from sequence 0.
    events: tuple[Event, ...] = ()
    executions: int = 0


@dataclass
class Model:
    """Every Action that was ever sent. All methods raise Broken."""

    actions: dict[str, Known] = field(default_factory=dict)

    def _spread(self, action_id: str, from_state: State, to: Iterable[World]) -> None:
        known = self.actions[action_id]
        if any(world.state is from_state for world in known.worlds):
            known.worlds |= frozenset(to)

    def _keep(self, action_id: str, possible: Callable[[World], bool], seen: object) -> None:
        known = self.actions[action_id]
        left = frozenset(filter(possible, known.worlds))
        if not left:
            raise Broken(f"{action_id} ({known.kind}): {seen}, but it can only be {sorted(map(str, known.worlds))}")
        known.worlds = left

    def _endings(self, action_id: str, status: str, error_type: str | None) -> set[World]:
        """Ended from outside: uncertain unless it never went, and never for a read."""
        unsure = (False,) if self.actions[action_id].kind.reads else (False, True)
        return {World(State.ENDED, Ending(status, error_type, uncertain)) for uncertain in unsure}

    # --- what is asked -------------------------------------------------------------------------------------------

    def live(self) -> list[str]:
        """Actions that may be at work."""
        return [action_id for action_id in self.actions if State.LIVE in self.states(action_id)]

    def states(self, action_id: str) -> set[State]:
        """Where an Action may be."""
        return {world.state for world in self.actions[action_id].worlds}

    # --- what is sent --------------------------------------------------------------------------------------------

    def start_sent(self, action_id: str, kind: Kind) -> None:
        """A start is on its way, the first one or a repeat."""
        self.actions.setdefault(action_id, Known(kind))
        natural = () if kind.natural is None else (World(State.ENDED, kind.natural),)
        self._spread(action_id, State.ABSENT, (World(State.LIVE), *natural))

    def cancel_sent(self, action_id: str) -> None:
        """A cancel is on its way."""
        self._spread(action_id, State.LIVE, self._endings(action_id, "cancelled", None))

    def archive_sent(self, action_id: str) -> None:
        """An archive is on its way."""
        worlds = self.actions[action_id].worlds
        self._spread(
            action_id, State.ENDED, [World(State.ARCHIVED, world.ending) for world in worlds if world.ending]
        )

    def supervisor_ended(self, error_type: str) -> None:
        """The supervisor is gone, with everything that was live: RESTARTED or SHUT_DOWN."""
        for action_id in self.live():
            self._spread(action_id, State.LIVE, self._endings(action_id, "failed", error_type))
            self._keep(action_id, lambda world: world.state is not State.LIVE, "the supervisor ended")

    # --- what is seen --------------------------------------------------------------------------------------------

    def start_answered(self, action_id: str, reply: Reply) -> None:
        """A start or repeat that waits was answered."""

        def possible(world: World) -> bool:
            if world.state is State.ARCHIVED:
                return reply == ARCHIVED_ANSWER
            if world.state is not State.ENDED or world.ending is None:
                return False
            match world.ending.status:
                case "completed":
                    return reply[0] == 200
                case "cancelled":
                    return reply == (409, "action_cancelled")
                case _:
                    timed_out = world.ending.error_type == "TimeoutError"
                    return reply == (502, "action_failed") or (timed_out and reply == (504, "action_timed_out"))

        self._keep(action_id, possible, f"a start was answered {reply}")

    def stream_opened(self, action_id: str, reply: Reply) -> None:
        """The head of a stream's answer was read: what it streams is durable."""

        def possible(world: World) -> bool:
            if world.state is State.ARCHIVED:
                return reply == ARCHIVED_ANSWER
            return world.state is not State.ABSENT and reply[0] == 200

        self._keep(action_id, possible, f"a stream was answered {reply}")

    def conflict_answered(self, action_id: str, reply: Reply) -> None:
        """A start with other material was answered."""
        fenced = State.ABSENT not in self.states(action_id)
        if not fenced or reply != ACTION_CONFLICT:
            raise Broken(f"{action_id}: other material was answered {reply}")

    def archive_answered(self, action_id: str, reply: Reply) -> None:
        """An archive was answered."""
        answers = {State.LIVE: ACTION_RUNNING, State.ABSENT: UNKNOWN, State.ENDED: None}
        # Archived just now, or before: then there is nothing left to archive.
        self._keep(
            action_id,
            lambda world: reply == answers.get(world.state, (200, None))
            or (world.state is State.ARCHIVED and reply == UNKNOWN),
            f"an archive was answered {reply}",
        )

    def shown(self, action_id: str, reply: Reply, view: Mapping[str, Any]) -> None:
        """A view was read, by itself or as the answer to a cancel."""

        def possible(world: World) -> bool:
            if world.state in (State.ABSENT, State.ARCHIVED):
                return reply == UNKNOWN
            if reply[0] != 200 or view["crew_id"] != self.actions[action_id].kind.crew_id:
                return False
            if world.state is State.LIVE:
                return bool(view["status"] == "running" and view["uncertain_outcome"] is None)
            assert world.ending is not None
            told = (view["status"], view["uncertain_outcome"], view["phase"])
            return told == (world.ending.status, world.ending.uncertain, "done")

        self._keep(action_id, possible, f"the view is {reply} {dict(view)}")
        if reply[0] == 200 and view["status"] != "running":
            self._check_stop(action_id, view["stop"])

    def _check_stop(self, action_id: str, stop: Mapping[str, Any] | None) -> None:
        # A view does not name the error: one that failed by itself may as well have been fenced.
        fenced = any(world.ending and world.ending.error_type == RESTARTED for world in self.actions[action_id].worlds)
        if stop is None or not (stop["confirmed"] or fenced):
            raise Broken(f"{action_id} has ended, and its stop is {stop}")
        if stop["confirmed"] and (stop["confirmed_at"] is None or stop["processes_left"]):
            raise Broken(f"{action_id}: confirmed without a proof: {stop}")

    def events_read(self, action_id: str, events: tuple[Event, ...]) -> None:
        """Events from sequence 0 on were read, all there were or a part."""
        known = self.actions[action_id]
        common = min(len(events), len(known.events))
        if events[:common] != known.events[:common]:
            raise Broken(f"{action_id}: a reader saw {known.events[-3:]}, another {events[-3:]}")
        ended = bool(known.events) and known.events[-1][1] in TERMINAL_EVENTS
        if len(events) > common and ended:
            raise Broken(f"{action_id}: {events[common:]} came after the end")
        if [seq for seq, _, _ in events] != list(range(len(events))):
            raise Broken(f"{action_id}: events are numbered {[seq for seq, _, _ in events]}")
        if len(events) > common:
            known.events = events
        terminal = [event for event in events if event[1] in TERMINAL_EVENTS]
        if terminal and terminal != [events[-1]]:
            raise Broken(f"{action_id}: ended {len(terminal)} times: {events}")
        if terminal:
            self._end_seen(action_id, terminal[0])

    def _end_seen(self, action_id: str, event: Event) -> None:
        _, name, data = event
        ending = Ending(name, data.get("error_type"), data.get("uncertain_outcome", False))
        # An archive that was sent may be carried out by now.
        self._keep(action_id, lambda world: world.ending == ending, f"its last event is {event}")

    def executed(self, action_id: str, count: int) -> None:
        """The crew was executed ``count`` times so far; for an Action whose events are read and that is not live."""
        known = self.actions[action_id]
        if count > 1 or count < known.executions:
            raise Broken(f"{action_id} was executed {count} times")
        known.executions = count
        if State.ARCHIVED in self.states(action_id):
            return  # its events may never have been read
        started = any(name == "started" for _, name, _ in known.events)
        if count and not started:
            raise Broken(f"{action_id} was executed without a durable start")

        def possible(world: World) -> bool:
            if world.ending is None:
                return count == 0
            at_work = bool(count) and not known.kind.reads and world.ending.status != "completed"
            return world.ending.uncertain if at_work else started or not world.ending.uncertain

        self._keep(action_id, possible, f"it was executed {count} times, started: {started}")
