"""Jobs of ``tests.crews.payer_crews`` on a server, and the provider whose books say how often something was done."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from demo.payments.provider import Provider
from protocol.effects import EffectKey
from tests.support import procs, scripts
from tests.support.client import Client
from tests.support.effects import key_of
from tests.support.server import Server

REGISTRY = "tests.crews.payer_crews:CREWS"
INVOICE, AMOUNT = "17", 120.0
WAIT_S = 30.0
NONE = {"claimed": 0, "settled": 0, "not_applied": 0, "unknown": 0, "abandoned": 0}
#: Codes of refusals.
IN_FLIGHT, UNKNOWN, CONFLICT = "effect_in_flight", "effect_outcome_unknown", "effect_conflict"


class Payers:
    """Starts payers, holds and releases them, and looks at what came of it."""

    def __init__(self, server: Server, provider: Provider, gates: Path) -> None:
        self.server, self.provider = server, provider
        self._gates = gates
        gates.mkdir(exist_ok=True)

    @property
    def client(self) -> Client:
        """A client of the server as it is now; it may have been restarted."""
        return self.server.client()

    def input(
        self,
        action_id: str,
        *invoices: str,
        tool: str = "pay",
        amount: float = AMOUNT,
        holds: tuple[str, ...] = (),
        then: str = "end",
        lookup: str = "",
        chars: int = 0,
        **more: Any,
    ) -> dict[str, Any]:
        """What the crews are given."""
        stage = {"url": self.provider.url, "gates": str(self._gates), "name": action_id, "holds": list(holds)}
        return {
            "tool": tool,
            "invoices": list(invoices) or [INVOICE],
            "amount": amount,
            "then": then,
            "stage": stage | {"lookup": lookup, "chars": chars},
            **more,
        }

    def pay(self, action_id: str, *invoices: str, crew_id: str = "payer", **options: Any) -> list[dict[str, Any]]:
        """Run a payer to its end; returns what each of its calls gave."""
        answer = self.client.start(action_id, crew_id, input=self.input(action_id, *invoices, **options))
        outcomes: list[dict[str, Any]] = answer.expect(200)["outcomes"]
        return outcomes

    def pay_one(self, action_id: str, invoice: str = INVOICE, **options: Any) -> str:
        """Run a payer with one call; returns its result or its code."""
        (outcome,) = self.pay(action_id, invoice, **options)
        return str(outcome.get("result", outcome.get("code")))

    def begin(self, action_id: str, *invoices: str, crew_id: str = "payer", until: str = "", **options: Any) -> None:
        """Start a payer, and wait until it is at ``until``, where it is held."""
        holds = (*options.pop("holds", ()), *([until] if until else []))
        document = self.input(action_id, *invoices, holds=holds, **options)
        headers = {"Prefer": "respond-async"}
        self.client.start(action_id, crew_id, input=document, headers=headers).expect(202)
        if until:
            self.wait(action_id, until)

    def reached(self, action_id: str, where: str) -> bool:
        """Whether a payer has been there."""
        return Path(self._gates, f"{action_id}-{where}").exists()

    def wait(self, action_id: str, where: str) -> None:
        """Wait until a payer is there."""
        procs.wait_until(lambda: self.reached(action_id, where), WAIT_S, f"{action_id} is at {where}")

    def release(self, action_id: str, where: str) -> None:
        """Let a payer go on."""
        Path(self._gates, f"{action_id}-{where}-go").touch()

    def outcome_file(self, action_id: str) -> dict[str, Any]:
        """What came of a call that no output shows."""
        found: dict[str, Any] = json.loads(Path(self._gates, f"{action_id}-outcome").read_text(encoding="ascii"))
        return found

    def worker(self, action_id: str) -> int:
        """Pid of a job's worker."""
        pid: int = self.client.get(action_id).expect(200)["worker"]["pid"]
        return pid

    def kill_worker(self, action_id: str) -> None:
        """SIGKILL of the job's worker, from outside."""
        os.kill(self.worker(action_id), signal.SIGKILL)

    def ended(self, action_id: str) -> dict[str, Any]:
        """Wait for the end of a job; returns its view."""

        def view() -> dict[str, Any] | None:
            found: dict[str, Any] = self.client.get(action_id).expect(200)
            return found if found["phase"] == "done" else None

        return procs.wait_until(view, WAIT_S, f"{action_id} has ended") or {}

    def last_event(self, action_id: str) -> dict[str, Any]:
        """The terminal event of a job."""
        event: dict[str, Any] = self.client.events(action_id).expect(200)["events"][-1]
        return event

    def key(self, invoice: str = INVOICE, *, tool: str = "pay") -> EffectKey:
        """The key of a global payment."""
        return key_of(invoice, tool=tool)

    def effect(self, invoice: str = INVOICE, *, tool: str = "pay") -> dict[str, Any] | None:
        """A global payment as HTTP shows it, None for a key that was never claimed."""
        answer = scripts.effect(self.client, self.key(invoice, tool=tool))
        if answer.status == 404:
            return None
        view: dict[str, Any] = answer.expect(200)
        return view

    def until(self, state: str, invoice: str = INVOICE, *, tool: str = "pay") -> dict[str, Any]:
        """Wait until a global payment is in that state; returns its view."""
        return scripts.until_state(self.client, state, self.key(invoice, tool=tool))

    def until_delivered(self, invoice: str = INVOICE, *, tool: str = "pay") -> None:
        """Wait until the ledger knows that a payment's caller has its receipt."""

        def delivered() -> bool:
            view = self.effect(invoice, tool=tool)
            return view is not None and view["delivered_at"] is not None

        procs.wait_until(delivered, WAIT_S, "the receipt is delivered")

    def charges(self, invoice: str = INVOICE) -> int:
        """How often the provider was charged for an invoice."""
        return sum(charge["invoice"] == invoice for charge in self.provider.charges())
