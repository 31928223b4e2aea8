"""A real systemd of the tests' own, in private namespaces over a throw-away copy of the machine's files.

Only root can have one, on Linux with cgroup v2 and its kill switch (5.14), overlay and systemd. Nothing of it reaches
the machine; only the network is shared, so tests speak HTTP to what runs inside.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.support import procs

BOOT = Path(__file__).with_name("boot.sh")
SYSTEMD = Path("/usr/lib/systemd/systemd")
UNSHARE = ("unshare", "--mount", "--pid", "--fork", "--cgroup", "--ipc", "--uts", "--propagation", "private")
#: What a boot needs of the kernel, tried out in namespaces that go away again.
PROBE = (
    'd=$(mktemp -d) && mount -t tmpfs tmpfs "$d" && mkdir "$d/u" "$d/w" "$d/r"'
    ' && mount -t overlay overlay -o "lowerdir=/,upperdir=$d/u,workdir=$d/w" "$d/r"'
    ' && mount -t proc proc "$d/r/proc" && mount -t sysfs -o ro sysfs "$d/r/sys"'
    ' && mount -t cgroup2 cgroup2 "$d/r/sys/fs/cgroup"'
    '; status=$?; umount -R "$d"; rmdir "$d"; exit $status'
)
BOOT_S = 60.0
COMMAND_S = 120.0


def cgroup2_mount() -> Path | None:
    """Where the machine has its cgroup v2 hierarchy, if it can be written."""
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        fields, _, tail = line.partition(" - ")
        if tail.startswith("cgroup2 ") and "rw" in fields.split()[5].split(","):
            return Path(fields.split()[4])
    return None


def why_not() -> str | None:
    """Why this machine cannot boot one; None if it can."""
    if os.geteuid() != 0:
        return "only root can boot a systemd"
    missing = [name for name in ("unshare", "nsenter", "pivot_root", "systemctl") if shutil.which(name) is None]
    if missing or not SYSTEMD.exists():
        return f"not installed: {', '.join(missing) or 'systemd'}"
    mount = cgroup2_mount()
    if mount is None:
        return "no cgroup v2 hierarchy can be written"
    with _cgroup(mount, "probe") as cgroup:
        if not (cgroup / "cgroup.kill").exists():
            return "the kernel has no cgroup.kill (Linux 5.14)"
        tried = subprocess.run([*_in(cgroup), *UNSHARE, "sh", "-c", PROBE], capture_output=True, text=True, check=False)
    return f"no private namespaces with an overlay: {tried.stderr.strip()}" if tried.returncode else None


@contextlib.contextmanager
def _cgroup(mount: Path, name: str) -> Iterator[Path]:
    """A cgroup of ours; whatever is in it at the end dies."""
    cgroup = mount / f"crew-tests-{os.getpid()}-{name}"
    cgroup.mkdir()
    try:
        yield cgroup
    finally:
        if (cgroup / "cgroup.kill").exists():
            (cgroup / "cgroup.kill").write_text("1", encoding="ascii")
        events = cgroup / "cgroup.events"
        procs.wait_until(lambda: "populated 0" in events.read_text(encoding="ascii"), 20, f"{cgroup} is empty")
        for directory, _, _ in os.walk(cgroup, topdown=False):
            os.rmdir(directory)


def _in(cgroup: Path) -> tuple[str, ...]:
    """A prefix that runs a command in that cgroup."""
    return ("sh", "-c", f'echo $$ >"{cgroup}/cgroup.procs" && exec "$@"', "sh")


class Booted:
    """The running system; paths inside of it are reached below ``root``."""

    def __init__(self, pid: int, cgroup: Path) -> None:
        self.pid = pid
        self.cgroup = cgroup
        self.root = Path(f"/proc/{pid}/root")

    def inside(self, path: str) -> Path:
        """Our path of a path in there."""
        return self.root / path.lstrip("/")

    def run(
        self, *command: str, check: bool = True, limit_s: float = COMMAND_S, environ: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as root inside. Raises CalledProcessError with ``check``, TimeoutExpired."""
        enter = ("nsenter", "-t", str(self.pid), "-m", "-p", "-i", "-u", "-C", "env", "-C", "/")
        clean = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", "SYSTEMD_PAGER": "", **(environ or {})}
        done = subprocess.run(
            [*_in(self.cgroup), *enter, *command],
            env=clean, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=limit_s,
        )  # fmt: skip
        if check and done.returncode:
            raise AssertionError(f"{' '.join(command)}: status {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done

    def show(self, unit: str, name: str) -> str:
        """One property of a unit."""
        return self.run("systemctl", "show", "--value", "--property", name, unit).stdout.strip()

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """Write a file inside."""
        target = self.inside(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        target.chmod(mode)

    def records(self, unit: str, **fields: str) -> list[dict[str, Any]]:
        """Records of a unit in the journal, oldest first, with these fields."""
        matches = [f"{name}={value}" for name, value in fields.items()]
        self.run("journalctl", "--sync")
        command = ("journalctl", "--output=json", "--all", "--no-pager", f"_SYSTEMD_UNIT={unit}", *matches)
        return [json.loads(line) for line in self.run(*command).stdout.splitlines()]

    def pids_in(self, cgroup: str) -> set[int]:
        """Processes in a cgroup, as /proc inside names it, and below; numbered as we count them."""
        found: set[int] = set()
        for directory, _, _ in os.walk(self.inside(f"/sys/fs/cgroup{cgroup}")):
            with contextlib.suppress(OSError):
                found |= {int(pid) for pid in (Path(directory) / "cgroup.procs").read_text("ascii").split()}
        return found


@contextlib.contextmanager
def boot(binds: Mapping[Path, str]) -> Iterator[Booted]:
    """Boot one; ``binds``: directories of the machine and where they are seen inside. Nothing of it is left behind."""
    mount = cgroup2_mount()
    assert mount is not None, why_not()
    work = Path(tempfile.mkdtemp(prefix="crew-tests-systemd-"))
    pairs = [str(word) for pair in binds.items() for word in pair]
    log = tempfile.TemporaryFile()  # noqa: SIM115 - closed below
    try:
        with _cgroup(mount, "systemd") as cgroup, _cgroup(mount, "commands") as commands:
            # systemd takes the root of its namespace for its own, so our commands are beside it.
            starter = subprocess.Popen(
                [*_in(cgroup), *UNSHARE, "bash", str(BOOT), str(work), *pairs],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
            try:
                yield _wait_for_boot(starter, commands, log)
            finally:
                # The init of a PID namespace takes everything in it along.
                (cgroup / "cgroup.kill").write_text("1", encoding="ascii")
                starter.wait(20)
    finally:
        log.close()
        shutil.rmtree(work)


def _wait_for_boot(starter: subprocess.Popen[bytes], commands: Path, log: Any) -> Booted:
    def first() -> int | None:
        if starter.poll() is not None:
            log.seek(0)
            raise AssertionError(f"systemd did not boot: {log.read().decode('utf-8', 'replace')}")
        # The shell before it is the same process, so only its program tells that it is systemd.
        for pid in procs.children(starter.pid):
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/exe").readlink().name == "systemd":
                    return pid
        return None

    booted = Booted(procs.wait_until(first, BOOT_S, "systemd runs"), commands)
    procs.wait_until(booted.inside("/run/systemd/private").exists, BOOT_S, "systemd takes commands")
    booted.run("systemctl", "is-system-running", "--wait", check=False, limit_s=BOOT_S)
    return booted
