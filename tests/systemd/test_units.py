"""The units as systemd's own tools see them, and a crew's limits in a unit."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.booted import Booted
from tests.systemd.service import PROGRAM, ServiceFactory

UNITS = ("crew-supervisor.service", "crew-supervisor@.service", "crew-supervisor.socket", "crew-supervisor@.socket")
#: Of 10; systemd calls what is below 2 "OK".
EXPOSURE = 1.8
MIB = 1 << 20


def test_they_verify_without_a_word(machine: Booted) -> None:
    paths = [f"/etc/systemd/system/{name}" for name in UNITS]
    done = machine.run("systemd-analyze", "verify", "--man=no", *paths, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_mistake_in_one_would_be_told(machine: Booted) -> None:
    text = machine.inside(f"/etc/systemd/system/{UNITS[0]}").read_text("utf-8")
    machine.write("/run/mistaken/mistaken.service", text.replace("WatchdogSec=", "WatchDogSec="))
    done = machine.run("systemd-analyze", "verify", "--man=no", "/run/mistaken/mistaken.service", check=False)
    assert "WatchDogSec" in done.stderr


@pytest.mark.parametrize("name", UNITS[:2])
def test_they_expose_little(machine: Booted, name: str) -> None:
    command = ("systemd-analyze", "security", "--offline=yes", "--no-pager", f"/etc/systemd/system/{name}")
    text = machine.run(*command, check=False).stdout
    found = re.search(r"Overall exposure level for \S+: ([0-9.]+)", text)
    assert found is not None, text
    assert float(found.group(1)) <= EXPOSURE, text


def test_installing_again_changes_nothing_and_replaces_nothing_of_others(machine: Booted) -> None:
    machine.run(PROGRAM, "install-units")
    machine.run(PROGRAM, "install-units", "--directory", "/run/mine", check=False)
    machine.write(f"/run/mine/{UNITS[0]}", "# mine\n")
    refused = machine.run(PROGRAM, "install-units", "--directory", "/run/mine", check=False)
    assert refused.returncode == 4
    assert machine.inside(f"/run/mine/{UNITS[0]}").read_text("utf-8") == "# mine\n"


def test_the_sysusers_file_makes_the_user(machine: Booted) -> None:
    machine.run("mkdir", "-p", "/run/examples")
    machine.run(PROGRAM, "install-units", "--examples", "/run/examples")
    machine.run("systemd-sysusers", "/run/examples/crew-supervisor.sysusers.conf")
    try:
        assert "crew-supervisor:" in machine.inside("/etc/passwd").read_text("utf-8")
    finally:
        machine.run("userdel", "crew-supervisor")


def test_a_job_out_of_memory_is_the_jobs_affair(machine: Booted, make_service: ServiceFactory) -> None:
    limits = {"hungry": {"memory_bytes": 512 * MIB}}
    service = make_service("hungry", registry="tests.crews.limited_crews:CREWS", settings={"crews": limits}).start()
    client, main = service.client(), service.show("MainPID")
    release, ours = service.heartbeat("release")
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(client.start, "other", "waiting", input={"release": release})
        service.wait_event("job_admitted", ACTION_ID="other")
        assert client.start("eats", "hungry", input={"bytes": 1 << 30}).status == 502
        ours.touch()
        assert other.result(30).expect(200)["raw"] == "waited"
    view = client.get("eats").expect(200)
    assert (view["status"], view["stop"]["confirmed"]) == ("failed", True)
    if "memory" in machine.inside(f"/sys/fs/cgroup{service.cgroup}/cgroup.controllers").read_text("ascii").split():
        assert view["stop"]["worker"]["oom"] is True
        assert view["stop"]["worker"]["exit_signal"] == "SIGKILL"
    else:
        # Without the controller the limit is one of address space: the allocation itself fails.
        (*_, last) = client.events("eats").expect(200)["events"]
        assert last["data"]["error_type"] == "MemoryError"
    assert (service.show("MainPID"), service.show("ActiveState")) == (main, "active")
