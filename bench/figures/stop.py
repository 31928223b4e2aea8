"""How long a stop takes until it is proved, what survives it, and what survives killing a process or its group."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from bench.measure import Scale, Series, Size, Step, Unmet, Values
from tests.support import procs
from tests.support.client import Client
from tests.support.server import ROOT, Server, ServerFailed

#: Ways to stop, with the settings that choose each.
METHODS: dict[str, dict[str, Any]] = {
    "cgroup": {"stop_method": "cgroup", "pid_namespace": "off"},
    "cgroup and pid_namespace": {"stop_method": "cgroup", "pid_namespace": "auto"},
    "keeper": {"stop_method": "keeper", "pid_namespace": "off"},
}
DESCENDANTS = 50
#: What was killed and is still dying is no survivor.
SETTLE_S = 0.5
TOGETHER = 8


class Scene(NamedTuple):
    """What is stopped: ``jobs`` at once of a crew, once each has streamed what ``ready`` looks for."""

    crew: str
    ready: Callable[[Mapping[str, Any]], bool]
    given: Mapping[str, Any] = {}
    jobs: int = 1


def _says_ready(data: Mapping[str, Any]) -> bool:
    return data.get("content") == "ready"


def _calls_model(data: Mapping[str, Any]) -> bool:
    return data.get("type") == "llm_call_started"


SCENES = {
    "idle": Scene("idle", _says_ready),
    "thread": Scene("blocking", _calls_model, {"seconds": 60}),
    f"{DESCENDANTS} descendants": Scene("family", _says_ready, {"descendants": DESCENDANTS}),
    f"{TOGETHER} at once": Scene("idle", _says_ready, jobs=TOGETHER),
}
#: The same family in a plain process.
PLAIN = """
import sys
from bench.fakes import Family
for chunk in Family().kickoff({"descendants": int(sys.argv[1])}):
    print(*chunk["pids"], flush=True)
