"""``crew-supervisor doctor`` as a process: each failure that it names is brought about, and nothing is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import pty
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from supervisor.doctor import CHECKS, Finding, Report
from supervisor.journal.files import prepare_directory
from tests.process.test_faults_journal import UNSHARE, may_mount
from tests.process.test_faults_start import OPEN_SOCKET, THREADED
from tests.support import procs, seccomp
from tests.support.registries import GOOD, with_registry
from tests.support.server import MARK, Server, ServerFactory

NAMES = [check.name for check in CHECKS]
GENERAL = [check.name for check in CHECKS if check.alone is not None]
#: Answers of the kernel that a test cannot have otherwise: argv is what would be executed.
PRETEND = "import sys\nfrom supervisor import filesystems\nfilesystems.magic_of = lambda path: 0x6969\n"
PRETEND += "del sys.argv[1:4]\nfrom supervisor.__main__ import main\nmain()\n"
ON_NFS = (sys.executable, "-c", PRETEND)
LEAVES_DAEMON = """
    import subprocess, sys
    subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
"""


class Examined(msgspec.Struct, frozen=True):
    """What one run said."""

    status: int
    findings: dict[str, Finding]

    def verdict(self, name: str) -> str:
        return self.findings[name].verdict.value

    @property
    def failures(self) -> list[str]:
        return [name for name in self.findings if self.verdict(name) == "failure"]


def examine(server: Server, **options: Any) -> Examined:
    """Run the doctor with this server's configuration; whatever it started is gone afterwards."""
    done = server.run_command("doctor", "--json", **options)
    assert done.stderr == ""
    report = msgspec.json.decode(done.stdout, type=Report)
    assert report.ok == (done.returncode == 0)
    for finding in report.findings:
        assert bool(finding.advice) == (finding.verdict.value != "ok"), finding
    ours = {server.pid, *procs.descendants(server.pid)} if runs(server) else set()
    assert set(procs.with_environment(f"{MARK}={server.mark}")) <= ours
    return Examined(done.returncode, {finding.name: finding for finding in report.findings})


def runs(server: Server) -> bool:
    return server._process is not None and server.process.poll() is None


@pytest.fixture
def server(make_server: ServerFactory, tmp_path: Path) -> Server:
    """A server that would start, and was not started."""
    return with_registry(make_server, tmp_path, GOOD)


def branches() -> set[Path]:
    """Cgroups that a doctor made which has ended; their names end in its pid."""
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines() if line.split()[2] == "cgroup2"]
    made = {path for mount in mounts for path in Path(mount).rglob("crew-supervisor-doctor*")}
    return {path for path in made if not procs.alive(int(path.name.removeprefix("crew-supervisor-doctor"), 16))}


def everything_below(directory: Path) -> dict[str, tuple[int, int, bytes]]:
    """Path to mode, time of change and content of every file and directory."""
    return {
        str(path): (path.lstat().st_mode, path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in [directory, *sorted(directory.rglob("*"))]
    }


# --- what it says ----------------------------------------------------------------------------------------------------


def test_a_good_configuration_has_no_failure_and_every_line(server: Server) -> None:
    found = examine(server)
    assert found.failures == []
    assert found.status == 0
    assert list(found.findings) == NAMES
    assert "1 crews" in found.findings["registry"].detail
    assert str(os.path.realpath(sys.executable)) in os.path.realpath(found.findings["python"].detail.split()[-1])


def test_json_is_of_its_schema(server: Server) -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "additionalProperties": False,
        "required": ["ok", "findings"],
        "properties": {
            "ok": {"type": "boolean"},
            "findings": {
                "type": "array",
                "minItems": len(NAMES),
                "items": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["name", "verdict", "detail", "advice"],
                    "properties": {
                        "name": {"enum": NAMES},
                        "verdict": {"enum": ["ok", "warning", "failure"]},
                        "detail": {"type": "string", "minLength": 1},
                        "advice": {"type": "string"},
                    },
                },
            },
        },
    }
    document = json.loads(server.run_command("doctor", "--json").stdout)
    jsonschema.Draft202012Validator(schema).validate(document)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(schema).validate({**document, "findings": document["findings"][1:]})


def test_lines_are_plain_where_nobody_looks(server: Server) -> None:
    done = server.run_command("doctor")
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert [line.split()[1].rstrip(":") for line in done.stdout.splitlines()] == NAMES


