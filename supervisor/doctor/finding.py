"""What a check says."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

import msgspec


class Verdict(StrEnum):
    """``failure``: a start would be refused, or a promise not kept. ``warning``: it works, but not well."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


class Said(NamedTuple):
    """A verdict with its reason, and what to do about it where it is not ok."""

    verdict: Verdict
    detail: str
    advice: str = ""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the report; ``advice`` is empty where there is nothing to do."""

    name: str
    verdict: Verdict
    detail: str
    advice: str = ""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Every finding, in the order of the checks; ``ok`` if none is a failure."""

    ok: bool
    findings: tuple[Finding, ...]


def ok(detail: str) -> Said:
    """All is well."""
    return Said(Verdict.OK, detail)


def warning(detail: str, advice: str) -> Said:
    """It works, and could be better."""
    return Said(Verdict.WARNING, detail, advice)


def failure(detail: str, advice: str) -> Said:
    """It does not work."""
    return Said(Verdict.FAILURE, detail, advice)