"""


class Stop:
    """Cancels, by every method that this machine has, beside kill and killpg of a process without a supervisor."""

    name = "stop"
    title = "Stop: from the cancel sent until the answer with the proof, grace_s = 0"
    notes = (
        "thread: a real crew's model call blocks in a thread; idle: a fake sleeps; "
        f"{DESCENDANTS} descendants: of a fake, SIGTERM ignored, every other one in a session of its own",
        f"{TOGETHER} at once: as many jobs, cancelled by as many client threads; each one's time",
        "answer: as the client measures it; evidence: elapsed_ms of the record, from the request to the proof",
        "survivors: of the worker and all below it, those alive when the answer came; n is how many were looked at",
        "kill the pid, killpg: SIGKILL of a plain process with the same descendants, until its wait status is in hand; "
        f"survivors are those alive {SETTLE_S} s later",
    )
    series = (
        *(
            series
            for method in METHODS
            for series in (
                *(Series(f"{method}: {scene}, {what}", "ms") for scene in SCENES for what in ("answer", "evidence")),
                Series(f"{method}: survivors", "count"),
            )
        ),
        *(
            series
            for how in ("kill the pid", "killpg")
            for series in (
                Series(f"{how}, {DESCENDANTS} descendants, until waited for", "ms", baseline=True),
                Series(f"{how}, survivors", "count", baseline=True),
            )
        ),
    )
    rounds = (2, 8)

    @contextmanager
    def open(self, directory: Path, scale: Scale) -> Iterator[Sequence[Step]]:
        """A server for each method; the baselines need none."""
        smoke = scale.size is Size.SMOKE
        numbers = count()
        steps = []
        with ExitStack() as stack:
            for method, settings in METHODS.items():
                server = Server(
                    directory / method.replace(" ", "-"),
                    registry="bench.fakes:CREWS" if smoke else "bench.registry:CREWS",
                    settings={
                        "grace_s": 0.0,
                        "max_concurrency": 16,
                        "template": {"preload": [] if smoke else ["crewai"]},
                        **settings,
                    },
                )
                try:
                    stack.enter_context(server)
                except ServerFailed as error:
                    stack.callback(server.close)
                    steps.append(Step(method, partial(_refuse, str(error).splitlines()[-1][-300:])))
                    continue
                for name, scene in SCENES.items():
                    if smoke and scene.crew == "blocking":
                        continue
                    times = scale.pick(1, 2, 4, 10) if scene.jobs == 1 else 1
                    step = partial(_stop, server, method, name, times, numbers)
                    steps.append(Step(f"{method}: {name}", step))
            steps.append(Step("kill the pid", partial(_kill_plain, "kill the pid", os.kill)))
            steps.append(Step("killpg", partial(_kill_plain, "killpg", os.killpg)))
            yield steps


def _refuse(why: str) -> Values:
    raise Unmet(f"the supervisor does not start with it: {why}")


def _stop(server: Server, method: str, name: str, times: int, numbers: Iterator[int]) -> Values:
    scene = SCENES[name]
    found: dict[str, list[float]] = {}
    for _ in range(times):
        stopped, lives = _stop_once(server, method, scene, numbers)
        found.setdefault(f"{method}: {name}, answer", []).extend(answer for answer, _ in stopped)
        found.setdefault(f"{method}: {name}, evidence", []).extend(evidence for _, evidence in stopped)
        found.setdefault(f"{method}: survivors", []).extend(map(float, lives))
    return found


def _stop_once(
    server: Server, method: str, scene: Scene, numbers: Iterator[int]
) -> tuple[list[tuple[float, float]], list[bool]]:
    """(answer, evidence) of each job in ms, and of every process that there was, whether it lives."""
    with ThreadPoolExecutor(scene.jobs) as pool, ExitStack() as streams:
        jobs = [(server.client(), f"stop-{next(numbers)}") for _ in range(scene.jobs)]
        for client, action_id in jobs:
            stream = streams.enter_context(client.stream(action_id, scene.crew, input=dict(scene.given)))
            while not scene.ready(stream.next().data):
                pass
        workers = [client.get(action_id).expect(200)["worker"]["pid"] for client, action_id in jobs]
        if "pid_namespace" in method and not all(map(_has_namespace, workers)):
            raise Unmet("the kernel gives the workers no PID namespace here (root without worker_user gets one)")
        pids = [pid for worker in workers for pid in (worker, *procs.descendants(worker))]
        below = [(pid, procs.start_ticks(pid)) for pid in pids]
        stopped = list(pool.map(lambda job: _cancel(*job, scene.crew), jobs))
        return stopped, [procs.alive(pid, ticks) for pid, ticks in below]


def _has_namespace(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    (line,) = (line for line in status.splitlines() if line.startswith("NSpid:"))
    return len(line.split()) > 2


def _cancel(client: Client, action_id: str, crew: str) -> tuple[float, float]:
    """ms until the answer, and those of the evidence. Raises RuntimeError for a stop without proof."""
    began = time.monotonic()
    answer = client.cancel(action_id, crew)
    answered_ms = (time.monotonic() - began) * 1000
    evidence = answer.expect(200)["stop"]
    if not evidence["confirmed"]:
        raise RuntimeError(f"the stop of {action_id} was not confirmed: {evidence}")
    return answered_ms, evidence["elapsed_ms"]


def _kill_plain(how: str, kill: Callable[[int, int], None]) -> Values:
    """A plain process that leads a session, with the same descendants."""
    process = subprocess.Popen(
        [sys.executable, "-c", PLAIN, str(DESCENDANTS)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    below: list[tuple[int, int | None]] = []
    try:
        assert process.stdout is not None
        pids = [process.pid, *map(int, process.stdout.readline().split())]
        below = [(pid, procs.start_ticks(pid)) for pid in pids]
        began = time.monotonic()
        kill(process.pid, signal.SIGKILL)
        process.wait()
        took_ms = (time.monotonic() - began) * 1000
        time.sleep(SETTLE_S)
        lives = [procs.alive(pid, ticks) for pid, ticks in below]
    finally:
        process.kill()
        process.wait()
        for pid, ticks in below:
            if ticks is not None and procs.alive(pid, ticks):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    return {
        f"{how}, {DESCENDANTS} descendants, until waited for": [took_ms],
        f"{how}, survivors": list(map(float, lives)),
    }
