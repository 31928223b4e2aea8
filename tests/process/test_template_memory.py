"""The memory that workers are forked from: what they share is shared on purpose, and cheap to fork."""

from __future__ import annotations

from pathlib import Path

from tests.support import procs
from tests.support.server import ServerFactory

#: Objects of the import, enough for some huge pages.
BALLAST = "BALLAST = [bytes(100) for _ in range(300_000)]\n"
DRAWS = """
import random

import numpy.random

random.random(), numpy.random.random()


class Draws:
    def kickoff(self, inputs):
        return {"raw": "", "drawn": [random.random(), numpy.random.random()]}


CREWS = {"draws": Draws}
"""
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


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
    wanted_kib = 16 * 1024 if HUGE_PAGES.exists() else 0  # a kernel may be built without them
    procs.wait_until(lambda: anonymous_huge_kib(template) >= wanted_kib, 30, "the heap is in huge pages")
    assert server.client().start("a", "instant").expect(200)["raw"] == "done"


def anonymous_huge_kib(pid: int) -> int:
    """AnonHugePages of proc_pid_smaps(5), KiB."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    return int(rollup.partition("AnonHugePages:")[2].split()[0])
