"""What an idle supervisor and its template take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.measure import Scale, Series, Step, Values
from tests.support import procs
from tests.support.server import Server

MB = 1e6


class Memory:
    """Resident memory of fresh processes that have nothing to do."""

    name = "memory"
    title = "Memory: a fresh supervisor that listens and has run nothing"
    notes = (
        "resident: VmRSS, shared pages of libraries included; private: pages of that process alone",
        "the template has imported CrewAI and the registry; workers share its pages until they write to them",
    )
    series = (
        Series("supervisor, resident", "MB"),
        Series("supervisor, private", "MB"),
        Series("template, resident", "MB"),
        Series("template, private", "MB"),
    )
    rounds = (2, 5)

    @contextmanager
    def open(self, directory: Path, scale: Scale) -> Iterator[Sequence[Step]]:
        """Nothing is kept between rounds."""
        yield [Step("fresh server", lambda: _fresh(directory))]


def _fresh(directory: Path) -> Values:
    found: dict[str, list[float]] = {}
    server = Server(
        directory / "server", registry="bench.registry:CREWS", settings={"template": {"preload": ["crewai"]}}
    )
    with server:
        server.client().health().expect(200)
        (template,) = procs.children(server.pid)
        for name, pid in (("supervisor", server.pid), ("template", template)):
            memory = _memory_kb(pid)
            found[f"{name}, resident"] = [memory["Rss"] * 1024 / MB]
            found[f"{name}, private"] = [(memory["Private_Clean"] + memory["Private_Dirty"]) * 1024 / MB]
    return found


def _memory_kb(pid: int) -> dict[str, int]:
    """Fields of /proc/PID/smaps_rollup (proc_pid_smaps(5)), kB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]
    return {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
