"""An Action on its way: its chunks, its one result, and a cancel that reports what was proved."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

import msgspec

from supervisor.client import endings, requests
from supervisor.client.action import CANCEL, EVENTS, READS, STARTABLE, STATUS, Action
from supervisor.client.answers import Job
from supervisor.client.connection import Connection, decode_job
from supervisor.client.failures import (
    CancelUnconfirmed,
    ClientFailure,
    InvalidRequest,
    InvalidStream,
    RemoteRejected,
    RemoteTemporary,
    ResponseTooLarge,
    TransportFailed,
)
from supervisor.client.requests import Call
from supervisor.client.results import READ_ONLY, Cancelled, Chunk, Completed, Failed, Result, chunk_of
from supervisor.client.stream import EventStream, Options

#: The server may take its grace and its stop timeout, 30 s each at most, and answers then.
CANCEL_TIMEOUT_S = 75.0
#: Chunks that wait for somebody to take them; then the stream waits too.
MAX_WAITING_CHUNKS = 256
DEFAULT_REASON = "cancelled by the caller"
FAULT_REASON = "the caller cannot read its stream"
STOP_UNCONFIRMED = "stop_unconfirmed"
#: What an operation about another job takes beside its id.
OPTIONAL = {STATUS: (), EVENTS: ("cursor",), CANCEL: ("reason",)}


class Invocation:
    """One Action being done, in ``async with``, which sends it.

    Iterate it for its chunks, the terminal one included. ``result`` waits for the end; ``cancel`` brings it about. All
    who ask get the same result, and failures are results. Leaving the block, and cancelling a task that waits, only
    stops looking: the Action goes on, and can be asked after by its id.
    """

    def __init__(self, connection: Connection, action: Action, options: Options) -> None:
        self.action = action
        self._connection = connection
        self._options = options
        self._target = action.action_id
        self._result: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        #: True once the Action is known to be admitted, false if its start failed.
        self._admission: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None
        self._canceller: asyncio.Task[None] | None = None
        self._chunks: deque[Chunk] = deque()
        self._changed = asyncio.Condition()
        self._iterators = 0
        self._awaited = False
        self._given_up: ClientFailure | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._work(), name=f"invoke {self.action.action_id}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = {task for task in (self._canceller, self._task) if task is not None}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await self._break(RuntimeError(f"the invocation of {self.action.action_id} was left before its end"))

    # --- what a caller does --------------------------------------------------------------------------------------

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """Yield the chunks that nobody has taken yet, up to the end."""
        self._iterators += 1
        try:
            while True:
                async with self._changed:
                    await self._changed.wait_for(lambda: self._chunks or self._result.done())
                    if not self._chunks:
                        return
                    chunk = self._chunks.popleft()
                    self._changed.notify_all()
                yield chunk
        finally:
            self._iterators -= 1
            await self._notify()

    async def result(self) -> Result:
        """Wait for the end. Chunks that nobody iterates are dropped from now on."""
        await self._await_end()
        return await asyncio.shield(self._result)

    async def cancel(self, reason: str | None = None) -> Result:
        """Stop the Action, whether or not its start was answered, and return what became of it.

        Cancelled says by ``remote_stop_confirmed`` whether the server has proved that nothing of the work is left. An
        Action that had ended before has its own result. Where neither can be had within ``cancel_timeout_s``: Failed
        with CancelUnconfirmed. ``reason`` is for the server's audit, at most 2048 bytes.

        A read that cannot be stopped is only left: Cancelled with ``provider_effect`` ``read_only``.
        """
        if self._entered and not self._result.done() and self._canceller is None:
            requests.check_reason(reason, action=self.action)
            self._canceller = asyncio.create_task(self._cancel(reason), name=f"cancel {self.action.action_id}")
        await self._await_end()
        return await asyncio.shield(self._result)

    @property
    def _entered(self) -> bool:
        return self._task is not None

    async def _await_end(self) -> None:
        if not self._entered:
            raise RuntimeError("an invocation is used in `async with`")
        self._awaited = True
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    # --- doing it ------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        """Send the Action and bring its end about. Decides the result, unless a cancel does."""
        try:
            result = await self._perform()
        except ClientFailure as failure:
            failure.concerning(self.action)
            if not self._admission.done():
                self._admission.set_result(False)
            if self._canceller is not None and (failure.uncertain or self._admitted):
                self._given_up = failure  # the canceller is asking what became of it
                return
            result = Failed(action=self.action, failure=failure)
        except Exception as error:  # noqa: BLE001 - whoever waits for the result has to see it
            await self._break(error)
            return
        await self._decide(result)

    @property
    def _admitted(self) -> bool:
        return self._admission.done() and self._admission.result()

    async def _decide(self, result: Result) -> None:
        if not self._result.done():
            self._result.set_result(result)
        await self._notify()

    async def _break(self, error: Exception) -> None:
        """There will be no result."""
        if not self._result.done():
            self._result.set_exception(error)
            self._result.exception()  # seen, though perhaps nobody waits
        await self._notify()

    async def _perform(self) -> Result:
        action = self.action
        if action.operation in STARTABLE:
            start = requests.start(action, "/jobs/stream", Accept=requests.EVENT_STREAM)
            return await self._streamed(start, cursor=0)
        if action.operation not in OPTIONAL:
            raise InvalidRequest(f"operation {action.operation!r} is not known", action=action)
        self._target = _target(action)
        if action.operation == EVENTS:
            cursor = action.input.get("cursor", 0)
            follow = requests.events(self._target, cursor, stream=True, crew_id=action.crew_id)
            return await self._streamed(msgspec.structs.replace(follow, action=action), cursor=cursor)
        if action.operation == STATUS:
            call = requests.show(self._target, crew_id=action.crew_id)
        else:
            reason = action.input.get("reason")
            call = requests.cancel(action.crew_id, self._target, reason=reason, action=action)
        reply = await self._connection.exchange(msgspec.structs.replace(call, action=action))
        return Completed(action=action, output=reply.document)

    async def _streamed(self, first: Call, *, cursor: int) -> Result:
        watched = first.method == "GET"
        stream = EventStream(
            self._connection,
            first,
            action_id=self._target,
            crew_id=self.action.crew_id if watched else None,
            cursor=cursor,
            options=self._options,
        )
        async with stream:
            await stream.open()
            self._admission.set_result(True)
            try:
                async for event in stream:
                    await self._hand_on(chunk_of(event))
            except (InvalidStream, ResponseTooLarge) as failure:
                return await self._after_fault(failure)
        if stream.last is None:
            # A job that had ended before the cursor: its record says how.
            return await endings.of_record(self._connection, self.action, target=self._target)
        return await endings.of_event(self._connection, self.action, stream.last, target=self._target)

    async def _hand_on(self, chunk: Chunk) -> None:
        """Keep a chunk until it is taken; wait where too many are kept, drop it where nobody will take it."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._chunks) < MAX_WAITING_CHUNKS or self._unread)
            if not self._unread:
                self._chunks.append(chunk)
            self._changed.notify_all()

    @property
    def _unread(self) -> bool:
        return self._awaited and self._iterators == 0

    async def _after_fault(self, failure: ClientFailure) -> Result:
        """The stream cannot be read on: nobody could follow the work, so it is stopped. Raises ClientFailure.

        The fault is what is reported, unless the work turns out to have ended by itself, or cannot be stopped.
        """
        if self.action.operation in READS or self._canceller is not None:
            raise failure
        try:
            async with asyncio.timeout(self._options.cancel_timeout_s):
                job = await self._ask(requests.cancel(self.action.crew_id, self._target, reason=FAULT_REASON))
        except TimeoutError:
            raise self._unconfirmed(None) from failure
        except ClientFailure as refused:
            if refused.refusal is not None and refused.refusal.status == 409:
                raise failure from refused  # the server does not stop this operation
            raise self._unconfirmed(refused) from failure
        if not job.ended:
            raise self._unconfirmed(None) from failure
        result = await endings.of_job(self._connection, self.action, job)
        if isinstance(result, Cancelled):
            failure.stop, failure.uncertain = result.stop, result.uncertain
            raise failure
        return result

    # --- cancelling it -------------------------------------------------------------------------------------------

    async def _cancel(self, reason: str | None) -> None:
        """Bring the end about, or say truthfully that it could not be shown."""
        try:
            result = await self._bring_about(reason)
        except Exception as error:  # noqa: BLE001 - whoever waits for the result has to see it
            await self._break(error)
            return
        await self._decide(result)
        if self._task is not None:
            self._task.cancel()

    async def _bring_about(self, reason: str | None) -> Result:
        if self.action.operation not in STARTABLE:
            return self._left()
        asking = asyncio.create_task(self._stop(reason))
        try:
            # Whatever is known first: the stream's terminal event is as durable as the answer to the cancel.
            await asyncio.wait(
                {asking, self._result}, timeout=self._options.cancel_timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if self._result.done():
                return self._result.result()
            return asking.result() if asking.done() else self._not_stopped(None)
        finally:
            asking.cancel()
            await asyncio.wait({asking})

    def _left(self) -> Result:
        """What a cancel makes of an operation about another job: that job is not touched."""
        if self.action.operation == CANCEL:
            return Failed(action=self.action, failure=self._unconfirmed(None))
        seen = self._admitted
        return Cancelled(
            action=self.action,
            remote_stop_confirmed=False,
            uncertain=False,
            provider_effect=READ_ONLY,
            completion_unobserved=not seen,
            stream_detached=seen,
        )

    def _not_stopped(self, why: ClientFailure | None) -> Result:
        if self.action.mutates:
            return Failed(action=self.action, failure=self._unconfirmed(why))
        return Cancelled(
            action=self.action,
            remote_stop_confirmed=False,
            uncertain=False,
            provider_effect=READ_ONLY,
            completion_unobserved=True,
        )

    def _unconfirmed(self, why: ClientFailure | None) -> CancelUnconfirmed:
        told = f": {why.detail}" if why is not None else ""
        return CancelUnconfirmed(
            f"the end of {self._target} could not be shown{told}",
            action=self.action,
            mutation=self.action.mutates,
            refusal=None if why is None else why.refusal,
        )

    async def _ask(self, call: Call) -> Job:
        return decode_job(call, (await self._connection.exchange(call)).document, self._target)

    async def _stop(self, reason: str | None) -> Result:
        """Ask the server to stop it, until the answer is about the end of it."""
        call = requests.cancel(self.action.crew_id, self._target, reason=reason or DEFAULT_REASON)
        retry, attempt = self._options.retry, 0
        while True:
            sure = self._admission.done()
            try:
                job = await self._ask(call)
            except RemoteRejected as failure:
                if failure.refusal is None or failure.refusal.status != 404 or sure:
                    return self._not_stopped(failure)
                # The start is still on its way: a cancel counts from its answer on.
                if not await asyncio.shield(self._admission) and self._given_up is None:
                    return await asyncio.shield(self._result)  # a failure that leaves no doubt
                continue
            except (TransportFailed, RemoteTemporary) as failure:
                attempt += 1
                if failure.refusal is not None and failure.refusal.code == STOP_UNCONFIRMED:
                    return await self._late(failure)
                if attempt > retry.attempts:
                    return self._not_stopped(failure)
                await asyncio.sleep(retry.delay_s(attempt, failure.retry_after_s or 0.0))
                continue
            except ClientFailure as failure:
                return self._not_stopped(failure)
            if not job.ended:
                return await self._late(None)
            return await endings.of_job(self._connection, self.action, job)

    async def _late(self, why: ClientFailure | None) -> Result:
        """The stop goes on: its proof would come as the terminal event."""
        if self._task is not None and self._given_up is None:
            await asyncio.wait({self._task})
        return self._not_stopped(why)


def _target(action: Action) -> str:
    found: Any = action.input.get("run_action_id")
    unknown = sorted(action.input.keys() - {"run_action_id", *OPTIONAL[action.operation]})
    if not isinstance(found, str) or unknown:
        told = f"has unknown fields {', '.join(unknown)}" if unknown else "needs a run_action_id"
        raise InvalidRequest(f"input of {action.operation} {told}", action=action)
    return found.strip()
