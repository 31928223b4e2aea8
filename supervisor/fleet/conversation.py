"""One replica's conversation with the database about shared effects: everything that waits, in one statement a turn.

News of the journal go first, so that a claim finds what is known here. What is not answered is asked again, for as long
as somebody can wait for it; a claim that was given up is looked for until it cannot come any more, and taken back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from protocol.effects import EffectRecord
from protocol.errors import CrewError, FleetUnavailable, JournalUnavailable, LeaseInvalid
from protocol.states import EffectState
from supervisor.fleet import effect_rows, effect_steps
from supervisor.fleet.database import RETRY_AFTER_S, Line
from supervisor.fleet.deciding import Request, Step, decide
from supervisor.fleet.effect_rows import Fenced, Row
from supervisor.fleet.effect_steps import Overruled
from supervisor.fleet.lease import Lease
from supervisor.journal import Journal
from supervisor.journal.effects import RESTARTED
from supervisor.log import get_log

log = get_log(__name__)
#: Requests that share a statement, and news that are read from the journal at once.
BATCH = 256
#: How often the journal is asked for news that nobody announced, and the database for what people found out, seconds.
POLL_S = 1.0
#: Pause before the database is asked again, seconds.
AGAIN_S = 0.2
#: How long a claim that was given up is looked for: no statement of ours lives longer, seconds.
DOUBT_S = 60.0


class Waiting(NamedTuple):
    """A request with who waits for it. ``given_up``: called where the database could not be asked until ``until``."""

    request: Request
    done: Callable[[object], None]
    given_up: Callable[[CrewError], None]
    until: float


class Conversation:
    """Belongs to its event loop. ``run`` it."""

    def __init__(
        self,
        journal: Journal,
        lease: Lease,
        line: Line,
        *,
        replica_id: str,
        clock: Callable[[], float],
        patience_s: float,
    ) -> None:
        self._journal = journal
        self._mirror = journal.mirror
        self._lease = lease
        self._line = line
        self._replica_id = replica_id
        self._clock = clock
        self._patience_s = patience_s
        self._waiting: list[Waiting] = []
        self._wake = asyncio.Event()
        #: The journal may have news that nobody waits for.
        self._news = True
        self._polled_at = 0.0
        #: The last key of unknown outcome that was looked up; "" to begin again.
        self._looked_at = ""
        #: What earlier processes of ours left claimed is unknown.
        self._swept = False
        #: The database did not answer the last time.
        self.away = False
        #: Rows as our claims left them, by key id: what a report will find there.
        self._held: dict[str, Row] = {}
        #: Claims of unknown fate that nobody has heard of, by their id: the key, and until when they are looked for.
        self._doubts: dict[str, tuple[str, float]] = {}

    def lease_fault(self) -> LeaseInvalid | None:
        """Why nothing that is shared can be decided here now; None while the lease is valid."""
        if self._lease.valid(self._clock()):
            return None
        said = f" ({self._lease.why})" if self._lease.why else ""
        return LeaseInvalid(
            f"replica {self._replica_id} has no valid lease{said} and decides nothing that is shared",
            retry_after_s=RETRY_AFTER_S,
        )

    def hold(self, record: EffectRecord, claim_id: str) -> None:
        """A claim of ours was granted; its row is so until it is reported."""
        self._held[record.key_id] = Row(
            record=record, replica_id=self._replica_id, replica_epoch=self._lease.epoch, claim_id=claim_id
        )

    def put(self, request: Request, done: Callable[[object], None], given_up: Callable[[CrewError], None]) -> None:
        """Have a request decided; ``done`` gets its answer, a refusal as its error."""
        until = asyncio.get_running_loop().time() + self._patience_s
        self._waiting.append(Waiting(request, done, given_up, until))
        self._wake.set()

    async def ask(self, key_id: str, step: Step) -> object:
        """The answer to a request. Raises what it refuses, and FleetUnavailable: it may be done all the same."""
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()

        def done(answer: object) -> None:
            if isinstance(answer, CrewError):
                future.set_exception(answer)
            else:
                future.set_result(answer)

        self.put(Request(key_id, step), done, future.set_exception)
        return await future

    def tell(self, local: EffectRecord, heard: Callable[[EffectRecord, CrewError | None], None]) -> None:
        """Tell the database what the journal has of an effect; ``heard``: of it, and why it does not count, if so."""
        step = partial(effect_steps.adopt, local=local, replica_id=self._replica_id)

        def done(answer: object) -> None:
            self._held.pop(local.key_id, None)
            if isinstance(answer, Overruled):
                log.error("effect_overruled", key_id=local.key_id, state=local.state.value, detail=answer.error.detail)
                if self._is_under_way_elsewhere(answer.row):
                    self._mirror.tell({local.key_id: local.version}).add_done_callback(seen)
                else:
                    self.copy(answer.row)
                heard(local, answer.error)
                return
            self._mirror.tell({local.key_id: local.version}).add_done_callback(seen)
            heard(local, None)

        def given_up(error: CrewError) -> None:
            self.ring()
            heard(local, None)

        guess = self._held.get(local.key_id)
        request = Request(local.key_id, step) if guess is None else Request(local.key_id, step, guess=guess)
        self.put(request, done, given_up)

    def copy(self, row: Row, *, over_news: bool = True) -> None:
        """Have the row as the database has it; a job of another replica is none of ours."""
        record = row.record
        if row.replica_id != self._replica_id:
            record = msgspec.structs.replace(record, job=None)
        self._mirror.keep(record, over_news=over_news).add_done_callback(seen)

    def doubt(self, claim_id: str, key_id: str) -> None:
        """A claim may be there, or come, that nobody was granted: it is to be taken back."""
        self._doubts[claim_id] = (key_id, asyncio.get_running_loop().time() + DOUBT_S)
        self._polled_at = 0.0
        self._wake.set()

    def ring(self) -> None:
        """The journal has news."""
        self._news = True
        self._wake.set()

    async def run(self) -> None:
        """Decide and tell until cancelled."""
        while True:
            self._wake.clear()
            try:
                await self._turn()
            except Exception as error:  # noqa: BLE001 - without this task no claim is answered any more
                log.failure("shared_effects_broke", error)
                await asyncio.sleep(AGAIN_S)
            if not self._waiting and not self._news:
                try:
                    async with asyncio.timeout(POLL_S):
                        await self._wake.wait()
                except TimeoutError:
                    pass

    async def _turn(self) -> None:
        """Everything that waits, at most BATCH of it, in one go."""
        fault = self.lease_fault()
        if fault is not None:
            waiting, self._waiting = self._waiting, []
            for one in waiting:
                one.given_up(fault)
            await asyncio.sleep(AGAIN_S)
            return
        epoch = self._lease.epoch
        try:
            await self._sweep(epoch)
            await self._gather()
        except (FleetUnavailable, JournalUnavailable) as error:
            await self._put_back([], error)
            return
        batch, self._waiting = self._waiting[:BATCH], self._waiting[BATCH:]
        if batch:
            await self._perform(batch, epoch)

    async def _perform(self, batch: list[Waiting], epoch: int) -> None:
        requests = [one.request for one in batch]
        deciding = partial(decide, requests=requests, replica_id=self._replica_id, epoch=epoch)
        try:
            answers = await self._line.run(deciding)
        except FleetUnavailable as error:
            await self._put_back(batch, error)
            return
        except Fenced:
            if epoch == self._lease.epoch:
                self._lease.fenced(f"the database refused epoch {epoch}")
            await self._put_back(batch, self.lease_fault() or FleetUnavailable("the lease is a new one; ask again"))
            return
        except Exception as error:  # noqa: BLE001 - a fault of ours must not leave workers waiting for ever
            log.failure("shared_effects_broke", error)
            await self._put_back(batch, FleetUnavailable("the supervisor met a fault of its own; its log names it"))
            return
        self.away = False
        for one, answer in zip(batch, answers, strict=True):
            try:
                one.done(answer)
            except Exception as error:  # noqa: BLE001 - nor must it take the answers of others along
                log.failure("shared_effects_broke", error)

    async def _put_back(self, batch: list[Waiting], error: CrewError) -> None:
        """Ask again for those that can still wait. Nothing is guessed of the others; none of them hears a grant."""
        if not self.away:
            log.warning("shared_effects_away", waiting=len(batch), why=error.detail)
        self.away = self._news = True
        now = asyncio.get_running_loop().time()
        kept = []
        for one in [*batch, *self._waiting]:
            if one.until > now:
                kept.append(one)
            else:
                one.given_up(error)
        self._waiting = kept
        await asyncio.sleep(AGAIN_S)

    async def _sweep(self, epoch: int) -> None:
        if self._swept:
            return
        sweeping = partial(
            effect_rows.lose_earlier,
            replica_id=self._replica_id,
            epoch=epoch,
            before=self._journal.epoch,
            reason=RESTARTED,
        )
        count = await self._line.run(sweeping)
        self._swept = True
        log.info("shared_effects_open", unknown=count)

    async def _gather(self) -> None:
        """Put what nobody waits for in front: news of the journal, claims in doubt, what people may have found out."""
        now = asyncio.get_running_loop().time()
        polls = now - self._polled_at >= POLL_S
        news: list[EffectRecord] = []
        if self._news or polls:
            self._news = False
            news = await self._mirror.untold(BATCH)
            self._news = len(news) == BATCH
        unknown: list[EffectRecord] = []
        if polls and self._journal.effects.unknown:
            unknown = await self._mirror.unknown(BATCH, after=self._looked_at)
            self._looked_at = unknown[-1].key_id if len(unknown) == BATCH else ""
        # From here on in one step, so that what comes meanwhile stays behind.
        ahead, self._waiting = self._waiting, []
        asked = {one.request.key_id for one in ahead}
        for record in news:
            if record.key_id not in asked:
                self.tell(record, ignore)
        if polls:
            self._polled_at = now
            self._poll(now, unknown)
        self._waiting += ahead

    def _poll(self, now: float, unknown: Sequence[EffectRecord]) -> None:
        # While nobody answers, one is enough to find out that somebody does.
        for claim_id, (key_id, until) in list(self._doubts.items())[: 1 if self.away else None]:
            withdrawing = Request(key_id, partial(effect_steps.withdraw, claim_id=claim_id))
            self.put(withdrawing, partial(self._withdrawn, claim_id, now > until), lambda error: None)
        for local in unknown:
            looking = Request(local.key_id, effect_steps.look)
            self.put(looking, partial(self._looked, local), lambda error: None)

    def _withdrawn(self, claim_id: str, late: bool, answer: object) -> None:
        if answer is True or late:
            self._doubts.pop(claim_id, None)

    def _looked(self, local: EffectRecord, answer: object) -> None:
        """Somebody has found out elsewhere what became of an effect that is unknown here."""
        if not isinstance(answer, Row) or self._is_under_way_elsewhere(answer):
            return
        if answer.record.version > local.version:
            self.copy(answer, over_news=False)

    def _is_under_way_elsewhere(self, row: Row) -> bool:
        """No copy of such a claim: what this journal has claimed is its own, and becomes unknown with its process."""
        return row.replica_id != self._replica_id and row.record.state is EffectState.CLAIMED

    async def flush(self) -> None:
        """Return once the database knows everything that this journal does."""
        while self._waiting or await self._mirror.untold(1):
            self.ring()
            await asyncio.sleep(0.02)


def seen(future: asyncio.Future[None]) -> None:
    """Nobody waits: what was not written is found by the next look for news."""
    future.exception()


def ignore(record: EffectRecord, error: CrewError | None) -> None:
    """Nobody waits for it."""
