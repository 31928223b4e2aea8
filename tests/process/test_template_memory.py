"""The memory that workers are forked from: what they share is shared on purpose, and cheap to fork."""

from __future__ import annotations

from pathlib import Path

from tests.support import procs
from tests.support.server import ServerFactory

#: What the import leaves: 192 MiB side by side, wherever they lie.
BALLAST = "BALLAST = b'x' * (192 << 20)\n"
DRAWS = """
import random

import numpy.random

random.random(), numpy.random.random()


class Draws:
    def kickoff(self, inputs):
        return {"raw": "", "drawn": [random.random(), numpy.random.random()]}


CREWS = {"draws": Draws}
"""
#: A kernel may be built without huge pages.
WANTED_KIB = 184 * 1024 if Path("/sys/kernel/mm/transparent_hugepage").exists() else 0


def test_no_two_workers_draw_the_same_random_numbers(start_server: ServerFactory, tmp_path: Path) -> None:
    (tmp_path / "drawing.py").write_text(DRAWS, encoding="ascii")
    client = start_server(registry="drawing:CREWS", python_path=(tmp_path,), settings={"launch": "fork"}).client()
    (random, numpy_random), (other_random, other_numpy_random) = (
        client.start(action_id, "draws").expect(200)["drawn"] for action_id in "ab"
    )
    assert random != other_random
    assert numpy_random != other_numpy_random


def test_an_idle_template_moves_its_heap_into_huge_pages(start_server: ServerFactory, tmp_path: Path) -> None:
    registry = f"{BALLAST}from tests.crews.fake_crews import CREWS\n"
    (tmp_path / "heavy.py").write_text(registry, encoding="ascii")
    server = start_server(registry="heavy:CREWS", python_path=(tmp_path,), settings={"launch": "fork"})
    (template,) = procs.children(server.pid)
    procs.wait_until(lambda: anonymous_huge_kib(template) >= WANTED_KIB, 30, "the heap is in huge pages")
    assert server.client().start("a", "instant").expect(200)["raw"] == "done"


def test_a_worker_of_the_first_moment_shares_what_the_template_has(start_server: ServerFactory, tmp_path: Path) -> None:
    registry = f"{BALLAST}from tests.crews.fake_crews import CREWS\n"
    (tmp_path / "heavy.py").write_text(registry, encoding="ascii")
    server = start_server(registry="heavy:CREWS", python_path=(tmp_path,), settings={"launch": "fork"})
    with server.client().stream("a", "sleeper") as stream:
        stream.until("started")
        worker = server.client().get("a").expect(200)["worker"]["pid"]
        assert anonymous_huge_kib(worker) >= WANTED_KIB, "all of it was in huge pages before the fork"
        assert kib_of(worker, "Private_Dirty") < 8 * 1024


def anonymous_huge_kib(pid: int) -> int:
    """Anonymous memory in huge pages, KiB."""
    return kib_of(pid, "AnonHugePages")


def kib_of(pid: int, name: str) -> int:
    """A sum over all mappings, KiB (proc_pid_smaps(5))."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    return int(rollup.partition(f"\n{name}:")[2].split()[0])
