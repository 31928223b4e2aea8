"""Named instants at which a test build ends the process or fails the write. In the product they do nothing.

Call them as ``points.reach("place.moment")`` with a literal name: tests find every point in the code, and replace the
two functions in the processes that they start.
"""

from __future__ import annotations


def reach(name: str) -> None:
    """Pass an instant at which the process may die."""


def write(name: str) -> None:
    """Pass the instant before something is written: the process may die, or the write fail."""
