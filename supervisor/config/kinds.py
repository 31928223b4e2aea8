"""Kinds of setting: how each is read from an environment variable or a TOML value, and what it accepts.

A reader returns the checked value or raises ``Refused`` with the reason and what to set instead; which setting it was
is added by the caller.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from protocol.operations import CONTROL_OPERATIONS, Operation


class Refused(Exception):
    """A value is not acceptable; the text says why and what would be."""


class Kind(Protocol):
    """One kind of setting. ``base`` is the directory that relative paths start from."""

    def from_text(self, text: str, base: Path) -> Any:
        """Read an environment variable's text."""
        ...

    def from_toml(self, value: Any, base: Path) -> Any:
        """Read a parsed TOML value."""
        ...


def suggest(name: str, known: Sequence[str]) -> str:
    """Return ``; did you mean 'x'?`` for the closest known name, or nothing."""
    close = get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


class Integer:
    """An integer in a range; ``toml_high`` lets the file go further than the environment."""

    def __init__(self, low: int, high: int, *, toml_high: int | None = None) -> None:
        self.low = low
        self.high = high
        self.toml_high = high if toml_high is None else toml_high

    def from_text(self, text: str, base: Path) -> int:
        """Read as Python's ``int()`` does: blanks around it and ``1_000`` are taken."""
        try:
            value = int(text)
        except ValueError:
            raise Refused(f"is not an integer; set one from {self.low} to {self.high}") from None
        return self._within(value, self.high)

    def from_toml(self, value: Any, base: Path) -> int:
        """Read a TOML integer; neither a boolean nor a float is one."""
        if not isinstance(value, int) or isinstance(value, bool):
            raise Refused(f"is not an integer; set one from {self.low} to {self.toml_high}")
        return self._within(value, self.toml_high)

    def _within(self, value: int, high: int) -> int:
        if not self.low <= value <= high:
            raise Refused(f"is outside {self.low}..{high}; set an integer within")
        return value


class Number:
    """A finite number of seconds in a range."""

    def __init__(self, low: float, high: float) -> None:
        self.low = low
        self.high = high

    def from_text(self, text: str, base: Path) -> float:
        """Read as Python's ``float()`` does, finite numbers only."""
        try:
            value = float(text)
        except ValueError:
            raise Refused(f"is not a number; set one from {self.low:g} to {self.high:g}") from None
        return self._within(value)

    def from_toml(self, value: Any, base: Path) -> float:
        """Read a TOML integer or float."""
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise Refused(f"is not a number; set one from {self.low:g} to {self.high:g}")
        return self._within(value)

    def _within(self, value: float) -> float:
        # A TOML integer may be too large for a float, so the range is checked first; NaN fails every comparison.
        if not self.low <= value <= self.high or not math.isfinite(value):
            raise Refused(f"is outside {self.low:g}..{self.high:g}; set a number within")
        return float(value)


class Text:
    """Text that is not blank; with ``optional``, blank text in the environment means that it is not set."""

    def __init__(self, *, optional: bool = False) -> None:
        self.optional = optional

    def from_text(self, text: str, base: Path) -> str | None:
        """Return the trimmed text."""
        if not text.strip():
            if self.optional:
                return None
            raise Refused("is blank; set it or remove it")
        return self.check(text.strip())

    def from_toml(self, value: Any, base: Path) -> str:
        """Read a TOML string."""
        if not isinstance(value, str) or not value.strip():
            raise Refused("is not text; set a string that is not blank")
        return self.check(value.strip())

    def check(self, text: str) -> str:
        """Return ``text`` if it may be used. Raises Refused."""
        if "\0" in text:
            raise Refused("contains a NUL character; remove it")
        return text


class Host(Text):
    """An address or host name to listen on."""

    def check(self, text: str) -> str:
        """Refuse what no resolver takes."""
        if any(char.isspace() or char < " " for char in text):
            raise Refused("contains blanks or control characters; set an address such as 127.0.0.1")
        return text


class ReplicaName(Text):
    """An id of a replica, which can stand in a path and in a header."""

    def check(self, text: str) -> str:
        """Letters, digits, dots, dashes and underscores."""
        if not _REPLICA.fullmatch(text):
            raise Refused("is no replica id; set 1 to 64 letters, digits, '.', '_' or '-', the first a letter or digit")
        return text


class Url(Text):
    """The base URL of an HTTP server."""

    def check(self, text: str) -> str:
        """Return it without the slash at its end."""
        try:
            parts = urlsplit(text)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            usable = False
        if not usable or parts.query or parts.fragment or parts.username is not None or not text.isascii():
            raise Refused("is no base URL; set for example http://replica-0.crew:8090")
        return text.rstrip("/")


