"""``make bench``: measure, print tables, write ``bench/results/<time>.json``. Nothing is asserted."""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import machine, report, targets
from bench.figures import FIGURES
from bench.goals import TARGETS
from bench.measure import Figure, Scale, Size, measure

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
#: No round of a figure begins after these seconds, so that all stays below ten minutes, or two, on a busy machine.
BUDGET_S = {Size.QUICK: 6.0, Size.NORMAL: 45.0}
BUDGETS_S = {Size.NORMAL: {"start": 70.0, "jobs": 150.0, "admission": 85.0}}
OURS = ("protocol", "supervisor", "worker", "bench", "tests")


def main() -> int:
    """Measure the figures that were asked for. Status 1 if one of them broke."""
    options = _options()
    if options.list:
        for figure in FIGURES:
            print(f"{figure.name:<10}{figure.title}")
        return 0
    chosen = [figure for figure in FIGURES if not options.only or figure.name in options.only]
    if options.size is not Size.SMOKE:
        _compile_bytecode()
    began = time.monotonic()
    facts = machine.describe() | {"size": options.size.name.lower()}
    print("machine: " + ", ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
    results, broken = {}, []
    for figure in chosen:
        try:
            results[figure.name] = _measured(figure, _scale(figure, options))
        except Exception:  # noqa: BLE001 - the other figures are still worth having
            broken.append(figure.name)
            print(f"\n{figure.title}\n  ! broke:")
            traceback.print_exc(file=sys.stdout)
    judged = targets.judge({name: found["series"] for name, found in results.items()}, TARGETS)
    report.print_targets(judged)
    facts["load at the end"] = machine.load()
    path = options.output or RESULTS / f"{datetime.now():%Y%m%d-%H%M%S}.json"
    report.write(path, facts, results, judged)
    print(
        f"\n{time.monotonic() - began:.0f} s, load {facts['load']} .. {facts['load at the end']}, every value in {path}"
    )
    if broken:
        print(f"broke: {', '.join(broken)}")
    return 1 if broken else 0


def _measured(figure: Figure, scale: Scale) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="crew-supervisor-bench-") as directory:
        found = measure(figure, Path(directory), scale, _progress)
    _progress("")
    report.print_figure(figure, found)
    return report.as_document(figure, found)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench/main.py", description="Measure and print; nothing is asserted.")
    size = parser.add_mutually_exclusive_group()
    for name, said in (
        (Size.SMOKE, "the smallest of everything, to see that it works; the numbers mean nothing"),
        (Size.QUICK, "few rounds, below two minutes"),
        (Size.FULL, "every cell, far above ten minutes"),
    ):
        size.add_argument(f"--{name.name.lower()}", dest="size", action="store_const", const=name, help=said)
    parser.set_defaults(size=Size.NORMAL)
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds of every figure")
    names = [figure.name for figure in FIGURES]
    parser.add_argument("--only", action="append", choices=names, metavar="FIGURE", help=f"one of {', '.join(names)}")
    parser.add_argument("--list", action="store_true", help="list the figures")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the values there")
    return parser.parse_args()


def _scale(figure: Figure, options: argparse.Namespace) -> Scale:
    size = options.size
    rounds = 1 if size is Size.SMOKE else figure.rounds[0 if size is Size.QUICK else 1]
    budget_s = BUDGETS_S.get(size, {}).get(figure.name, BUDGET_S.get(size, math.inf))
    return Scale(rounds=options.rounds or rounds, size=size, budget_s=budget_s)


def _compile_bytecode() -> None:
    """Cold starts are measured with compiled bytecode, even where the environment forbids Python to write it."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    places = [sysconfig.get_path("purelib"), *(str(ROOT / name) for name in OURS)]
    # A few packages ship files that no compiler accepts, so the exit status says nothing.
    _run([sys.executable, "-m", "compileall", "-qq", "-j", "2", *places], environment)


def _run(command: Sequence[str], environment: dict[str, str]) -> None:
    subprocess.run(command, env=environment, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{text}")
        sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
