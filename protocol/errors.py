"""One error root and one table of the errors a caller can meet over HTTP, on the command line or in the log."""

from __future__ import annotations

from typing import ClassVar


class CrewError(Exception):
    """Root of every error this project raises on purpose.

    ``code`` is stable and machine readable, ``status`` is the HTTP status (RFC 9110), ``retryable`` says whether the
    same request may be sent again unchanged without an operator's decision. The message says what happened, to which
    id, and what to do next.
    """

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    title: ClassVar[str] = "Internal error"
    retryable: ClassVar[bool] = False

    def __init__(self, detail: str, *, action_id: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.action_id = action_id
        self.retry_after_s = retry_after_s


class ConfigError(CrewError):
    """A setting is missing, unknown, out of range or contradicts another; the start is refused."""

    code = "config_invalid"
    title = "Configuration refused"


class StartError(CrewError):
    """The supervisor cannot start: journal owned, registry broken, no usable stop method."""

    code = "start_refused"
    title = "Start refused"


class BadJson(CrewError):
    """The body is not strict JSON."""

    code = "json_invalid"
    status = 422
    title = "Body is not strict JSON"


class InputInvalid(CrewError):
    """The request or the operation's input breaks a rule of the contract."""

    code = "input_invalid"
    status = 422
    title = "Request refused by its schema"


class Unauthorized(CrewError):
    """No bearer token or a wrong one."""

    code = "unauthorized"
    status = 401
    title = "Invalid credential"


class ReadOnlyToken(CrewError):
    """The token may read and not change anything."""

    code = "read_only_token"
    status = 403
    title = "Token may only read"


class RequestUnreadable(CrewError):
    """The body breaks its own framing or encoding, or ended in the middle."""

    code = "request_unreadable"
    status = 400
    title = "Request cannot be read"


class LegacyRoute(CrewError):
    """A legacy route was given an operation other than run."""

    code = "legacy_route"
    status = 400
    title = "Legacy route accepts run only"


class KeyInvalid(CrewError):
    """The Idempotency-Key is too long or holds control characters."""

    code = "key_invalid"
    status = 400
    title = "Idempotency-Key refused"


class ActionMismatch(CrewError):
    """The id in the path is not the id in the body."""

    code = "action_mismatch"
    status = 400
    title = "Path and body name different Actions"


class OperationDisabled(CrewError):
    """The operation is not enabled here."""

    code = "operation_disabled"
    status = 403
    title = "Operation not enabled"


class UnknownCrew(CrewError):
    """No crew of that id is in the registry."""

    code = "crew_unknown"
    status = 404
    title = "Unknown crew"


class RouteUnknown(CrewError):
    """No route has that path."""

    code = "route_unknown"
    status = 404
    title = "Unknown path"


class MethodNotAllowed(CrewError):
    """The path has other methods; Allow names them."""

    code = "method_not_allowed"
    status = 405
    title = "Method not allowed"


class UnknownAction(CrewError):
    """No retained job has that Action id (for the crew named, where one is)."""

    code = "action_unknown"
    status = 404
    title = "Unknown Action"


class BodyTimedOut(CrewError):
    """The body did not arrive whole in time; nothing was admitted."""

    code = "body_timed_out"
    status = 408
    title = "Body came too slowly"
    retryable = True


class ActionConflict(CrewError):
    """The Action id is known with other material."""

    code = "action_conflict"
    status = 409
    title = "Action id already used with other material"


class ActionRunning(CrewError):
    """The Action is not finished, so it can be neither archived nor reconciled."""

    code = "action_running"
    status = 409
    title = "Action is still running"


class OutcomeCertain(CrewError):
    """The Action's outcome is not uncertain, so there is nothing to reconcile."""

    code = "outcome_certain"
    status = 409
    title = "Outcome is certain"


class ActionRetained(CrewError):
    """The Action ended too recently to be archived (min_retention_s)."""

    code = "action_retained"
    status = 409
    title = "Action is inside its retention window"
    retryable = True


class ActionCancelled(CrewError):
    """The Action was cancelled, so it has no result."""

    code = "action_cancelled"
    status = 409
    title = "Action was cancelled"


class ActionArchived(CrewError):
    """The Action was archived; its id stays fenced for ever."""

    code = "action_archived"
    status = 410
    title = "Action was archived"


class InputTooLarge(CrewError):
    """The body or the operation's input is above its bound."""

    code = "input_too_large"
    status = 413
    title = "Input too large"


class CursorInvalid(CrewError):
    """The cursor points outside the job's events."""

    code = "cursor_invalid"
    status = 416
    title = "Cursor outside the events"


class ExpectationUnknown(CrewError):
    """The Expect header asks for something other than 100-continue."""

    code = "expectation_unknown"
    status = 417
    title = "Unknown expectation"


class KeyMissing(CrewError):
    """The Idempotency-Key header is missing or blank."""

    code = "key_missing"
    status = 428
    title = "Idempotency-Key required"


class ConfirmationMissing(CrewError):
    """X-AIP-Archive-Confirmation does not repeat the Action id."""

    code = "confirmation_missing"
    status = 428
    title = "Archive confirmation required"


class ActionFailed(CrewError):
    """The Action failed; its last event says how."""

    code = "action_failed"
    status = 502
    title = "Action failed"


class NotAccepting(CrewError):
    """The supervisor is draining, its queue is full or a part it needs is not ready; nothing was admitted."""

    code = "not_accepting"
    status = 503
    title = "Not accepting work"
    retryable = True


class StopUnconfirmed(CrewError):
    """The work could not be shown to be gone in time; the attempt goes on."""

    code = "stop_unconfirmed"
    status = 503
    title = "Stop not confirmed"
    retryable = True


class ActionTimedOut(CrewError):
    """The Action reached its timeout and was stopped."""

    code = "action_timed_out"
    status = 504
    title = "Action timed out"


class FleetUnavailable(CrewError):
    """The fleet's database does not answer, so it is not known whose the Action is; nothing was admitted here."""

    code = "fleet_unavailable"
    status = 503
    title = "Fleet database unavailable"
    retryable = True


class LeaseInvalid(CrewError):
    """This replica has no valid lease; it admits nothing and goes on with what it had begun."""

    code = "lease_invalid"
    status = 503
    title = "Replica without a lease"
    retryable = True


class OwnerUnavailable(CrewError):
    """The replica that owns the Action has no valid lease or does not answer; the Action is executed nowhere else."""

    code = "owner_unavailable"
    status = 503
    title = "Owner of the Action unavailable"
    retryable = True


class OwnerRetired(CrewError):
    """The replica that owned the Action was retired, and what it knew of the Action is gone with it."""

    code = "owner_retired"
    status = 410
    title = "Owner of the Action was retired"


class ReplicaUnknown(CrewError):
    """The fleet has no replica of that id."""

    code = "replica_unknown"
    status = 404
    title = "Unknown replica"


class ReplicaLive(CrewError):
    """The replica's lease is valid, so it cannot be retired."""

    code = "replica_live"
    status = 409
    title = "Replica is alive"


class JournalFull(CrewError):
    """The journal retains as many jobs as it may; archive some."""

    code = "journal_full"
    status = 507
    title = "Journal full"
    retryable = True


class JournalUnavailable(CrewError):
    """The journal cannot be written; nothing was admitted or recorded."""

    code = "journal_unavailable"
    status = 507
    title = "Journal cannot be written"
    retryable = True


class NotCanonical(CrewError):
    """A value has no canonical form in RFC 8785: NaN, infinite, bytes, a set, a lone surrogate, an unsafe integer."""

    code = "effect_arguments_refused"
    status = 422
    title = "Value has no canonical form"


class EffectMalformed(CrewError):
    """A claim or receipt breaks a rule of the effect ledger; nothing was claimed."""

    code = "effect_malformed"
    status = 422
    title = "Effect refused by its schema"


class EffectConflict(CrewError):
    """The key was claimed before with other arguments or under another policy; the tool's body does not run."""

    code = "effect_conflict"
    status = 409
    title = "Effect key used with other material"


class EffectInFlight(CrewError):
    """Another call of the same key is under way."""

    code = "effect_in_flight"
    status = 409
    title = "Effect is under way"


class EffectOutcomeUnknown(CrewError):
    """An earlier call was begun and nobody knows whether it took effect; it is not repeated before a reconciliation.

    ``version``: the record's version that was seen, None where it is not at hand.
    """

    code = "effect_outcome_unknown"
    status = 409
    title = "Effect outcome unknown"

    def __init__(self, detail: str, *, version: int | None = None) -> None:
        super().__init__(detail)
        self.version = version


class EffectAbandoned(CrewError):
    """An operator gave up finding out what became of the effect; its key is blocked for ever."""

    code = "effect_abandoned"
    status = 409
    title = "Effect was abandoned"


class EffectStopping(CrewError):
    """The job is being stopped, so nothing more is claimed."""

    code = "effect_stopping"
    status = 409
    title = "Job is being stopped"


class EffectLedgerUnavailable(CrewError):
    """The ledger cannot be reached or written, so the tool does not run."""

    code = "effect_ledger_unavailable"
    status = 507
    title = "Effect ledger unavailable"
    retryable = True


class EffectStale(CrewError):
    """A report about an effect does not come from the owner of its claim; it is recorded and changes nothing."""

    code = "effect_stale"
    status = 409
    title = "Report of a past owner"


class EffectNotOpen(CrewError):
    """The effect's state does not allow that step."""

    code = "effect_not_open"
    status = 409
    title = "Effect is past that"


class EffectChanged(CrewError):
    """If-Match names another version of the effect than there is now."""

    code = "effect_changed"
    status = 412
    title = "Effect has changed"


class EffectNotFound(CrewError):
    """The ledger has no effect of that key."""

    code = "effect_not_found"
    status = 404
    title = "No effect of that key"


class EffectsOpen(CrewError):
    """The job has effects that are claimed or of unknown outcome, so it cannot be archived."""

    code = "effects_open"
    status = 409
    title = "Job has open effects"


class IfMatchMissing(CrewError):
    """A reconciliation needs If-Match with the effect's ETag."""

    code = "if_match_missing"
    status = 428
    title = "If-Match required"


class ProtocolViolation(CrewError):
    """A worker or template sent bytes that are no frame of this protocol."""

    code = "protocol_violation"
    title = "Pipe protocol violated"


class IllegalTransition(CrewError):
    """A state machine was asked for a transition that its table does not have."""

    code = "illegal_transition"
    title = "Illegal state transition"
