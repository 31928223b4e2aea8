"""README.md, followed from its top to its end: a created project, a model behind HTTP, every command in its order."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.docs.newcomer import INSTALLING, Newcomer
from tests.support.model import Model
from tests.support.page import ROOT, Page

PAGE = Page("../README.md")
TEXT = "Thought: I now can give a great answer\nFinal Answer: all about it"
ANSWER = "all about it"
#: Blocks that are not run here, by their first line, and what sees to them.
ELSEWHERE = {
    "your program ─┐        ┌────────────────────────────────────────────────┐": "a picture",
    "make demo     # four scenes with a real supervisor and real crews; no key, no network; under a minute": (
        "`make test` runs this; that both targets are there, and that the demo holds what it claims, is tested below"
    ),
    "crew-supervisor install-units": "tests/systemd/test_units.py",
}

pytestmark = pytest.mark.timeout(240)


Step = Callable[[Newcomer, str], None]


def create(newcomer: Newcomer, block: str) -> None:
    newcomer.run(block)
    assert (newcomer.home / "your_project" / "src" / "your_project" / "crew.py").exists()


def write(newcomer: Newcomer, block: str) -> None:
    assert newcomer.write(block).name in {"registry.py", "supervisor.toml"}


def serve(newcomer: Newcomer, block: str) -> None:
    newcomer.serve(block)
    health = newcomer.client.request("GET", "/health").expect(200)
    assert (health["crews"], health["launch_mode"], health["status"]) == (["research"], "fork", "ready")
    assert newcomer.client.request("GET", "/").status == 200, "the dashboard"


def submit(newcomer: Newcomer, block: str) -> None:
    assert ANSWER in newcomer.run(block)
    assert newcomer.client.get("letter-1").expect(200)["status"] == "completed"


def stop(newcomer: Newcomer, block: str) -> None:
    with newcomer.model.held(after=1):
        printed = newcomer.run(block)
    assert "cancelled" in printed
    view = newcomer.client.get("letter-2").expect(200)
    assert (view["status"], view["stop"]["confirmed"]) == ("cancelled", True)


def name(newcomer: Newcomer, block: str) -> None:
    assert newcomer.run(block) == ""


def wait(newcomer: Newcomer, block: str) -> None:
    newcomer.run(block)
    assert newcomer.client.get("letter-3").expect(200)["output"]["raw"] == ANSWER


def stream(newcomer: Newcomer, block: str) -> None:
    newcomer.run(block)
    assert newcomer.client.get("letter-4").expect(200)["status"] == "completed"


def cancel(newcomer: Newcomer, block: str) -> None:
    with newcomer.model.held(after=1):
        newcomer.run(block)
    assert newcomer.client.get("letter-5").expect(200)["stop"]["confirmed"] is True


def call(newcomer: Newcomer, block: str) -> None:
    newcomer.write(block)
    printed = newcomer.run("python example.py")
    assert "Completed(" in printed
    assert newcomer.client.get("letter-6").expect(200)["output"]["raw"] == ANSWER


#: What follows a block, by a part of it, in the page's order.
STEPS: list[tuple[str, Step]] = [
    ("crewai create crew", create),
    ("def research", write),
    ("state_file =", write),
    ("crew-supervisor serve", serve),
    ("--follow", submit),
    ("crew-supervisor cancel", stop),
    ("auth=", name),
    ("$url/jobs -H", wait),
    ("$url/jobs/stream", stream),
    ("$url/jobs/letter-5/cancel", cancel),
    ("client.invoke", call),
]
#: The number of blocks after which the server runs.
AFTER_START = 4


def blocks() -> list[str]:
    """The blocks that are followed."""
    return [text for _, text in PAGE.all_blocks() if text.splitlines()[0] not in ELSEWHERE]


def follow(newcomer: Newcomer, page: list[str]) -> None:
    """Go through the page from its beginning on."""
    for (_, step), block in zip(STEPS, page, strict=False):
        step(newcomer, block)


def test_every_block_is_followed_or_named_with_a_reason() -> None:
    assert [part for (part, _), text in zip(STEPS, blocks(), strict=True) if part not in text] == []
    first = {text.splitlines()[0] for _, text in PAGE.all_blocks()}
    assert ELSEWHERE.keys() <= first
    lines = {line for text in blocks() for line in text.splitlines()}
    assert INSTALLING.keys() <= lines
    assert (ROOT / ELSEWHERE["crew-supervisor install-units"]).exists()


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    """The endpoint."""
    model = Model(TEXT)
    yield model
    model.close()


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory, model: Model) -> Iterator[Newcomer]:
    """Somebody who has followed the page."""
    with contextlib.closing(Newcomer(tmp_path_factory.mktemp("newcomer"), model)) as newcomer:
        follow(newcomer, blocks())
        yield newcomer


def test_a_newcomer_comes_through(walked: Newcomer) -> None:
    jobs = walked.client.request("GET", "/jobs").expect(200)["jobs"]
    ended = {job["action_id"]: job["status"] for job in jobs}
    assert {number for number in range(1, 7) if ended[f"letter-{number}"] == "completed"} == {1, 3, 4, 6}
    assert {number for number in range(1, 7) if ended[f"letter-{number}"] == "cancelled"} == {2, 5}


def test_the_page_may_be_followed_again_and_nothing_is_executed_twice(walked: Newcomer) -> None:
    asked = len(walked.model.requests())
    for step, block in later():
        if step not in (stop, cancel):  # a repeat of what was cancelled says so, and is no success
            step(walked, block)
    assert len(walked.model.requests()) == asked


def later() -> list[tuple[Step, str]]:
    """What is done while the server runs."""
    return [(step, block) for (_, step), block in zip(STEPS, blocks(), strict=True)][AFTER_START:]


#: A part of the page that would be wrong, and the words that it would have instead: no server starts.
BROKEN_BEFORE = [
    ("state_file =", "statefile ="),
    ("--config supervisor.toml     # would", "--config supervisor.tml     # would"),
    ("> token)", "> tokens)"),
]
#: Later: what is right does no harm when it is repeated, or has an id of its own, so what is wrong is seen by itself.
BROKEN_AFTER = [
    ("submit research --action-id letter-1", "submit reserch --action-id letter-1"),
    ("crew-supervisor show letter-2", "crew-supervisor display letter-2"),
    ("$url/jobs -H", "$url/job -H"),
    ('# {"raw":"..."', '# {"output":"..."'),
    ("$url/jobs/stream", "$url/jobs/streams"),
    ("# event: completed", "# event: finished"),
    ("$url/jobs/letter-5/cancel", "$url/jobs/letter-5/stop"),
    ('"stop":{"confirmed":true', '"stop":{"confirmed":false'),
    ("Action(action_id=", "Action(id="),
]


@pytest.mark.parametrize(("right", "wrong"), BROKEN_BEFORE, ids=[wrong for _, wrong in BROKEN_BEFORE])
def test_a_page_that_leads_to_no_server_is_found_out(tmp_path: Path, model: Model, right: str, wrong: str) -> None:
    written, served = blocks()[AFTER_START - 2 : AFTER_START]
    assert right in written + served
    with contextlib.closing(Newcomer(tmp_path, model)) as newcomer:
        write(newcomer, written.replace(right, wrong))
        with pytest.raises(AssertionError, match="the process ended first"):
            serve(newcomer, served.replace(right, wrong))


@pytest.mark.parametrize(("right", "wrong"), BROKEN_AFTER, ids=[wrong for _, wrong in BROKEN_AFTER])
def test_a_page_with_a_broken_command_is_found_out(walked: Newcomer, right: str, wrong: str) -> None:
    step, block = next((step, block) for step, block in later() if right in block)
    block = block.replace(right, wrong)
    for cancelled in ("letter-2", "letter-5"):
        block = block.replace(cancelled, f"letter-{10 + BROKEN_AFTER.index((right, wrong))}")
    with pytest.raises(AssertionError):
        step(walked, block)


def test_make_has_the_targets_of_the_page() -> None:
    (block,) = [text for _, text in PAGE.all_blocks() if text.startswith("make demo")]
    targets = [line.split()[1] for line in block.splitlines()]
    done = subprocess.run(
        ["make", "--dry-run", *targets], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert targets == ["demo", "test"]
    assert "demo/main.py" in done.stdout
    assert "-m pytest" in done.stdout


def test_every_claim_of_the_demo_holds() -> None:
    done = subprocess.run(
        [sys.executable, "demo/main.py"], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "16 of 16 claims held" in done.stdout
