"""One server and the attacks on it: start a job, wait until its attack stands, end it, look."""

from __future__ import annotations

import http.client
import itertools
import signal
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.crash.trial import read_journal
from tests.process.hostile import outside
from tests.process.hostile.matrix import ESCAPES, METHODS, STRIKES, Run
from tests.support import procs
from tests.support.client import Answer, Client, Stream
from tests.support.server import Server

CREW = "adversary"
REGISTRY = "tests.crews.adversaries:CREWS"
SETTINGS: dict[str, Any] = {
    "max_concurrency": 32,
    "linger_s": 0.1,
    "grace_s": 0.05,
    "drain_s": 0,
}
#: Each cell runs once, and 20 times under ``make stress``.
RUNS = [1, pytest.param(20, marks=[pytest.mark.stress, pytest.mark.timeout(3600)], id="stress")]
#: Imported once, in the template: the MCP attack needs it.
MCP = {"template": {"preload": ["mcp.client.stdio"]}}
READY_S = 60.0
#: The first timeout of a job that must reach it; a machine that needs longer to set the attack up gets more.
TIMEOUTS_MS = (400, 1_500, 5_000, 20_000, 60_000)
NEVER_MS = 86_000


def make_server(
    directory: Path, method: str, *, registry: str = REGISTRY, preload_mcp: bool = False, **options: Any
) -> Server:
    """A server of that method, not started; ``settings`` replace the suite's."""
    settings = SETTINGS | METHODS[method] | (MCP if preload_mcp else {}) | options.pop("settings", {})
    return Server(directory, registry=registry, settings=settings, **options)


class Siege:
    """One job and its attack."""

    def __init__(self, server: Server, attack: str, action_id: str, directory: Path, refuge: Path | None) -> None:
        self.attack = attack
        self.action_id = action_id
        self._server = server
        self._files = {name: directory / f"{action_id}-{name}" for name in ("heartbeat", "ready", "fire")}
        self._refuge = refuge
        self._stream: Stream | None = None

    @property
    def heartbeats(self) -> Path:
        """Where the attack's processes beat."""
        return self._files["heartbeat"]

    @property
    def client(self) -> Client:
        """A client of the server as it now runs."""
        return self._server.client()

    @property
    def stands(self) -> bool:
        """Whether the attack is in place."""
        return self._files["ready"].exists()

    def _input(self, then: str) -> dict[str, Any]:
        given = {name: str(path) for name, path in self._files.items()}
        return given | {"attack": self.attack, "then": then, "cgroup": str(self._refuge or "")}

    def begin(self, *, then: str, timeout_ms: int = NEVER_MS) -> Stream:
        """Start the job and stream it."""
        self._stream = self.client.stream(
            self.action_id, CREW, input=self._input(then), timeout_ms=timeout_ms, complete=False
        )
        return self._stream

    def call(self, *, then: str, timeout_ms: int | None = None) -> Answer:
        """Start the job and wait for its answer, one that the supervisor's end cuts off included."""
        try:
            return self.client.start(self.action_id, CREW, input=self._input(then), timeout_ms=timeout_ms or NEVER_MS)
        except (OSError, http.client.HTTPException) as error:
            return Answer(0, {}, repr(error).encode())

    def wait_until_it_stands(self) -> None:
        """Wait until the attack is in place."""
        procs.wait_until(lambda: self.stands, READY_S, f"{self.attack} of {self.action_id} stands")

    def wait_until_seen(self) -> None:
        """Wait until the look from outside finds the attack that stands, or its absence would prove nothing."""
        self.wait_until_it_stands()
        procs.wait_until(lambda: outside.belonging_to(self.heartbeats), READY_S, f"{self.attack} is seen from outside")

    def strike(self) -> None:
        """Let an attack on a process begin."""
        self._files["fire"].touch()

    def wait_until_struck(self) -> None:
        """Wait until an attack on a process has been made."""
        done = Path(f"{self._files['fire']}-done")
        procs.wait_until(done.exists, READY_S, f"{self.attack} has struck")

    def view(self) -> dict[str, Any]:
        """The job's record as the server shows it."""
        shown: dict[str, Any] = self.client.get(self.action_id).expect(200)
        return shown

    def close(self) -> None:
        """Let go of the stream, and end whatever is left."""
        if self._stream is not None:
            self._stream.close()
        outside.kill_all(self.heartbeats)


