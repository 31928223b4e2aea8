"""Effects in the journal: requests on real SQLite, restarts, endings, archives, faults, what the commands say."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from protocol.effects import COLUMNS, Decision, EffectRecord, Replayed, Scope
from protocol.errors import (
    CrewError,
    EffectChanged,
    EffectConflict,
    EffectInFlight,
    EffectMalformed,
    EffectNotFound,
    EffectNotOpen,
    EffectOutcomeUnknown,
    EffectStale,
)
from protocol.states import EffectState
from supervisor.journal import Journal, schema
from supervisor.journal.checking import check_journal
from tests.support.effects import ARGS, OTHER_ARGS, RECEIPT, claim, claim_of, decision, key_of, known, settle, who
from tests.support.journals import opened, start
from tests.unit.test_journal_faults import Gate


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "journal.db"


@pytest.fixture
async def journal(path: Path) -> AsyncIterator[Journal]:
    async with opened(path) as journal:
        yield journal


# --- requests --------------------------------------------------------------------------------------------------------


def test_the_migration_has_the_columns_of_the_record() -> None:
    with closing(sqlite3.connect(":memory:")) as connection:
        for statement in schema.MIGRATIONS[schema.EFFECTS_VERSION - 1]:
            connection.execute(statement)
        connection.execute(f"CREATE TABLE wanted({COLUMNS})")
        made, wanted = (connection.execute(f"PRAGMA table_info({name})").fetchall() for name in ("effects", "wanted"))
    assert made == wanted


async def test_a_claim_is_stored_as_it_was_granted_and_replayed_once_settled(journal: Journal) -> None:
    record = await claim(journal)
    assert record == await known(journal)
    assert (record.state, record.epoch, record.attempt) == (EffectState.CLAIMED, journal.epoch, 1)
    with pytest.raises(EffectInFlight):
        await journal.effects.claim(claim_of(action_id="a-2", job=2))
    settled = await settle(journal, record)
    assert settled == await known(journal)
    replay = await journal.effects.claim(claim_of(action_id="a-2", job=2))
    assert isinstance(replay, Replayed)
    assert (replay.record.receipt, replay.record.replays) == (RECEIPT, 1)
    with pytest.raises(EffectConflict):
        await journal.effects.claim(claim_of(args_hash=OTHER_ARGS))


async def test_of_fifty_claims_at_once_one_is_granted_in_one_commit(path: Path) -> None:
    gate = Gate()
    async with opened(path, faults=gate) as journal:
        blocker = await gate.hold(journal)
        futures = [journal.effects.claim(claim_of(job=n, action_id=f"a-{n}")) for n in range(50)]
        gate.go.set()
        results = await asyncio.gather(*futures, return_exceptions=True)
        await blocker
        assert sorted(type(result).__name__ for result in results) == ["EffectInFlight"] * 49 + ["Granted"]
        assert gate.reached["commit"] == 2


async def test_a_delivery_is_noted_once(journal: Journal) -> None:
    await settle(journal, await claim(journal))
    await journal.effects.deliver(who(), key_of().key_id)
    delivered = await known(journal)
    assert delivered.delivered_at is not None
    assert await journal.effects.deliver(who(2, action_id="a-2"), key_of().key_id) is None
    assert await known(journal) == delivered


async def test_a_job_speaks_only_of_its_own_scope(journal: Journal) -> None:
    for scope, mine, other in ((Scope.ACTION, "a-1", "a-2"), (Scope.CREW, "crew", "another")):
        theirs = key_of(scope=scope, scope_id=other).preimage
        with pytest.raises(EffectMalformed, match="scope of another"):
            await journal.effects.claim(claim_of(preimage=theirs))
        await claim(journal, preimage=key_of(scope=scope, scope_id=mine).preimage)
    with pytest.raises(EffectMalformed, match="scope of another"):
        await journal.effects.claim(claim_of(preimage=key_of(scope_id="x").preimage))
    key_id = key_of(scope=Scope.ACTION, scope_id="a-1").key_id
    assert isinstance(await journal.effects.deliver(who(2, action_id="a-2"), key_id), EffectMalformed)


@pytest.mark.effect_case(35)
async def test_a_stale_report_is_refused_and_recorded_and_changes_nothing(journal: Journal) -> None:
    record = await claim(journal)
    for row, changes in ((1, {"epoch": record.epoch - 1}), (2, {}), (1, {"args_hash": OTHER_ARGS})):
        said: dict[str, Any] = {"epoch": record.epoch, "args_hash": ARGS, "receipt": None, **changes}
        assert isinstance(await journal.effects.settle(who(row), record.key_id, **said), EffectStale)
    assert isinstance(await journal.effects.lose(who(), "0" * 64, epoch=1, reason="x"), EffectStale)
    assert await known(journal) == record
    notes = [(entry.act, json.loads(entry.detail or b"")) for entry in await journal.audit_of("a-1")]
    refused = {"key_id": record.key_id, "code": "effect_stale"}
    assert notes == [("effect_refused", refused)] * 3 + [("effect_refused", refused | {"key_id": "0" * 64})]


@pytest.mark.effect_case(36)
async def test_a_late_settlement_by_the_same_epoch_settles_an_unknown_outcome(journal: Journal) -> None:
    record = await claim(journal)
    assert await journal.effects.lose_all(who(), {record.key_id: (record.epoch, "worker_died")}) == 1
    assert ((await known(journal)).state, journal.effects.unknown) == (EffectState.UNKNOWN, 1)
    settled = await settle(journal, record)
    assert isinstance(settled, EffectRecord)
    assert (settled.state, settled.reason, journal.effects.unknown) == (EffectState.SETTLED, "", 0)


async def test_what_was_reported_is_not_lost_afterwards(journal: Journal) -> None:
    record = await claim(journal)
    settling = journal.effects.settle(who(), record.key_id, epoch=record.epoch, args_hash=ARGS, receipt=RECEIPT)
    losing = journal.effects.lose_all(who(), {record.key_id: (record.epoch, "worker_died")})
    assert (await losing, type(await settling)) == (0, EffectRecord)
    assert (await known(journal)).state is EffectState.SETTLED


# --- reconciliation --------------------------------------------------------------------------------------------------


@pytest.mark.effect_case(37)
@pytest.mark.parametrize("kind", Decision)
async def test_a_decision_ends_an_unknown_outcome_and_is_audited(journal: Journal, kind: Decision) -> None:
    record = await claim(journal)
    found = decision(kind, receipt=RECEIPT if kind is Decision.SETTLED else None)
    with pytest.raises(EffectNotOpen):
        await journal.effects.reconcile(record.key_id, found, versions={record.version}, by="http:x")
    await journal.effects.lose(who(), record.key_id, epoch=record.epoch, reason="TimeoutError")
    with pytest.raises(EffectChanged):
        await journal.effects.reconcile(record.key_id, found, versions={record.version, 9}, by="http:x")
    made = await journal.effects.reconcile(record.key_id, found, versions={2}, by="http:x")
    assert made == await known(journal)
    assert (made.state.value, made.receipt, journal.effects.unknown) == (kind.value, found.receipt, 0)
    [entry] = [entry for entry in await journal.audit_of("a-1") if entry.act == "effect_reconciled"]
    assert (entry.actor, time.time() - entry.at < 60) == ("ops", True)
    assert json.loads(entry.detail or b"") == {
        "key_id": record.key_id, "decision": kind.value, "version": 3, "by": "http:x"
    }  # fmt: skip


@pytest.mark.effect_case(38)
async def test_of_two_decisions_on_one_version_one_wins(journal: Journal) -> None:
    record = await claim(journal)
    await journal.effects.lose(who(), record.key_id, epoch=record.epoch, reason="TimeoutError")
    results = await asyncio.gather(
        *(
            journal.effects.reconcile(record.key_id, decision(kind), versions={2}, by="http:x")
            for kind in (Decision.NOT_APPLIED, Decision.ABANDONED)
        ),
        return_exceptions=True,
    )
    assert sorted(type(result).__name__ for result in results) == ["EffectChanged", "EffectRecord"]


async def test_a_job_that_asked_its_provider_reconciles_the_version_it_saw(journal: Journal) -> None:
    record = await claim(journal)
    await journal.effects.lose(who(), record.key_id, epoch=record.epoch, reason="TimeoutError")
    found = msgspec.structs.replace(decision(Decision.SETTLED, receipt=RECEIPT), actor="pay:lookup")
    other = who(2, action_id="a-2")
    assert isinstance(await journal.effects.found_out(other, record.key_id, version=1, found=found), EffectChanged)
    made = await journal.effects.found_out(other, record.key_id, version=2, found=found)
    assert isinstance(made, EffectRecord)
    assert (made.state, made.actor) == (EffectState.SETTLED, "pay:lookup")
    [entry] = [entry for entry in await journal.audit_of("a-1") if entry.act == "effect_reconciled"]
    assert json.loads(entry.detail or b"")["by"] == "worker of a-2"


async def test_unknown_keys_are_not_found(journal: Journal) -> None:
    for attempt in (
        journal.effects.get("0" * 64),
        journal.effects.reconcile("0" * 64, decision(Decision.ABANDONED), versions={1}, by="x"),
    ):
        with pytest.raises(EffectNotFound):
            await attempt


# --- restarts --------------------------------------------------------------------------------------------------------


@pytest.mark.effect_case(34)
async def test_a_new_epoch_carries_effects_over_and_nothing_of_them_is_open(path: Path) -> None:
    async with opened(path) as journal:
        row = await start(journal)
        left = await claim(journal, job=row)
        await settle(journal, await claim(journal, "settled", job=row))
        outside = await claim(journal, "outside", job=None)
    async with opened(path) as journal:
        assert journal.epoch == left.epoch + 1
        for record in (left, outside):
            now = await journal.effects.get(record.key_id)
            assert (now.state, now.reason, now.epoch) == (EffectState.UNKNOWN, "supervisor_restarted", left.epoch)
        with pytest.raises(EffectOutcomeUnknown, match="supervisor_restarted"):
            await journal.effects.claim(claim_of(job=9))
        assert isinstance(await journal.effects.claim(claim_of("settled", job=9)), Replayed)
        assert journal.effects.unknown == 2
        # A worker that outlived its supervisor has the old epoch, and still the right to say what it did.
        assert isinstance(await settle(journal, left, epoch=journal.epoch), EffectStale)
        assert isinstance(await settle(journal, left), EffectRecord)


@pytest.mark.effect_case(41)
async def test_a_year_changes_nothing(path: Path) -> None:
    async with opened(path) as journal:
        for name in ("claimed", "settled", "unknown"):
            await claim(journal, name)
        await settle(journal, await known(journal, "settled"))
        await journal.effects.lose(who(), key_of("unknown").key_id, epoch=journal.epoch, reason="TimeoutError")
        past = time.time() - 366 * 86_400
        await journal.write(
            lambda connection: connection.execute("UPDATE effects SET claimed_at = ?, settled_at = ? ", (past, past))
        )
        refusals: dict[str, type[CrewError]] = {"claimed": EffectInFlight, "unknown": EffectOutcomeUnknown}
        for name, refusal in refusals.items():
            with pytest.raises(refusal):
                await journal.effects.claim(claim_of(name, job=2))
        assert isinstance(await journal.effects.claim(claim_of("settled", job=2)), Replayed)


@pytest.mark.effect_case(14)
async def test_a_torn_end_of_the_log_leaves_earlier_receipts_intact(path: Path, tmp_path: Path) -> None:
    """A copy of the live files whose log is cut in its last frames, as a crash of the machine may leave it."""
    copies = []
    async with opened(path) as journal:
        for number in range(20):
            await settle(journal, await claim(journal, f"n-{number}"))
        wal = path.with_name("journal.db-wal")
        whole = wal.stat().st_size
        await settle(journal, await claim(journal, "last"))
        grown = wal.stat().st_size
        assert grown > whole
        for cut in (1, 100, 4096, grown - whole - 1, grown - whole):
            copy = tmp_path / f"cut-{cut}" / "journal.db"
            copy.parent.mkdir(mode=0o700)
            shutil.copy(path, copy)
            shutil.copy(wal, copy.with_name("journal.db-wal"))
            change_size(copy.with_name("journal.db-wal"), grown - cut)
            copies.append(copy)
    for copy in copies:
        disown(copy)
        async with opened(copy) as journal:
            for number in range(20):
                record = await known(journal, f"n-{number}")
                assert (record.state, record.receipt) == (EffectState.SETTLED, RECEIPT)
            with contextlib.suppress(EffectNotFound):
                last = await known(journal, "last")
                assert (last.state, last.reason) == (EffectState.UNKNOWN, "supervisor_restarted")
        assert check_journal(copy).findings == ()


def change_size(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)


def disown(path: Path) -> None:
    """A copy of a journal that we have open names us as its owner; it is to look like one of a machine that crashed."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DELETE FROM meta WHERE key = 'owner'")
