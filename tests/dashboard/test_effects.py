"""Effects: unknown ones in front, and what an operator records of them."""

from __future__ import annotations

from protocol.effects import EffectKey
from tests.dashboard.page import Page
from tests.support.client import Client
from tests.support.effects import key_of
from tests.support.scripts import claim, effect, make_unknown, perform, reconcile, settle


def ask_about(page: Page, key: EffectKey) -> None:
    """Open the dialog about an effect."""
    page.wait(lambda: page.find(f'button[data-key="{key.key_id}"]').is_displayed(), "it can be reconciled")
    page.find(f'button[data-key="{key.key_id}"]').click()
    page.wait_text("reconcile-effect", key.key_id)


def decide(page: Page, decision: str, *, receipt: str | None = None) -> None:
    """Fill the dialog in and send it."""
    page.find(f'input[value="{decision}"]').click()
    if receipt is not None:
        page.type("receipt", receipt)
    page.type("actor", "ops@example.org")
    page.type("evidence", "the bank's statement")
    page.find("#reconcile-form button[type=submit]").click()


def test_unknown_effects_stand_in_front_and_can_be_reconciled(page: Page, client: Client) -> None:
    key, known = key_of("front-1"), key_of("front-2")
    perform(client, "paid-1", claim(known), settle(known), claim(key), {"do": "die"}).expect(502)
    page.sign_in(where="/jobs/paid-1")
    page.wait_text("unknown-effects", "front-1")
    assert "the worker died" in page.text("unknown-effects")
    assert "front-2" in page.text("effects")
    above = "return arguments[0].compareDocumentPosition(arguments[1]) & Node.DOCUMENT_POSITION_FOLLOWING"
    assert page.run(above, page.by_id("unknown-effects"), page.by_id("facts"))
    ask_about(page, key)
    decide(page, "settled", receipt="17 was paid")
    page.wait_text("reconcile-error", "not JSON")
    assert effect(client, key).json()["state"] == "unknown"
    page.type("receipt", '{"charge": 12345678901234567}')
    page.find("#reconcile-form button[type=submit]").click()
    page.wait(lambda: not page.shown("reconcile-dialog"), "it was recorded")
    page.wait_text("effects", "front-1")
    assert not page.shown("unknown-section")
    view = effect(client, key).json()
    assert (view["state"], view["receipt"]) == ("settled", {"charge": 12345678901234567})
    assert view["reconciliation"] == {
        "decision": "settled", "actor": "ops@example.org", "evidence": "the bank's statement",
    }  # fmt: skip
    assert "settled by ops@example.org: the bank's statement" in page.text("effects")


def test_a_decision_about_an_effect_that_changed_meanwhile_is_not_recorded(page: Page, client: Client) -> None:
    key = key_of("changed-1")
    make_unknown(client, key, action_id="paid-2")
    page.sign_in(where="/jobs/paid-2")
    ask_about(page, key)
    reconcile(client, key, decision="not_applied", actor="somebody else").expect(200)
    decide(page, "abandoned")
    page.wait_text("reconcile-error", "changed since")
    page.wait_text("reconcile-effect", "somebody else")
    assert effect(client, key).json()["state"] == "not_applied"


def test_what_is_missing_is_asked_for(page: Page, client: Client) -> None:
    key = key_of("missing-1")
    make_unknown(client, key, action_id="paid-3")
    page.sign_in(where="/jobs/paid-3")
    ask_about(page, key)
    page.find("#reconcile-form button[type=submit]").click()
    page.wait_text("reconcile-error", "Choose a decision")
    page.find('input[value="abandoned"]').click()
    page.find("#reconcile-form button[type=submit]").click()
    page.wait_text("reconcile-error", "who decides")
    assert page.focused() == "actor"
    page.press("ESCAPE")
    page.wait(lambda: not page.shown("reconcile-dialog"), "closed")
    assert page.run("return document.activeElement.dataset.key") == key.key_id
    assert effect(client, key).json()["state"] == "unknown"


def test_unknown_effects_of_all_jobs_are_one_click_away(page: Page, client: Client) -> None:
    key = key_of("all-1")
    make_unknown(client, key, action_id="paid-4")
    page.sign_in()
    page.wait(lambda: page.find("#health a").is_displayed(), "the summary counts it")
    page.find("#health a").click()
    page.wait_text("all-unknown-effects", "paid-4")
    ask_about(page, key)
    decide(page, "not_applied")
    page.wait(lambda: "all-1" not in page.text("all-unknown"), "it is gone from the list")
    assert effect(client, key).json()["state"] == "not_applied"
