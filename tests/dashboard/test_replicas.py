"""The replicas of a fleet in the browser, and an Action of another replica behind the same page."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.dashboard.page import DESKTOP, PHONE, Page
from tests.fleet.checks import begin, runs
from tests.support.fleet import Replicas, listens, registered, relayed
from tests.support.postgres import Postgres


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    """Two replicas, each with the dashboard, on this machine: a browser has to reach them."""
    with Postgres() as postgres, relayed(postgres, postgres.create(), 2) as network:
        made = Replicas(tmp_path_factory.mktemp("fleet"), network)
        try:
            for _ in range(2):
                made.add(settings={"dashboard": True}).launch()
            for server in made.servers:
                registered(listens(server))
            yield made
        finally:
            made.close()


def test_the_page_lists_the_replicas_and_leads_to_the_actions_of_each(
    replicas: Replicas, page_at: Callable[[str], Page]
) -> None:
    here, other = replicas.servers
    begin(other, "theirs")
    runs(other, "theirs")
    page = page_at(here.url)
    page.sign_in()
    page.find("a[href='#/replicas']").click()
    page.wait(lambda: len(page.all("#replica-rows tr")) == 2, "both replicas are listed")
    for row, name in zip(page.all("#replica-rows tr"), ("replica-0", "replica-1"), strict=True):
        assert name in row.text
        assert "ready" in row.text
    assert "replica-0" in page.text("replicas-here")
    assert "its lease is valid" in page.text("replicas-here")
    page.wait(lambda: page.all("#replica-rows tr")[1].text.split()[2:4] == ["1", "0"], "it runs one", deadline_s=30)
    for size in (PHONE, DESKTOP):
        page.resize(size)
        page.wait(lambda: page.overflow() <= 0, f"nothing is wider than {size[0]} pixels")
        page.shoot(f"replicas-{size[0]}")

    page.type("open-id", "theirs")
    page.press("ENTER")
    page.wait_text("facts", "running")
    page.click("cancel")
    page.type("cancel-id", "theirs")
    page.press("ENTER")
    page.wait_text("cancel-proof", "Proved")
    assert other.client().get("theirs").json()["stop"]["confirmed"] is True


def test_a_replica_that_is_away_is_shown_as_such(replicas: Replicas, page_at: Callable[[str], Page]) -> None:
    here, other = replicas.servers
    other.kill()
    page = page_at(here.url)
    page.sign_in(where="/replicas")
    page.wait(lambda: "away" in page.all("#replica-rows tr")[1].text, "its lease has ended")
    assert page.by_id("replica-rows").text.count("ready") == 1


def test_alone_there_is_no_way_to_replicas(page: Page) -> None:
    page.sign_in()
    page.wait_text("health", "Ready")
    assert page.all("a[href='#/replicas']") == []
