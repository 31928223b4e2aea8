"""The code of docs/effects.md, as it stands there, with the bank and the crew that it leaves to its reader.

``PAYMENTS_URL`` names the provider behind the bank. While the file BANK_STANDS_STILL exists, the bank does.
"""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from crewai import Agent, Crew, Task
from crewai.tools import tool

from demo.payments import provider
from tests.crews.scripted_llm import Prompt, ScriptedLLM, final, use_tool
from tests.effects.stage import observed
from tests.support.page import block
from worker.effect import effect


def _charge(invoice: str, amount: float = 1.0, *, idempotency_key: str | None) -> SimpleNamespace:
    still = Path(os.environ["BANK_STANDS_STILL"])
    if still.exists():
        still.with_suffix(".reached").touch()
        time.sleep(60)
    made = provider.charge(os.environ["PAYMENTS_URL"], invoice, amount, key=idempotency_key)
    return SimpleNamespace(status="done", receipt=f"charge {made['id']}")


def _find(*, idempotency_key: str) -> SimpleNamespace | None:
    for charge in provider.look_up(os.environ["PAYMENTS_URL"], idempotency_key):
        return SimpleNamespace(id=charge["id"], receipt=f"charge {charge['id']}")
    return None


bank = SimpleNamespace(charge=_charge, find=_find)


@tool("bank_charge")
def bank_charge(invoice: str, memo: str = "", idempotency_key: str = "") -> str:
    """Somebody else's tool: it acts, and the answer is lost."""
    bank.charge(invoice, idempotency_key=idempotency_key)
    raise ConnectionError("the answer was lost")


@tool("several")
def several(invoice: str, amount: float) -> str:
    """The page's several effects in one tool."""
    names = {"effect": effect, "bank": bank, "invoice": invoice, "amount": amount}
    exec(block("python", 'effect.claim("charge"'), names)
    call: Any = names["call"]
    return f"replayed {call.receipt}" if call.replayed else "charged"


def billing_crew() -> Crew:
    """Calls the tool of its inputs with the arguments there, and reports what it said."""

    def script(prompt: Prompt) -> str:
        if heard := observed(prompt):
            return final(heard)
        named = re.search(r"Call (\w+) with <(.*?)>", prompt.text)
        assert named is not None
        return use_tool(named[1], **dict(pair.split("=") for pair in named[2].split(",")))

    clerk = Agent(
        role="Clerk",
        goal="pay",
        backstory="b",
        llm=ScriptedLLM(script),
        tools=[_page["send_payment"], bank_charge, several],
        allow_delegation=False,
    )
    task = Task(name="pay", description="Call {tool} with <{arguments}>", expected_output="e", agent=clerk)
    return Crew(name="billing", agents=[clerk], tasks=[task])


_page: dict[str, Any] = {"bank": bank, "billing_crew": billing_crew}
exec(block("python", '@tool("send_payment")'), _page)
exec(block("python", "CREWS ="), _page)
CREWS, EFFECTS = _page["CREWS"], _page["EFFECTS"]

#: The module of the page's configuration.
_module = ModuleType("billing.bank")
vars(_module)["bank"] = bank
exec(block("python", "def ask_bank"), vars(_module))
sys.modules |= {"billing": ModuleType("billing"), "billing.bank": _module}
