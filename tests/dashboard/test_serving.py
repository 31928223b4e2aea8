"""What is served at ``/`` and below ``/dashboard/``, and to whom."""

from __future__ import annotations

import re

import pytest

from supervisor.http.pages import MEDIA_TYPES
from tests.support import scripts
from tests.support.client import Client
from tests.support.server import ROOT, Server, ServerFactory

FILES = sorted(path for path in (ROOT / "supervisor" / "dashboard").iterdir() if path.suffix in MEDIA_TYPES)
#: Whatever makes markup or code of text.
SINKS = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|DOMParser|srcdoc")


def anybody(server: Server) -> Client:
    """A client without a token."""
    return Client(server.host, server.port)


def test_it_is_off_unless_it_is_asked_for(start_server: ServerFactory) -> None:
    server = start_server(registry=scripts.REGISTRY)
    for path in ("/", "/dashboard/app.js"):
        assert anybody(server).request("GET", path).status == 401
        answer = server.client().request("GET", path)
        assert (answer.status, answer.json()["code"]) == (404, "route_unknown")
    assert not {"/", "/dashboard/{file}"} & server.client().request("GET", "/openapi.json").json()["paths"].keys()


def test_the_page_needs_no_token_and_what_it_asks_for_does(server: Server) -> None:
    page = anybody(server).request("GET", "/")
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    for path in FILES:
        answer = anybody(server).request("GET", f"/dashboard/{path.name}")
        assert (answer.status, answer.body) == (200, path.read_bytes())
        assert answer.headers["content-type"] == f"{MEDIA_TYPES[path.suffix]}; charset=utf-8"
    for path in ("/health", "/jobs", "/effects", "/openapi.json", "/metrics"):
        assert anybody(server).request("GET", path).status == 401
    assert anybody(server).request("POST", "/", body={}).status == 405


@pytest.mark.parametrize(
    "path",
    ["/dashboard/../jobs", "/dashboard/..%2fjobs", "/dashboard/%2e%2e/jobs", "/dashboard//jobs", "/dashboard/./../jobs",
     "/dashboard/index.html", "/dashboard/..%2fserve.py", "/dashboard/", "/dashboard", "//", "/dashboard/app.js/"],
)  # fmt: skip
def test_no_other_path_leads_past_the_token(server: Server, path: str) -> None:
    answer = anybody(server).request("GET", path)
    assert answer.status in {307, 401, 404}
    assert b'"jobs"' not in answer.body


def test_every_answer_has_a_strict_policy(server: Server) -> None:
    for path in ("/", "/dashboard/app.js", "/dashboard/style.css"):
        headers = anybody(server).request("GET", path).headers
        policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
        assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == "'none'"
        assert policy["frame-ancestors"] == policy["trusted-types"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["require-trusted-types-for"] == "'script'"
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cross-origin-resource-policy"] == "same-origin"


def test_the_page_names_no_other_host_and_has_nothing_inline(server: Server) -> None:
    page = anybody(server).request("GET", "/").body.decode()
    named = {f"/dashboard/{name}" for name in ("icon.svg", "style.css", "app.js")}
    assert set(re.findall(r'(?:src|href)="([^"#]+)[^"]*"', page)) == named
    assert not re.search(r"<style|<script(?! type=\"module\" src=)|\sstyle=|\son\w+=", page)
    for path in FILES:
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//\w+\.", text), path.name
        assert not SINKS.search(text), path.name
