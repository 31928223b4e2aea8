"""A mutant of the worker: the payers' decorated tools claim nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.crews.payer_crews import CREWS
from worker.guarding import calls

__all__ = ["CREWS"]


def _perform(call: calls.Call, body: Callable[[], Any], **_: Any) -> Any:
    return body()


assert "perform" in vars(calls), "calls are made elsewhere"
vars(calls)["perform"] = _perform
