"""The numbers to reach: one table."""

from __future__ import annotations

from bench.targets import Target, read

TARGETS: tuple[Target, ...] = (
    Target("durable events/s, one worker", 20_000, "1/s", read("events", "1 workers, durable"), at_most=False),
)
