"""``worker_user``: templates and workers of an unprivileged user below a supervisor that is root."""

from __future__ import annotations

import errno
import os
import pwd
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.process.hostile import outside
from tests.process.hostile.field import Field, make_server
from tests.process.hostile.matrix import ENDINGS, Run
from tests.support import procs, world
from tests.support.client import Client
from tests.support.open_python import USER, OpenPython, for_user, is_open, open_directory
from tests.support.server import TOKEN, Server

REGISTRY = "tests.crews.confined_crews:CREWS"
WAIT_S = 30.0
OPEN_FILES = 100
#: Everything but the attack that needs another cgroup to write to, and those on keepers.
ATTACKS = ("double_fork", "cleared_environment", "fork_bomb", "pid_hopper", "exited_leader", "kills_template")

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can give its workers to another user"),
    pytest.mark.skipif(procs.cgroup2_mount() is None, reason="no cgroup v2 hierarchy is mounted"),
]


@pytest.fixture(scope="module")
def server(open_python: OpenPython) -> Iterator[Server]:
    """One server for what does not end it."""
    with (
        open_directory() as directory,
        Server(
            directory,
            registry=REGISTRY,
            settings=for_user(directory, max_concurrency=8, crews={"opener": {"open_files": OPEN_FILES}}),
            prefix=open_python.prefix,
            environment={**open_python.environment, "A_SECRET_OF_THE_OPERATOR": TOKEN},
        ) as running,
    ):
        yield running


@pytest.fixture
def client(server: Server) -> Client:
    """A client of that server."""
    return server.client()


def attempt(client: Client, action_id: str, **inputs: Any) -> dict[str, Any]:
    """What came of a prisoner's attempts."""
    answer: dict[str, Any] = client.start(action_id, "prisoner", input=inputs).expect(200)
    return answer


def template_of(server: Server) -> int:
    """Pid of the template, while nothing runs."""
    (template,) = procs.wait_until(
        lambda: children if len(children := procs.children(server.pid)) == 1 else None, WAIT_S, "only the template runs"
    )
    return template


def launch_methods(server: Server) -> set[str]:
    """How the recorded workers were made."""
    with closing(sqlite3.connect(f"{server.state_file.as_uri()}?mode=ro", uri=True)) as connection:
        return {method for (method,) in connection.execute("SELECT method FROM workers")}


# --- who it is -------------------------------------------------------------------------------------------------------


def test_a_job_is_that_user_with_nothing_of_root_left(server: Server, client: Client) -> None:
    entry = pwd.getpwnam(USER)
    said = attempt(client, "who")
    assert said["uids"] == [entry.pw_uid] * 3
    assert said["gids"] == [entry.pw_gid] * 3
    assert said["groups"] == sorted(os.getgrouplist(USER, entry.pw_gid))
    assert said["user"] == USER
    assert said["imported"] == "done", "the registry found a home and a storage where it may write"
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{template_of(server)}/status").read_text().splitlines()
    )
    assert status["Uid"].split() == [str(entry.pw_uid)] * 4
    assert (int(status["CapEff"], 16), int(status["CapPrm"], 16)) == (0, 0)
    assert launch_methods(server) <= {"clone3", "clone", "fork"}, "this user needs no PID namespace"


def test_its_directories_are_its_own_and_closed_to_others(server: Server, client: Client, tmp_path: Path) -> None:
    owner = pwd.getpwnam(USER)
    work = server.directory / "work"
    with client.stream("places", "sleeper", complete=False) as stream:
        stream.until("started")
        (job,) = (work / "jobs").iterdir()
        crews = [path for path in (work / "crews").iterdir() if path.name.startswith("sleeper-")]
        for path in [job, *job.iterdir(), *crews, *crews[0].iterdir()]:
            found = path.stat()
            assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (owner.pw_uid, owner.pw_gid, 0o700), path
        client.cancel("places", "sleeper").expect(200)
    for path in (work, work / "crews", work / "jobs"):
        assert (path.stat().st_uid, path.stat().st_mode & 0o777) == (0, 0o711)
    for path in (work / "logs", work / "replays", server.state_file.parent):
        assert (path.stat().st_uid, path.stat().st_mode & 0o777) == (0, 0o700)


# --- what it cannot do -----------------------------------------------------------------------------------------------


def test_it_cannot_leave_its_leaf(client: Client) -> None:
    mount = procs.cgroup2_mount()
    assert mount is not None
    with client.stream("elsewhere", "sleeper", complete=False) as stream, outside.refuge() as refuge:
        stream.until("started")
        neighbour = mount / client.get("elsewhere").expect(200)["worker"]["cgroup"].lstrip("/")
        assert (neighbour / "cgroup.procs").read_text().split(), "the neighbour's leaf is there"
        places = [str(path) for path in (neighbour, neighbour.parent, mount, refuge)]
        assert attempt(client, "leave", enter=places)["tries"] == dict.fromkeys(places, "EACCES")
        client.cancel("elsewhere", "sleeper").expect(200)


def test_it_cannot_kill_the_supervisor_nor_read_what_that_knows(server: Server, client: Client) -> None:
    state, proc = server.state_file, f"/proc/{server.pid}"
    closed = [str(state), f"{state}-wal", f"{state}.lock", str(server.directory / "token")]
    closed += [f"{proc}/environ", f"{proc}/mem", f"{proc}/maps"]
    for path in closed[:4]:
        assert Path(path).exists(), path
    listed = [f"{proc}/fd", str(state.parent), str(server.directory / "work" / "logs")]
    tries = attempt(client, "spy", read=closed, list=listed, kill=[server.pid])["tries"]
    assert tries.pop(str(server.pid)) == "EPERM"
    assert tries == dict.fromkeys([*closed, *listed], "EACCES")
    # A path that it can read, or the look above would prove nothing.
    mine = attempt(client, "look", read=["/proc/self/environ", "/etc/passwd"])["tries"]
    assert set(mine.values()) == {"done"}
    assert client.health().expect(200)["status"] == "ready"


