"""A process that pays once and dies at a named moment: ``python -m tests.effects.dying MOMENT LEDGER URL``.

The product has no switch for any of this: its functions are replaced here.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from demo.payments import provider
from worker import ledger
from worker.effect import effect


def die(*_: Any, **__: Any) -> None:
    """SIGKILL this process; nothing of it runs any more."""
    os.kill(os.getpid(), signal.SIGKILL)


def before_claim_commits() -> None:
    """The claim is written in its transaction, and the transaction never ends."""
    put = ledger._put

    def put_and_die(*values: Any) -> None:
        put(*values)
        die()

    ledger._put = put_and_die


def before_delivery() -> None:
    """The outcome is durable, and the caller has not heard of it."""
    ledger.LocalLedger.deliver = die  # type: ignore[method-assign]


PREPARED: dict[str, Callable[[], None]] = {
    "before_claim_commits": before_claim_commits,
    "before_delivery": before_delivery,
}


def pay(url: str, moment: str = "") -> Callable[..., Any]:
    """The tool, which dies by itself where the moment lies in its body."""

    @effect(key="invoice", scope="global", tool="pay")
    def act(invoice: str, amount: float) -> str:
        if moment == "before_effect":
            die()
        made = provider.charge(url, invoice, amount)
        if moment == "after_effect":
            die()
        return f"charge {made['id']}"

    made: Callable[..., Any] = act
    return made


def main(moment: str, path: str, url: str) -> None:
    """Pay, and die at ``moment``."""
    effect.use_ledger(path, action="first")
    PREPARED.get(moment, lambda: None)()
    pay(url, moment)("17", 120.0)
    if moment == "after_delivery":
        die()


if __name__ == "__main__":
    main(*sys.argv[1:])
