"""Every named point of the code, struck once by SIGKILL, and where something is written by ENOSPC and EIO.

The points are read from the code. A new one is tried with the mixed load at once, and fails here if that load does not
pass it: give it a scenario then.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.crash.found_points import PointNotFindable, points_in, points_in_code
from tests.crash.mixed import Mixed
from tests.crash.trial import Trial
from tests.support import procs, scripts
from tests.support.crash_build import EIO, ENOSPC, KILL, Plan
from tests.support.planned import PlannedServer
from tests.support.server import Server

SEED = int(os.environ.get("CRASH_SEED", "20250117"))
SETTINGS: dict[str, Any] = {
    "max_concurrency": 6,
    "max_retained_runs": 100_000,
    "linger_s": 0.02,
    "grace_s": 0.05,
    # Workers die by the signal itself; as the init of a namespace they could not.
    "pid_namespace": "off",
}
#: How long a server may take to be ready again after a failed write, seconds.
RECOVERY_S = 20.0
STRESS_ROUNDS = 4
#: Which passing in CI, where the first is the one of an admission or of a point that has no neighbour.
FIRST = {"journal.begin": 4, "journal.op": 6, "journal.commit": 5, "journal.effect": 2}
#: Exit status of a server that cannot open its journal.
REFUSED_START = 3


class CrashServer(PlannedServer):
    """A server that follows a plan, with everything below it."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        super().__init__(directory, registry="tests.crews.crash_crews:CREWS", settings=SETTINGS | settings)


class Chain:
    """One server that goes through one plan after the other, on one journal. A failed case gets the next a new one."""

    def __init__(self, make_directory: Callable[[], Path], **settings: Any) -> None:
        self._make_directory = make_directory
        self._settings = settings
        self._numbers = itertools.count()
        self._trial: Trial | None = None
        self._server: CrashServer | None = None

    def strike(self, plan: Plan, scenario: Scenario) -> None:
        """Run ``scenario`` with ``plan``. Raises AssertionError with every broken promise."""
        if self._trial is None or self._server is None:
            self._server = CrashServer(self._make_directory(), **self._settings)
            self._trial = Trial(self._server)
            self._server.start()
        load = Mixed(self._trial, f"n{next(self._numbers)}")
        try:
            scenario(Case(plan, self._server, self._trial, load))
            assert self._server.plan.fired, f"nothing has passed {plan.point}"
            broken = load.check()
            assert not broken, f"{plan}:\n" + "\n".join(broken)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kill what runs."""
        if self._server is not None:
            self._server.close()
        self._trial = self._server = None


class Case(NamedTuple):
    """What a scenario works with."""

    plan: Plan
    server: CrashServer
    trial: Trial
    load: Mixed

    def wait_for_death(self) -> None:
        """The server must have killed itself."""
        assert self.server.wait_exit(deadline_s=30) == -signal.SIGKILL, f"ended otherwise at {self.plan.point}"

    def settle(self) -> None:
        """Bring a server that was struck to where every promise can be checked."""
        self.server.plan.disarm()
        if self.server.process.poll() is not None:
            self.server.start()
        client, work = self.trial.client(), self.server.state_file.parent / "work" / "jobs"
        procs.wait_until(lambda: client.request("GET", "/readyz").status == 200, RECOVERY_S, "ready again")
        procs.wait_until(lambda: client.health().expect(200)["active_runs"] == 0, RECOVERY_S, "no job is live")
        procs.wait_until(lambda: not os.listdir(work), RECOVERY_S, "no job has a directory")


Scenario = Callable[[Case], None]


def supervisor_struck(case: Case) -> None:
    """The plan strikes the supervisor under load."""
    case.server.plan.arm(case.plan)
    case.load.run()
    if case.plan.kind == KILL:
        case.wait_for_death()
    case.settle()


def below_struck(case: Case) -> None:
    """The plan strikes a template, worker or keeper under load; the supervisor goes on."""
    case.server.plan.arm(case.plan)
    case.load.run()
    assert case.server.process.poll() is None, "the supervisor ended too"
    case.settle()


def reload_struck(case: Case) -> None:
    """The new template dies while the registry is reloaded: the old one stays."""
    case.server.plan.arm(case.plan)
    failed = failed_reloads(case.server)
    case.server.process.send_signal(signal.SIGHUP)
    procs.wait_until(lambda: failed_reloads(case.server) > failed, 30, "the reload has failed")
    case.load.run()
    case.settle()


def failed_reloads(server: Server) -> int:
    """How many reloads have failed so far."""
    return sum(line["event"] == "reload_failed" for line in server.log_lines())


def restart_struck(case: Case) -> None:
    """The supervisor is killed at work, and the next one at the plan's point while it recovers."""
    kill_at_work(case)
    case.server.plan.arm(case.plan)
    case.server.launch()
    case.wait_for_death()
    case.settle()


