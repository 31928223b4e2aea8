"""docs/client.md says what the client does, and its example runs."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import supervisor.client
from supervisor.client import Client, ClientFailure
from tests.support.page import Page, plain
from tests.support.registries import with_registry
from tests.support.server import ROOT, TOKEN, ServerFactory

DOCUMENT = Page("client.md")

YOURS = """
    import time

    class Yours:
        stream = False

        async def akickoff(self, inputs):
            if inputs.get("slowly"):
                time.sleep(60)
            return self.letter(inputs["topic"])

        async def letter(self, topic):
            yield {"content": f"Dear {topic},", "channel": "messages"}

    CREWS = {"yours": Yours}
"""


def test_the_example_runs(make_server: ServerFactory, tmp_path: Path) -> None:
    (example,) = DOCUMENT.blocks("python")
    program = tmp_path / "example.py"
    program.write_text(example, encoding="utf-8")
    with with_registry(make_server, tmp_path, YOURS) as server:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "CREW_URL": server.url, "CREW_TOKEN": TOKEN}
        ran = subprocess.run(
            [sys.executable, str(program)], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        jobs = server.client().request("GET", "/jobs").expect(200)["jobs"]
    assert (ran.returncode, ran.stderr) == (0, "")
    first, second, third = ran.stdout.splitlines()
    assert first == "data Dear bees,"
    assert second.startswith("completed: ")
    assert third == "stop confirmed: True"
    assert {job["action_id"]: job["status"] for job in jobs} == {"letter-17": "completed", "letter-18": "cancelled"}


def test_every_method_is_listed() -> None:
    public = {
        name for name, member in vars(Client).items() if inspect.isfunction(member) and not name.startswith("_")
    }
    rows = [plain(row[0]).partition("(") for row in DOCUMENT.table("method", "what")]
    assert {name for name, _, _ in rows} == public
    for name, _, arguments in rows:
        known = inspect.signature(getattr(Client, name)).parameters
        assert set(re.findall(r"\w+", arguments)) <= known.keys()


def test_every_failure_is_listed_as_it_is() -> None:
    rows: dict[str, Any] = {plain(row[0]): row[1:4] for row in DOCUMENT.table("class", "category")}
    yes = {True: "yes", False: "no"}
    assert rows == {
        kind.__name__: [kind.category.value, yes[kind.passes], yes[kind.leaves_doubt]]
        for kind in ClientFailure.__subclasses__()
    }


def test_everything_that_is_named_can_be_imported() -> None:
    for name in supervisor.client.__all__:
        assert getattr(supervisor.client, name).__doc__ or name == "CATALOGUE"
    assert len(set(supervisor.client.__all__)) == len(supervisor.client.__all__)


def test_the_client_needs_nothing_of_the_serving_process() -> None:
    """Importing it brings neither the journal nor CrewAI nor the command line."""
    look = "import sys, supervisor.client; print(*sorted(name for name in sys.modules if name.startswith(TOPS)))"
    tops = ("supervisor", "worker", "crewai", "sqlite3", "click", "rich", "psutil")
    program = f"TOPS = {tops!r}\n{look}"
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = ran.stdout.split()
    assert all(name == "supervisor" or name.startswith("supervisor.client") for name in loaded), loaded
    assert (ROOT / "supervisor" / "py.typed").exists()
