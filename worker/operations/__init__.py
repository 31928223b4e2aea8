"""The seven operations as a worker performs them on one crew."""

from worker.operations.cancellation import Cancellation
from worker.operations.dispatch import perform

__all__ = ["Cancellation", "perform"]
