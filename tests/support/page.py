"""docs/effects.md as its reader has it: blocks of code, of configuration and of commands."""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path

TEXT = Path(__file__).resolve().parents[2].joinpath("docs", "effects.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The blocks in a language, "" for those in none, in their order."""
    found = re.findall(r"^( *)```(\w*)\n(.*?)^\1```$", TEXT, re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(text) for _, name, text in found if name == language]


def block(language: str, part: str) -> str:
    """The one block with ``part`` in it."""
    (found,) = [text for text in blocks(language) if part in text]
    return found


def command(part: str, **words: str) -> list[str]:
    """Arguments of the one command with ``part`` in it; the words in capitals are replaced."""
    lines = "\n".join(blocks("")).replace("\\\n", " ").splitlines()
    (line,) = [line for line in lines if part in line]
    program, *arguments = shlex.split(line)
    assert program == "crew-supervisor"
    return [words.get(argument, argument) for argument in arguments]