def opening_struck(case: Case) -> None:
    """The supervisor is killed at work, and the next one fails while it takes the journal over."""
    kill_at_work(case)
    case.server.plan.arm(case.plan)
    case.server.launch()
    ended = case.server.wait_exit(deadline_s=30)
    assert ended == (-signal.SIGKILL if case.plan.kind == KILL else REFUSED_START)
    case.settle()


def orphan_struck(case: Case) -> None:
    """The supervisor is killed at work, and a keeper that outlives it is struck."""
    case.server.plan.arm(case.plan)
    kill_at_work(case)
    procs.wait_until(lambda: case.server.plan.fired, 10, "a keeper was struck")
    case.settle()


def kill_at_work(case: Case) -> None:
    """SIGKILL of the supervisor while one job sleeps, one has left a daemon and one is in the middle of a payment."""
    client, load = case.trial.client(), case.load
    with (
        load.sleeper.stream(client) as sleeping,
        load.daemon.stream(client) as leaving,
        load.holder.stream(client) as holding,
    ):
        for stream in (sleeping, leaving, holding):
            stream.next()
        scripts.until_state(client, "claimed", load.held)
        procs.wait_until(lambda: case.trial.executions()[load.sleeper.action_id], 10, "the crew is at work")
        case.server.kill()


SCENARIOS: dict[str, Scenario] = {
    "template.loaded": reload_struck,
    "recovery.killed": restart_struck,
    "recovery.recorded": restart_struck,
    "journal.take_over": opening_struck,
    "keeper.word": orphan_struck,
}
POINTS = {point.name: point for point in points_in_code()}
CASES = [(point, kind) for point in POINTS.values() for kind in (KILL, *((ENOSPC, EIO) if point.writes else ()))]
NAMES = [f"{point.name}-{kind}" for point, kind in CASES]


#: A load passes these once; the others at least three times.
ONCE = {
    *SCENARIOS,
    "archive.recorded",
    "artifact.placed",
    "artifact.write",
    "cancel.recorded",
    "journal.archive",
    "journal.record_stop_request",
}


def scenario_of(name: str) -> Scenario:
    """The scenario that passes a point."""
    ours = POINTS[name].file.parts[0] == "supervisor"
    return SCENARIOS.get(name, supervisor_struck if ours else below_struck)


@pytest.fixture(scope="module")
def chains(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Chain]]:
    """The chain for a point: keepers exist only where no cgroup is used."""

    def directory() -> Path:
        return tmp_path_factory.mktemp("server")

    made = {"cgroup": Chain(directory), "keeper": Chain(directory, stop_method="keeper")}
    yield lambda name: made["keeper" if name.startswith("keeper.") else "cgroup"]
    for chain in made.values():
        chain.close()


@pytest.mark.parametrize(("point", "kind"), CASES, ids=NAMES)
def test_each_point_once(chains: Callable[[str], Chain], point: Any, kind: str) -> None:
    plan = Plan(point.name, kind, first=FIRST.get(point.name, 1))
    chains(point.name).strike(plan, scenario_of(point.name))


@pytest.mark.stress
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("point", "kind"), CASES, ids=NAMES)
def test_each_point_at_other_passings_and_for_longer(
    chains: Callable[[str], Chain], point: Any, kind: str
) -> None:
    rng = random.Random(f"{SEED}/{point.name}/{kind}")
    for _ in range(STRESS_ROUNDS):
        first = 1 if point.name in ONCE else rng.randrange(1, 4)
        plan = Plan(point.name, kind, first=first, times=1 if kind == KILL else rng.randrange(1, 6))
        chains(point.name).strike(plan, scenario_of(point.name))


def test_a_scenario_names_a_point_of_the_code() -> None:
    assert ONCE | set(FIRST) <= set(POINTS)


def test_points_stand_on_both_sides_of_what_matters() -> None:
    rooms = {point.file.parts[0] for point in POINTS.values()}
    assert rooms == {"supervisor", "worker"}
    assert {point.name.partition(".")[0] for point in POINTS.values()} >= {
        "journal", "admission", "start", "events", "cancel", "ending", "archive",
        "launch", "template", "worker", "keeper", "stop", "recovery", "effect",
    }  # fmt: skip


@pytest.mark.parametrize(
    "source",
    [
        "from protocol.points import reach",
        "points.reach(name)",
        'points.write(f"a.{b}")',
        'points.reach("a", "b")',
    ],
)
def test_a_point_that_nobody_would_find_is_refused(source: str) -> None:
    with pytest.raises(PointNotFindable):
        list(points_in(source, Path("supervisor/x.py")))


def test_points_are_found_wherever_they_stand() -> None:
    source = textwrap.dedent("""
        def f():
            if x:
                points.reach("a.b")
            return [points.write("c.d") for _ in y]
    """)
    assert [(point.name, point.writes) for point in points_in(source, Path("worker/x.py"))] == [
        ("a.b", False),
        ("c.d", True),
    ]
