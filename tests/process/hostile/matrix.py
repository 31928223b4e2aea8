"""The matrix: attack by ending by method, what was found in each cell, and how it is printed."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import msgspec

from tests.process.hostile.outside import Look

ATTACKS = (
    "plain_child",
    "new_session",
    "double_fork",
    "cleared_environment",
    "changed_group",
    "ignored_signals",
    "stopped",
    "fork_bomb",
    "pid_hopper",
    "reparented",
    "exited_leader",
    "undumpable",
    "own_subreaper",
    "mcp_server",
    "other_cgroup",
    "kills_worker",
    "kills_keeper",
    "kills_template",
    "held_pipe",
    "closed_descriptors",
    "held_gil",
)
#: Of one process in uninterruptible sleep; it has tests of its own.
FROZEN = "uninterruptible"

#: Settings of each method.
METHODS: dict[str, dict[str, Any]] = {
    "namespace": {"stop_method": "cgroup", "pid_namespace": "auto"},
    "cgroup": {"stop_method": "cgroup", "pid_namespace": "off"},
    "keeper": {"stop_method": "keeper"},
}
#: A supervisor without privileges in a cgroup that was given to it; it has tests of its own.
DELEGATED = "delegated"
#: Endings that a supervisor lives through, and those that end it.
ENDINGS = ("cancel", "timeout", "completion")
SUPERVISOR_ENDINGS = ("sigterm", "sigkill")

#: What a restart may answer instead of a proof, by method, where no evidence excludes an escape ...
UNPROVED_RESTART = {"cgroup": "escape_possible", DELEGATED: "escape_possible"}
#: ... and where the evidence is destroyed: a keeper that could not finish was killed, by the attack or by a supervisor
#: that looked itself and then had to go.
UNPROVED_ATTACK = {("keeper", "kills_keeper"): "keeper_lost", ("keeper", FROZEN): "keeper_lost"}
#: The only two that may leave a survivor, and only across a SIGKILL.
ESCAPES = {("cgroup", "other_cgroup"), (DELEGATED, "other_cgroup"), ("keeper", "kills_keeper")}
#: Attacks on processes of ours. The stop of a job whose worker they kill hunts strays, those of other jobs too.
STRIKES = ("kills_worker", "kills_keeper", "kills_template")


ORDER = (*ATTACKS, FROZEN, *ENDINGS, *SUPERVISOR_ENDINGS, *METHODS, DELEGATED)
COLUMNS = ("runs", "survivors", "false proofs", "med ms", "max ms")


def attacks_on(method: str) -> tuple[str, ...]:
    """Every attack that means anything there."""
    return tuple(attack for attack in ATTACKS if attack != "kills_keeper" or method == "keeper")


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one cell."""

    attack: str
    ending: str
    method: str
    stop: dict[str, Any] | None
    look: Look
    #: Another supervisor than the one that was told to stop it gave the evidence.
    restarted: bool = False

    @property
    def confirmed(self) -> bool:
        """Whether the stop was said to be proved."""
        return self.stop is not None and self.stop["confirmed"] is True

    @property
    def false_proof(self) -> bool:
        """A proof that the world contradicts."""
        return self.confirmed and not self.look.clean

    @property
    def excused(self) -> bool:
        """An honest ``confirmed: false`` where a restart cannot know better."""
        if not self.restarted or self.stop is None or self.confirmed:
            return False
        allowed = {UNPROVED_RESTART.get(self.method), UNPROVED_ATTACK.get((self.method, self.attack))} - {None}
        return self.stop["reason"] in allowed

    @property
    def may_survive(self) -> bool:
        """Whether a survivor is what the evidence says: nobody knows."""
        return self.excused and (self.method, self.attack) in ESCAPES

    def faults(self) -> list[str]:
        """What must not be; empty is success."""
        found = []
        where = f"{self.attack}, {self.ending}, {self.method}"
        if self.look.survivors and not self.may_survive:
            found.append(f"{where}: {len(self.look.survivors)} survivors {self.look.survivors[:5]}")
        if self.false_proof:
            found.append(f"{where}: false proof, late by {self.look.late_ms} ms: {self.stop}")
        if not self.confirmed and not self.excused:
            found.append(f"{where}: not confirmed: {self.stop}")
        return found


class Matrix:
    """Every run of a session."""

    def __init__(self) -> None:
        self.runs: list[Run] = []

    def add(self, run: Run) -> Run:
        """Keep a run; returns it."""
        self.runs.append(run)
        return run

    def lines(self) -> list[str]:
        """The table, and what proved the restarts."""
        cells: defaultdict[tuple[str, str, str], list[Run]] = defaultdict(list)
        for run in self.runs:
            cells[run.attack, run.ending, run.method].append(run)
        order = {name: place for place, name in enumerate(ORDER)}
        rows = [_row(*key, cells[key]) for key in sorted(cells, key=lambda key: [order[name] for name in key])]
        head = f"{'case':20} {'ending':10} {'method':10}" + "".join(f" {name:>8}" for name in COLUMNS)
        return [head, *rows, *self._evidence(), self.summary()]

    def _evidence(self) -> Iterable[str]:
        """How restarts judged the two escapes, and by method everything else."""
        said: Counter[tuple[str, str, str, str]] = Counter()
        for run in self.runs:
            if run.restarted and run.stop is not None:
                escape = run.attack in {attack for _, attack in ESCAPES}
                proved = f"proved by {run.stop['method']}" if run.confirmed else f"unconfirmed: {run.stop['reason']}"
                said[run.ending, run.attack if escape else "the others", run.method, proved] += 1
        for (ending, attack, method, proved), count in sorted(said.items()):
            yield f"{ending} + restart: {attack}, {method}: {proved} ({count})"

    def summary(self) -> str:
        """Totals."""
        unproved = [run for run in self.runs if run.excused]
        survivors = sum(len(run.look.survivors) for run in self.runs if not run.may_survive)
        named = sum(len(run.look.survivors) for run in unproved)
        return (
            f"{len(self.runs)} runs, {survivors} survivors, {sum(run.false_proof for run in self.runs)} false proofs; "
            f"{len(unproved)} restarts said that they cannot know, {named} processes had survived those"
        )


def _row(attack: str, ending: str, method: str, runs: list[Run]) -> str:
    times = [run.stop["elapsed_ms"] for run in runs if run.stop is not None and run.stop["elapsed_ms"] is not None]
    survivors = sum(len(run.look.survivors) for run in runs if not run.may_survive)
    said = f"{statistics.median(times):8.1f} {max(times):8.1f}" if times else f"{'-':>8} {'-':>8}"
    note = "" if all(run.confirmed for run in runs) else "  unconfirmed"
    false = sum(run.false_proof for run in runs)
    return f"{attack:20} {ending:10} {method:10} {len(runs):8} {survivors:9} {false:12} {said}{note}"
