"""A page of the documentation as its reader has it: blocks of code, of configuration and of commands."""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)


class Page:
    """One page, named as a link in ``docs`` names it."""

    def __init__(self, name: str) -> None:
        self.text = (DOCS / name).read_text(encoding="utf-8")

    def all_blocks(self) -> list[tuple[str, str]]:
        """Language and text of every block, in their order."""
        return [(language, textwrap.dedent(text)) for _, language, text in FENCED.findall(self.text)]

    def table(self, *header: str) -> list[list[str]]:
        """Rows of the table whose header starts with these cells."""
        begin = re.escape(" | ".join(header))
        found = re.search(rf"^\| {begin}.*\n\|[-|]+\|\n((?:\|.*\n)+)", self.text, re.MULTILINE)
        assert found, f"there is no table {header}"
        return [[cell.strip() for cell in line.strip("|").split("|")] for line in found[1].splitlines()]

    def blocks(self, language: str, *, section: str | None = None) -> list[str]:
        """The blocks in a language, "" for those in none, in their order; those below one heading."""
        text = self.text if section is None else self._section(section)
        return [textwrap.dedent(code) for _, name, code in FENCED.findall(text) if name == language]

    def _section(self, heading: str) -> str:
        _, found, rest = self.text.partition(f"\n## {heading}\n")
        assert found, f"there is no section {heading}"
        return rest.partition("\n## ")[0]


def plain(cell: str) -> str:
    """A cell without the marks of code."""
    return cell.strip("`")


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
