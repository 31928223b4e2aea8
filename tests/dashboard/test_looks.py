"""A phone's width, both colour schemes, and pictures of it all for people to look at, in tests/.artifacts/dashboard."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dashboard.conftest import SETTINGS
from tests.dashboard.page import DESKTOP, PHONE, Page
from tests.support import scripts
from tests.support.effects import key_of
from tests.support.scripts import claim, make_unknown, perform, settle
from tests.support.server import Server

ASYNC = {"Prefer": "respond-async"}
LONG = "an-action-" + "0123456789" * 24
VIEWS = {
    "list": "/",
    "unpaid": "/jobs/pay-invoice-17",
    "stream": "/jobs/flood",
    "output": "/jobs/summary",
    "effects": "/unknown-effects",
    "long": f"/jobs/{LONG}",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("looks"), registry=scripts.REGISTRY, settings=SETTINGS) as server:
        client = server.client()
        client.start(LONG, "echo", input={"word": "x" * 3000}).expect(200)
        client.start("summary", "echo", input={"topic": "bees", "findings": ["they dance", "they count to four"]})
        client.start("failed", "failing")
        client.start("flood", "flood", input={"chunks": 300}).expect(200)
        paid = key_of("invoice-16")
        perform(client, "pay-invoice-16", claim(paid), settle(paid)).expect(200)
        make_unknown(client, key_of("invoice-17"), action_id="pay-invoice-17")
        client.start("nightly-report", "async_sleeper", headers=ASYNC).expect(202)
        yield server


def luminance(page: Page) -> float:
    """How bright the page's background is, 0 to 255."""
    colour = page.run("return getComputedStyle(document.body).backgroundColor")
    channels = [int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    return sum(channels) / 3


def show(page: Page, where: str) -> None:
    """Show a view and wait for what it is about."""
    page.go(where)
    if where.startswith("/jobs/"):
        page.wait_text("timeline-state", "ended")
        page.wait_text("stop", "Proved")
    elif where == "/":
        page.wait(lambda: page.shown("jobs") and len(page.rows()) == 7, "the list is there")
    else:
        page.wait_text("all-unknown-effects", "invoice-17")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "size"), [("desktop", DESKTOP), ("phone", PHONE)])
def test_every_view_fits_and_is_in_the_colours_that_are_preferred(
    page: Page, width: str, size: tuple[int, int], scheme: str
) -> None:
    page.resize(size)
    page.prefer(scheme)
    page.open()
    page.shoot(f"{width}-{scheme}-sign-in")
    assert page.overflow() <= 0
    page.sign_in()
    assert (luminance(page) > 200) if scheme == "light" else (luminance(page) < 60)
    for name, where in VIEWS.items():
        show(page, where)
        page.shoot(f"{width}-{scheme}-{name}")
        assert page.overflow() <= 0, name
    show(page, "/jobs/failed")
    page.wait_text("log", "ValueError")
    page.run("document.getElementById('log-section').scrollIntoView()")
    page.shoot(f"{width}-{scheme}-log")
    show(page, VIEWS["unpaid"])
    page.find("button[data-key]").click()
    page.wait_text("reconcile-effect", "invoice-17")
    page.find('input[value="settled"]').click()
    page.shoot(f"{width}-{scheme}-reconcile")
    assert page.overflow() <= 0
    page.press("ESCAPE")
    page.go("/jobs/nightly-report")
    page.click("cancel")
    page.shoot(f"{width}-{scheme}-cancel")
    assert page.overflow() <= 0
    assert page.faults() == []


@pytest.mark.parametrize("width", [360, 500, 641, 800, 960, 1199, 1200, 1280, 1366, 1440, 1600, 1920])
def test_nothing_sticks_out_of_its_part_at_any_width(page: Page, width: int) -> None:
    page.resize((width, 900))
    page.sign_in()
    for name in ("list", "unpaid", "long"):
        show(page, VIEWS[name])
        assert (page.overflow() <= 0, page.sticking_out()) == (True, []), name


def test_a_view_that_is_too_wide_is_noticed(page: Page) -> None:
    """The mutant of the tests above."""
    page.resize(PHONE)
    page.sign_in()
    page.run("document.getElementById('main').style.width = '500px'")
    assert page.overflow() > 0
    page.resize((1280, 900))
    page.run("document.getElementById('main').style.width = ''")
    show(page, VIEWS["unpaid"])
    page.run("document.querySelectorAll('.jobs .id').forEach(cell => { cell.style.minWidth = '400px' })")
    assert page.sticking_out() == ["jobs"]


def test_every_field_has_a_label_and_every_button_a_name(page: Page) -> None:
    page.sign_in(where=VIEWS["unpaid"])
    page.wait(lambda: page.find("button[data-key]").is_displayed(), "the job is there")
    nameless = """return [...document.querySelectorAll('input, select, textarea, button')].filter(
        e => e.tagName === 'BUTTON' ? !e.textContent.trim() && !e.hidden : !e.labels.length).map(e => e.outerHTML)"""
    assert page.run(nameless) == []
    assert page.run("return document.documentElement.lang") == "en"
    headings = page.run("return [...document.querySelectorAll('main :is(h2, h3)')].filter(e => e.offsetParent).length")
    assert headings >= 4


def test_contrast_is_enough_in_both_schemes(page: Page) -> None:
    """WCAG 2.2, 1.4.3: text on its background at least 4.5 to 1."""
    page.sign_in(where=VIEWS["unpaid"])
    page.wait_text("stop", "Proved")
    for scheme in ("light", "dark"):
        page.prefer(scheme)
        page.wait(lambda scheme=scheme: (luminance(page) > 200) == (scheme == "light"), scheme)
        page.wait(lambda: not page.run("return document.getAnimations().length"), "colours have changed")
        assert page.run(CONTRAST) == []


CONTRAST = """
const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
const linear = c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
const behind = element => {
  for (let e = element; e; e = e.parentElement) {
    const colour = numbers(getComputedStyle(e).backgroundColor);
    if (colour[3] !== 0) return colour;
  }
  return [255, 255, 255];
};
const poor = [];
for (const element of document.querySelectorAll('body *')) {
  const own = [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim());
  if (!own || !element.offsetParent || element.disabled) continue;
  const [a, b] = [light(numbers(getComputedStyle(element).color)), light(behind(element))].sort((x, y) => y - x);
  if ((a + 0.05) / (b + 0.05) < 4.5) poor.push(element.outerHTML.slice(0, 200));
}
return poor;
"""