@pytest.mark.parametrize("colours", [True, False])
def test_a_terminal_gets_a_table_and_no_colours_if_it_wants_none(server: Server, colours: bool) -> None:
    server.environment |= {"TERM": "xterm-256color", "COLUMNS": "200", "NO_COLOR": None if colours else "1"}
    text = on_terminal(server)
    assert "check" in text.splitlines()[0]
    assert all(name in text for name in NAMES)
    assert ("\x1b[32m" in text) is colours


def on_terminal(server: Server) -> str:
    """What the doctor prints on a terminal."""
    ours, theirs = pty.openpty()
    server._write_config()
    command = [sys.executable, "-m", "supervisor", "doctor", "--config", str(server.config_file)]
    process = subprocess.Popen(command, cwd=server.directory, env=server._environment(), stdout=theirs, stderr=theirs)
    os.close(theirs)
    text = b""
    with contextlib.suppress(OSError):  # EIO: the other end is closed
        while block := os.read(ours, 65_536):
            text += block
    os.close(ours)
    assert process.wait(30) == 0, text
    return text.decode()


# --- it changes nothing ----------------------------------------------------------------------------------------------


def test_nothing_is_made_where_nothing_was(server: Server) -> None:
    server._write_config()
    before, scratch = everything_below(server.directory), set(os.listdir(tempfile.gettempdir()))
    assert examine(server).status == 0
    assert set(everything_below(server.directory)) == set(before)
    left = set(os.listdir(tempfile.gettempdir())) - scratch
    assert not [name for name in left if name.startswith(("crew-supervisor", ".doctor"))]
    assert branches() == set()


def test_a_running_supervisor_is_named_and_not_disturbed(server: Server) -> None:
    server.start()
    server.client().start("before", "good").expect(200)
    server.settings["port"] = server.port
    state = server.state_file.parent
    jobs = state / "work" / "jobs"
    procs.wait_until(lambda: not os.listdir(jobs), 10, "the directory of the job that ended is gone")
    before = everything_below(state)
    found = examine(server)
    assert found.failures == []
    assert f"pid {server.pid}" in found.findings["journal"].detail
    assert f"the running supervisor, pid {server.pid}," in found.findings["port"].detail
    after = everything_below(state)
    moved = {path for path in before if before[path] != after.get(path)} | (after.keys() - before.keys())
    assert moved <= {str(state)}, "only the time of the directory, in which a file was written and removed"
    assert branches() == set()
    server.client().start("after", "good").expect(200)


def test_a_supervisor_that_is_gone_owns_nothing(server: Server) -> None:
    server.start()
    server.kill()
    found = examine(server)
    assert "nobody here has" in found.findings["journal"].detail


def test_a_supervisor_of_another_pid_namespace_is_not_called_gone(server: Server) -> None:
    server.start()
    owner = json.loads(server.state_file.with_name("journal.db.lock").read_bytes())
    server.stop()
    elsewhere = {**owner, "pid_ns": owner["pid_ns"] + 1}
    server.state_file.with_name("journal.db.lock").write_text(json.dumps(elsewhere))
    found = examine(server)
    assert found.verdict("journal") == "warning"
    assert "PID namespace" in found.findings["journal"].detail


# --- failures, each for real -----------------------------------------------------------------------------------------


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


# --- the registry ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (("raise LookupError('where is my key')",), "LookupError: where is my key"),
        (("CREWS = {}",), "is empty"),
        (("import os; os._exit(7)",), "ended"),
        (("import sys; sys.exit('no')",), "SystemExit: no"),
    ],
)
def test_a_registry_that_cannot_be_imported(
    make_server: ServerFactory, tmp_path: Path, parts: tuple[str, ...], said: str
) -> None:
    found = examine(with_registry(make_server, tmp_path, *parts))
    assert found.failures == ["registry"]
    assert said in found.findings["registry"].detail
    assert "\n" not in found.findings["registry"].detail


def test_a_registry_that_hangs(make_server: ServerFactory, tmp_path: Path) -> None:
    server = with_registry(make_server, tmp_path, "import time; time.sleep(3600)", registry_timeout_s=1.0)
    found = examine(server)
    assert found.failures == ["registry"]
    assert "registry_timeout_s" in found.findings["registry"].advice


