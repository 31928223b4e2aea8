"""One operation at work: its crew, its input, its stream, and the moment from which effects are possible."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from protocol import frames
from worker import loaded
from worker.crew_events import Subscription
from worker.operations.cancellation import Cancellation
from worker.stream import Stream


class Refused(Exception):
    """The operation cannot be done on this crew; nothing was called."""

    def __init__(self, detail: str, error_type: str = "RegistryError") -> None:
        super().__init__(detail)
        self.error_type = error_type


@dataclass(kw_only=True)
class Job:
    """What the operations share. ``dispatched`` turns true right before the first call of a crew method."""

    crew: Any
    go: frames.Go
    input: Mapping[str, Any]
    directories: frames.Directories
    evaluators: Mapping[str, object]
    stream: Stream
    cancellation: Cancellation
    subscription: Subscription | None = None
    dispatched: bool = False
    task_ids: tuple[str, ...] = ()
    #: The bound that a thread of the crew broke, and who is told of it at once.
    fault: BaseException | None = None
    on_fault: Callable[[BaseException], None] | None = None

    @property
    def is_crewai(self) -> bool:
        """Whether the crew is CrewAI's own class, whose misbehaviours are known, and not a duck type."""
        return loaded.is_crewai_crew(self.crew)

    def method(self, *names: str) -> Callable[..., Any]:
        """The first method of ``names`` that the crew has. Raises Refused."""
        for name in names:
            if callable(found := getattr(self.crew, name, None)):
                return found  # type: ignore[no-any-return]
        raise Refused(f"crew {self.go.crew_id!r} has no method {' or '.join(names)}")

    def call(self, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call a crew's method in this thread; an awaitable that it returns is run to its end."""
        self.dispatched = True
        result = method(*arguments, **named)
        if inspect.isawaitable(result):
            return self.cancellation.run(_await(result))
        return result

    def set(self, name: str, value: object, *, only_existing: bool = False) -> None:
        """Set an attribute of the crew if it takes it; a crew that refuses goes without."""
        if only_existing and not hasattr(self.crew, name):
            return
        with contextlib.suppress(AttributeError, TypeError, ValueError):
            setattr(self.crew, name, value)

    def violated(self, fault: BaseException) -> None:
        """Note that a thread of the crew broke a bound; the operation fails with ``fault``."""
        self.fault = fault
        if self.on_fault is not None:
            self.on_fault(fault)

    def settle(self) -> None:
        """Wait for the events that the crew has emitted, so that they precede the result."""
        if self.subscription is not None:
            self.subscription.flush()


async def _await(awaitable: Any) -> Any:
    return await awaitable
