"""The doctor's judgements that no test can bring about for real, and its list of checks."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import pytest

from docs import generate
from protocol.errors import StartError
from supervisor import filesystems
from supervisor.config import Settings
from supervisor.doctor import CHECKS, Verdict, checks, kernel, limits, packages, places, registry
from supervisor.doctor.finding import Said, ok
from supervisor.journal import RESERVE_BYTES
from supervisor.journal.files import prepare_directory

MIB = 1 << 20
NOBODY = 65_534
NFS, FUSE, TMPFS, EXT4 = 0x6969, 0x65735546, 0x01021994, 0xEF53


def settings(tmp_path: Path, **changes: Any) -> Settings:
    state_file = tmp_path / "state" / "journal.db"
    return Settings(**{"registry": "a:b", "state_file": state_file, "work_dir": tmp_path / "work", **changes})


def test_the_document_is_what_the_list_says() -> None:
    written = generate.DOCTOR.read_text(encoding="utf-8")
    assert written == generate.doctor_document(), "out of date; run python -m docs.generate"


def test_every_check_has_a_name_of_its_own_and_one_way_to_look() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    for check in CHECKS:
        ways = (check.alone is not None) + (check.look is not None) + (check.name == checks.CONFIGURATION)
        assert ways == 1, check.name


def test_a_check_that_breaks_is_a_failure_and_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Said:
        raise ZeroDivisionError("no way")

    monkeypatch.setattr(checks, "CHECKS", (checks.Check("a", "", broken), checks.Check("b", "", lambda: ok("fine"))))
    found = list(checks.examine(None, {}))
    assert [finding.verdict for finding in found] == [Verdict.FAILURE, Verdict.OK]
    assert "ZeroDivisionError: no way" in found[0].detail


# --- packages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "bounds", "expected"),
    [
        ("3.11", ">=3.11,<4", True),
        ("3.14.5", ">=3.11,<4", True),
        ("3.9.9", ">=3.11,<4", False),
        ("4.0", ">=3.11,<4", False),
        ("4", ">=3.11,<4", False),
        ("3.11.0rc1", ">=3.11,<4", True),
        ("10.0", ">=9", True),
        ("0.1.4", ">=0.1.4", True),
        ("0.1.3", ">=0.1.4", False),
        ("1.0", "", True),
    ],
)
def test_a_version_is_compared_by_numbers(version: str, bounds: str, expected: bool) -> None:
    assert packages.within(version, bounds) is expected


@pytest.mark.parametrize(
    ("version", "verdict"), [((3, 10), "failure"), ((3, 11), "ok"), ((3, 13), "ok"), ((3, 14), "failure")]
)
def test_pythons_that_we_were_not_made_for(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int], verdict: str
) -> None:
    monkeypatch.setattr(sys, "version_info", version)
    assert packages.python().verdict == verdict


def test_the_range_of_pythons_is_the_one_of_the_package() -> None:
    text = (packages.HOME / "pyproject.toml").read_text(encoding="utf-8")
    low, high = (".".join(map(str, bound)) for bound in packages.PYTHONS)
    assert f'requires-python = ">={low},<{high}"' in text


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name == "aiohttp":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    said = packages.packages()
    assert (said.verdict, said.detail) == ("failure", "aiohttp is missing")


def test_a_source_tree_that_was_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "DISTRIBUTION", "no-distribution-of-that-name")
    said = packages.packages()
    assert (said.verdict, "is not installed" in said.detail) == ("warning", True)


# --- the disk --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("magic", "verdict", "name"),
    [(NFS, "failure", "nfs"), (0xFE534D42, "failure", "smb2"), (0xFF534D42, "failure", "cifs"),
     (FUSE, "warning", "fuse"), (TMPFS, "warning", "tmpfs"), (EXT4, "ok", "ext4"),
     (0x12345678, "ok", "0x12345678")],
)  # fmt: skip
def test_file_systems(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, magic: int, verdict: str, name: str) -> None:
    monkeypatch.setattr(filesystems, "magic_of", lambda path: magic)
    said = places.filesystem(settings(tmp_path))
    assert said.verdict == verdict
    assert name in said.detail


def test_a_journal_is_not_opened_on_a_network_file_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(filesystems, "magic_of", lambda path: NFS)
    with pytest.raises(StartError, match="is on nfs, a network file system"):
        prepare_directory(tmp_path / "new" / "state")
    assert not (tmp_path / "new").exists()


def test_the_kernel_is_asked_for_the_real_kind() -> None:
    assert filesystems.file_system_of(Path("/proc/self")).name == "0x9fa0"
    assert filesystems.file_system_of(Path("/dev/shm/not/there")).volatile
    with pytest.raises(FileNotFoundError):
        filesystems.magic_of(Path("/not/there"))


def test_a_slow_disk_is_a_warning() -> None:
    assert places.judge_sync([0.5, 90.0, 0.5]).verdict == "ok"
    assert places.judge_sync([0.5, 90.0, 12.0]).verdict == "warning"


def room(free_mib: float, *, inodes: int = 10) -> os.statvfs_result:
    return os.statvfs_result((4096, 4096, 10**9, int(free_mib * 256), int(free_mib * 256), 100, inodes, inodes, 0, 255))


@pytest.mark.parametrize(
    ("found", "verdict"),
    [(room(0), "failure"), (room(15), "failure"), (room(17), "warning"), (room(2000), "ok"),
     (room(2000, inodes=0), "failure")],
)  # fmt: skip
def test_too_little_room(tmp_path: Path, found: os.statvfs_result, verdict: str) -> None:
    assert places.judge_space(tmp_path, found, needed_bytes=RESERVE_BYTES).verdict == verdict


def test_a_reserve_that_is_there_needs_no_more_room(tmp_path: Path) -> None:
    assert places.judge_space(tmp_path, room(1), needed_bytes=0).verdict == "warning"


# --- limits and the clock --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits_", "verdict"), [({}, "ok"), ({"a": 5000, "b": 100}, "warning"), ({"a": 5000, "b": 192}, "ok")]
)
def test_processes_against_concurrency(limits_: dict[str, int], verdict: str) -> None:
    said = limits.judge_processes(limits_, 4)
    assert said.verdict == verdict
    assert not limits_ or "b" in said.detail


@pytest.mark.parametrize(
    ("now", "drift_s", "synchronised", "verdict"),
    [
        (2e9, 0.001, True, "ok"),
        (2e9, 0.001, None, "ok"),
        (2e9, 0.001, False, "warning"),
        (2e9, -0.5, True, "warning"),
        (0.0, 0.0, True, "warning"),
    ],
)
def test_clocks(now: float, drift_s: float, synchronised: bool | None, verdict: str) -> None:
    assert kernel.judge_clock(now, drift_s, synchronised=synchronised).verdict == verdict


def test_short_tokens_and_no_tokens(tmp_path: Path) -> None:
    assert limits.tokens(settings(tmp_path, tokens=("x" * 32,))).verdict == "ok"
    assert limits.tokens(settings(tmp_path, tokens=("x" * 32, "short"))).verdict == "warning"
    assert limits.tokens(settings(tmp_path, tokens=("x" * 32,), read_tokens=("short",))).verdict == "warning"
    assert limits.tokens(settings(tmp_path, host="127.0.0.1")).verdict == "warning"


# --- as another user -------------------------------------------------------------------------------------------------


@pytest.fixture
def closed() -> Iterator[Path]:
    """A state directory that only its owner may use, below one that everybody may read."""
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o755)
        prepare_directory(Path(made) / "state")
        yield Path(made) / "state" / "journal.db"


def as_nobody(look: Callable[[], Said]) -> Said:
    """What a check says to a user without rights, in a process that is one."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:  # from here on no exception may leave
        said = Said(Verdict.OK, "it broke", "")
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            said = look()
        finally:
            os.write(theirs, msgspec.json.encode(said))
            os._exit(0)
    os.close(theirs)
    with open(ours, "rb") as answer:
        said = msgspec.json.decode(answer.read(), type=Said)
    os.waitpid(pid, 0)
    return said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_state_directory_of_somebody_else(closed: Path) -> None:
    theirs = settings(closed, state_file=closed)
    said = as_nobody(lambda: places.state_directory(theirs))
    assert (said.verdict, said.detail) == ("failure", f"{closed.parent} cannot be written by uid {NOBODY}")
    assert as_nobody(lambda: places.sync(theirs)).verdict == "failure"
    inside = settings(closed, state_file=closed, work_dir=closed.parent / "work")
    assert f"{closed.parent} has " in as_nobody(lambda: places.space(inside)).detail
    said = as_nobody(lambda: places.journal(theirs))
    assert (said.verdict, said.advice) == ("warning", "run the doctor as the supervisor's user")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_state_directory_that_cannot_be_made(closed: Path) -> None:
    missing = closed.parent.parent / "new" / "journal.db"
    said = as_nobody(lambda: places.state_directory(settings(closed, state_file=missing)))
    assert (said.verdict, said.advice) == ("failure", f"create {missing.parent}, mode 0700")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_user_of_the_crews_that_only_root_can_give(closed: Path) -> None:
    wanted = settings(closed, state_file=closed, worker_user="daemon")
    assert as_nobody(lambda: limits.worker_user(wanted)).verdict == "failure"
    assert as_nobody(lambda: registry.registry(wanted)).verdict == "failure"
