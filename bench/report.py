"""Results as tables for people and as a JSON file for comparisons."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.measure import Figure, Found, Measured
from bench.targets import Judged

HEADER = ("", "n", "median", "p99", "min", "max", "medians of rounds", "unit")
TARGETS_HEADER = ("figure against target", "target", "figure", "baseline", "ratio", "")


def print_figure(figure: Figure, found: Found) -> None:
    """Print one figure."""
    print(f"\n{figure.title}")
    _print_table([HEADER, *(_row(item) for item in found.measured if item.values)])
    for step, why in found.unmet.items():
        print(f"  ! {step}: not measured here, {why}")
    for note in figure.notes:
        print(f"  - {note}")
    done, wanted = found.rounds
    cut = f" of {wanted} (its time was over)" if done < wanted else ""
    print(f"  {done} rounds{cut}, {found.seconds:.0f} s, load {found.load[0]} .. {found.load[1]}", flush=True)


def _print_table(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        print("  " + "  ".join(cells).rstrip())


def _row(item: Measured) -> tuple[str, ...]:
    found = item.summary()
    name = f"({item.series.name})" if item.series.baseline else item.series.name
    if item.series.unit == "count":
        return (name, str(found["n"]), "", "", "", "", f"{found['sum']:.0f} in all", "")
    low, high = found["round_medians"]
    numbers = (found["median"], found["p99"], found["min"], found["max"])
    shown = tuple(_number(number) for number in numbers)
    return (name, str(found["n"]), *shown, f"{_number(low)} .. {_number(high)}", item.series.unit)


def _number(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 0.1 or value == 0 else f"{value:.2g}"


def print_targets(judged: Sequence[Judged]) -> None:
    """Print what was to be reached, what was, and by how much it falls short where it does."""
    print("\nTargets")
    _print_table([TARGETS_HEADER, *(_judged_row(item) for item in judged)])


def _judged_row(item: Judged) -> tuple[str, ...]:
    target = item.target
    sign = "<=" if target.at_most else ">="
    return (
        target.what,
        f"{sign} {_number(target.bound)} {target.unit}".rstrip(),
        "-" if item.value is None else _number(item.value),
        "-" if item.baseline is None else _number(item.baseline),
        "-" if item.ratio is None else f"{_number(item.ratio)}x",
        item.verdict,
    )


def write(path: Path, machine: dict[str, str], results: dict[str, Any], judged: Sequence[Judged]) -> None:
    """Write everything that was measured to ``path``."""
    document = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine,
        "figures": results,
        "targets": [item.document() for item in judged],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def as_document(figure: Figure, found: Found) -> dict[str, Any]:
    """One figure for the file: summaries and every value, by round."""
    return {
        "title": figure.title,
        "notes": list(figure.notes),
        "seconds": round(found.seconds, 1),
        "load": list(found.load),
        "rounds": list(found.rounds),
        "unmet": found.unmet,
        "series": {
            item.series.name: {
                "unit": item.series.unit,
                "baseline": item.series.baseline,
                **item.summary(),
                "rounds": item.rounds,
            }
            for item in found.measured
            if item.values
        },
    }
