"""The interpreter, the packages, and where the names of our three packages lead to."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from supervisor.doctor.finding import Said, failure, ok, warning
from supervisor.environment import worker_environment

DISTRIBUTION = "crew-supervisor"
OURS = ("protocol", "supervisor", "worker")
PYTHONS = ((3, 11), (3, 14))
#: Where the packages are that this very program is made of.
HOME = Path(__file__).resolve().parents[2]
#: Templates are started with ``python -m``, which looks into the working directory first; so does this.
FIND = """
import importlib.util, json, sys
found = [importlib.util.find_spec(name) for name in sys.argv[1:]]
print(json.dumps([spec and (spec.origin or str(spec.submodule_search_locations)) for spec in found]))
"""
FIND_TIMEOUT_S = 60
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)\s*(?:\[[^]]*\])?\s*([<>=!~][^;]*)?$")
_OWN_ENVIRONMENT = f"install {DISTRIBUTION} and your project into a virtual environment of their own"


def python() -> Said:
    """The interpreter's version."""
    version = platform.python_version()
    low, high = (".".join(map(str, bound)) for bound in PYTHONS)
    if not PYTHONS[0] <= sys.version_info[:2] < PYTHONS[1]:
        return failure(f"Python {version}", f"make the virtual environment with Python {low} or later, below {high}")
    return ok(f"Python {version} at {sys.executable}")


def packages() -> Said:
    """Versions of what we need, against the ranges that we were made for."""
    try:
        required = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return warning(f"{DISTRIBUTION} is not installed, so that no ranges are known", "install it with pip")
    shown, wrong = [], []
    for name, bounds in _named(required):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{name} is missing")
            continue
        shown.append(f"{name} {version}")
        if not within(version, bounds):
            wrong.append(f"{name} {version} is not {bounds}")
    if wrong:
        return failure("; ".join(wrong), f"pip install --upgrade {DISTRIBUTION}, in an environment of its own")
    return ok(", ".join(shown))


def _named(required: list[str]) -> Iterator[tuple[str, str]]:
    for line in required:
        found = _REQUIREMENT.match(line.partition(";")[0].strip())
        if found and "extra ==" not in line:
            yield found[1], (found[2] or "").strip()


def within(version: str, bounds: str) -> bool:
    """Whether a version keeps bounds such as ``>=3.11,<4``; other comparisons than these two are not looked at."""
    found = _numbers(version)
    for bound in filter(None, bounds.split(",")):
        wanted = _numbers(bound.strip().lstrip("<>=!~ "))
        length = max(len(found), len(wanted))
        left, right = (numbers + (0,) * (length - len(numbers)) for numbers in (found, wanted))
        text = bound.strip()
        if (text.startswith(">=") and left < right) or (text.startswith("<") and text[1:2] != "=" and left >= right):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def names() -> Said:
    """Whether our packages' names lead to ours, here and in a worker, and no other distribution has them too."""
    foreign = [*_strangers("here", _found_here()), *_strangers("in a worker", _found_by_workers())]
    if foreign:
        return failure("; ".join(foreign), f"rename or remove it, or {_OWN_ENVIRONMENT}")
    clashes = [
        f"{name} also belongs to {distribution.name} {distribution.version}"
        for distribution in metadata.distributions()
        if distribution.name != DISTRIBUTION
        for name in _shared(distribution)
    ]
    if clashes:
        return failure("the distributions overwrite each other: " + "; ".join(clashes), _OWN_ENVIRONMENT)
    return ok(f"{', '.join(OURS)} are imported from {HOME}")


def _shared(distribution: metadata.Distribution) -> list[str]:
    """Our names among the packages of a distribution."""
    listed = distribution.read_text("top_level.txt")
    if listed is not None:
        return [name for name in OURS if name in listed.split()]
    files = "\n" + (distribution.read_text("RECORD") or "")
    return [name for name in OURS if f"\n{name}/" in files or f"\n{name}.py," in files]


def _found_here() -> list[str | None]:
    specs = [importlib.util.find_spec(name) for name in OURS]
    return [None if spec is None else spec.origin or str(spec.submodule_search_locations) for spec in specs]


def _found_by_workers() -> list[str | None]:
    done = subprocess.run(
        [sys.executable, "-c", FIND, *OURS],
        env=worker_environment(os.environ, home=Path.home()),
        capture_output=True,
        text=True,
        timeout=FIND_TIMEOUT_S,
        check=True,
    )
    found: list[str | None] = json.loads(done.stdout)
    return found


def _strangers(where: str, origins: list[str | None]) -> list[str]:
    pairs = zip(OURS, origins, strict=True)
    return [
        f"{name} is {origin or 'not found'} {where}"
        for name, origin in pairs
        if origin is None or Path(origin).resolve().parent.parent != HOME
    ]
