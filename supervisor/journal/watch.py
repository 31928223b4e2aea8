"""Whoever wants to know what the journal did: for metrics."""

from __future__ import annotations

from supervisor.journal.records import JobRecord


class Watch:
    """Is told what happened, and does nothing with it unless overridden. No method may raise or wait."""

    def committed(self, operations: int, seconds: float) -> None:
        """A transaction of so many operations is durable; it took that long. Called in the writer's thread."""

    def failed(self) -> None:
        """A transaction could not be committed. Called in the writer's thread."""

    def refused_operations(self, operations: int) -> None:
        """So many operations were told that nothing was recorded. Called in the writer's thread."""

    def appended(self, events: int) -> None:
        """So many events of jobs are durable."""

    def ended(self, record: JobRecord, reason: str) -> None:
        """A terminal record is durable; ``reason`` is the word for its cause."""
