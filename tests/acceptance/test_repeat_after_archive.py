"""An Action that is archived as soon as it has ended, while its directory is still being removed."""

from __future__ import annotations

from pathlib import Path

from tests.support.registries import with_registry
from tests.support.server import ServerFactory

FILES = 20_000
#: Leaves so many files that their removal outlasts an archive.
LITTER = f"""
    class Crew:
        def kickoff(self, inputs):
            for number in range({FILES}):
                open(f"{{number}}", "x").close()
            return {{"raw": "littered"}}

    CREWS = {{"litter": Crew}}
"""


def test_an_archived_action_stays_archived_while_its_directory_is_removed(
    make_server: ServerFactory, tmp_path: Path
) -> None:
    server = with_registry(make_server, tmp_path, LITTER, linger_s=0.1).start()
    client = server.client()
    client.start("a", "litter").expect(200)
    client.archive("a").expect(200)
    repeats = [client.start("a", "litter").status, client.start("a", "litter", timeout_ms=1234).status]
    directory = server.state_file.parent / "work" / "jobs" / "1"
    assert directory.exists(), "the directory was removed too soon to show anything"
    assert repeats == [410, 409]
