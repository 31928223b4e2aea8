"""A worker's parent dies in the instant between the worker's end and the word of it: the status is not lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.process.hostile.field import Field, make_server
from tests.process.hostile.test_refusals import needs_filter, under

STRUCK = "tests.crews.adversaries_struck:CREWS"

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="one of the methods needs root")


@pytest.mark.parametrize("ending", ["completion", "cancel"])
@pytest.mark.parametrize(
    ("method", "prefix", "proved_by"),
    [
        pytest.param("keeper", (), "subreaper", id="keeper"),
        pytest.param("cgroup", under(("clone3", "siblings")), "cgroup", id="template", marks=needs_filter),
    ],
)
def test_a_parent_that_dies_as_its_worker_ends_takes_no_status_along(
    tmp_path: Path, method: str, prefix: tuple[str, ...], proved_by: str, ending: str
) -> None:
    with make_server(tmp_path / "server", method, registry=STRUCK, prefix=prefix) as server:
        run = Field(server, method, None).run("plain_child", ending)
    assert run.faults() == []
    assert run.stop is not None
    assert run.stop["method"] == proved_by
    worker = run.stop["worker"]
    assert (worker["exit_code"], worker["exit_signal"]) == ((0, None) if ending == "completion" else (None, "SIGKILL"))
