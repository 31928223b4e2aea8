"""Every link of the pages leads somewhere, and every page is linked."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.page import DOCS, FENCED, ROOT

PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
#: ``[words](target)``; an address of its own, ``<http://...>``, is no link of ours.
LINK = re.compile(r"\[[^\]\n]+\]\(([^)\s]+)\)")


def links(page: Path) -> Iterator[str]:
    """Targets of a page's links, without its blocks of code."""
    yield from LINK.findall(FENCED.sub("", page.read_text(encoding="utf-8")))


def anchors(page: Path) -> set[str]:
    """What a ``#`` may name: headings, in small letters, without marks, with hyphens for spaces."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(page: Path, target: str) -> bool:
    """Whether a link leads nowhere."""
    path, _, anchor = target.partition("#")
    found = (page.parent / path).resolve() if path else page
    return not found.exists() or bool(anchor and anchor not in anchors(found))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    assert [target for target in links(page) if "://" in target or broken(page, target)] == []


def test_every_page_is_linked_from_the_readme() -> None:
    linked = {(ROOT / target.partition("#")[0]).resolve() for target in links(ROOT / "README.md")}
    assert set(PAGES[1:]) <= linked


@pytest.mark.parametrize("target", ["docs/stoping.md", "docs/stopping.md#method", "#two-command"])
def test_a_link_that_leads_nowhere_is_found_out(target: str) -> None:
    assert broken(ROOT / "README.md", target)
