"""Results as a table for people and as a JSON file for comparisons."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.measure import Figure, Measured

HEADER = ("", "n", "median", "p99", "min", "max", "medians of rounds", "unit")


def print_figure(figure: Figure, measured: Sequence[Measured]) -> None:
    """Print one figure."""
    print(f"\n{figure.title}")
    rows = [HEADER, *(_row(item) for item in measured if item.values)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        print("  " + "  ".join(cells).rstrip())
    for note in figure.notes:
        print(f"  - {note}")


def _row(item: Measured) -> tuple[str, ...]:
    found = item.summary()
    if item.series.unit == "count":
        return (item.series.name, str(found["n"]), "", "", "", "", f"{found['sum']:.0f} in all", "")
    low, high = found["round_medians"]
    numbers = (found["median"], found["p99"], found["min"], found["max"])
    shown = tuple(_number(number) for number in numbers)
    return (item.series.name, str(found["n"]), *shown, f"{_number(low)} .. {_number(high)}", item.series.unit)


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def write(path: Path, machine: dict[str, str], results: dict[str, Any]) -> None:
    """Write everything that was measured to ``path``."""
    document = {"at": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine, "figures": results}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def as_document(figure: Figure, measured: Sequence[Measured]) -> dict[str, Any]:
    """One figure for the file: summaries and every value, by round."""
    return {
        "title": figure.title,
        "notes": list(figure.notes),
        "series": {
            item.series.name: {"unit": item.series.unit, **item.summary(), "rounds": item.rounds} for item in measured
        },
    }
