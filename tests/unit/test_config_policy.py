"""What settings must satisfy together: exposure, tokens, operations and the training directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from protocol.operations import Operation
from supervisor.config import Settings, is_loopback, prepare_training_dir
from tests.unit.test_config import from_env, refusal

# --- loopback, tokens, journal -----------------------------------------------------------------------------------


@pytest.mark.case(10)
def test_what_is_loopback() -> None:
    assert all(is_loopback(host) for host in ("localhost", "LocalHost", "127.0.0.1", "127.255.255.254", "::1"))
    others = ("0.0.0.0", "::", "10.0.0.1", "128.0.0.1", "localhost.", "my.localhost", "::ffff:127.0.0.1", "[::1]", "")
    assert not any(is_loopback(host) for host in others)


@pytest.mark.case(8)
@pytest.mark.parametrize("flag", ["1", None])
def test_not_loopback_and_no_token_is_refused(flag: str | None) -> None:
    message = refusal(from_env, AIP_CREWAI_BEARER_TOKEN=None, AIP_CREWAI_ALLOW_UNAUTHENTICATED=flag)
    assert "0.0.0.0" in message


@pytest.mark.case(9)
@pytest.mark.parametrize("flag", ["1", None])
def test_not_loopback_and_no_journal_is_refused(flag: str | None) -> None:
    message = refusal(from_env, AIP_CREWAI_STATE_FILE=None, AIP_CREWAI_ALLOW_EPHEMERAL=flag)
    assert "state_file" in message


@pytest.mark.case(10)
@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
@pytest.mark.parametrize("yes", ["1", "TRUE", " true "])
def test_loopback_with_the_flags_is_allowed(host: str, yes: str) -> None:
    settings = from_env(
        AIP_CREWAI_HOST=host,
        AIP_CREWAI_BEARER_TOKEN=None,
        AIP_CREWAI_STATE_FILE=None,
        AIP_CREWAI_ALLOW_UNAUTHENTICATED=yes,
        AIP_CREWAI_ALLOW_EPHEMERAL=yes,
    )
    assert settings.tokens == ()
    assert settings.ephemeral
    assert settings.work_dir is None


@pytest.mark.case(10)
@pytest.mark.parametrize("no", ["yes", "on", "0", "", None])
def test_loopback_without_the_flags_is_refused(no: str | None) -> None:
    local = {"AIP_CREWAI_HOST": "127.0.0.1"}
    message = refusal(from_env, AIP_CREWAI_BEARER_TOKEN=None, AIP_CREWAI_ALLOW_UNAUTHENTICATED=no, **local)
    assert "allow_unauthenticated" in message
    assert not no or repr(no) in message
    message = refusal(from_env, AIP_CREWAI_STATE_FILE=None, AIP_CREWAI_ALLOW_EPHEMERAL=no, **local)
    assert "allow_ephemeral" in message


@pytest.mark.case(10)
def test_a_journal_makes_the_ephemeral_flag_idle() -> None:
    assert not from_env(AIP_CREWAI_HOST="127.0.0.1", AIP_CREWAI_ALLOW_EPHEMERAL="1").ephemeral


@pytest.mark.case(11)
def test_an_inline_token_is_trimmed_and_bounded() -> None:
    assert from_env(AIP_CREWAI_BEARER_TOKEN=" x \n").tokens == ("x",)
    assert from_env(AIP_CREWAI_BEARER_TOKEN="x" * 16_384).tokens == ("x" * 16_384,)
    for wrong in ("", "  ", "x" * 16_385, "é" * 8193, "a\nb", "a\x7fb", "a\udcffb"):
        assert "bearer_token" in refusal(from_env, AIP_CREWAI_BEARER_TOKEN=wrong)


@pytest.mark.case(11)
def test_two_tokens_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("t")
    path.chmod(0o600)
    assert from_env(AIP_CREWAI_BEARER_TOKEN=None, AIP_CREWAI_BEARER_TOKEN_FILE=str(path)).tokens == ("t",)
    assert "both" in refusal(from_env, AIP_CREWAI_BEARER_TOKEN_FILE=str(path))


# --- operations and the training directory -----------------------------------------------------------------------


@pytest.mark.case(13)
def test_operations_are_a_comma_list_with_blanks_dropped() -> None:
    assert from_env(AIP_CREWAI_ALLOWED_OPERATIONS=" run , ,batch_run,").allowed_operations == (
        Operation.RUN,
        Operation.BATCH_RUN,
    )


@pytest.mark.case(13)
@pytest.mark.parametrize("wrong", ["", " , ", "status", "run,events", "run,cancel", "runn", "RUN"])
def test_other_operations_are_refused(wrong: str) -> None:
    assert "AIP_CREWAI_ALLOWED_OPERATIONS" in refusal(from_env, AIP_CREWAI_ALLOWED_OPERATIONS=wrong)


@pytest.mark.case(13)
def test_an_unknown_operation_gets_a_suggestion() -> None:
    assert "'batch_run'" in refusal(from_env, AIP_CREWAI_ALLOWED_OPERATIONS="batchrun")


@pytest.mark.case(14)
def test_train_needs_a_training_directory() -> None:
    assert "training_dir" in refusal(from_env, AIP_CREWAI_ALLOWED_OPERATIONS="train")


@pytest.mark.case(14)
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_training_directory_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "training"
    path.mkdir()
    path.chmod(mode)
    assert f"{mode:04o}" in refusal(with_training, path)
    assert f"{mode:04o}" in refusal(prepare_training_dir, path)


@pytest.mark.case(14)
def test_a_training_directory_that_is_a_symlink_or_a_file_is_refused(tmp_path: Path) -> None:
    real, link, file = tmp_path / "real", tmp_path / "link", tmp_path / "file"
    real.mkdir(mode=0o700)
    link.symlink_to(real)
    file.touch()
    for path in (link, file):
        assert str(path) in refusal(with_training, path)
        assert str(path) in refusal(prepare_training_dir, path)


@pytest.mark.case(14)
def test_a_missing_training_directory_is_created_private_at_start_only(tmp_path: Path) -> None:
    path = tmp_path / "new" / "training"
    assert with_training(path).training_dir == path
    assert not path.parent.exists()
    old = os.umask(0)
    try:
        prepare_training_dir(path)
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o700
    prepare_training_dir(path)


def with_training(path: Path) -> Settings:
    """Load with ``train`` allowed."""
    return from_env(AIP_CREWAI_ALLOWED_OPERATIONS="train", AIP_CREWAI_TRAINING_DIR=str(path))
