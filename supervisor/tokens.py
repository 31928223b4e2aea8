"""Bearer tokens: read from a file that nobody else can read, compared in constant time."""

from __future__ import annotations

import hmac
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from protocol.errors import ConfigError

MAX_TOKEN_BYTES = 16_384
#: Permissions that a token file must not have, and a credential of root's: systemd lets a service read that one by an
#: access list, whose mask stands where the group's bits stand elsewhere.
FORBIDDEN = 0o077
FORBIDDEN_OF_CREDENTIAL = 0o037


def check_token(text: str, origin: str) -> str:
    """Return ``text`` trimmed, if a header can carry it: 1 to MAX_TOKEN_BYTES of UTF-8, no control characters.

    ``origin`` names the setting in the message; the token itself is never repeated. Raises ConfigError.
    """
    token = text.strip()
    if not token:
        raise ConfigError(f"{origin} is blank; put a token there")
    try:
        size = len(token.encode("utf-8"))
    except UnicodeEncodeError:
        raise ConfigError(f"{origin} is not UTF-8; use a token of ASCII characters") from None
    if size > MAX_TOKEN_BYTES:
        raise ConfigError(f"{origin} has {size} bytes; use a token of at most {MAX_TOKEN_BYTES}")
    if any(char < " " or char == "\x7f" for char in token):
        raise ConfigError(f"{origin} contains a newline or another control character; put one token on one line")
    return token


def read_credential(path: Path) -> str:
    """Return the token in a file of CREDENTIALS_DIRECTORY (systemd.exec(5)). As ``read_token_file``, but for the mode:

    0400 of the service's user, or 0440 of root.
    """
    return _read(path, f"credential {str(path)!r}", FORBIDDEN_OF_CREDENTIAL)


def read_token_file(path: Path) -> str:
    """Return the token in ``path``.

    The file must be regular, no symlink, closed to group and others (0600 or 0400) and of 1 to MAX_TOKEN_BYTES; it is
    the same file before and after it is opened. Raises ConfigError.
    """
    return _read(path, f"bearer_token_file {str(path)!r}", FORBIDDEN)


def _read(path: Path, origin: str, forbidden: int) -> str:
    try:
        before = os.lstat(path)
        _check_stat(before, origin, forbidden)
        # O_NONBLOCK: opening a FIFO that took the file's place must not wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(fd, "rb", buffering=0) as file:
            after = os.fstat(fd)
            if (after.st_dev, after.st_ino) != (before.st_dev, before.st_ino):
                raise ConfigError(f"{origin} was replaced while it was opened; start again")
            _check_stat(after, origin, forbidden)
            body = file.read(MAX_TOKEN_BYTES + 1) or b""
    except OSError as error:
        raise ConfigError(f"{origin} cannot be read: {error.strerror}; create it with mode 0600") from None
    if len(body) > MAX_TOKEN_BYTES:
        raise ConfigError(f"{origin} has more than {MAX_TOKEN_BYTES} bytes; put only the token there")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{origin} is not UTF-8; use a token of ASCII characters") from None
    return check_token(text, origin)


def _check_stat(found: os.stat_result, origin: str, forbidden: int) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"{origin} is a symbolic link or no regular file; name the file itself")
    if found.st_mode & (forbidden if found.st_uid == 0 else FORBIDDEN):
        raise ConfigError(
            f"{origin} is open to group or others (mode {stat.S_IMODE(found.st_mode):04o}); chmod it to 0600"
        )
    if not 1 <= found.st_size <= MAX_TOKEN_BYTES:
        raise ConfigError(f"{origin} has {found.st_size} bytes; put a token of 1 to {MAX_TOKEN_BYTES} bytes there")


def bearer_matches(raw_header: bytes | None, tokens: Sequence[str]) -> bool:
    """Whether an Authorization header, as raw bytes, is exactly ``Bearer <token>`` with one of ``tokens``.

    False without a header and without tokens: whether callers may go unauthenticated is the caller's decision. Every
    token is compared, each in constant time.
    """
    if raw_header is None:
        return False
    matches = [hmac.compare_digest(raw_header, b"Bearer " + token.encode("utf-8")) for token in tokens]
    return any(matches)
