"""The hostile suite's crew below keepers that adopt no orphans: the process that forks them imports this registry.

A check that passes with these checks nothing.
"""

from __future__ import annotations

from tests.crews.adversaries import CREWS
from worker import sandbox

__all__ = ["CREWS"]

assert "adopt_orphans" in vars(sandbox), "there is nothing to be switched off"
sandbox.adopt_orphans = lambda: None
