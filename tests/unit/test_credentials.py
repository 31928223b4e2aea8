"""Tokens from the service manager's credentials."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from protocol.errors import ConfigError
from supervisor.config import load


def credential(directory: Path, name: str, text: str, mode: int = 0o400) -> None:
    """Write one as systemd does."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / name
    path.unlink(missing_ok=True)
    path.write_text(text)
    path.chmod(mode)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {
        "AIP_CREWAI_REGISTRY": "crews:CREWS",
        "AIP_CREWAI_STATE_FILE": str(tmp_path / "journal.db"),
        "CREDENTIALS_DIRECTORY": str(tmp_path / "credentials"),
        "CREW_SUPERVISOR_RELOADED_CREDENTIALS": str(tmp_path / "reloaded"),
        "INVOCATION_ID": "0123abcd",
    }


def test_both_tokens_are_read(tmp_path: Path, environ: dict[str, str]) -> None:
    credential(tmp_path / "credentials", "bearer_token", "may do everything\n")
    credential(tmp_path / "credentials", "read_token", "may read\n")
    settings = load(None, environ)
    assert (settings.tokens, settings.read_tokens) == (("may do everything",), ("may read",))


@pytest.mark.parametrize("blank", ["", "\n", " \n"])
def test_a_blank_one_is_none(tmp_path: Path, environ: dict[str, str], blank: str) -> None:
    credential(tmp_path / "credentials", "bearer_token", "t")
    credential(tmp_path / "credentials", "read_token", blank)
    assert load(None, environ).read_tokens == ()


def test_without_any_the_server_is_not_open(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="bearer token"):
        load(None, environ)


def test_a_setting_counts_before_a_credential(tmp_path: Path, environ: dict[str, str]) -> None:
    credential(tmp_path / "credentials", "bearer_token", "of the credential")
    assert load(None, environ | {"AIP_CREWAI_BEARER_TOKEN": "of the setting"}).tokens == ("of the setting",)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has files of root's")
def test_one_of_roots_may_be_readable_by_its_access_list(tmp_path: Path, environ: dict[str, str]) -> None:
    credential(tmp_path / "credentials", "bearer_token", "t", 0o440)
    assert load(None, environ).tokens == ("t",)
    os.chown(tmp_path / "credentials" / "bearer_token", 54_321, -1)
    with pytest.raises(ConfigError, match="0440"):
        load(None, environ)


@pytest.mark.parametrize("mode", [0o460, 0o444, 0o404])
def test_one_that_others_may_read_or_write_is_refused(tmp_path: Path, environ: dict[str, str], mode: int) -> None:
    credential(tmp_path / "credentials", "bearer_token", "t", mode)
    with pytest.raises(ConfigError, match=f"{mode:04o}"):
        load(None, environ)


def test_a_copy_of_this_start_counts_before_the_original(tmp_path: Path, environ: dict[str, str]) -> None:
    credential(tmp_path / "credentials", "bearer_token", "first")
    credential(tmp_path / "reloaded" / "0123abcd", "bearer_token", "second")
    assert load(None, environ).tokens == ("second",)
    assert load(None, environ | {"INVOCATION_ID": "another"}).tokens == ("first",), "a copy of an earlier start is old"
