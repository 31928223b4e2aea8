"""The crew: it pays one invoice.

``PAYMENTS_URL`` names the provider. The model is a script, so that the demo needs no key and no network.
"""

from __future__ import annotations

import os
import re
from typing import Any

from crewai import Agent, Crew, Task
from crewai.tools import tool

from demo.payments import provider
from demo.scripted_llm import ScriptedLLM, final, use
from worker.effect import NotApplied, effect, not_applied, settled


def ask_provider(key_id: str, tool: str, args: dict[str, Any]) -> Any:
    """What became of a payment: the provider knows it by the key that it was given."""
    found = provider.look_up(os.environ["PAYMENTS_URL"], key_id)
    if found:
        return settled(_receipt(found[0]), evidence=f"charge {found[0]['id']} at the provider")
    return not_applied(evidence="the provider has no charge of that key")


@tool("send_payment")
@effect(key="invoice", scope="global", volatile=("memo",), reconcile="demo.payments.registry:ask_provider")
def send_payment(invoice: str, amount: float, memo: str = "") -> str:
    """Pay an invoice."""
    try:
        made = provider.charge(os.environ["PAYMENTS_URL"], invoice, amount, key=effect.provider_key())
    except provider.Refused as refused:
        # The provider says so itself: nothing happened, and the call may be made again.
        raise NotApplied(str(refused)) from refused
    return _receipt(made)


def _receipt(charge: dict[str, Any]) -> str:
    return f"charge {charge['id']}: {charge['amount']:.2f} for {charge['invoice']}"


def _answer(conversation: str) -> str:
    """Pay what the task names; once the tool has answered, report what it said."""
    if heard := re.search(r'"as agreed"\}\s*Observation: (.*)', conversation):
        return final(heard[1])
    wanted = re.search(r"Pay invoice (\S+) of ([\d.]+)", conversation)
    assert wanted is not None, conversation
    return use("send_payment", invoice=wanted[1], amount=float(wanted[2]), memo="as agreed")


def payments() -> Crew:
    """A crew with one agent and one task; input: ``invoice`` and ``amount``."""
    clerk = Agent(
        role="Clerk",
        goal="pay invoices",
        backstory="A careful clerk.",
        llm=ScriptedLLM(_answer),
        tools=[send_payment],
        allow_delegation=False,
    )
    task = Task(
        name="pay",
        description="Pay invoice {invoice} of {amount}",
        expected_output="the provider's charge",
        agent=clerk,
    )
    return Crew(name="payments", agents=[clerk], tasks=[task])


CREWS = {"payments": payments}
