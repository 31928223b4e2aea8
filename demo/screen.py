"""What a person reads: headings, facts, and claims that are checked before they are printed."""

from __future__ import annotations

import os
import sys
import textwrap

WIDTH = 96
COLOURS = {"bold": "1", "dim": "2", "red": "31", "green": "32", "cyan": "36"}


class Screen:
    """Prints; counts the claims that did not hold."""

    def __init__(self) -> None:
        self.claims = 0
        self.broken = 0
        self._coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "") != "dumb"

    def paint(self, text: str, colour: str) -> str:
        """``text`` in a colour, where colours are wanted."""
        return f"\033[{COLOURS[colour]}m{text}\033[0m" if self._coloured else text

    def write(self, text: str) -> None:
        """Print at once and without a newline."""
        sys.stdout.write(text)
        sys.stdout.flush()

    def title(self, text: str) -> None:
        """A heading."""
        self.write("\n" + self.paint(text, "bold") + "\n")

    def say(self, text: str) -> None:
        """A paragraph of prose."""
        self.write(textwrap.fill(text, WIDTH, initial_indent="   ", subsequent_indent="   ") + "\n")

    def fact(self, name: str, value: object) -> None:
        """A name and its value."""
        self.write(f"     {self.paint(f'{name:<18}', 'cyan')} {value}\n")

    def note(self, text: str) -> None:
        """A line of what happens."""
        self.write(f"     {text}\n")

    def claim(self, text: str, holds: bool) -> None:
        """Something that this demo promises; ``holds`` says whether it was so."""
        self.claims += 1
        self.broken += not holds
        mark = self.paint("  ok", "green") if holds else self.paint("  NOT SO:", "red")
        indent = " " * 8
        self.write(f"{mark}  {textwrap.fill(text, WIDTH - 8, subsequent_indent=indent)}\n")
