"""Tokens that the service manager hands over as credentials (systemd.exec(5), LoadCredential=)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from supervisor import tokens

#: Names of the credentials.
BEARER_TOKEN = "bearer_token"
READ_TOKEN = "read_token"
#: Not a token, but as secret: it may hold the database's password.
FLEET_DATABASE = "fleet_database"
#: A file of nothing but white space up to here is blank.
BLANK_BYTES = 64
#: Directory in which a reload finds fresh copies, in one of its own for each INVOCATION_ID: systemd reads credentials
#: at the start only, so the unit's ExecReload= puts them there.
RELOADED_VARIABLE = "CREW_SUPERVISOR_RELOADED_CREDENTIALS"


def read(name: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The token of that name, none where it was not handed over. Raises ConfigError for one that cannot be used.

    A blank file is none: the default of an optional credential (SetCredential=).
    """
    for directory in _directories(environ):
        path = directory / name
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return () if _is_blank(path) else (tokens.read_credential(path),)
    return ()


def _is_blank(path: Path) -> bool:
    """Raises FileNotFoundError; what else is wrong with the file is said by whoever reads it."""
    try:
        with path.open("rb") as file:
            return not file.read(BLANK_BYTES).strip()
    except (PermissionError, IsADirectoryError):
        return False


def _directories(environ: Mapping[str, str]) -> Iterator[Path]:
    reloaded, invocation = environ.get(RELOADED_VARIABLE), environ.get("INVOCATION_ID")
    if reloaded and invocation:
        yield Path(reloaded) / invocation
    if environ.get("CREDENTIALS_DIRECTORY"):
        yield Path(environ["CREDENTIALS_DIRECTORY"])
