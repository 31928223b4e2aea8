"""A server with one mechanism broken: ``python -m tests.support.mutants NAME serve --config FILE``.

The product has no switch for any of this. A check that passes on a mutant checks nothing. Where PLAN of
``tests.support.crash_build`` is set, the mutant follows that plan too.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

from protocol import effects
from protocol.api import Stray
from supervisor import __main__ as entry
from supervisor import serve
from supervisor.cgroup import Leaf
from supervisor.effects import Desk
from supervisor.jobs import Jobs
from supervisor.journal import Ledger, readers
from supervisor.journal.writer import Writer
from supervisor.predecessor import Predecessor
from supervisor.pulse import Pulse
from supervisor.recovery import Recovery
from supervisor.run.recorder import Recorder
from supervisor.stop import Stop
from supervisor.strays import Hunter
from tests.support import crash_build

#: How long after its lie ``late`` kills, seconds.
LATE_S = 0.1
#: How long after it was shown ``hasty`` commits an event, seconds.
HASTY_S = 0.03


def replace(owner: type, name: str, value: Any) -> None:
    """Replace what must be there: a renamed mechanism must not leave a mutant that is none."""
    assert name in vars(owner), f"{owner.__name__} has no {name} to be switched off"
    setattr(owner, name, value)


def replace_in(module: ModuleType, name: str, value: Any) -> None:
    """``replace`` in a module."""
    assert name in vars(module), f"{module.__name__} has no {name} to be switched off"
    setattr(module, name, value)


def toothless() -> None:
    """Nothing is killed; the look is honest."""
    replace(Stop, "_strike", lambda stop, leaf: None)


def blind() -> None:
    """Nothing is killed, and every look says that nothing is left."""
    toothless()
    replace(Stop, "_look", lambda stop, leaf: None)


def late() -> None:
    """The proof is claimed first and the kill comes afterwards."""
    kill = Stop._strike
    replace(Stop, "_look", lambda stop, leaf: None)
    replace(Stop, "_strike", lambda stop, leaf: asyncio.get_running_loop().call_later(LATE_S, kill, stop, leaf))


def hasty() -> None:
    """Events are shown before they are durable."""

    async def run(recorder: Recorder) -> None:
        while recorder._pending:
            batch, first = tuple(recorder._pending), recorder._feed.count
            recorder._committed(len(batch))
            await asyncio.sleep(HASTY_S)
            await recorder._journal.append_events(recorder._row, first, batch, at=time.time())
        recorder._flush = None

    replace(Recorder, "_run", run)


def sparing() -> None:
    """A restart records what its predecessor left unfinished, and kills nothing."""

    async def kill(recovery: Recovery, *arguments: Any) -> set[int]:
        return set()

    replace(Recovery, "_kill", kill)


def unhunted() -> None:
    """Nobody looks for processes that left their leaf."""
    replace(Hunter, "pass_once", lambda hunter: ([], True))


def grasping() -> None:
    """The hunt knows no other job: every orphan is a stray."""
    look = Hunter.pass_once

    def pass_once(hunter: Hunter) -> tuple[list[Stray], bool]:
        hunter._live_leaves = lambda: ()
        return look(hunter)

    replace(Hunter, "pass_once", pass_once)


def unswept() -> None:
    """What is left in a leaf is killed by cgroup.kill alone."""
    replace(Leaf, "sweep", lambda leaf: 0)


def lazy() -> None:
    """Threads of pools are started when they are needed."""
    for module in (serve, readers):
        replace_in(module, "started_pool", ThreadPoolExecutor)


def eager() -> None:
    """A claim is granted while its commit is still to come."""
    claim = Ledger.claim

    def granted(ledger: Ledger, wanted: effects.Claim) -> asyncio.Future[Any]:
        claim(ledger, wanted).add_done_callback(lambda future: future.exception())
        answer = asyncio.get_running_loop().create_future()
        answer.set_result(effects.claim(None, wanted, epoch=ledger._journal.epoch, at=time.time()))
        return answer

    replace(Ledger, "claim", granted)


def granting() -> None:
    """Whatever the ledger has of a key, its claim is granted."""
    decide = effects.claim
    replace_in(effects, "claim", lambda record, wanted, **when: decide(None, wanted, **when))


def hoping() -> None:
    """What a dead worker has not reported stays claimed until its job's end is recorded; nothing is killed."""
    toothless()
    replace(Desk, "lose_open", lambda desk: None)


