"""Token files and the Authorization header."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from protocol.errors import ConfigError
from supervisor.tokens import bearer_matches, read_token_file


def write(path: Path, body: bytes, mode: int = 0o600) -> Path:
    """Write a token file with exactly that mode."""
    path.write_bytes(body)
    path.chmod(mode)
    return path


def refusal(path: Path) -> str:
    """The message with which a token file is refused."""
    with pytest.raises(ConfigError) as caught:
        read_token_file(path)
    assert str(path) in caught.value.detail
    return caught.value.detail


@pytest.mark.case(11)
@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_private_file_is_read_and_trimmed(tmp_path: Path, mode: int) -> None:
    assert read_token_file(write(tmp_path / "token", b" tok en \n", mode)) == "tok en"


@pytest.mark.case(11)
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o610, 0o601, 0o620, 0o602, 0o644])
def test_a_file_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    assert f"{mode:04o}" in refusal(write(tmp_path / "token", b"t", mode))


@pytest.mark.case(11)
@pytest.mark.parametrize("body", [b"", b"\n", b" \t\n", b"\xff\xfe", b"a\nb", b"a\x00b", b"a\rb"])
def test_a_file_without_one_usable_token_is_refused(tmp_path: Path, body: bytes) -> None:
    refusal(write(tmp_path / "token", body))


@pytest.mark.case(11)
def test_the_size_has_both_bounds(tmp_path: Path) -> None:
    assert len(read_token_file(write(tmp_path / "token", b"x" * 16_384))) == 16_384
    assert "16385" in refusal(write(tmp_path / "token", b"x" * 16_385))
    assert read_token_file(write(tmp_path / "token", b"x")) == "x"


@pytest.mark.case(11)
def test_only_a_regular_file_is_read(tmp_path: Path) -> None:
    real, link, fifo = write(tmp_path / "token", b"t"), tmp_path / "link", tmp_path / "fifo"
    link.symlink_to(real)
    os.mkfifo(fifo, 0o600)
    for path in (link, fifo, tmp_path, tmp_path / "missing"):
        refusal(path)


@pytest.mark.case(11)
@pytest.mark.parametrize("replacement", ["file", "symlink", "fifo"])
def test_a_file_that_is_replaced_while_it_is_opened_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replacement: str
) -> None:
    path, other = write(tmp_path / "token", b"t"), write(tmp_path / "other", b"attacker")
    real_lstat = os.lstat

    def put(kind: str) -> None:
        if kind == "file":
            other.rename(path)
        elif kind == "symlink":
            path.symlink_to(other)
        else:
            os.mkfifo(path, 0o600)

    def lstat_then_replace(name: Path) -> os.stat_result:
        found = real_lstat(name)
        if name == path:
            path.unlink()
            put(replacement)
        return found

    monkeypatch.setattr(os, "lstat", lstat_then_replace)
    refusal(path)


@pytest.mark.case(3)
@pytest.mark.parametrize(
    "header",
    [
        None, b"", b"Bearer", b"Bearer ", b"tok", b"bearer tok", b"BEARER tok", b"Bearer  tok", b"Bearer tok ",
        b" Bearer tok", b"Bearer\ttok", b"Bearer to", b"Bearer tokk", b"Basic tok", b"Bearer t\xe9k", b"\xe9",
    ],
)  # fmt: skip
def test_any_other_header_does_not_match(header: bytes | None) -> None:
    assert bearer_matches(header, ("tok",)) is False


@pytest.mark.case(3)
def test_the_exact_header_matches() -> None:
    assert bearer_matches(b"Bearer tok", ("tok",)) is True
    assert bearer_matches(b"Bearer new", ("old", "new")) is True
    assert bearer_matches("Bearer é".encode(), ("é",)) is True


def test_without_tokens_nothing_matches() -> None:
    assert bearer_matches(b"Bearer ", ()) is False
    assert bearer_matches(b"Bearer None", ()) is False
