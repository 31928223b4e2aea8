"""docs/effects.md, followed to the letter: its code, its configuration and its commands, on a real supervisor."""

from __future__ import annotations

import json
import os
import re
import signal
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from demo.payments.provider import Provider
from tests.support import procs
from tests.support.page import block, command
from tests.support.payers import WAIT_S
from tests.support.server import Server
from tests.unit.test_cli import run

pytestmark = pytest.mark.timeout(240)


class Billing:
    """The page's crew on a server."""

    def __init__(self, server: Server, provider: Provider, still: Path) -> None:
        self.server, self.client = server, server.client()
        self._provider, self._still = provider, still

    def call(self, action_id: str, tool: str, arguments: str) -> str:
        """Let the crew call a tool; returns what it reports."""
        inputs = {"tool": tool, "arguments": arguments}
        return str(self.client.start(action_id, "billing", input=inputs).expect(200)["raw"])

    def charges(self, invoice: str) -> int:
        """How often the bank charged an invoice."""
        return sum(charge["invoice"] == invoice for charge in self._provider.charges())

    def only_effect(self, action_id: str) -> dict[str, Any]:
        """The one effect of a job, by the page's route."""
        (found,) = self.client.request("GET", f"/jobs/{action_id}/effects").expect(200)["effects"]
        return dict(found)

    def lose(self, action_id: str, invoice: str) -> dict[str, Any]:
        """Kill the worker in the middle of a payment; returns its effect."""
        self._still.touch()
        reached = self._still.with_suffix(".reached")
        inputs = {"tool": "send_payment", "arguments": f"invoice={invoice},amount=5"}
        self.client.start(action_id, "billing", input=inputs, headers={"Prefer": "respond-async"}).expect(202)
        procs.wait_until(reached.exists, WAIT_S, "the bank is asked")
        os.kill(self.client.get(action_id).expect(200)["worker"]["pid"], signal.SIGKILL)
        procs.wait_until(lambda: self.client.get(action_id).json()["phase"] == "done", WAIT_S, "the job has ended")
        for path in (self._still, reached):
            path.unlink()
        return self.only_effect(action_id)

    def command(self, arguments: list[str]) -> str:
        """Run a command of the page; returns what it prints."""
        token = str(self.server.directory / "token")
        done = run(*arguments, AIP_CREWAI_BEARER_TOKEN_FILE=token, CREW_SUPERVISOR_SERVER=self.server.url)
        assert done.returncode == 0, done.stderr
        return str(done.stdout)


@pytest.fixture(scope="module")
def billing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Billing]:
    home = tmp_path_factory.mktemp("billing")
    provider, still = Provider(home / "provider.db").start(), home / "still"
    server = Server(
        home / "server",
        registry="tests.crews.documented_crews:CREWS",
        settings=tomllib.loads(block("toml", "[crews.billing")),
        environment={"PAYMENTS_URL": provider.url, "BANK_STANDS_STILL": str(still)},
    )
    try:
        with server:
            yield Billing(server, provider, still)
    finally:
        provider.kill()


def test_the_decorated_tool_pays_an_invoice_once_whatever_the_action_and_the_memo(billing: Billing) -> None:
    answers = [billing.call(f"paid-{memo}", "send_payment", f"invoice=17,amount=5,memo={memo}") for memo in "ab"]
    assert answers[0].startswith("charge ")
    assert answers[0] == answers[1]
    assert billing.charges("17") == 1


def test_a_person_decides_by_the_command(billing: Billing) -> None:
    lost = billing.lose("lost", "18")
    assert (lost["state"], lost["version"]) == ("unknown", 2)
    assert lost["key_id"] in billing.command(command("effects list"))
    assert "worker_died" in billing.command(command("effects show", KEY_ID=lost["key_id"]))
    assert "settled" in billing.command(command("effects reconcile", KEY_ID=lost["key_id"]))
    assert billing.call("again", "send_payment", "invoice=18,amount=5") == "charge 4711"
    assert billing.charges("18") == 0


def test_a_person_decides_over_http(billing: Billing) -> None:
    lost = billing.lose("gone", "19")
    page = block("", "POST /effects")
    (etag,) = set(re.findall(r'(?:ETag|If-Match): ("\d+")', page))
    body = json.loads(page[page.index('{"decision"') :])
    assert billing.client.request("GET", f"/effects/{lost['key_id']}").headers["etag"] == etag
    assert billing.client.archive("gone").expect(409)["code"] == "effects_open"
    unknown = billing.client.request("GET", "/effects?state=unknown").expect(200)["effects"]
    assert [effect["key_id"] for effect in unknown] == [lost["key_id"]]
    route = f"/effects/{lost['key_id']}/reconcile"
    billing.client.request("POST", route, body=body, headers={"If-Match": etag}).expect(200)
    assert billing.client.request("GET", "/effects?state=unknown").expect(200)["effects"] == []
    assert billing.call("retried", "send_payment", "invoice=19,amount=5").startswith("charge ")
    assert billing.charges("19") == 1
    billing.client.archive("gone").expect(200)


def test_the_configured_tool_gets_its_key_and_its_provider_is_asked(billing: Billing) -> None:
    """It acts and raises; CrewAI calls again, and instead the bank is asked, whose receipt the agent gets."""
    assert billing.call("configured", "bank_charge", "invoice=20,memo=x").startswith("charge ")
    effect = billing.only_effect("configured")
    assert (effect["scope"], effect["scope_id"], effect["identity"]) == ("crew", "billing", ["key", "20"])
    assert effect["reconciliation"]["actor"] == "billing.bank:ask_bank"
    assert billing.charges("20") == 1


def test_one_of_several_effects_in_a_tool_is_replayed(billing: Billing) -> None:
    assert billing.call("several", "several", "invoice=21,amount=5") == "charged"
    effect = billing.only_effect("several")
    assert (effect["tool"], effect["receipt"].startswith("charge ")) == ("charge", True)
    assert billing.charges("21") == 1