class RegistrySpec(Text):
    """``module:attribute``, both dotted Python names."""

    def check(self, text: str) -> str:
        """Check the form only; the template imports it."""
        module, colon, attribute = text.partition(":")
        if not colon or not all(part.isidentifier() for name in (module, attribute) for part in name.split(".")):
            raise Refused("is not of the form module:attribute; set for example my_crews:registry")
        return text


class Directory(Text):
    """A path, made absolute from ``base``; symlinks are left as they are."""

    def __init__(self) -> None:
        super().__init__(optional=True)

    def from_text(self, text: str, base: Path) -> Any:
        """Return an absolute Path, or None for blank text."""
        found = super().from_text(text, base)
        return None if found is None else base / found

    def from_toml(self, value: Any, base: Path) -> Any:
        """Return an absolute Path."""
        return base / super().from_toml(value, base)


class Paths:
    """A list of paths, made absolute from ``base``."""

    def from_text(self, text: str, base: Path) -> tuple[Path, ...]:
        """Read a comma list."""
        return tuple(base / entry.strip() for entry in text.split(",") if entry.strip())

    def from_toml(self, value: Any, base: Path) -> tuple[Path, ...]:
        """Read a TOML array of strings."""
        return tuple(base / entry for entry in strings(value))


class Choice(Text):
    """One of a few words."""

    def __init__(self, *words: str) -> None:
        super().__init__()
        self.words = words

    def check(self, text: str) -> str:
        """Refuse any other word."""
        if text not in self.words:
            hint = suggest(text, self.words) or "; set one of them"
            raise Refused(f"is not one of {', '.join(self.words)}{hint}")
        return text


class Flag:
    """A boolean. In the environment only ``1`` and ``true`` mean yes, every other text no (contract, section 1)."""

    def from_text(self, text: str, base: Path) -> bool:
        """Read trimmed and in any case."""
        return text.strip().lower() in {"1", "true"}

    def from_toml(self, value: Any, base: Path) -> bool:
        """Read a TOML boolean."""
        if not isinstance(value, bool):
            raise Refused("is not a boolean; set true or false")
        return value


class Operations:
    """The operations that may be started: a comma list in the environment, an array of strings in the file."""

    def from_text(self, text: str, base: Path) -> tuple[Operation, ...]:
        """Entries are trimmed and blank ones dropped."""
        return self._check([entry.strip() for entry in text.split(",") if entry.strip()])

    def from_toml(self, value: Any, base: Path) -> tuple[Operation, ...]:
        """Read a TOML array of strings."""
        return self._check(strings(value))

    def _check(self, names: Sequence[str]) -> tuple[Operation, ...]:
        known = [operation.value for operation in Operation]
        if not names:
            raise Refused(f"names no operation; set some of {', '.join(known)}")
        for name in names:
            if name in CONTROL_OPERATIONS:
                raise Refused(f"contains {name!r}, which is always available and cannot be started; remove it")
            if name not in known:
                hint = suggest(name, known) or f"; set some of {', '.join(known)}"
                raise Refused(f"contains the unknown operation {name[:64]!r}{hint}")
        return tuple(operation for operation in Operation if operation.value in names)


class Modules:
    """Dotted module names; none is fine."""

    def from_text(self, text: str, base: Path) -> tuple[str, ...]:
        """Read a comma list."""
        return self._check([entry.strip() for entry in text.split(",") if entry.strip()])

    def from_toml(self, value: Any, base: Path) -> tuple[str, ...]:
        """Read a TOML array of strings."""
        return self._check(strings(value))

    def _check(self, names: Sequence[str]) -> tuple[str, ...]:
        for name in names:
            if not all(part.isidentifier() for part in name.split(".")):
                raise Refused(f"contains {name[:64]!r}, which is no module name; set names such as crewai")
        return tuple(names)


_REPLICA = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Variables:
    """A table of environment variables for a crew's workers; file only."""

    def from_text(self, text: str, base: Path) -> dict[str, str]:
        """There is no variable for this setting."""
        raise Refused("cannot be set by an environment variable; use the configuration file")

    def from_toml(self, value: Any, base: Path) -> dict[str, str]:
        """Read a table of strings. Values may be secrets, so no message repeats one."""
        if not isinstance(value, dict):
            raise Refused("is not a table; set NAME = \"text\" pairs")
        for name, text in value.items():
            if not _VARIABLE.fullmatch(name):
                raise Refused(f"has the name {name[:64]!r}; set names of letters, digits and underscores")
            if not isinstance(text, str) or "\0" in text:
                raise Refused(f"has no usable text for {name!r}; set a string without NUL")
        return dict(value)


def strings(value: Any) -> list[str]:
    """Return ``value`` if it is an array of strings. Raises Refused."""
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise Refused("is not an array of strings; set for example [\"run\"]")
    return value
