"""Which server a command talks to, and with which token: flags, then the environment, then the client file."""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path

import click
import msgspec

from protocol.errors import ConfigError
from supervisor import tokens

SERVER_VARIABLE = "CREW_SUPERVISOR_SERVER"
TOKEN_VARIABLE = "AIP_CREWAI_BEARER_TOKEN"
TOKEN_FILE_VARIABLE = "AIP_CREWAI_BEARER_TOKEN_FILE"
CLIENT_FILE_VARIABLE = "CREW_SUPERVISOR_CLIENT_FILE"
DEFAULT_SERVER = "http://127.0.0.1:8090"
#: Below XDG_CONFIG_HOME, else ~/.config.
CLIENT_FILE = Path("crew-supervisor", "client.toml")
MAX_CLIENT_FILE_BYTES = 65_536

server_option = click.option(
    "--server", metavar="URL", help=f"The server; else {SERVER_VARIABLE}, the client file, {DEFAULT_SERVER}."
)
token_option = click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help=f"File with the token; else what {TOKEN_FILE_VARIABLE} or {TOKEN_VARIABLE} says, the client file.",
)
client_file_option = click.option(
    "--client-file",
    type=click.Path(path_type=Path),
    help=f"TOML file with server, token or token_file; else {CLIENT_FILE_VARIABLE}, ~/.config/{CLIENT_FILE}.",
)


class Target(msgspec.Struct, frozen=True):
    """A server's URL and the token that it wants, None without one."""

    url: str
    token: str | None


class ClientFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a client file says; ``token_file`` is relative to it. Its token is for its server and no other."""

    server: str = DEFAULT_SERVER
    token: str | None = None
    token_file: str | None = None


def find_target(
    server: str | None, token_file: Path | None, client_file: Path | None, environ: Mapping[str, str]
) -> Target:
    """The server and token to use; arguments are the flags. A blank variable says nothing. Raises ConfigError."""
    path = client_file or _path_of(environ.get(CLIENT_FILE_VARIABLE, ""))
    found = _read_client_file(path) if path is not None else _read_default(environ)
    url = server or environ.get(SERVER_VARIABLE, "").strip() or (found[1].server if found else DEFAULT_SERVER)
    token = _told_token(token_file, environ)
    # A token must not go to a server that it was not written down for.
    if token is None and found is not None and url.rstrip("/") == found[1].server.rstrip("/"):
        token = _file_token(*found)
    return Target(url, token)


def _path_of(text: str) -> Path | None:
    return Path(text.strip()) if text.strip() else None


def _told_token(token_file: Path | None, environ: Mapping[str, str]) -> str | None:
    path = token_file or _path_of(environ.get(TOKEN_FILE_VARIABLE, ""))
    if path is not None:
        return tokens.read_token_file(path)
    text = environ.get(TOKEN_VARIABLE, "")
    return tokens.check_token(text, TOKEN_VARIABLE) if text.strip() else None


def _file_token(path: Path, said: ClientFile) -> str | None:
    if said.token_file is not None:
        return tokens.read_token_file(path.parent / said.token_file)
    return None if said.token is None else tokens.check_token(said.token, f"token in {path}")


def _read_default(environ: Mapping[str, str]) -> tuple[Path, ClientFile] | None:
    base = environ.get("XDG_CONFIG_HOME", "") or (f"{environ['HOME']}/.config" if environ.get("HOME") else "")
    path = Path(base, CLIENT_FILE)
    return _read_client_file(path) if base and os.path.lexists(path) else None


def _read_client_file(path: Path) -> tuple[Path, ClientFile]:
    """Raises ConfigError, also for a file that others may read or that is another user's."""
    try:
        # O_NONBLOCK: opening a FIFO must not wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            _check_stat(os.fstat(fd), path)
            body = file.read(MAX_CLIENT_FILE_BYTES)
    except OSError as error:
        raise ConfigError(f"client file {path} cannot be read: {error.strerror}") from None
    try:
        said = msgspec.convert(tomllib.loads(body.decode("utf-8")), ClientFile)
    except (ValueError, msgspec.ValidationError) as error:
        # Only the place and the kind: the text of a line may be the token.
        why = error if isinstance(error, msgspec.ValidationError) else "it is no TOML in UTF-8"
        raise ConfigError(f"client file {path} is refused: {why}") from None
    if said.token is not None and said.token_file is not None:
        raise ConfigError(f"client file {path} has both token and token_file; keep one")
    return path, said


def _check_stat(found: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"client file {path} is no regular file")
    if found.st_mode & tokens.FORBIDDEN:
        mode = stat.S_IMODE(found.st_mode)
        raise ConfigError(f"client file {path} is open to group or others (mode {mode:04o}); chmod it to 0600")
    if found.st_uid not in (os.geteuid(), 0):
        raise ConfigError(f"client file {path} belongs to another user")
