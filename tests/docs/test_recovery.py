"""docs/recovery.md, followed to the letter: each failure is brought about, and its commands lead out of it."""

from __future__ import annotations

import json
import os
import re
import signal
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.docs.operator import Operator
from tests.process.hostile.outside import Freezer
from tests.process.test_faults_journal import SIZE_MIB, UNSHARE, Disk, may_mount
from tests.support import procs, scripts
from tests.support.client import Client
from tests.support.crash_build import EIO, Plan
from tests.support.effects import key_of
from tests.support.page import Page
from tests.support.planned import PlannedServer
from tests.support.registries import GOOD, write_registry
from tests.support.server import Server

PAGE = Page("recovery.md")
WAIT_S = 30.0
#: Every write fails from here on, until the plan is disarmed.
BROKEN_DISK = Plan("journal.commit", EIO, first=1, times=1_000_000)

pytestmark = pytest.mark.timeout(180)
Begin = Callable[..., Operator]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Somebody who looks after a server, which is started."""
    servers: list[Server] = []

    def make(server: Server) -> Operator:
        servers.append(server)
        home = tmp_path / "operator"
        home.mkdir()
        return Operator(PAGE, server.start(), home)

    yield make
    for server in servers:
        server.close()


def last(text: str) -> dict[str, Any]:
    """The last JSON document that was printed; curl puts no newline between two."""
    found: dict[str, Any] = {}
    decoder, rest = json.JSONDecoder(), text
    while (start := rest.find("{")) >= 0:
        found, end = decoder.raw_decode(rest[start:])
        rest = rest[start + end :]
    return found


def wrong(document: dict[str, Any]) -> dict[str, str]:
    """The checks that are not ok, ``boundary.check``, and why."""
    return {
        f"{boundary}.{name}": check["why"]
        for boundary in ("readiness", "durability", "outcome")
        for name, check in document[boundary].items()
        if not check["ok"]
    }


def readyz(client: Client) -> dict[str, Any]:
    """The readiness document for those who may know."""
    return dict(client.request("GET", "/readyz").json())


def until_wrong(client: Client, check: str) -> None:
    """Wait until a check is not ok."""
    procs.wait_until(lambda: check in wrong(readyz(client)), WAIT_S, f"{check} is not ok")


#: Checks that a supervisor without a fleet has not; the tests of the fleet see them fail.
IN_A_FLEET = {("readiness", "lease")}


def test_every_check_is_in_the_table_of_the_page(begin: Begin, tmp_path: Path) -> None:
    server = Server(tmp_path / "server", registry=scripts.REGISTRY)
    begin(server)
    document = readyz(server.client())
    told = {(boundary, name) for boundary in ("readiness", "durability", "outcome") for name in document[boundary]}
    assert set(re.findall(r"^\| `(\w+)` \| `(\w+)` \|", PAGE.text, re.MULTILINE)) == told | IN_A_FLEET
    assert (document["status"], wrong(document)) == ("ready", {})


def test_a_registry_that_broke_is_found_and_repaired(begin: Begin, tmp_path: Path) -> None:
    path = write_registry(tmp_path, GOOD)
    server = Server(tmp_path / "server", registry="my_registry:CREWS", python_path=(path,))
    operator = begin(server)
    which, attempts, doctor, repaired = operator.steps("Not ready", 4)
    (path / "my_registry.py").write_text("import a_module_that_is_gone\n", encoding="utf-8")
    os.kill(template_of(server), signal.SIGKILL)
    until_wrong(server.client(), "readiness.template")
    seen = operator.follow(which)
    assert seen.startswith('{"status":"ok"}')
    assert set(wrong(last(seen.partition("crew-supervisor: active")[0]))) == {"readiness.template"}
    assert "crew-supervisor: active" in seen
    server.wait_log("template_start_failed")
    assert "template_start_failed" in operator.follow(attempts)
    assert "a_module_that_is_gone" in operator.follow(doctor, status=1)
    (path / "my_registry.py").write_text(textwrap.dedent(GOOD), encoding="utf-8")
    operator.follow(repaired)
    server.client().start("a-1", "good").expect(200)


def template_of(server: Server) -> int:
    """The process that workers are forked from."""
    (pid,) = procs.children(server.pid)
    return pid


@pytest.mark.skipif(not may_mount(), reason="no private mount namespace can be had here")
def test_a_full_disk_is_found_and_survived(begin: Begin, tmp_path: Path) -> None:
    state = tmp_path / "server" / "state"
    state.mkdir(parents=True, mode=0o700)
    mount = f'mount -t tmpfs -o size={SIZE_MIB}m,mode=0700 tmpfs "$0" && exec "$@"'
    server = Server(
        tmp_path / "server",
        registry=scripts.REGISTRY,
        settings={"work_dir": str(tmp_path / "work")},
        prefix=(*UNSHARE, "sh", "-c", mount, str(state)),
    )
    operator = begin(server)
    disk, client = Disk(server), server.client()
    operator.prefix = ("nsenter", "--target", str(server.pid), "--mount")
    look, room, whole, ended = operator.steps("Storage fails", 4)
    begin_running(client)
    disk.fill()
    assert client.start("refused", "scripted", input={"steps": []}).status == 507
    seen = operator.follow(look)
    assert "full" in wrong(last(seen))["durability.journal"]
    assert "100%" in seen
    disk.free()
    survive(operator, client, room, whole, ended)


def begin_running(client: Client) -> None:
    """A job that runs on until it is cancelled."""
    scripts.begin(client, "running", scripts.SLEEP)
    procs.wait_until(lambda: client.get("running").json()["phase"] == "running", WAIT_S, "it runs")


def survive(operator: Operator, client: Client, room: str, whole: str, ended: str) -> None:
    """The second half of the walk: it is ready again, the journal is whole, and says what ended."""
    operator.follow(room)
    client.start("refused", "scripted", input={"steps": []}).expect(200)
    client.cancel("running", "scripted").expect(200)
    operator.follow(whole)
    assert "running" not in operator.follow(ended), "it was cancelled"


def test_a_broken_disk_is_found_and_survived(begin: Begin, tmp_path: Path) -> None:
    server = PlannedServer(tmp_path / "server", registry=scripts.REGISTRY)
    operator, client = begin(server), server.client()
    look, room, whole, ended = operator.steps("Storage fails", 4)
    begin_running(client)
    server.plan.arm(BROKEN_DISK)
    assert client.cancel("running", "scripted").status == 507, "it is stopped, and that is not durable"
    assert client.start("refused", "scripted", input={"steps": []}).status == 507
    why = wrong(last(operator.follow(look).partition("Filesystem")[0]))
    assert set(why) == {"readiness.journal", "durability.journal", "durability.endings"}
    assert "disk I/O error" in why["durability.journal"]
    assert "running" in why["durability.endings"]
    assert server.plan.fired
    server.plan.disarm()
    survive(operator, client, room, whole, ended)
    assert (server.state_file.parent / "journal-after-the-failure.db").exists()


def test_an_interrupted_action_is_found_judged_and_asked_for_again(begin: Begin, tmp_path: Path) -> None:
    server = Server(tmp_path / "server", registry=scripts.REGISTRY)
    operator, client, key = begin(server), server.client(), key_of()
    fenced, known, unknown, decide, judge, again = operator.steps("An interrupted Action", 6)
    scripts.begin(client, "interrupted", scripts.claim(key), scripts.SLEEP)
    scripts.until_state(client, "claimed", key)
    server.kill()
    server.start()  # Restart= of the unit
    client = server.client()
    (line,) = [json.loads(line) for line in operator.follow(fenced).splitlines()]
    assert (line["action_id"], line["uncertain"]) == ("interrupted", True)
    evidence = last(operator.follow(known, ACTION="interrupted"))
    assert evidence["record"]["uncertain_outcome"] is True
    assert [effect["key_id"] for effect in evidence["effects"]] == [key.key_id]
    assert set(wrong(readyz(client))) == {"outcome.effects"}
    seen = operator.follow(unknown, KEY_ID=key.key_id)
    assert key.key_id in seen
    assert "supervisor_restarted" in seen
    assert "settled" in operator.follow(decide, KEY_ID=key.key_id)
    assert wrong(readyz(client)) == {}
    operator.follow(judge, ACTION="interrupted")
    record = client.get("interrupted").expect(200)
    assert (record["status"], record["uncertain_outcome"]) == ("failed", True)
    assert (record["reconciliation"]["decision"], record["reconciliation"]["actor"]) == ("partly_applied", "you")
    (tmp_path / "operator" / "input.json").write_text(json.dumps({"steps": [scripts.claim(key)]}), encoding="utf-8")
    operator.follow(again, CREW_ID="scripted", NEW_ACTION="again")
    (answer,) = client.get("again").expect(200)["output"]["answers"]
    assert (answer["type"], answer["receipt"]) == ("effect_replayed", '"charge 4711"')


def test_a_drained_supervisor_is_restarted_and_no_work_is_lost(begin: Begin, tmp_path: Path) -> None:
    server = Server(tmp_path / "server", registry=scripts.REGISTRY, settings={"drain_s": 0})
    operator, client = begin(server), server.client()
    server.settings["port"] = server.port  # as a service has it: the next process listens there too
    drain, restart = operator.steps("A restart without losing work", 2)
    may_end, waited = tmp_path / "may-end", tmp_path / "waited"
    operator.provide("sleep", f'#!/bin/sh\ntouch "{waited}"\nexec /bin/sleep "$@"\n')
    scripts.begin(client, "running", scripts.wait(may_end))
    procs.wait_until(lambda: client.get("running").json()["phase"] == "running", WAIT_S, "it runs")
    assert "admits nothing; 1 running" in operator.follow(drain)
    assert client.start("late", "scripted", input={"steps": []}).status == 503
    assert set(wrong(readyz(client))) == {"readiness.accepting"}
    with ThreadPoolExecutor(1) as pool:
        restarting = pool.submit(operator.follow, restart)
        procs.wait_until(waited.exists, WAIT_S, "the operator waits for what runs")
        may_end.touch()
        restarting.result()
    assert client.get("running").expect(200)["status"] == "completed"
    client.start("late", "scripted", input={"steps": []}).expect(200)


class Stuck:
    """A process that no kill ends: it sleeps uninterruptibly where the kernel lets us arrange that, else a server
    whose kill does nothing stands in."""

    def __init__(self) -> None:
        self._freezer = Freezer() if os.geteuid() == 0 and Freezer.usable() else None
        self.mutant = None if self._freezer else "toothless"
        self.state = "D" if self._freezer else "S"
        self._pid = 0

    def stick(self, pid: int) -> None:
        """From here on it cannot be killed."""
        self._pid = pid
        if self._freezer:
            self._freezer.freeze(pid)

    def let_go(self) -> None:
        """What it waited for is there."""
        if self._freezer:
            self._freezer.thaw()
        else:
            os.kill(self._pid, signal.SIGKILL)

    def close(self) -> None:
        """Leave nothing."""
        if self._freezer:
            self._freezer.close()


def test_a_stop_that_is_not_confirmed_is_found_and_confirmed(begin: Begin, tmp_path: Path) -> None:
    stuck = Stuck()
    settings = {"stop_timeout_s": 0.5, "max_concurrency": 1}
    server = Server(tmp_path / "server", registry=scripts.REGISTRY, settings=settings, mutant=stuck.mutant)
    operator, client = begin(server), server.client()
    which, state, confirmed = operator.steps("A stop is not confirmed", 3)
    try:
        scripts.begin(client, "stuck", scripts.SLEEP)
        procs.wait_until(lambda: client.get("stuck").json()["phase"] == "running", WAIT_S, "it runs")
        stuck.stick(client.get("stuck").json()["worker"]["pid"])
        refused = client.cancel("stuck", "scripted")
        assert (refused.status, refused.json()["code"]) == (503, "stop_unconfirmed")
        seen = operator.follow(which, ACTION="stuck")
        assert set(wrong(json.JSONDecoder().raw_decode(seen)[0])) == {"readiness.slots", "outcome.stops"}
        view = last(seen)
        assert (view["status"], view["phase"], view["stop"]) == ("running", "stopping", None)
        pid = str(view["worker"]["pid"])
        assert re.search(rf"^ *{pid} +{stuck.state}", operator.follow(state, PID=pid), re.MULTILINE)
        stuck.let_go()
        operator.follow(confirmed, ACTION="stuck")
        assert client.get("stuck").json()["stop"]["confirmed"] is True
        assert wrong(readyz(client)) == {}
    finally:
        stuck.close()
