"""The Action: what a caller wants done, under an id that stays its own."""

from __future__ import annotations

from typing import Any

import msgspec

from protocol.operations import READ_OPERATIONS, Operation

STATUS, EVENTS, CANCEL = "status", "events", "cancel"
#: Operations that change nothing: a failure of theirs is never uncertain and may be retried.
READS = frozenset({*(operation.value for operation in READ_OPERATIONS), STATUS, EVENTS})
STARTABLE = frozenset(operation.value for operation in Operation)


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """One operation of one crew.

    ``action_id``: 1..256 of ``A-Z a-z 0-9 . _ : ~ -``; the server executes it at most once, and an exact repeat gets
    the same answer. ``idempotency_key``: part of what must be equal in a repeat, at most 512 bytes of UTF-8; the Action
    id where there is none. ``timeout_ms``: 1..3600000 from the moment the work begins; the server's default where None.
    ``operation``: one of the seven of a crew, with their inputs; or ``status``, ``events`` and ``cancel``, whose input
    is ``run_action_id`` and, for events, ``cursor``, for cancel, ``reason``.
    """

    action_id: str
    crew_id: str
    operation: str = Operation.RUN.value
    input: dict[str, Any] = msgspec.field(default_factory=dict)
    timeout_ms: int | None = None
    idempotency_key: str | None = None

    @property
    def key(self) -> str:
        """The idempotency key that is sent."""
        return self.action_id if self.idempotency_key is None else self.idempotency_key

    @property
    def mutates(self) -> bool:
        """Whether it may have effects."""
        return self.operation not in READS