@pytest.mark.parametrize("leftover", [THREADED, OPEN_SOCKET])
def test_a_registry_that_leaves_something_behind(make_server: ServerFactory, tmp_path: Path, leftover: str) -> None:
    forced = with_registry(make_server, tmp_path, GOOD, leftover, launch="fork")
    found = examine(forced)
    assert found.failures == ["registry"]
    assert "leaves" in found.findings["registry"].detail
    unproved = with_registry(make_server, tmp_path, GOOD, leftover, stop_method="keeper")
    assert examine(unproved).failures == ["registry"]
    chosen = with_registry(make_server, tmp_path, GOOD, leftover, stop_method="group")
    found = examine(chosen)
    assert found.verdict("registry") == "warning"
    assert "spawned" in found.findings["registry"].detail


@pytest.mark.parametrize("stop_method", ["auto", "keeper"])
def test_what_a_registry_starts_is_gone_afterwards(
    make_server: ServerFactory, tmp_path: Path, stop_method: str
) -> None:
    server = with_registry(make_server, tmp_path, GOOD, LEAVES_DAEMON, stop_method=stop_method)
    assert examine(server).verdict("registry") == "ok"  # and ``examine`` looks for what carries the server's mark


def test_the_doctor_itself_imports_neither_crews_nor_crewai(server: Server) -> None:
    listing = "import atexit, sys\natexit.register(lambda: print(*sys.modules, file=open('modules', 'w')))\n"
    listing += "del sys.argv[1:4]\nfrom supervisor.__main__ import main\nmain()\n"
    assert examine(server, prefix=(sys.executable, "-c", listing)).status == 0
    modules = set((server.directory / "modules").read_text().split())
    assert "supervisor.doctor.registry" in modules
    assert {name.partition(".")[0] for name in modules}.isdisjoint({"my_registry", "worker", "crewai", "pydantic"})


# --- names and packages ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["worker", "protocol"])
def test_a_package_of_the_same_name_in_the_working_directory(server: Server, tmp_path: Path, name: str) -> None:
    """A template is started with ``python -m``: what lies in the working directory comes first."""
    project = tmp_path / "project"
    (project / name).mkdir(parents=True)
    (project / name / "__init__.py").touch()
    started = "import sys; sys.path.remove('')\ndel sys.argv[1:4]\nfrom supervisor.__main__ import main\nmain()\n"
    found = examine(server, cwd=project, prefix=(sys.executable, "-c", started))
    assert "names" in found.failures
    assert f"{name} is {project / name / '__init__.py'} in a worker" in found.findings["names"].detail


def installed(directory: Path, name: str, version: str, *packages: str, top_level: bool = True) -> Path:
    """What pip leaves of a distribution, as far as it is looked at; not every one has a list of its packages."""
    info = directory / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if top_level:
        (info / "top_level.txt").write_text("\n".join(packages))
    (info / "RECORD").write_text("".join(f"{package}/__init__.py,,\n" for package in packages))
    return directory


@pytest.mark.parametrize("top_level", [True, False])
def test_supervisord_in_the_same_environment(
    make_server: ServerFactory, server: Server, tmp_path: Path, top_level: bool
) -> None:
    site = installed(tmp_path / "site", "supervisor", "4.2.5", "supervisor", top_level=top_level)
    same = make_server(registry=server.registry, python_path=(*server.python_path, site))
    found = examine(same)
    assert found.failures == ["names"]
    assert "supervisor also belongs to supervisor 4.2.5" in found.findings["names"].detail


def test_a_package_out_of_its_range(make_server: ServerFactory, server: Server, tmp_path: Path) -> None:
    site = installed(tmp_path / "site", "aiohttp", "2.0.0", "aiohttp")
    same = make_server(registry=server.registry, python_path=(*server.python_path, site))
    found = examine(same)
    assert found.failures == ["packages"]
    assert "aiohttp 2.0.0 is not" in found.findings["packages"].detail


# --- the kernel and its limits ---------------------------------------------------------------------------------------


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


def test_without_a_configuration_the_machine_is_looked_at() -> None:
    clean: Mapping[str, str] = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, "-m", "supervisor", "doctor", "--json"],
        env={**clean, "PYTHONPATH": root}, cwd=root, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert [one["name"] for one in report["findings"] if one["verdict"] == "failure"] == ["configuration"]
