"""Crews without CrewAI whose guarded tools charge the payment provider, and which stand still where a test wants it.

``inputs``: ``tool``, ``invoices`` (one call for each), ``amount``, and ``stage``: ``url`` of the provider, ``gates``, a
directory, ``name``, the job's own there, and ``holds``, the places where it waits. The output has ``outcomes``: of each
call its result, or the code of what refused it.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from demo.payments import provider
from protocol.errors import CrewError
from worker.effect import NotApplied, effect, not_applied, settled, unknown
from worker.guarding import session

WAIT_S = 60.0
Stage = Mapping[str, Any]


def reach(stage: Stage, where: str) -> None:
    """Say by a file that the job is here, and wait for the test's file if it is to be held."""
    Path(stage["gates"], f"{stage['name']}-{where}").touch()
    if where in stage["holds"]:
        go = Path(stage["gates"], f"{stage['name']}-{where}-go")
        give_up = time.monotonic() + WAIT_S
        while not go.exists():
            if time.monotonic() > give_up:
                raise TimeoutError(str(go))
            time.sleep(0.002)


def pay(invoice: str, amount: float, stage: Stage) -> str:
    """Pay an invoice."""
    reach(stage, "body")
    try:
        made = provider.charge(stage["url"], invoice, amount, key=effect.provider_key())
    except provider.Refused as refused:
        raise NotApplied(str(refused)) from refused
    reach(stage, "charged")
    return f"charge {made['id']}".ljust(stage.get("chars", 0), ".")


def ask(key_id: str, tool: str, args: dict[str, Any]) -> Any:
    """What the provider's books have of the call; ``stage.lookup`` is ``unknown`` where it cannot say."""
    if args["stage"].get("lookup") == "unknown":
        return unknown()
    found = provider.look_up(args["stage"]["url"], key_id)
    return settled(f"charge {found[0]['id']}", evidence="the provider's books") if found else not_applied()


POLICIES: dict[str, dict[str, Any]] = {
    "pay": {"key": "invoice", "scope": "global"},
    "pay_here": {"key": "invoice"},
    "pay_loosely": {},
    "pay_asking": {"key": "invoice", "scope": "global", "reconcile": ask},
}
TOOLS = {name: effect(tool=name, volatile=("stage",), **policy)(pay) for name, policy in POLICIES.items()}


def attempt(call: Callable[[], Any]) -> dict[str, Any]:
    """What an agent would hear of a call."""
    try:
        return {"result": call()}
    except CrewError as error:
        return {"code": error.code}
    except (OSError, NotApplied, TimeoutError) as error:
        return {"code": type(error).__name__}


class Payer:
    """Pays each invoice, one after the other, and then fails, dies or returns as ``inputs.then`` says."""

    def kickoff(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        stage = inputs["stage"]
        reach(stage, "start")
        tool = TOOLS[inputs["tool"]]
        outcomes = [attempt(partial(tool, invoice, inputs["amount"], stage)) for invoice in inputs["invoices"]]
        reach(stage, "paid")
        getattr(self, inputs["then"])()
        return {"raw": "done", "outcomes": outcomes}

    def end(self) -> None:
        """Return."""

    def fail(self) -> None:
        raise ValueError("the crew fails")


class Leaving(Payer):
    """Leaves a process behind."""

    def kickoff(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        subprocess.Popen(["sleep", str(WAIT_S)], start_new_session=True)
        return super().kickoff(inputs)


class Blocks:
    """``effect.claim``: whether it was replayed, and its receipt."""

    def kickoff(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        (invoice,) = inputs["invoices"]
        with effect.claim("charge", key=invoice, args={"amount": inputs["amount"]}, scope="global") as call:
            if not call.replayed:
                call.settle(pay(invoice, inputs["amount"], inputs["stage"]))
            return {"raw": "done", "outcomes": [{"replayed": call.replayed, "result": call.receipt}]}


class Late:
    """A tool that does not wait for its thread any longer; the thread says later what happened."""

    def kickoff(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        (invoice,) = inputs["invoices"]
        stage = inputs["stage"]
        with ThreadPoolExecutor(1) as pool:
            done: list[Future[None]] = []

            def tool() -> None:
                args = {"invoice": invoice, "amount": inputs["amount"]}
                with effect.claim("pay", key=invoice, args=args, scope="global") as call:
                    work = pool.submit(lambda: call.settle(pay(invoice, inputs["amount"], stage)))
                    done.append(work)
                    work.result(timeout=0.01)

            outcome = attempt(tool)
            reach(stage, "timed_out")
            done[0].result()
        reach(stage, "paid")
        return {"raw": "done", "outcomes": [outcome]}


class Closing:
    """Pays while it is being cancelled; the file ``outcome`` says what came of it."""

    async def akickoff(self, inputs: Mapping[str, Any]) -> AsyncIterator[str]:
        return self._chunks(inputs)

    async def _chunks(self, inputs: Mapping[str, Any]) -> AsyncIterator[str]:
        stage = inputs["stage"]
        try:
            reach(stage, "start")
            yield "waiting"
            await asyncio.sleep(WAIT_S)
        finally:
            outcome = attempt(lambda: TOOLS["pay"](inputs["invoices"][0], inputs["amount"], stage))
            Path(stage["gates"], f"{stage['name']}-outcome").write_text(json.dumps(outcome), encoding="ascii")


class Forking:
    """Pays in a process that it forks; the file ``outcome`` says what came of it. Then it pays itself."""

    def kickoff(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        (invoice,) = inputs["invoices"]
        stage = inputs["stage"]
        child = os.fork()
        if child == 0:
            outcome = attempt(lambda: TOOLS["pay"](invoice, inputs["amount"], stage))
            Path(stage["gates"], f"{stage['name']}-outcome").write_text(json.dumps(outcome), encoding="ascii")
            os._exit(0)
        os.waitpid(child, 0)
        return {"raw": "done", "outcomes": [attempt(lambda: TOOLS["pay"](invoice, inputs["amount"], stage))]}


class Stale:
    """Settles, on the worker's own ledger, what another epoch had claimed: ``inputs.settle``."""

    def kickoff(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        said = inputs["settle"]
        key_id = said.pop("key_id")
        settle = session.current().ledger.settle
        return {"raw": "done", "outcomes": [attempt(lambda: settle(key_id, receipt=b'"late"', **said))]}


CREWS: dict[str, Callable[[], Any]] = {
    "payer": Payer,
    "other_payer": Payer,
    "leaving": Leaving,
    "blocks": Blocks,
    "late": Late,
    "closing": Closing,
    "forking": Forking,
    "stale": Stale,
}
