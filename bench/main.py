"""``make bench``: measure, print tables, write ``bench/results/<time>.json``. Nothing is asserted."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import machine, report
from bench.figures import FIGURES
from bench.measure import Figure, Scale, measure

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
OURS = ("protocol", "supervisor", "worker", "bench", "tests")


def main() -> int:
    """Measure the figures that were asked for."""
    options = _options()
    if options.list:
        for figure in FIGURES:
            print(f"{figure.name:<10}{figure.title}")
        return 0
    chosen = [figure for figure in FIGURES if not options.only or figure.name in options.only]
    _compile_bytecode()
    began = time.monotonic()
    facts = machine.describe()
    print("machine: " + ", ".join(f"{name} {value}" for name, value in facts.items()))
    results = {}
    for figure in chosen:
        scale = _scale(figure, options)
        with tempfile.TemporaryDirectory(prefix="crew-supervisor-bench-") as directory:
            measured = measure(figure, Path(directory), scale, _progress)
        _progress("")
        report.print_figure(figure, measured)
        results[figure.name] = report.as_document(figure, measured)
    facts["load at the end"] = machine.load()
    path = RESULTS / f"{datetime.now():%Y%m%d-%H%M%S}.json"
    report.write(path, facts, results)
    print(
        f"\n{time.monotonic() - began:.0f} s, load {facts['load']} .. {facts['load at the end']}, every value in {path}"
    )
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench/main.py", description="Measure and print; nothing is asserted.")
    parser.add_argument("--quick", action="store_true", help="few rounds, below two minutes")
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds of every figure")
    names = [figure.name for figure in FIGURES]
    parser.add_argument("--only", action="append", choices=names, metavar="FIGURE", help=f"one of {', '.join(names)}")
    parser.add_argument("--list", action="store_true", help="list the figures")
    return parser.parse_args()


def _scale(figure: Figure, options: argparse.Namespace) -> Scale:
    return Scale(rounds=options.rounds or figure.rounds[0 if options.quick else 1], quick=options.quick)


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
