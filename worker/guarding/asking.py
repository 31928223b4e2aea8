"""Asking the provider what became of a call whose outcome nobody knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from protocol.effects import Decision, Reconciliation
from worker import failures
from worker.guarding import policies, receipts

#: Longest actor and evidence on the wire, in characters.
MAX_NAME = 512


@dataclass(frozen=True)
class Finding:
    """What the provider said. ``decision`` None: it does not know either, and nothing changes."""

    decision: Decision | None
    receipt: Any = None
    evidence: str = ""


def ask(
    reconcile: Callable[..., Any] | str, key_id: str, tool: str, arguments: dict[str, Any]
) -> Reconciliation | None:
    """Call ``reconcile(key_id, tool, arguments)``; None unless it knows. What it raises is said in the job's log."""
    try:
        function, actor = policies.reference(reconcile)
        found = function(key_id, tool, dict(arguments))
        if not isinstance(found, Finding):
            raise TypeError(f"{actor} returned a {type(found).__name__}; return settled(), not_applied() or unknown()")
    except Exception as error:  # noqa: BLE001 - a crew author's function: whatever went wrong, nothing is known
        failures.say(error)
        return None
    if found.decision is None:
        return None
    return Reconciliation(
        decision=found.decision,
        actor=actor[:MAX_NAME],
        evidence=(found.evidence or f"{actor} was asked")[:MAX_NAME],
        receipt=receipts.encode(found.receipt) if found.decision is Decision.SETTLED else None,
    )