def test_it_can_kill_the_template_which_is_its_own_user_and_is_made_up_for(server: Server, client: Client) -> None:
    template = template_of(server)
    with client.stream("bystander", "sleeper", complete=False) as stream:
        stream.until("started")
        assert attempt(client, "strike", kill=[template])["tries"] == {str(template): "done"}
        server.wait_log("template_lost", pid=template)
        client.start("after-the-strike", "instant").expect(200)
        assert client.get("bystander").expect(200)["phase"] == "running"
        stop = client.cancel("bystander", "sleeper").expect(200)["stop"]
    assert (stop["confirmed"], stop["method"], stop["processes_left"]) == (True, "cgroup", 0)


def test_what_a_training_leaves_is_stored_as_the_supervisors(server: Server, client: Client) -> None:
    def train(name: str, **inputs: Any) -> Any:
        given = {"n_iterations": 1, "artifact_name": name, "inputs": inputs}
        return client.start(f"train-{name}", "trainer", operation="train", input=given)

    assert train("good.pkl").expect(200)["bytes"] == len(b"trained")
    stored = server.directory / "training" / "good.pkl"
    assert stored.read_bytes() == b"trained"
    assert (stored.stat().st_uid, stored.stat().st_mode & 0o777) == (0, 0o600)
    for leaves in ("link", "fifo"):
        assert train(f"{leaves}.pkl", leaves=leaves, to=str(server.directory / "token")).status == 502
        last = client.events(f"train-{leaves}.pkl").expect(200)["events"][-1]
        assert last["data"]["error_type"] == "OSError", "the worker looks first"
    assert [path.name for path in stored.parent.iterdir()] == ["good.pkl"]


def test_it_cannot_raise_its_limits(client: Client) -> None:
    said = client.start("raise", "opener").expect(200)
    assert said["stopped"] == "EMFILE"
    assert said["opened"] < OPEN_FILES
    assert said["raised"] == "ValueError", "as Python calls EPERM of setrlimit(2)"


# --- how it ends -----------------------------------------------------------------------------------------------------


def faults(runs: list[Run]) -> list[str]:
    """What must not be."""
    return [fault for run in runs for fault in run.faults()]


def test_nothing_survives_any_ending_and_a_restart_has_its_proof(open_python: OpenPython) -> None:
    owner = pwd.getpwnam(USER)
    with open_directory() as directory:
        server = make_server(
            directory,
            "cgroup",
            prefix=open_python.prefix,
            environment=open_python.environment,
            settings=for_user(directory),
        )
        with server:
            field = Field(server, "worker_user", None)
            os.chown(directory / "attacks", owner.pw_uid, owner.pw_gid)
            cells = [(attack, ending) for ending in ENDINGS for attack in ATTACKS]
            assert faults(field.run_cells(cells, at_once=3)) == []
            # Workers die with the supervisor, whatever they have started is found, and nothing may have left its leaf.
            restarted = field.kill_and_restart(ATTACKS)
            assert faults(restarted) == []
            said = {(run.stop["confirmed"], run.stop["method"], run.stop["reason"]) for run in restarted if run.stop}
            assert said == {(True, "cgroup", "restart")}
            assert faults(field.terminate(ATTACKS)) == []
            assert server.returncode == 0


def test_a_worker_dies_with_its_supervisor_before_any_restart(open_python: OpenPython) -> None:
    with open_directory() as directory:
        server = Server(
            directory,
            registry=REGISTRY,
            settings=for_user(directory),
            prefix=open_python.prefix,
            environment=open_python.environment,
        )
        with server:
            client = server.client()
            with client.stream("orphan", "sleeper", complete=False) as stream:
                stream.until("started")
                worker = client.get("orphan").expect(200)["worker"]
                ticks = procs.start_ticks(worker["pid"])
                template = next(pid for pid in procs.children(server.pid) if pid != worker["pid"])
                # Asleep, neither can notice the end of its pipe: only the kernel's signal reaches them.
                for pid in (worker["pid"], template):
                    os.kill(pid, signal.SIGSTOP)
                server.kill()
            for pid in (worker["pid"], template):
                procs.wait_until(lambda pid=pid: not procs.alive(pid), WAIT_S, f"{pid} has died with its supervisor")
            server.start()
            stop = server.client().get("orphan").expect(200)["stop"]
            assert (stop["confirmed"], stop["method"], stop["reason"]) == (True, "cgroup", "restart")
            assert not procs.alive(worker["pid"], ticks)
            assert world.in_cgroup(worker["cgroup"]) == []


def test_a_user_that_cannot_reach_the_work_directory_is_refused(open_python: OpenPython) -> None:
    with open_directory() as directory:
        (directory / "closed").mkdir(mode=0o700)
        assert not is_open(directory / "closed")
        server = Server(
            directory,
            registry=REGISTRY,
            settings=for_user(directory / "closed"),
            prefix=open_python.prefix,
            environment=open_python.environment,
        )
        assert server.run_refused() == 2
        refused = server.wait_log("config_refused")
        assert "work_dir" in refused["detail"]
        assert os.strerror(errno.EACCES) not in refused["detail"], "it is refused by a look, not by a failure"
