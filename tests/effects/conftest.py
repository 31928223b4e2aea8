"""A provider with its own books, and a ledger file."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from demo.payments.provider import Provider
from protocol.effects import EffectRecord
from worker.effect import effect
from worker.guarding import session
from worker.guarding.session import Session
from worker.ledger import LocalLedger

MakeProvider = Callable[..., Provider]


@pytest.fixture
def make_provider(tmp_path: Path) -> Iterator[MakeProvider]:
    """Start providers; each is a process, and gone after the test."""
    made: list[Provider] = []

    def make(*, idempotent: bool = False) -> Provider:
        made.append(Provider(tmp_path / f"provider{len(made)}.db", idempotent=idempotent))
        return made[-1].start()

    yield make
    for provider in made:
        provider.kill()


@pytest.fixture
def provider(make_provider: MakeProvider) -> Provider:
    """One provider that does not know idempotency keys: every call that reaches it is an effect."""
    return make_provider()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the ledger will be."""
    return tmp_path / "effects.db"


@pytest.fixture
def here(path: Path) -> Iterator[Session]:
    """This process as an owner of the ledger, on behalf of the Action ``a``."""
    with effect.ledger(path, action="a", crew="c") as session:
        yield session


def records(session: Session) -> list[EffectRecord]:
    """Every effect of the session's ledger, oldest first."""
    assert isinstance(session.ledger, LocalLedger)
    return session.ledger.records()


def only(session: Session) -> EffectRecord:
    """The one effect."""
    (record,) = records(session)
    return record


class Counted:
    """Counts what a body did, where a provider would add nothing."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def __call__(self, *what: object) -> None:
        self.calls.append(what)

    def __len__(self) -> int:
        return len(self.calls)


@pytest.fixture
def acted() -> Counted:
    """What was done."""
    return Counted()


@pytest.fixture(autouse=True)
def _no_ledger_left() -> Iterator[None]:
    """A test that names a ledger for the whole process takes it back."""
    with contextlib.ExitStack() as stack:
        stack.callback(session.begin, None)
        yield