def _take_order(variable: str) -> bool:
    """Whether the file that ``variable`` names is there; it is removed, so that a restarted process finds none."""
    try:
        os.unlink(os.environ[variable])
    except FileNotFoundError:
        return False
    return True


def blocked() -> None:
    """The event loop stands still once the file that BLOCK_ORDER names is there."""
    beat = Pulse.beat

    def block(pulse: Pulse) -> None:
        if _take_order("BLOCK_ORDER"):
            time.sleep(600)
        beat(pulse)

    replace(Pulse, "beat", block)


def deaf() -> None:
    """The journal's writer thread hangs once the file that BLOCK_ORDER names is there; the event loop turns."""
    perform = Writer._perform

    def hang(writer: Writer, batch: list[Any]) -> list[Any]:
        if _take_order("BLOCK_ORDER"):
            time.sleep(600)
        return perform(writer, batch)

    replace(Writer, "_perform", hang)


def trusting() -> None:
    """A restart takes its unit's cgroup for empty, without a look."""

    async def vacate(predecessor: Predecessor) -> None:
        pass

    replace(Predecessor, "vacate", vacate)


def mortal() -> None:
    """No mechanism is broken: where CREW_TESTS_MORTAL is set, the process dies once an Action's owner is recorded."""
    own = Jobs._own_action

    async def own_and_die(jobs: Jobs, new: Any, ownership: Any) -> None:
        await own(jobs, new, ownership)
        if "CREW_TESTS_MORTAL" in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)

    replace(Jobs, "_own_action", own_and_die)


def unowned() -> None:
    """Actions are admitted without asking whose they are."""
    from supervisor.fleet.ownership import FleetOwnership

    async def take(ownership: FleetOwnership, new: Any) -> None:
        pass

    replace(FleetOwnership, "take", take)


def guessing() -> None:
    """An answer of the database that was lost is taken for a yes."""
    from supervisor.fleet.ownership import FleetOwnership

    async def put_back(ownership: FleetOwnership, batch: list[Any], error: Exception) -> None:
        for _, settled, _ in batch:
            settled.set_result(None)

    replace(FleetOwnership, "_put_back", put_back)


def ageless() -> None:
    """A lease ends neither here nor, for heartbeats, in the database."""
    from supervisor.fleet import registration
    from supervisor.fleet.lease import Lease

    replace(Lease, "look", lambda lease, now: None)
    replace_in(registration, "_RENEW", registration._RENEW.replace("AND expires_at > clock_timestamp()", ""))


def lonely() -> None:
    """Every claim is decided in the replica's own journal."""
    from supervisor.fleet.effects import SharedLedger

    replace(SharedLedger, "claim", lambda shared, wanted: shared._local.claim(wanted))


def credulous() -> None:
    """A claim whose answer was lost is taken for granted."""
    from supervisor.fleet import effect_steps
    from supervisor.fleet.conversation import Conversation

    async def put_back(talk: Conversation, batch: list[Any], error: Exception) -> None:
        for one in batch:
            step = one.request.step
            if getattr(step, "func", None) is effect_steps.claim:
                one.done(step(None, talk._lease.epoch).answer)
            else:
                one.given_up(error)
        await asyncio.sleep(0.2)

    replace(Conversation, "_put_back", put_back)


MUTANTS: dict[str, Callable[[], None]] = {
    "toothless": toothless,
    "blind": blind,
    "late": late,
    "hasty": hasty,
    "sparing": sparing,
    "unhunted": unhunted,
    "grasping": grasping,
    "unswept": unswept,
    "lazy": lazy,
    "eager": eager,
    "granting": granting,
    "hoping": hoping,
    "blocked": blocked,
    "deaf": deaf,
    "trusting": trusting,
    "mortal": mortal,
    "unowned": unowned,
    "guessing": guessing,
    "ageless": ageless,
    "lonely": lonely,
    "credulous": credulous,
}


if __name__ == "__main__":
    if crash_build.PLAN in os.environ:
        crash_build.follow()
    MUTANTS[sys.argv.pop(1)]()
    entry.main()
