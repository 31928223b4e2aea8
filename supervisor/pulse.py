"""The sign of life that the service manager's watchdog waits for, and the status line that people see."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from supervisor.journal import Journal
from supervisor.notify import Notifier

#: How long the status line may lag behind, seconds.
STATUS_S = 1.0
#: Signs of life within the watchdog's limit: one may be late.
SIGNS_PER_LIMIT = 3
#: How much more time a drain asks for with each beat, seconds.
EXTENSION_S = 10.0


def status_line(*, running: int, queued: int, unknown_effects: int, faults: tuple[str, ...] = ()) -> str:
    """What ``systemctl status`` shows. ``unknown_effects``: calls whose outcome nobody knows yet."""
    parts = (f"{running} running", f"{queued} queued", f"{unknown_effects} effects unknown")
    return "; ".join((", ".join(parts), *faults))


class Pulse:
    """Beats as long as the event loop turns and the journal's writer thread answers, be it with an error.

    A full disk is an answer: a restart would not cure it. A writer that hangs or has died gives none.
    """

    def __init__(self, notifier: Notifier, journal: Journal, status: Callable[[], str]) -> None:
        self._notifier = notifier
        self._journal = journal
        self._status = status
        self._shown = ""
        #: Set while the service stops: each beat asks for time.
        self.draining = False

    async def run(self) -> None:
        """Beat until cancelled; return at once where nobody listens, or when the writer thread has died."""
        limit_s = self._notifier.watchdog_s
        pause_s = STATUS_S if limit_s is None else min(STATUS_S, limit_s / SIGNS_PER_LIMIT)
        while self._notifier.present and await self._journal.answers():
            self.beat()
            await asyncio.sleep(pause_s)

    def beat(self) -> None:
        """Say that we live, how we do if that has changed, and that we need time if we stop."""
        fields: dict[str, str | int] = {} if self._notifier.watchdog_s is None else {"WATCHDOG": 1}
        status = self._status()
        if status != self._shown:
            fields["STATUS"] = self._shown = status
        if fields:
            self._notifier.send(**fields)
        if self.draining:
            self._notifier.extend(EXTENSION_S)
