"""The life of one guarded call: claim, body, outcome. In threads and in coroutines, which are never blocked."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

from protocol import effects
from protocol.effects import EffectKey
from protocol.errors import CrewError, EffectMalformed, EffectOutcomeUnknown, NotCanonical
from worker.guarding import arguments, asking, places, receipts, session
from worker.guarding.places import ToolCall
from worker.guarding.policies import Guarding
from worker.guarding.session import Granted, Replayed

T = TypeVar("T")
#: Longest reason and evidence on the wire, in characters.
MAX_REASON = 512

_provider_key: contextvars.ContextVar[str | None] = contextvars.ContextVar("effect_provider_key", default=None)
_running: contextvars.ContextVar[str | None] = contextvars.ContextVar("effect_running", default=None)


class NotApplied(Exception):
    """Raised by the body of a guarded call: the effect did not happen, so the call may be made again."""


def provider_key() -> str | None:
    """Key id of the call whose body is running, None outside of any."""
    return _provider_key.get()


def running(tool: str) -> bool:
    """Whether this is the body of a call of ``tool``: what it calls under that name is part of the call."""
    return _running.get() == tool


@contextlib.contextmanager
def part_of(tool: str | None) -> Iterator[None]:
    """Let calls of ``tool`` pass as parts of the one that is running; None: nothing is running here."""
    token = _running.set(tool)
    try:
        yield
    finally:
        _running.reset(token)


class Call:
    """One call that wants to be made. Raises CrewError while it is made if it can have no key.

    ``values``: the validated arguments, ``self`` not among them. ``tool``: the name in the key.
    """

    def __init__(self, guarding: Guarding, tool: str, values: dict[str, Any]) -> None:
        self._session = session.current()
        self._guarding = guarding
        self._tool = tool
        self.arguments: dict[str, Any] = arguments.plain(
            {name: value for name, value in values.items() if name != guarding.pass_key_as}
        )
        self.args_hash = arguments.digest(self.arguments, volatile=guarding.volatile)
        self._above = places.current(self._session.root)
        self._ordinal: int | None = None
        self._inner = ToolCall(self._above, tool, lambda: self.args_hash)
        self._granted: Granted | None = None
        try:
            self._wanted = self._make_claim(self._identity(values))
        except BaseException:
            self._release()
            raise
        self.key_id = effects.key_id_of(self._wanted.preimage)

    def _identity(self, values: dict[str, Any]) -> tuple[Any, ...]:
        key = self._guarding.key
        if callable(key):
            return ("key", self._named(lambda: arguments.plain(key(**values))))
        if key:
            parts = self._named(lambda: [self.arguments[name] for name in key])
            return ("key", parts[0] if len(parts) == 1 else parts)
        self._ordinal = self._above.ordinals.begin((self._tool, self.args_hash))
        return ("call", self._above.index, self.args_hash, self._ordinal)

    def _named(self, make: Callable[[], Any]) -> Any:
        try:
            name = make()
        except CrewError:
            raise
        except Exception as error:
            raise NotCanonical(f"the key of tool {self._tool!r} raised {type(error).__name__}: {error}") from error
        if name is None:
            raise NotCanonical(f"the key of tool {self._tool!r} is None; nothing tells its calls apart")
        return name

    def _make_claim(self, identity: tuple[Any, ...]) -> effects.Claim:
        scope = self._guarding.scope
        key = EffectKey(scope=scope, scope_id=self._session.scope_id(scope), tool=self._tool, identity=identity)
        preimage = key.preimage
        if len(preimage) > effects.MAX_PREIMAGE_BYTES:
            raise EffectMalformed(
                f"the key of tool {self._tool!r} is above {effects.MAX_PREIMAGE_BYTES} bytes; use a shorter one"
            )
        return effects.Claim(
            preimage=preimage,
            args_hash=self.args_hash,
            policy=self._guarding.policy,
            action_id=self._session.action_id,
            crew_id=self._session.crew_id,
        )

    def begin(self) -> Replayed | None:
        """Claim the call; None: its body may run now. Blocks. Raises CrewError: its body must not run.

        Where the outcome is unknown and the policy names a function that asks the provider, it is asked once.
        """
        try:
            try:
                answer = self._session.ledger.claim(self._wanted)
            except EffectOutcomeUnknown as unknown:
                if not self._ask(unknown):
                    raise
                answer = self._session.ledger.claim(self._wanted)
        except BaseException:
            self._release()
            raise
        if isinstance(answer, Granted):
            self._granted = answer
            return None
        self._session.ledger.deliver(self.key_id)
        return answer

    def _ask(self, unknown: EffectOutcomeUnknown) -> bool:
        if self._guarding.reconcile is None or unknown.version is None:
            return False
        found = asking.ask(self._guarding.reconcile, self.key_id, self._tool, self.arguments)
        if found is None:
            return False
        with contextlib.suppress(CrewError):
            # Somebody else may have found out first; the claim that follows tells.
            self._session.ledger.reconcile(self.key_id, found, version=unknown.version)
        return True

    @contextlib.contextmanager
    def body(self) -> Iterator[None]:
        """The context of the body."""
        token = _provider_key.set(self.key_id)
        try:
            with part_of(self._tool), places.inside(self._inner.place):
                yield
        finally:
            _provider_key.reset(token)

    @property
    def _epoch(self) -> int:
        assert self._granted is not None, "the call was not claimed"
        return self._granted.epoch

    def settle(self, result: Any) -> None:
        """Record that the call took effect, durably, and then that its caller has the result. Blocks.

        Raises EffectOutcomeUnknown if that cannot be recorded: then nobody may count on the result.
        """
        receipt = receipts.encode(result)
        try:
            self._session.ledger.settle(self.key_id, epoch=self._epoch, args_hash=self.args_hash, receipt=receipt)
        except CrewError as error:
            self.lose(f"not recorded: {error.code}")
            raise EffectOutcomeUnknown(
                f"effect {self.key_id} of tool {self._tool!r} was begun and its outcome could not be recorded "
                f"({error.code}); it is not repeated until it is reconciled"
            ) from error
        self._session.ledger.deliver(self.key_id)

    def fail(self, error: BaseException) -> None:
        """Record what it means that the body raised ``error``. Blocks; raises nothing."""
        if isinstance(error, NotApplied):
            self.not_apply()
        else:
            self.lose(type(error).__name__)

    def not_apply(self) -> None:
        """Record that nothing happened, as far as that can be. Blocks."""
        self._release()
        with contextlib.suppress(CrewError):
            self._session.ledger.not_applied(self.key_id, epoch=self._epoch)

    def lose(self, reason: str) -> None:
        """Record that nobody knows, as far as that can be: a claim whose owner dies comes to the same. Blocks."""
        self._release()
        with contextlib.suppress(CrewError):
            self._session.ledger.lose(self.key_id, epoch=self._epoch, reason=reason[:MAX_REASON])

    def _release(self) -> None:
        """Let the repeat of this call be the same call."""
        if self._ordinal is not None:
            self._above.ordinals.raised((self._tool, self.args_hash), self._ordinal)
            self._ordinal = None
        self._inner.raised()


#: Tells whether a result says that the tool failed; the guard of CrewAI replaces it by one that knows its kind.
Failed = Callable[[Any], bool]


def perform(call: Call, body: Callable[[], T], *, failed: Failed = lambda result: False) -> T | Any:
    """Make the call in this thread. Returns the result of ``body`` or the stored one.

    Raises what the body raises, and CrewError where the body did not run or its outcome is unknown.
    """
    if (past := call.begin()) is not None:
        return receipts.decode(past.receipt)
    try:
        with call.body():
            result = body()
    except BaseException as error:
        call.fail(error)
        raise
    _finish(call, result, failed)
    return result


def _finish(call: Call, result: Any, failed: Failed) -> None:
    if failed(result):
        call.lose(type(result).__name__)
    else:
        call.settle(result)


async def perform_async(
    call: Call, body: Callable[[], Awaitable[T]], *, failed: Failed = lambda result: False
) -> T | Any:
    """Make the call in this coroutine; a cancellation while the ledger is asked leaves no claim behind."""
    if (past := await begin_async(call)) is not None:
        return receipts.decode(past.receipt)
    try:
        with call.body():
            result = await body()
    except BaseException as error:
        await to_the_end(call.fail, error)
        raise
    await to_the_end(_finish, call, result, failed)
    return result


async def begin_async(call: Call) -> Replayed | None:
    """As Call.begin, without blocking the event loop."""
    asked = asyncio.ensure_future(asyncio.to_thread(call.begin))
    try:
        return await asyncio.shield(asked)
    except asyncio.CancelledError:
        await asyncio.shield(asyncio.ensure_future(_withdraw(call, asked)))
        raise


async def _withdraw(call: Call, asked: asyncio.Future[Replayed | None]) -> None:
    """Nobody waits for the claim any more. The body has not run, so if it was granted, nothing was applied."""
    with contextlib.suppress(CrewError):
        if await asked is None:
            await asyncio.to_thread(call.not_apply)


async def to_the_end(work: Callable[..., T], *values: Any) -> T:
    """Run ``work`` in a thread, and wait for it even while this task is being cancelled."""
    task = asyncio.ensure_future(asyncio.to_thread(work, *values))
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return task.result()