class Field:
    """A server under attack; ``number`` goes through all its jobs."""

    def __init__(self, server: Server, method: str, refuge: Path | None) -> None:
        self.server = server
        self.method = method
        self._refuge = refuge
        self._numbers = itertools.count(1)
        self._directory = server.directory / "attacks"
        self._directory.mkdir(exist_ok=True)

    def siege(self, attack: str) -> Siege:
        """A new job for that attack, not begun."""
        return Siege(self.server, attack, f"{attack}-{next(self._numbers)}", self._directory, self._refuge)

    # --- endings that the supervisor lives through ---------------------------------------------------------------

    def run_cells(self, cells: Iterable[tuple[str, str]], *, at_once: int) -> list[Run]:
        """Cells, so many at a time; those that leave what says whose they are, by themselves at the end.

        Out of its leaf an orphan belongs to nobody, and the next stop that looks, a neighbour's too, kills it.
        """
        cells = list(cells)
        alone = [cell for cell in cells if (self.method, cell[0]) in ESCAPES]
        with ThreadPoolExecutor(at_once) as pool:
            together = list(pool.map(lambda cell: self.run(*cell), [cell for cell in cells if cell not in alone]))
        return together + [self.run(*cell) for cell in alone]

    def run(self, attack: str, ending: str) -> Run:
        """One cell, once."""
        if ending == "timeout":
            return self._time_out(attack)
        siege = self.siege(attack)
        try:
            with siege.begin(then="return" if ending == "completion" else "block") as stream:
                if ending == "completion":
                    # Where the worker's end is that of its PID namespace, nothing may be there to be seen any more.
                    siege.wait_until_it_stands()
                    siege.strike()
                    stream.rest()
                else:
                    siege.wait_until_seen()
                    siege.strike()
                    answer = siege.client.cancel(siege.action_id, CREW)
                    assert answer.status in (200, 503), answer
                return self.judge(siege, ending, siege.view()["stop"])
        finally:
            siege.close()

    def _time_out(self, attack: str) -> Run:
        """A timeout before the attack stands proves nothing: then again with more time."""
        for timeout_ms in TIMEOUTS_MS:
            siege = self.siege(attack)
            try:
                with siege.begin(then="block", timeout_ms=timeout_ms) as stream:
                    stream.until("started")
                    procs.wait_until(lambda siege=siege: siege.stands or _ended(siege), READY_S, "it stands or ended")
                    stood = siege.stands
                    siege.strike()
                    stream.rest()
                    if stood:
                        return self.judge(siege, "timeout", siege.view()["stop"])
            finally:
                siege.close()
        raise AssertionError(f"{attack} never stood within {TIMEOUTS_MS[-1]} ms")

    # --- endings of the supervisor -------------------------------------------------------------------------------

    def terminate(self, attacks: tuple[str, ...]) -> list[Run]:
        """SIGTERM under all the attacks at once."""
        sieges = self._besiege(attacks)
        try:
            for siege in sieges:
                siege.strike()
            self.server.stop()
            records = read_journal(self.server.state_file)
            return [self.judge(siege, "sigterm", records[siege.action_id].last.get("stop")) for siege in sieges]
        finally:
            _close(sieges)

    def kill_and_restart(self, attacks: tuple[str, ...]) -> list[Run]:
        """SIGKILL under all the attacks at once, and the next supervisor. It sees nothing of the strikes any more."""
        sieges = self._besiege(attacks)
        try:
            self.server.process.send_signal(signal.SIGSTOP)
            for siege in sieges:
                siege.strike()
            for siege in sieges:
                if siege.attack in STRIKES:
                    siege.wait_until_struck()
            self.server.kill()
            self.server.start()
            return [self.judge(siege, "sigkill", siege.view()["stop"]) for siege in sieges]
        finally:
            _close(sieges)

    def _besiege(self, attacks: tuple[str, ...]) -> list[Siege]:
        sieges = [self.siege(attack) for attack in attacks]
        try:
            for siege in sieges:
                siege.begin(then="block")
            for siege in sieges:
                siege.wait_until_seen()
        except BaseException:
            _close(sieges)
            raise
        return sieges

    def judge(self, siege: Siege, ending: str, stop: Mapping[str, Any] | None) -> Run:
        """What is seen from outside, against what was said."""
        said = None if stop is None else dict(stop)
        seen = outside.look(siege.heartbeats, said or {"confirmed_at": None})
        return Run(
            attack=siege.attack,
            ending=ending,
            method=self.method,
            stop=said,
            look=seen,
            restarted=ending == "sigkill",
        )


def _ended(siege: Siege) -> bool:
    return bool(siege.view()["phase"] == "done")


def _close(sieges: list[Siege]) -> None:
    for siege in sieges:
        siege.close()
