"""One browser for all tests of the dashboard, and a server that has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from selenium.webdriver import Chrome

from tests.dashboard.page import Page, browser, programs
from tests.support import scripts
from tests.support.client import Client
from tests.support.server import Server

SETTINGS: dict[str, Any] = {
    "dashboard": True,
    "grace_s": 0.1,
    "linger_s": 0.2,
    "max_concurrency": 8,
    "max_events_per_run": 20_000,
}


@pytest.fixture(scope="package")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    if programs() is None:
        pytest.skip("needs chromium and chromedriver, on Debian the packages chromium and chromium-driver")
    with browser(tmp_path_factory.mktemp("profile")) as chrome:
        yield chrome


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("server"), registry=scripts.REGISTRY, settings=SETTINGS) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    """A client of the server; what a test has left running is cancelled."""
    client = server.client()
    yield client
    for job in client.request("GET", "/jobs?status=running").expect(200)["jobs"]:
        client.cancel(job["action_id"], job["crew_id"]).expect(200)


@pytest.fixture
def page_at(chrome: Chrome) -> Iterator[Callable[[str], Page]]:
    """Make pages at servers of a test's own; whatever they did, the console has nothing to complain of."""
    made: list[Page] = []

    def make(url: str) -> Page:
        made.append(Page(chrome, url))
        return made[-1]

    yield make
    chrome.get("about:blank")
    assert [page.faults(besides="status of 4") for page in made] == [[] for _ in made]


@pytest.fixture
def page(page_at: Callable[[str], Page], server: Server) -> Page:
    """The dashboard of the server."""
    return page_at(server.url)
