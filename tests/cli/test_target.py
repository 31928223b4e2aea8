"""Where a command finds its server and its token, and what it refuses to read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from protocol.errors import ConfigError
from supervisor.cli.target import (
    CLIENT_FILE,
    CLIENT_FILE_VARIABLE,
    DEFAULT_SERVER,
    SERVER_VARIABLE,
    TOKEN_FILE_VARIABLE,
    TOKEN_VARIABLE,
    Target,
    find_target,
)
from tests.support.server import Server
from tests.unit.test_cli import run


def secret(path: Path, text: str, mode: int = 0o600) -> Path:
    """A file for its owner only."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    path.write_text(text)
    path.chmod(mode)
    return path


def test_without_anything_it_is_this_machine_and_no_token() -> None:
    assert find_target(None, None, None, {}) == Target(DEFAULT_SERVER, None)


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    """Takes one source away after another, from the strongest to the weakest."""
    said = secret(tmp_path / "client.toml", 'server = "https://file"\ntoken = "of-the-file"\n')
    flag = secret(tmp_path / "flag", "of-the-flag")
    environ = {
        SERVER_VARIABLE: "https://environment",
        TOKEN_FILE_VARIABLE: str(secret(tmp_path / "variable", "of-the-variable's-file")),
        TOKEN_VARIABLE: "of-the-variable",
    }
    assert find_target("https://flag", flag, said, environ) == Target("https://flag", "of-the-flag")
    assert find_target(None, None, said, environ) == Target("https://environment", "of-the-variable's-file")
    environ[TOKEN_FILE_VARIABLE] = " "
    assert find_target(None, None, said, environ) == Target("https://environment", "of-the-variable")
    environ[SERVER_VARIABLE] = ""
    assert find_target(None, None, said, environ) == Target("https://file", "of-the-variable")
    del environ[TOKEN_VARIABLE]
    assert find_target(None, None, said, environ) == Target("https://file", "of-the-file")


def test_the_client_file_is_named_by_flag_variable_or_its_place(tmp_path: Path) -> None:
    files = {name: secret(tmp_path / name / CLIENT_FILE, f'server = "https://{name}"') for name in "abc"}
    home = secret(tmp_path / "home" / ".config" / CLIENT_FILE, 'server = "https://home"')
    environ = {
        CLIENT_FILE_VARIABLE: str(files["b"]),
        "XDG_CONFIG_HOME": str(tmp_path / "c"),
        "HOME": str(tmp_path / "home"),
    }
    assert find_target(None, None, files["a"], environ).url == "https://a"
    assert find_target(None, None, None, environ).url == "https://b"
    del environ[CLIENT_FILE_VARIABLE]
    assert find_target(None, None, None, environ).url == "https://c"
    del environ["XDG_CONFIG_HOME"]
    assert find_target(None, None, None, environ).url == "https://home"
    home.unlink()
    assert find_target(None, None, None, environ).url == DEFAULT_SERVER


def test_a_token_file_is_relative_to_the_client_file(tmp_path: Path) -> None:
    secret(tmp_path / "deep" / "token", "beside-it")
    said = secret(tmp_path / "deep" / "client.toml", 'token_file = "token"')
    assert find_target(None, None, said, {}) == Target(DEFAULT_SERVER, "beside-it")


@pytest.mark.parametrize("server", ["https://another", "https://file.example", "http://file"])
def test_the_file_s_token_goes_to_no_other_server(tmp_path: Path, server: str) -> None:
    said = secret(tmp_path / "client.toml", 'server = "https://file"\ntoken = "of-the-file"\n')
    assert find_target(server, None, said, {}) == Target(server, None)
    assert find_target(None, None, said, {SERVER_VARIABLE: server}) == Target(server, None)
    assert find_target("https://file/", None, said, {}).token == "of-the-file"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o666, 0o611])
def test_a_file_that_others_may_open_is_refused(tmp_path: Path, mode: int) -> None:
    said = secret(tmp_path / "client.toml", 'token = "t-1"', mode)
    with pytest.raises(ConfigError, match=f"{mode:04o}.*0600"):
        find_target(None, None, said, {})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("server = 1", "server"),
        ("sever = 'x'", "sever"),
        ("token = secret-and-no-toml", "no TOML"),
        ("token = 'a'\ntoken_file = 'b'", "both"),
        ("token = ''", "blank"),
        ("token_file = 'missing'", "cannot be read"),
    ],
)
def test_a_file_without_sense_is_refused_and_no_token_is_repeated(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        find_target(None, None, secret(tmp_path / "client.toml", text), {})
    assert "secret-and" not in refused.value.detail


def test_no_link_fifo_or_missing_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(secret(tmp_path / "file", ""))
    os.mkfifo(tmp_path / "fifo", 0o600)
    for name in ("link", "fifo", "missing"):
        with pytest.raises(ConfigError):
            find_target(None, None, tmp_path / name, {})
    with pytest.raises(ConfigError):
        find_target(None, None, None, {CLIENT_FILE_VARIABLE: str(tmp_path / "missing")})


def test_a_command_uses_it(server: Server, tmp_path: Path) -> None:
    said = secret(tmp_path / CLIENT_FILE, f'server = "{server.url}"\ntoken = "{server.token}"\n')
    assert run("ps", XDG_CONFIG_HOME=str(tmp_path)).returncode == 0
    assert run("ps", "--client-file", str(said)).returncode == 0
    said.chmod(0o644)
    refused = run("ps", XDG_CONFIG_HOME=str(tmp_path))
    assert (refused.returncode, "chmod it to 0600" in refused.stderr) == (2, True)
    assert run("ps", XDG_CONFIG_HOME=str(tmp_path), CREW_SUPERVISOR_SERVER=server.url).returncode == 2
