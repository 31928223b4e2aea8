"""Whose process is it? And builds with one cross-check switched off, on which the suite's own checks must fail."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.process.hostile import outside
from tests.process.hostile.field import CREW, REGISTRY, Field, make_server
from tests.process.hostile.matrix import METHODS
from tests.support import procs

UNADOPTED = "tests.crews.adversaries_unadopted:CREWS"
BEAT_S = 10.0

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the attacks and two of the methods need root")


def confusions(field: Field, attack: str) -> list[str]:
    """Cancel one of two jobs that attack alike at once. Returns what befell the wrong one, or not the right one."""
    cancelled, spared = field.siege(attack), field.siege(attack)
    try:
        for siege in (cancelled, spared):
            siege.begin(then="block")
        for siege in (cancelled, spared):
            siege.wait_until_seen()
        before = set(outside.belonging_to(spared.heartbeats))
        stop = cancelled.client.cancel(cancelled.action_id, CREW).expect(200)["stop"]
        found = field.judge(cancelled, "cancel", stop).faults()
        missing = before - set(outside.belonging_to(spared.heartbeats))
        if missing:
            found.append(f"{len(missing)} processes of the other job were killed")
        elif not _beats_on(spared.heartbeats):
            found.append("the other job beats no more")
        if spared.view()["phase"] != "running":
            found.append(f"the other job is {spared.view()['phase']}")
        return found
    finally:
        for siege in (cancelled, spared):
            siege.close()
            siege.client.cancel(siege.action_id, CREW)


def _beats_on(heartbeats: Path) -> bool:
    seen = len(procs.read_beats(heartbeats))
    return procs.wait_until(lambda: len(procs.read_beats(heartbeats)) > seen, BEAT_S, "another heartbeat")


@pytest.mark.parametrize("attack", ["double_fork", "cleared_environment", "own_subreaper"])
@pytest.mark.parametrize("method", METHODS)
def test_a_cancel_kills_only_its_own(fields: dict[str, Field], method: str, attack: str) -> None:
    assert confusions(fields[method], attack) == []


def test_what_was_killed_outside_of_every_leaf_is_in_the_audit_of_every_live_job(
    fields: dict[str, Field], refuge: Path | None
) -> None:
    assert refuge is not None
    escaped, cancelled = fields["cgroup"].siege("other_cgroup"), fields["cgroup"].siege("double_fork")
    try:
        for siege in (escaped, cancelled):
            siege.begin(then="block")
            siege.wait_until_seen()
        before = set(outside.belonging_to(escaped.heartbeats))
        (stray,) = cancelled.client.cancel(cancelled.action_id, CREW).expect(200)["stop"]["strays"]
        assert before - set(outside.belonging_to(escaped.heartbeats)) == {stray["pid"]}
        assert escaped.view()["phase"] == "running"
        for siege in (escaped, cancelled):
            audit = siege.client.request("GET", f"/jobs/{siege.action_id}/evidence").expect(200)["audit"]
            (entry,) = [entry for entry in audit if entry["act"] == "strays_killed"]
            assert entry["detail"]["strays"] == [stray]
    finally:
        for siege in (escaped, cancelled):
            siege.close()
            siege.client.cancel(siege.action_id, CREW)


# --- without a cross-check -------------------------------------------------------------------------------------------


def broken(directory: Path, method: str, refuge: Path | None, **options: Any) -> Field:
    """The field of a broken build."""
    server = make_server(directory / "server", method, settings={"stop_timeout_s": 0.5}, **options)
    return Field(server, method, refuge)


def test_without_the_hunt_an_escape_from_the_leaf_is_a_false_proof(tmp_path: Path, refuge: Path | None) -> None:
    if refuge is None:
        pytest.skip("there is no cgroup to escape to")
    field = broken(tmp_path, "cgroup", refuge, mutant="unhunted")
    with field.server:
        run = field.run("other_cgroup", "cancel")
    assert run.false_proof
    assert run.look.late_ms is not None
    assert any("survivors" in fault for fault in run.faults())


def test_without_the_sweep_a_process_without_a_leader_thread_is_never_killed(tmp_path: Path) -> None:
    field = broken(tmp_path, "cgroup", None, mutant="unswept")
    with field.server:
        run = field.run("exited_leader", "cancel")
    assert not run.confirmed, "this is not hidden: it is not cleared away"
    assert len(run.look.survivors) == 1


def test_a_hunt_that_knows_no_other_job_kills_a_neighbours_daemon(tmp_path: Path) -> None:
    field = broken(tmp_path, "cgroup", None, mutant="grasping")
    with field.server:
        found = confusions(field, "double_fork")
    assert any("of the other job were killed" in fault for fault in found), found


@pytest.mark.parametrize("registry", [REGISTRY, UNADOPTED])
def test_a_keeper_that_adopts_no_orphans_proves_nothing(tmp_path: Path, registry: str) -> None:
    field = broken(tmp_path, "keeper", None, registry=registry)
    with field.server:
        run = field.run("double_fork", "cancel")
    assert run.false_proof is (registry == UNADOPTED), run
