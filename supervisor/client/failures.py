"""What can go wrong between a caller and the supervisor: ten classes, each with the category that a host decides by.

``retryable`` is true where the same request may be sent again without asking anybody: reads only. ``uncertain`` is true
where a mutation may have taken effect and nobody here knows: reconcile it by its Action id, never under a new one.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, ClassVar, Self

import msgspec

from protocol.api import StopEvidence
from protocol.errors import CrewError, JournalFull, NotAccepting
from supervisor.client.action import Action

#: Codes of a supervisor's refusals that say that nothing was admitted, whatever class their status is of.
NOT_ADMITTED = frozenset({NotAccepting.code, JournalFull.code})


class Category(StrEnum):
    """Whom a failure concerns: credentials, the moment, the request, the connection, or what came over it."""

    AUTH = "auth"
    TEMPORARY = "temporary"
    PERMANENT = "permanent"
    TRANSPORT = "transport"
    CONNECTOR = "connector"


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """An answer that is no success; of its body only what a problem document (RFC 9457) says, if it was one."""

    status: int
    code: str | None = None
    detail: str | None = None
    retry_after_s: int | None = None


class ClientFailure(CrewError):
    """Root of the client's failures.

    ``action`` is the Action that was asked for, as it was given, so that it can be repeated exactly or reconciled;
    None for requests about something else. ``refusal`` is the server's answer where there was one. ``stop``: evidence
    of the end of the work, where the failure made the client stop it.
    """

    category: ClassVar[Category]
    #: Here it depends on the request too.
    retryable: bool  # type: ignore[misc]
    #: A read that meets it may be tried again.
    passes: ClassVar[bool] = False
    #: A mutation that meets it may have taken effect.
    leaves_doubt: ClassVar[bool] = False

    def __init__(
        self,
        detail: str,
        *,
        action: Action | None = None,
        action_id: str | None = None,
        mutation: bool = False,
        doubt: bool | None = None,
        refusal: Refusal | None = None,
    ) -> None:
        super().__init__(
            detail,
            action_id=action.action_id if action is not None else action_id,
            retry_after_s=None if refusal is None else refusal.retry_after_s,
        )
        self.action = action
        self.refusal = refusal
        self.stop: StopEvidence | None = None
        self.retryable = self.passes and not mutation
        self.uncertain = mutation and (self.leaves_doubt if doubt is None else doubt)

    def concerning(self, action: Action) -> Self:
        """The same failure, with the Action that it keeps from being done."""
        self.action, self.action_id = action, action.action_id
        return self


class InvalidCredential(ClientFailure):
    """The token cannot be a bearer token; nothing was sent."""

    code = "connector.crewai.invalid_credential"
    title = "Unusable token"
    category = Category.AUTH


class InvalidRequest(ClientFailure):
    """The configuration or the request breaks a rule that is known here; nothing was sent."""

    code = "connector.crewai.configuration_or_input"
    title = "Configuration or input refused"
    category = Category.PERMANENT


class AuthenticationFailed(ClientFailure):
    """The server answered 401 or 403: it does not know the token, or does not allow that to it."""

    code = "connector.crewai.authentication"
    title = "Not authorised"
    category = Category.AUTH


class RemoteTemporary(ClientFailure):
    """The server answered 429 or something from 500 up."""

    code = "connector.crewai.remote_temporary"
    title = "Server cannot at the moment"
    category = Category.TEMPORARY
    passes = True
    leaves_doubt = True


class RemoteRejected(ClientFailure):
    """The server refused the request with another status that is no success."""

    code = "connector.crewai.remote_rejected"
    title = "Server refuses the request"
    category = Category.PERMANENT


class TransportFailed(ClientFailure):
    """The connection could not be made, broke, or was silent for too long.

    ``sent`` is false where it was never made: then nothing has arrived, and there is no doubt.
    """

    code = "connector.crewai.transport"
    title = "Connection failed"
    category = Category.TRANSPORT
    passes = True
    leaves_doubt = True
    sent = True


class InvalidStream(ClientFailure):
    """What came is no strict JSON, no valid event stream, or ended before the terminal event."""

    code = "connector.crewai.invalid_stream"
    title = "Answer breaks the contract"
    category = Category.CONNECTOR
    passes = True
    leaves_doubt = True


class ResponseTooLarge(ClientFailure):
    """What came is above a bound on bytes or events."""

    code = "connector.crewai.response_too_large"
    title = "Answer too large"
    category = Category.CONNECTOR
    leaves_doubt = True


class CancelUnconfirmed(ClientFailure):
    """The Action was to be cancelled, and neither its end nor the end of its work could be shown."""

    code = "connector.crewai.cancelled_unconfirmed"
    title = "Cancel not confirmed"
    category = Category.TEMPORARY
    leaves_doubt = True


class ExecutionFailed(ClientFailure):
    """The Action was executed and failed; ``details`` is the data of its last event, unchanged."""

    code = "connector.crewai.execution_failed"
    title = "Action failed"
    category = Category.CONNECTOR
    leaves_doubt = True

    def __init__(self, detail: str, *, details: Any, **about: Any) -> None:
        super().__init__(detail, **about)
        self.details = details


def of_refusal(refusal: Refusal, **about: Any) -> ClientFailure:
    """The failure that an answer's status stands for; ``about`` as ClientFailure takes it.

    The status alone decides the class. The server's own code can only take doubt away: where it says that nothing was
    admitted, nothing was.
    """
    told = f": {refusal.detail}" if refusal.detail else ""
    text = f"the server answered {refusal.status}{f' {refusal.code}' if refusal.code else ''}{told}"
    if refusal.status in (401, 403):
        return AuthenticationFailed(text, refusal=refusal, **about)
    if refusal.status == 429 or refusal.status >= 500:
        if refusal.code in NOT_ADMITTED:
            about.setdefault("doubt", False)
        return RemoteTemporary(text, refusal=refusal, **about)
    return RemoteRejected(text, refusal=refusal, **about)
