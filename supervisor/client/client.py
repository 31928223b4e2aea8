"""The supervisor's routes as methods."""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from protocol import canonical
from protocol.api import JobDecision
from protocol.effects import Decision, Scope
from protocol.states import EffectState, Status
from supervisor.client import endings, requests
from supervisor.client.action import Action
from supervisor.client.answers import (
    Archived,
    Draining,
    Effect,
    EffectPage,
    EventPage,
    Fleet,
    Health,
    Job,
    JobEvidence,
    JobPage,
    Retirement,
)
from supervisor.client.connection import MAX_RESPONSE_BYTES, TIMEOUT_S, Connection, Reply, decode, decode_job
from supervisor.client.failures import ClientFailure, InvalidRequest
from supervisor.client.invocation import CANCEL_TIMEOUT_S, Invocation
from supervisor.client.requests import Call, check_id, query_text
from supervisor.client.results import Completed, Failed, Result
from supervisor.client.stream import STALL_TIMEOUT_S, EventStream, Options, Retry

#: Codes of a start's refusals that say that the Action has ended already.
ENDED = frozenset({"action_cancelled", "action_failed", "action_timed_out"})
MAX_RESPONSE_BOUND = 256 << 20

T = TypeVar("T")


class Client:
    """A client of one supervisor; use it in ``async with``. Its methods raise ClientFailure.

    ``base_url``: an origin, https or http to this machine. ``token``: the bearer token, None for a server without one.
    ``tls``: context to check the server with, the system's by default. ``timeout_s``: of one request, a waiting one
    included. ``stall_timeout_s``: silence after which a stream is taken up again, of servers that keep theirs alive.
    ``cancel_timeout_s``: how long a cancel is pursued. ``max_response_bytes``: 1..256 MiB for an answer or a stream.
    Raises InvalidRequest and InvalidCredential at once.
    """

    def __init__(
        self,
        base_url: str,
        *,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        retry: Retry | None = None,
        timeout_s: float = TIMEOUT_S,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        cancel_timeout_s: float = CANCEL_TIMEOUT_S,
        max_response_bytes: int = MAX_RESPONSE_BYTES,
    ) -> None:
        if not 1 << 20 <= max_response_bytes <= MAX_RESPONSE_BOUND:
            raise InvalidRequest("max_response_bytes must be from 1 MiB to 256 MiB")
        self._connection = Connection(
            base_url, token=token, tls=tls, timeout_s=timeout_s, max_response_bytes=max_response_bytes
        )
        self._options = Options(
            retry=Retry() if retry is None else retry,
            stall_timeout_s=stall_timeout_s,
            cancel_timeout_s=cancel_timeout_s,
        )

    async def __aenter__(self) -> Self:
        await self._connection.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._connection.close()

    # --- Actions -------------------------------------------------------------------------------------------------

    def invoke(self, action: Action) -> Invocation:
        """Do an Action to its end, with its chunks and a cancel that is confirmed; use it in ``async with``."""
        return Invocation(self._connection, action, self._options)

    async def start(self, action: Action) -> Result:
        """Start an Action, or repeat it exactly, and wait for its end on one request. A failure is a result too.

        A cancelled wait leaves the Action running.
        """
        try:
            call = requests.start(action, "/jobs")
            try:
                reply = await self._connection.exchange(call)
            except ClientFailure as failure:
                if not _has_ended(failure):
                    raise
                return await endings.of_record(self._connection, action, target=action.action_id)
            return Completed(action=action, output=reply.document)
        except ClientFailure as failure:
            return Failed(action=action, failure=failure.concerning(action))

    async def submit(self, action: Action) -> Job:
        """Start an Action, or repeat it exactly, and return its record as soon as it is durable.

        A server that does not know the preference ``respond-async`` answers only when the Action has ended.
        """
        call = requests.start(action, "/jobs", Prefer="respond-async")
        try:
            reply = await self._connection.exchange(call)
        except ClientFailure as failure:
            if not _has_ended(failure):
                raise
            return await self.status(action.action_id)
        if reply.status == 202:
            return decode_job(call, reply.document, action.action_id)
        return await self.status(action.action_id)

    def stream(self, action: Action) -> EventStream:
        """Start an Action, or repeat it exactly, and iterate its events from the first. Raises InvalidRequest."""
        call = requests.start(action, "/jobs/stream", Accept=requests.EVENT_STREAM)
        return EventStream(self._connection, call, action_id=action.action_id, options=self._options)

    # --- one job -------------------------------------------------------------------------------------------------

    async def status(self, action_id: str, *, crew_id: str | None = None) -> Job:
        """A job's record; with ``crew_id`` only if it is that crew's."""
        return await self._get_job(requests.show(action_id, crew_id=crew_id), action_id)

    async def events(self, action_id: str, *, cursor: int = 0, crew_id: str | None = None) -> EventPage:
        """A job's events so far, from ``cursor`` on."""
        return await self._get(requests.events(action_id, cursor, stream=False, crew_id=crew_id), EventPage)

    def follow(self, action_id: str, *, cursor: int = 0, crew_id: str | None = None) -> EventStream:
        """Iterate a job's events from ``cursor`` on to the terminal one; none of a job that had ended before."""
        call = requests.events(action_id, cursor, stream=True, crew_id=crew_id)
        return EventStream(
            self._connection, call, action_id=action_id, crew_id=crew_id, cursor=cursor, options=self._options
        )

    async def wait(self, action_id: str, *, crew_id: str | None = None) -> Job:
        """Wait for a job's end, however often the connection breaks; returns its terminal record."""
        job = await self.status(action_id, crew_id=crew_id)
        if not job.ended:
            async with self.follow(action_id, cursor=job.event_count, crew_id=crew_id) as events:
                async for _ in events:
                    pass
            job = await self.status(action_id, crew_id=crew_id)
        return job

    async def cancel(
        self, action_id: str, crew_id: str, *, reason: str | None = None, wait_s: int | None = None
    ) -> Job:
        """Cancel a job; returns its record when the stop is proved, or when the job had ended before.

        With ``wait_s`` (seconds) it returns after that time even without a proof: look at ``ended`` and ``stop``. A
        stop that the server cannot prove in time is RemoteTemporary with code ``stop_unconfirmed``; it goes on.
        """
        return await self._get_job(requests.cancel(crew_id, action_id, reason=reason, wait_s=wait_s), action_id)

    async def archive(self, action_id: str) -> Archived:
        """Archive a job that has ended. Its id stays fenced: it is never executed again."""
        headers = {"X-AIP-Archive-Confirmation": action_id}
        path = requests.job_path(action_id)
        call = Call(method="DELETE", path=path, headers=headers, action_id=action_id, mutation=True)
        return await self._get(call, Archived)

    async def log(self, action_id: str, *, tail: int | None = None, follow: bool = False) -> AsyncGenerator[bytes]:
        """Yield a job's captured output in pieces: all of it or its last ``tail`` bytes.

        With ``follow`` it goes on to the end of the job. A connection that breaks is TransportFailed.
        """
        path = requests.job_path(action_id, "/log", tail=tail, follow=1 if follow else None)
        call = Call(method="GET", path=path, action_id=action_id, endless=follow)
        async for piece in self._connection.pieces(call):
            yield piece

    async def evidence(self, action_id: str) -> JobEvidence:
        """What is known of a job, in one document."""
        call = Call(method="GET", path=requests.job_path(action_id, "/evidence"), action_id=action_id)
        return await self._get(call, JobEvidence)

    async def reconcile(self, action_id: str, decision: JobDecision, *, actor: str, evidence: str) -> Job:
        """Record what was found out about a job's uncertain outcome, and by whom; its record stays as it is.

        RemoteRejected with status 409 says that it runs, or that its outcome is certain.
        """
        body = {"decision": JobDecision(decision).value, "actor": actor, "evidence": evidence}
        call = Call(
            method="POST",
            path=requests.job_path(action_id, "/reconcile"),
            body=canonical.compact(body),
            action_id=action_id,
            mutation=True,
        )
        return await self._get_job(call, action_id)

    # --- the server ----------------------------------------------------------------------------------------------

    async def list_jobs(
        self,
        *,
        status: Status | None = None,
        crew_id: str | None = None,
        operation: str | None = None,
        cursor: str | None = None,
        limit: int | None = None,
    ) -> JobPage:
        """A page of the retained jobs, newest first; ``cursor`` is ``next_cursor`` of the page before."""
        query = query_text(
            status=None if status is None else Status(status).value,
            crew_id=crew_id,
            operation=operation,
            cursor=cursor,
            limit=limit,
        )
        return await self._get(Call(method="GET", path=f"/jobs{query}"), JobPage)

    async def health(self) -> Health:
        """What the server says of itself; see ``lacks`` for what a host asks of it."""
        return await self._get(Call(method="GET", path="/health"), Health)

    async def drain(self) -> Draining:
        """Have the server admit nothing more, until ``undrain`` or its end; what was admitted goes on."""
        return await self._get(Call(method="POST", path="/drain", mutation=True), Draining)

    async def undrain(self) -> Draining:
        """Have it admit again."""
        return await self._get(Call(method="DELETE", path="/drain", mutation=True), Draining)

    # --- fleet ---------------------------------------------------------------------------------------------------

    async def fleet(self) -> Fleet:
        """The replicas; RemoteRejected with status 404 where the server is none."""
        return await self._get(Call(method="GET", path="/fleet"), Fleet)

    async def retire(self, replica_id: str, *, actor: str, evidence: str) -> Retirement:
        """Write off a replica whose machine is off for good; ``evidence``: how that is known.

        RemoteRejected with status 409 says that its lease is valid.
        """
        call = Call(
            method="POST",
            path=f"/fleet/{check_id('replica_id', replica_id)}/retire",
            body=canonical.compact({"actor": actor, "evidence": evidence}),
            mutation=True,
        )
        return await self._get(call, Retirement)

    # --- effects -------------------------------------------------------------------------------------------------

    async def list_effects(
        self,
        *,
        state: EffectState | None = None,
        crew_id: str | None = None,
        scope: Scope | None = None,
        cursor: str | None = None,
        limit: int | None = None,
    ) -> EffectPage:
        """A page of the effects of every job. ``scope`` crew or global: a replica lists those of its whole fleet."""
        query = query_text(
            state=None if state is None else EffectState(state).value,
            crew_id=crew_id,
            scope=None if scope is None else Scope(scope).value,
            cursor=cursor,
            limit=limit,
        )
        return await self._get(Call(method="GET", path=f"/effects{query}"), EffectPage)

    async def job_effects(self, action_id: str, *, cursor: str | None = None) -> EffectPage:
        """A page of the effects of one job."""
        path = requests.job_path(action_id, "/effects", cursor=cursor)
        return await self._get(Call(method="GET", path=path, action_id=action_id), EffectPage)

    async def effect(self, key_id: str) -> Effect:
        """One effect, with the ``etag`` that a reconciliation of it needs."""
        call = Call(method="GET", path=f"/effects/{check_id('key_id', key_id)}")
        return _tagged(await self._connection.exchange(call), call)

    async def reconcile_effect(
        self, effect: Effect, decision: Decision, *, actor: str, evidence: str, receipt: Any = msgspec.UNSET
    ) -> Effect:
        """Record what was found out about an effect of unknown outcome, and by whom.

        ``receipt`` goes with ``settled``, and with that decision only; None is one.

        RemoteRejected with status 412 says that the effect has changed since ``effect`` was read, 409 that its state
        has nothing to reconcile.
        """
        if effect.etag is None:
            raise InvalidRequest(f"effect {effect.key_id} has no etag; read it with `effect` first")
        body = {"decision": Decision(decision).value, "actor": actor, "evidence": evidence}
        call = Call(
            method="POST",
            path=f"/effects/{check_id('key_id', effect.key_id)}/reconcile",
            body=canonical.compact(body if receipt is msgspec.UNSET else body | {"receipt": receipt}),
            headers={"If-Match": effect.etag},
            mutation=True,
        )
        return _tagged(await self._connection.exchange(call), call)

    async def _get(self, call: Call, kind: type[T]) -> T:
        reply = await self._connection.exchange(call)
        return decode(call, reply.document, kind)

    async def _get_job(self, call: Call, action_id: str) -> Job:
        reply = await self._connection.exchange(call)
        return decode_job(call, reply.document, action_id)


def _tagged(reply: Reply, call: Call) -> Effect:
    effect = decode(call, reply.document, Effect)
    return msgspec.structs.replace(effect, etag=reply.headers.get("ETag", effect.etag))


def _has_ended(failure: ClientFailure) -> bool:
    return failure.refusal is not None and failure.refusal.code in ENDED
