"""A herd whose ledger has one mechanism broken: ``python -m tests.effects.broken NAME SIZE LEDGER URL``.

The product has no switch for any of this. A check that passes on a mutant checks nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from tests.effects import herd
from tests.support.mutants import replace
from worker import ledger
from worker.ledger import LocalLedger

#: Between the look and the write of ``hasty``, seconds.
HASTY_S = 0.05


def hasty() -> None:
    """A claim is looked up and written without a lock, as a check-then-act."""

    def change(ledger_: LocalLedger, key_id: str, decide: Callable[..., Any], *, synced: bool = True) -> Any:
        with ledger_._using() as connection:
            record, answer = decide(connection, ledger._find(connection, key_id))
            time.sleep(HASTY_S)
            if record is not None:
                ledger._put(connection, record)
        return answer

    replace(LocalLedger, "_change", change)


MUTANTS: dict[str, Callable[[], None]] = {"hasty": hasty}

if __name__ == "__main__":
    MUTANTS[sys.argv[1]]()
    herd.main(int(sys.argv[2]), *sys.argv[3:])
