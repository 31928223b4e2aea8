"""Who may be ``worker_user``, and what must be so that workers of that user can live."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from protocol.errors import ConfigError
from supervisor.config import Settings, resolve_worker_user
from supervisor.environment import worker_environment

SOMEBODY = "nobody"


@pytest.fixture
def as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the check take us for root."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)


def of(name: str | None, work_dir: Path | None = None) -> Settings:
    return Settings(registry="a:b", worker_user=name, work_dir=work_dir)


def test_without_the_setting_nobody_is_resolved() -> None:
    assert resolve_worker_user(of(None)) is None


@pytest.mark.usefixtures("as_root")
def test_a_user_is_resolved_with_the_groups_of_its_own() -> None:
    entry = pwd.getpwnam(SOMEBODY)
    user = resolve_worker_user(of(SOMEBODY))
    assert user is not None
    assert (user.uid, user.gid) == (entry.pw_uid, entry.pw_gid)
    assert set(user.groups) == set(os.getgrouplist(SOMEBODY, entry.pw_gid))


@pytest.mark.usefixtures("as_root")
@pytest.mark.parametrize(("name", "why"), [("no-such-user-here", "no user"), ("root", "leave any cgroup")])
def test_who_is_no_user_or_too_powerful_is_refused(name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        resolve_worker_user(of(name))


def test_only_root_may_change_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="runs as root"):
        resolve_worker_user(of(SOMEBODY))


@pytest.mark.usefixtures("as_root")
def test_every_directory_above_the_work_directory_must_let_others_pass(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with pytest.raises(ConfigError, match="lets others not pass"):
        resolve_worker_user(of(SOMEBODY, tmp_path / "work"))


def test_workers_of_another_user_get_its_name_and_a_home_of_their_own() -> None:
    ours = {"HOME": "/root", "USER": "root", "LOGNAME": "root", "KEPT": "1", "AIP_CREWAI_BEARER_TOKEN": "secret"}
    kept = worker_environment(ours, home=Path("/w/template"))
    assert (kept["HOME"], kept["USER"], kept["KEPT"]) == ("/root", "root", "1")
    theirs = worker_environment(ours, SOMEBODY, home=Path("/w/template"))
    assert (theirs["HOME"], theirs["USER"], theirs["LOGNAME"]) == ("/w/template", SOMEBODY, SOMEBODY)
    assert "AIP_CREWAI_BEARER_TOKEN" not in kept | theirs
