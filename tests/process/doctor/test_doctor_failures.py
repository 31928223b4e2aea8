"""The doctor's failures, each brought about for real: configuration, places, port, users, kernel, limits."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from supervisor.journal.files import prepare_directory
from tests.process.doctor.examined import GENERAL, NAMES, examine
from tests.process.test_faults_journal import UNSHARE, may_mount
from tests.support import seccomp
from tests.support.server import Server, ServerFactory

#: Answers of the kernel that a test cannot have otherwise: argv is what would be executed.
PRETEND = "import sys\nfrom supervisor import filesystems\nfilesystems.magic_of = lambda path: 0x6969\n"
PRETEND += "del sys.argv[1:4]\nfrom supervisor.__main__ import main\nmain()\n"
ON_NFS = (sys.executable, "-c", PRETEND)


def test_a_configuration_that_cannot_be_read_leaves_the_general_checks(server: Server) -> None:
    server.settings["max_concurrenzy"] = 4
    found = examine(server)
    assert found.failures == ["configuration"]
    assert list(found.findings) == [name for name in NAMES if name in {*GENERAL, "configuration"}]
    assert "max_concurrency" in found.findings["configuration"].detail + found.findings["configuration"].advice


def test_a_token_file_that_others_may_read(server: Server) -> None:
    server._write_config()
    (server.directory / "token").chmod(0o644)
    found = examine(server)
    assert found.failures == ["configuration"]
    assert "mode 0644" in found.findings["configuration"].detail
    assert "0600" in found.findings["configuration"].advice


def test_secrets_of_crews_in_a_file_that_others_may_read(server: Server) -> None:
    server.settings["crews"] = {"good": {"environment": {"API_KEY": "x"}}}
    server._write_config()
    server.config_file.chmod(0o644)
    found = examine(server)
    assert found.verdict("tokens") == "warning"
    server.config_file.chmod(0o600)
    assert examine(server).verdict("tokens") == "ok"


@pytest.mark.parametrize(
    ("mode", "verdict"), [(0o777, "failure"), (0o770, "failure"), (0o755, "warning"), (0o700, "ok")]
)
def test_modes_of_the_state_directory(server: Server, mode: int, verdict: str) -> None:
    state = server.state_file.parent
    state.mkdir(parents=True)
    state.chmod(mode)
    found = examine(server)
    assert found.verdict("state_directory") == verdict
    assert (found.status == 0) is (verdict != "failure")


def test_a_journal_that_others_may_read(server: Server) -> None:
    prepare_directory(server.state_file.parent)
    server.state_file.touch(mode=0o644)
    server.state_file.chmod(0o644)
    found = examine(server)
    assert found.failures == ["state_directory"]
    assert "mode 0644" in found.findings["state_directory"].detail


def test_a_state_directory_that_is_a_link(server: Server, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    server.state_file.parent.symlink_to(tmp_path / "elsewhere")
    assert examine(server).failures == ["state_directory"]


def test_a_state_directory_that_cannot_be_made(server: Server) -> None:
    server.settings["state_file"] = "/proc/nowhere/journal.db"
    found = examine(server)
    assert {"sync"} <= set(found.failures) <= {"sync", "state_directory", "space"}
    assert found.status == 1


def test_a_network_file_system_is_a_failure_here_and_refuses_the_start(
    server: Server, make_server: ServerFactory
) -> None:
    found = examine(server, prefix=ON_NFS)
    assert found.failures == ["filesystem"]
    assert "nfs" in found.findings["filesystem"].detail
    same = make_server(registry=server.registry, python_path=server.python_path, prefix=ON_NFS)
    assert same.run_refused() == 3
    assert "network file system" in same.wait_log("start_refused")["detail"]
    assert not same.state_file.parent.exists()


def test_a_volatile_file_system_is_a_warning(server: Server) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
        server.settings |= {"state_file": f"{made}/state/journal.db", "work_dir": f"{made}/work"}
        found = examine(server)
    assert found.verdict("filesystem") == "warning"
    assert "tmpfs" in found.findings["filesystem"].detail


@pytest.mark.skipif(not may_mount(), reason="no private mount namespace can be had here")
@pytest.mark.parametrize(("size_mib", "verdict"), [(8, "failure"), (64, "warning")])
def test_a_disk_that_is_nearly_full(server: Server, size_mib: int, verdict: str) -> None:
    state = server.state_file.parent
    state.mkdir(mode=0o700)
    mount = f'mount -t tmpfs -o mode=0700,size={size_mib}m none "{state}" && exec "$@"'
    found = examine(server, prefix=(*UNSHARE, "sh", "-c", mount, "sh"))
    assert found.verdict("space") == verdict
    assert ("space" in found.failures) is (verdict == "failure")


def test_a_port_that_another_process_has(server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server.settings["port"] = listener.getsockname()[1]
        found = examine(server)
    assert found.failures == ["port"]
    assert f"pid {os.getpid()}" in found.findings["port"].detail
    found = examine(server)
    assert found.verdict("port") == "ok"


def test_an_address_that_is_not_ours(server: Server) -> None:
    server.settings |= {"host": "192.0.2.1", "port": 8090}
    assert examine(server).failures == ["port"]


def test_a_worker_user_that_does_not_exist(server: Server) -> None:
    server.settings["worker_user"] = "nobody-of-that-name"
    found = examine(server)
    assert "worker_user" in found.failures
    assert "no user of this machine" in found.findings["worker_user"].detail


# --- the kernel and its limits ----------------------------------------------------------------------------------------


def test_stop_methods(server: Server, tmp_path: Path) -> None:
    """A directory that is in no cgroup hierarchy stands for a machine without a writable one."""
    nowhere = {"cgroup_root": str(tmp_path)}
    for method, more, verdict in (
        ("cgroup", nowhere, "failure"),
        ("auto", nowhere, "warning"),
        ("keeper", nowhere, "ok"),
        ("group", {}, "warning"),
    ):
        server.settings |= {"stop_method": method, "cgroup_root": None, **more}
        assert examine(server).verdict("stop_method") == verdict, method


@pytest.mark.skipif(platform.machine() not in seccomp.MACHINES, reason="no seccomp filter is written for this machine")
def test_calls_that_a_filter_refuses(server: Server) -> None:
    assert "clone3 is there" in examine(server).findings["clone3"].detail
    prefix = (sys.executable, "-m", "tests.support.seccomp", "pidfds", "clone3", "--")
    found = examine(server, prefix=prefix)
    assert found.failures == []
    assert found.verdict("pidfd") == "warning"
    assert "no clone3" in found.findings["clone3"].detail


def test_few_descriptors(server: Server) -> None:
    lower = "import os, resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200)); "
    found = examine(server, prefix=(sys.executable, "-c", lower + "os.execv(sys.argv[1], sys.argv[1:])"))
    assert found.verdict("descriptors") == "warning"
    assert examine(server).verdict("descriptors") == "ok"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_namespaces_and_the_user_of_the_crews(server: Server) -> None:
    server.settings["pid_namespace"] = "auto"
    found = examine(server)
    assert found.verdict("worker_user") == "warning"
    may = subprocess.run(["unshare", "--pid", "true"], check=False, capture_output=True).returncode == 0
    assert found.verdict("namespaces") == ("ok" if may else "warning")
    server.settings["pid_namespace"] = "off"
    assert examine(server).verdict("namespaces") == "warning"
