"""What a template does to its heap before it forks."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: Leaves holes in some 1,600 pools, and prints over how many of them 800 new objects are spread.
HOLES = """
import sys
from worker import heap

kept = [bytes(96) for _ in range(200_000)]
del kept[::125]
filled = heap.fill_holes() if sys.argv[1] == "filled" else []
new = [bytes(96) for _ in range(800)]
print(len({id(each) // heap.POOL_BYTES for each in new}), len(filled))
"""


def spread(how: str) -> tuple[int, int]:
    """Pools that new objects of a process with holes lie in, and objects that fill the holes."""
    run = subprocess.run([sys.executable, "-c", HOLES, how], capture_output=True, text=True, check=True)
    pools, filled = map(int, run.stdout.split())
    return pools, filled


def test_new_objects_lie_together_once_the_holes_are_filled() -> None:
    scattered, _ = spread("left")
    together, filled = spread("filled")
    assert together * 10 < scattered
    assert filled < 50_000


@pytest.mark.parametrize("size", range(16, 513, 16))
def test_every_size_is_filled_with_objects_of_that_size(size: int) -> None:
    from worker import heap

    filling = heap._maker(size)()
    assert (sys.getsizeof(filling) + 15) // 16 * 16 == size
