"""A page of the documentation as its reader has it: blocks of code, of configuration and of commands."""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


class Page:
    """One page."""

    def __init__(self, name: str) -> None:
        self.text = (DOCS / name).read_text(encoding="utf-8")

    def blocks(self, language: str, *, section: str | None = None) -> list[str]:
        """The blocks in a language, "" for those in none, in their order; those below one heading."""
        text = self.text if section is None else self._section(section)
        found = re.findall(r"^( *)```(\w*)\n(.*?)^\1```$", text, re.DOTALL | re.MULTILINE)
        return [textwrap.dedent(code) for _, name, code in found if name == language]

    def _section(self, heading: str) -> str:
        _, found, rest = self.text.partition(f"\n## {heading}\n")
        assert found, f"there is no section {heading}"
        return rest.partition("\n## ")[0]


EFFECTS = Page("effects.md")


def blocks(language: str) -> list[str]:
    """Those of docs/effects.md."""
    return EFFECTS.blocks(language)


def block(language: str, part: str) -> str:
    """The one block of docs/effects.md with ``part`` in it."""
    (found,) = [text for text in blocks(language) if part in text]
    return found


def command(part: str, **words: str) -> list[str]:
    """Arguments of its one command with ``part`` in it; the words in capitals are replaced."""
    lines = "\n".join(blocks("")).replace("\\\n", " ").splitlines()
    (line,) = [line for line in lines if part in line]
    program, *arguments = shlex.split(line)
    assert program == "crew-supervisor"
    return [words.get(argument, argument) for argument in arguments]
