"""Looks for what would keep a supervisor from starting, or from keeping its promises, here. Nothing is changed."""

from supervisor.doctor.checks import CHECKS, Check, examine
from supervisor.doctor.finding import Finding, Report, Verdict

__all__ = ["CHECKS", "Check", "Finding", "Report", "Verdict", "examine"]
