"""The registry of the smallest size: no CrewAI is imported."""

from __future__ import annotations

from bench import fakes
from bench.stamps import stamped
from tests.crews import fake_crews

CREWS = {**fakes.CREWS, "fake": stamped(fake_crews.Instant), "kept": fakes.Idle}
