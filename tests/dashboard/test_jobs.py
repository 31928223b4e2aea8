"""Signing in, the list, one job, its cancel, its stream."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.client.relay import Relay, Rule
from tests.dashboard.conftest import SETTINGS
from tests.dashboard.page import Page
from tests.support import procs, scripts, world
from tests.support.client import Client
from tests.support.procs import read_beats
from tests.support.server import TOKEN, Server, ServerFactory

ASYNC = {"Prefer": "respond-async"}
MARKUP = '<img src=x onerror="window.struck=1"><script>window.struck=1</script>'
#: The longest time for which the page may do nothing else, milliseconds; measured 90 to 200 on two busy cores.
STALL_MS = 1000
#: Notes the longest gap between two turns of the page's event loop.
WATCH = """window.gap = 0; let last = performance.now();
    const look = () => { const now = performance.now(); window.gap = Math.max(window.gap, now - last); last = now; };
    setInterval(look, 10);"""


def begin(client: Client, action_id: str, crew_id: str = "sleeper", **input: Any) -> None:
    """Start a job and wait until its worker runs."""
    client.start(action_id, crew_id, input=input, headers=ASYNC).expect(202)
    procs.wait_until(lambda: client.get(action_id).json()["worker"], 20, f"{action_id} runs")


def listed(page: Page, action_id: str, *parts: str) -> str:
    """Wait until the list has a job whose row shows all of these."""
    row = lambda: page.rows().get(action_id, "")  # noqa: E731
    return page.wait(lambda: all(part in row() for part in parts) and row(), f"{action_id} is listed with {parts}")


# --- signing in ------------------------------------------------------------------------------------------------------


def test_a_wrong_token_is_said_to_be_wrong_and_asked_for_again(page: Page) -> None:
    page.open()
    page.type("token", "a-token-that-is-wrong")
    page.press("ENTER")
    page.wait_text("sign-in-error", "does not accept this token")
    assert page.focused() == "token"
    assert not page.shown("views")
    page.type("token", TOKEN)
    page.press("ENTER")
    page.wait(lambda: page.shown("views"), "the right one is taken")
    assert not page.shown("sign-in")
    assert TOKEN not in page.run("return location.href + document.documentElement.outerHTML")


def test_the_token_is_kept_only_where_that_is_wanted_and_only_for_the_tab(page: Page) -> None:
    page.sign_in()
    assert page.run("return sessionStorage.length + localStorage.length + document.cookie.length") == 0
    page.open()
    page.click("keep")
    page.type("token", TOKEN)
    page.press("ENTER")
    page.wait(lambda: page.shown("views"), "signed in")
    page.chrome.refresh()
    page.wait(lambda: page.shown("views"), "still signed in")
    assert page.run("return localStorage.length + document.cookie.length") == 0
    page.click("sign-out")
    page.wait(lambda: page.shown("sign-in"), "signed out")
    assert page.run("return sessionStorage.length") == 0
    assert page.rows() == {}


def test_a_token_that_is_withdrawn_leads_back_to_the_sign_in(
    start_server: ServerFactory, page_at: Callable[[str], Page]
) -> None:
    server = start_server(registry=scripts.REGISTRY, settings=SETTINGS)
    page = page_at(server.url)
    page.sign_in()
    (server.directory / "token").write_text("another-token", encoding="utf-8")
    os.kill(server.pid, signal.SIGHUP)
    page.wait_text("sign-in-error", "does not accept the token any more")
    assert not page.shown("views")


# --- the list --------------------------------------------------------------------------------------------------------


def test_jobs_are_listed_as_they_come_and_go(page: Page, client: Client) -> None:
    page.sign_in()
    begin(client, "listed-1")
    listed(page, "listed-1", "running", "sleeper", "run")
    page.wait_text("health", "Ready")
    assert "proved by" in page.text("health")
    client.cancel("listed-1", "sleeper").expect(200)
    listed(page, "listed-1", "cancelled", "uncertain")
    client.start("listed-2", "instant").expect(200)
    listed(page, "listed-2", "completed")
    assert list(page.rows())[:2] == ["listed-2", "listed-1"]


def test_filters_narrow_the_list(page: Page, client: Client) -> None:
    client.start("narrow-1", "instant").expect(200)
    client.start("narrow-2", "failing")
    page.sign_in()
    listed(page, "narrow-1")
    for name, text, stays, goes in (
        ("filter-status", "failed", "narrow-2", "narrow-1"), ("filter-crew", "instant", "narrow-1", "narrow-2"),
    ):  # fmt: skip
        page.choose(name, text)
        page.wait(lambda goes=goes, stays=stays: goes not in page.rows() and stays in page.rows(), f"{name} counts")
        page.choose(name, "any")
    page.type("filter-id", "narrow-")
    page.wait(lambda: set(page.rows()) == {"narrow-1", "narrow-2"}, "only ids with that part are listed")
    page.choose("filter-status", "cancelled")
    page.wait_text("empty", "matches")


def test_a_supervisor_that_is_gone_is_said_to_be_gone(
    start_server: ServerFactory, page_at: Callable[[str], Page]
) -> None:
    server = start_server(registry=scripts.REGISTRY, settings=SETTINGS)
    page = page_at(server.url)
    page.sign_in()
    server.kill()
    page.wait_text("trouble", "cannot be reached")
    assert page.shown("views")
    page.leave()
    assert page.faults(besides="ERR_CONNECTION_REFUSED") == []
    page.console.clear()


# --- one job ---------------------------------------------------------------------------------------------------------


def test_events_are_shown_as_they_come(page: Page, client: Client) -> None:
    begin(client, "live-1", "async_sleeper")
    page.sign_in(where="/jobs/live-1")
    page.wait(lambda: (1, "messages", "sleeping") in page.events(), "the chunk is there while the job runs")
    page.wait_text("timeline-state", "live")
    assert client.get("live-1").json()["status"] == "running"
    client.cancel("live-1", "async_sleeper").expect(200)
    page.wait(lambda: page.events()[-1][1] == "cancelled", "the last event came too")
    page.wait_text("facts", "cancelled")
    page.wait_text("timeline-state", "ended")
    assert not page.shown("cancel")


def test_a_completed_job_has_its_output_and_its_evidence(page: Page, client: Client) -> None:
    client.start("done-1", "echo", input={"word": "bees"}).expect(200)
    page.sign_in(where="/jobs/done-1")
    assert page.wait_text("output", "echo")
    assert "Proved" in page.wait_text("stop", "Nothing of it is left")
    assert page.focused() == "job-title"
    page.go("/jobs/nobody")
    page.wait_text("job-missing", "no such job")


def test_the_log_is_shown_as_the_route_has_it(page: Page, client: Client) -> None:
    client.start("logged-1", "failing")
    page.sign_in(where="/jobs/logged-1")
    page.wait_text("log", "ValueError")
    log = client.request("GET", "/jobs/logged-1/log").body.decode()
    assert page.run("return document.getElementById('log').textContent") == log
    page.go("/jobs/nobody")
    page.wait_text("job-missing", "no such job")
    assert not page.shown("log-section")


def test_a_log_that_grows_is_read_again_on_demand(page: Page, client: Client, tmp_path: Path) -> None:
    first, second = ({"do": "say", "text": text} for text in ("first", "second"))
    steps = (first, scripts.wait(tmp_path / "more"), second, scripts.wait(tmp_path / "end"))
    scripts.begin(client, "logged-2", *steps)
    procs.wait_until(lambda: b"first" in client.request("GET", "/jobs/logged-2/log").body, 20, "it is written")
    page.sign_in(where="/jobs/logged-2")
    page.wait_text("log", "first")
    (tmp_path / "more").touch()
    page.wait(lambda: b"second" in client.request("GET", "/jobs/logged-2/log").body, "it is written")
    assert "second" not in page.text("log")
    page.click("log-again")
    page.wait_text("log", "stdout second")
    (tmp_path / "end").touch()


def test_what_crews_say_is_text_and_never_markup(page: Page, client: Client) -> None:
    client.start("hostile-1", "echo", input={"word": MARKUP}).expect(200)
    page.sign_in(where="/jobs/hostile-1")
    page.wait_text("timeline-state", "ended")
    page.wait(lambda: page.find("#output summary").is_displayed(), "the output is there")
    page.find("#output summary").click()
    assert "<img src=x onerror=" in page.text("output")
    assert "<img src=x onerror=" in page.events()[-1][2]
    made = "return [document.images.length, document.querySelectorAll('main script').length, window.struck]"
    assert page.run(made) == [0, 0, None]


def test_a_sink_for_markup_is_closed_by_the_policy(page: Page) -> None:
    """The mutant of the test above: a page that did make markup of text would be refused by the browser."""
    page.sign_in()
    use = "try { document.getElementById('empty').innerHTML = arguments[0]; } catch (error) { return error.name; }"
    assert page.run(use, MARKUP) == "TypeError"
    assert page.run("return window.struck") is None
    assert page.faults(besides="status of 4") != []
    page.console.clear()


def test_a_stream_that_breaks_anywhere_is_shown_without_a_gap_or_a_double(
    server: Server, client: Client, page_at: Callable[[str], Page]
) -> None:
    client.start("broken-1", "flood", input={"chunks": 300}).expect(200)
    line = "GET /jobs/broken-1/events"
    with relayed(server.port) as (relay, _):
        relay.on(line, Rule(cut=9000), Rule(cut=12_000))
        page = page_at(relay.url)
        page.sign_in(where="/jobs/broken-1")
        page.wait_text("timeline-state", "ended")
        page.click("earlier")
        assert [event[0] for event in page.events()] == list(range(302))
        assert [asked.line for asked in relay.requests].count(line) == 3
        page.leave()
        assert page.faults(besides="ERR_INCOMPLETE_CHUNKED_ENCODING") == []
        page.console.clear()


def test_a_stream_goes_on_behind_the_last_event_that_was_seen(
    server: Server, client: Client, page_at: Callable[[str], Page]
) -> None:
    begin(client, "broken-2", "async_sleeper")
    line = "GET /jobs/broken-2/events"
    with relayed(server.port) as (relay, cut):
        page = page_at(relay.url)
        page.sign_in(where="/jobs/broken-2")
        page.wait(lambda: len(page.events()) == 2, "two events were seen")
        cut()
        client.cancel("broken-2", "async_sleeper").expect(200)
        page.wait_text("timeline-state", "ended")
        assert [event[:2] for event in page.events()] == [(0, "started"), (1, "messages"), (2, "cancelled")]
        assert [asked.headers.get("last-event-id") for asked in relay.requests if asked.line == line] == [None, "1"]
        page.leave()
        assert page.faults(besides="Failed to load resource: net::ERR_") == []
        page.console.clear()


@contextmanager
def relayed(port: int) -> Iterator[tuple[Relay, Callable[[], None]]]:
    """A relay with an event loop and a thread of its own, and what cuts all of its connections."""
    relay, loop, ready = Relay(port), asyncio.new_event_loop(), threading.Event()
    end = asyncio.Event()

    async def pass_on() -> None:
        async with relay:
            ready.set()
            await end.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(pass_on(),))
    thread.start()
    assert ready.wait(10)

    def cut_all() -> None:
        for task in relay._tasks:
            task.cancel()

    def cut() -> None:
        loop.call_soon_threadsafe(cut_all)

    try:
        yield relay, cut
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join(10)
        loop.close()


def test_five_thousand_events_do_not_freeze_the_page(page: Page, client: Client) -> None:
    page.sign_in()
    page.run(WATCH)
    client.start("flood-1", "flood", input={"chunks": 5000}, headers=ASYNC).expect(202)
    page.go("/jobs/flood-1")
    page.wait_text("timeline-state", "ended")
    # The line above the rows is ahead of them by one drawing.
    page.wait(lambda: page.events()[-1][:2] == (5001, "completed"), "the last event is drawn")
    assert page.text("timeline-state").startswith("5,002 events, 200 of them shown")
    assert len(page.events()) == 200
    for _ in range(5):
        page.click("earlier")
    assert len(page.events()) == 600
    assert page.events()[0][0] == 5002 - 200 * 6
    page.click("newest")
    assert [event[0] for event in page.events()] == list(range(4802, 5002))
    assert page.run("return document.querySelectorAll('*').length") < 3000
    stall_ms = page.run("return window.gap")
    assert 0 < stall_ms < STALL_MS


def test_a_page_that_stalls_is_noticed(page: Page) -> None:
    """The mutant of the test above."""
    page.sign_in()
    page.run(WATCH)
    page.run("setTimeout(() => { const end = performance.now() + 1200; while (performance.now() < end); }, 50)")
    page.wait(lambda: page.run("return window.gap") > STALL_MS, "it was noticed")


# --- cancel ----------------------------------------------------------------------------------------------------------


def test_a_cancel_wants_the_action_id_and_shows_the_proof(page: Page, client: Client) -> None:
    begin(client, "cancel-1")
    page.sign_in(where="/jobs/cancel-1")
    page.click("cancel")
    page.type("cancel-id", "cancel-2")
    page.press("ENTER")
    page.wait_text("cancel-error", "Nothing was cancelled")
    assert client.get("cancel-1").json()["phase"] == "running"
    page.type("cancel-id", "cancel-1")
    page.type("cancel-reason", "no longer needed")
    page.press("ENTER")
    page.wait_text("cancel-title", "Cancelled")
    stop = client.get("cancel-1").json()["stop"]
    shown = page.text("cancel-proof")
    assert stop["confirmed"] is True
    assert "Proved" in shown
    assert f"pid {stop['worker']['pid']}, ended by {stop['worker']['exit_signal']}" in shown
    audit = client.request("GET", "/jobs/cancel-1/evidence").json()["audit"]
    assert any("no longer needed" in str(entry["detail"]) for entry in audit)
    page.press("ESCAPE")
    page.wait_text("stop", "Proved")
    page.wait(lambda: page.focused() == "job-title", "the focus goes where the button was")


def test_a_cancel_by_keys_alone(page: Page, client: Client) -> None:
    begin(client, "keys-1")
    page.open()
    page.wait(lambda: page.focused() == "token", "the token is asked for")
    page.press(TOKEN, "ENTER")
    listed(page, "keys-1")
    page.tab_to("keys-1")
    page.press("ENTER")
    page.wait(lambda: page.focused() == "job-title", "the job has the focus")
    page.wait(lambda: page.shown("cancel"), "it can be cancelled")
    page.tab_to("cancel")
    page.press("ENTER")
    page.wait(lambda: page.focused() == "cancel-id", "the id is asked for")
    page.press("keys-1", "ENTER")
    page.wait_text("cancel-title", "Cancelled")
    assert page.focused() == "cancel-title"
    page.tab_to("Close")
    page.press("ENTER")
    page.wait(lambda: page.focused() == "job-title", "back at the job")
    assert client.get("keys-1").json()["stop"]["confirmed"] is True


def test_a_stop_without_proof_is_not_called_one(start_server: ServerFactory, page_at: Callable[[str], Page]) -> None:
    server = start_server(registry=scripts.REGISTRY, settings={**SETTINGS, "stop_method": "group"})
    begin(server.client(), "group-1")
    page = page_at(server.url)
    page.sign_in(where="/jobs/group-1")
    page.wait_text("health", "not proved")
    page.click("cancel")
    page.type("cancel-id", "group-1")
    page.press("ENTER")
    page.wait(lambda: page.shown("cancel-done"), "it was answered")
    assert "Not proved" in page.text("cancel-dialog")
    assert "Nothing of it is left" not in page.text("cancel-dialog")


def test_everything_that_the_job_started_is_gone_when_the_page_says_so(
    start_server: ServerFactory, page_at: Callable[[str], Page], tmp_path: Path
) -> None:
    server = start_server(registry="tests.crews.stop_crews:CREWS", settings=SETTINGS)
    client, beats = server.client(), tmp_path / "beats"
    client.start("escapee-1", "escapee", input={"heartbeat": str(beats), "then": "block"}, headers=ASYNC).expect(202)
    work = world.observe(client, "escapee-1", beats)
    page = page_at(server.url)
    page.sign_in(where="/jobs/escapee-1")
    page.click("cancel")
    page.type("cancel-id", "escapee-1")
    page.press("ENTER")
    page.wait_text("cancel-title", "Cancelled")
    assert read_beats(beats)
    assert world.violations(work, client.get("escapee-1").json()["stop"]) == []
    assert f"{client.get('escapee-1').json()['stop']['processes_killed']} processes" in page.text("cancel-proof")


def test_a_token_that_may_only_read_is_told_so(
    make_server: ServerFactory, page_at: Callable[[str], Page], tmp_path: Path
) -> None:
    reading = tmp_path / "reading"
    reading.touch(mode=0o600)
    reading.write_text("may-only-read", encoding="utf-8")
    server = make_server(registry=scripts.REGISTRY, settings={**SETTINGS, "read_token_files": [str(reading)]}).start()
    begin(server.client(), "reader-1")
    page = page_at(server.url)
    page.sign_in("may-only-read", where="/jobs/reader-1")
    page.click("cancel")
    page.type("cancel-id", "reader-1")
    page.press("ENTER")
    page.wait_text("cancel-title", "Not cancelled")
    assert "may not POST" in page.text("cancel-progress")
    assert server.client().get("reader-1").json()["phase"] == "running"
