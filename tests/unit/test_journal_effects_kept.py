"""Effects in the journal: endings, archives, pages, damage, faults, and what the commands say."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from protocol.api import effect_view
from protocol.effects import Decision, EffectRecord, Policy, Replayed, key_id_of
from protocol.errors import (
    EffectConflict,
    EffectNotFound,
    EffectsOpen,
    JournalUnavailable,
)
from protocol.states import EffectState, Status
from supervisor.archiving import Archiver
from supervisor.journal import Journal
from supervisor.journal.checking import check_journal
from supervisor.journal.effects import EffectQuarantined
from supervisor.workspace import Workspace
from tests.support.effects import ARGS, OTHER_ARGS, RECEIPT, claim, claim_of, decision, key_of, known, settle, who
from tests.support.journals import LIMIT, admit, make_older, new_job, opened, sample_ending, start
from tests.unit.test_journal_cli import journal as command
from tests.unit.test_journal_faults import BROKEN, FULL, Gate
from tests.unit.test_journal_open import change

FAILED = b'{"status":"failed","stop":{"elapsed_ms":1.5}}'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "journal.db"


@pytest.fixture
async def journal(path: Path) -> AsyncIterator[Journal]:
    async with opened(path) as journal:
        yield journal


# --- endings and archives --------------------------------------------------------------------------------------------


@pytest.mark.effect_case(31)
@pytest.mark.parametrize("status", [Status.FAILED, Status.CANCELLED])
async def test_an_ending_makes_unknown_what_is_claimed_and_says_how_many(journal: Journal, status: Status) -> None:
    row = await start(journal)
    await claim(journal, "open", job=row)
    unrecorded = await claim(journal, "unrecorded", job=row)
    await settle(journal, await claim(journal, "settled", job=row))
    foreign = await claim(journal, "foreign", job=row + 1)
    ending = sample_ending(
        status=status, event_data=FAILED, lost="cancelled", lost_keys={unrecorded.key_id: "settle_not_recorded"}
    )
    ended = await journal.finish(row, ending)
    counts = {"claimed": 0, "settled": 1, "not_applied": 0, "unknown": 2, "abandoned": 0}
    assert ended.lost == 2
    assert json.loads(ended.event_data) == {**json.loads(FAILED), "effects": counts}
    assert (await journal.events(row, 0))[-1].data == ended.event_data
    assert await journal.effects.counts([row, row + 1, row + 2]) == {
        row: counts, row + 1: counts | {"claimed": 1, "settled": 0, "unknown": 0}
    }  # fmt: skip
    assert ((await known(journal, "open")).reason, (await known(journal, "unrecorded")).reason) == (
        "cancelled", "settle_not_recorded"
    )  # fmt: skip
    assert await journal.effects.get(foreign.key_id) == foreign


async def test_an_output_stays_the_crews_and_an_ending_without_effects_stays_as_it_is(journal: Journal) -> None:
    row = await start(journal)
    await claim(journal, job=row)
    ended = await journal.finish(row, sample_ending())
    assert (ended.event_data, ended.lost) == (b'{"raw":"done"}', 1)
    other = await start(journal, "a-2")
    ended = await journal.finish(other, sample_ending(status=Status.FAILED, event_data=FAILED))
    assert (ended.event_data, ended.lost) == (FAILED, 0)


@pytest.mark.effect_case(32)
@pytest.mark.effect_case(33)
async def test_a_job_with_open_effects_is_not_archived(journal: Journal, tmp_path: Path) -> None:
    archiver = Archiver(journal, Workspace(tmp_path / "work", None), min_retention_s=0)
    row = await start(journal)
    for number in range(5):
        await claim(journal, f"n-{number}", job=row)
    await journal.finish(row, sample_ending())
    with pytest.raises(EffectsOpen, match=f"has 5 effects.*{key_of('n-0').key_id}.*\\.\\.\\."):
        await archiver.archive("a-1", actor="ops")
    with pytest.raises(EffectsOpen):
        await journal.archive("a-1", actor="ops")
    assert not journal.path.with_name("journal.db.archive.jsonl").exists()
    for number in range(5):
        await journal.effects.reconcile(
            key_of(f"n-{number}").key_id, decision(Decision.ABANDONED), versions={2}, by="http:x"
        )
    await archiver.archive("a-1", actor="ops")
    line = json.loads(journal.path.with_name("journal.db.archive.jsonl").read_bytes())
    assert [effect["state"] for effect in line["effects"]] == ["abandoned"] * 5
    assert line["effects"][-1]["preimage"] == key_of("n-0").preimage.decode()


@pytest.mark.effect_case(42)
async def test_effects_of_an_archived_job_still_replay_or_conflict(journal: Journal, tmp_path: Path) -> None:
    row = await start(journal)
    await settle(journal, await claim(journal, job=row))
    await journal.finish(row, sample_ending())
    await Archiver(journal, Workspace(tmp_path / "work", None), min_retention_s=0).archive("a-1", actor="ops")
    assert await journal.get("a-1") is None
    replay = await journal.effects.claim(claim_of(action_id="a-2", job=row + 1))
    assert isinstance(replay, Replayed)
    with pytest.raises(EffectConflict):
        await journal.effects.claim(claim_of(args_hash=OTHER_ARGS))
    assert (await journal.effects.page()).records == [replay.record]


# --- pages -----------------------------------------------------------------------------------------------------------


async def test_pages_are_in_the_order_of_the_first_claim_and_filtered(journal: Journal) -> None:
    for number in range(7):
        record = await claim(journal, f"n-{number}", job=number % 2, crew_id="odd" if number % 2 else "even")
        if number < 2:
            await settle(journal, record)

    async def names(**filters: Any) -> list[str]:
        found, before = [], None
        while True:
            page = await journal.effects.page(before=before, limit=2, **filters)
            assert len(page.records) <= 2
            found += [effect_view(record).identity[1] for record in page.records]
            before = page.before
            if before is None:
                return found

    assert await names() == [f"n-{number}" for number in (6, 5, 4, 3, 2, 1, 0)]
    assert await names(state=EffectState.SETTLED) == ["n-1", "n-0"]
    assert await names(crew_id="odd") == ["n-5", "n-3", "n-1"]
    assert await names(crew_id="odd", state=EffectState.CLAIMED) == ["n-5", "n-3"]
    assert await names(job=0) == ["n-6", "n-4", "n-2", "n-0"]
    assert await names(state=EffectState.ABANDONED) == []


async def test_a_page_is_bounded_in_bytes(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        await settle(journal, await claim(journal, f"n-{number}"), receipt=b'"' + b"x" * 60_000 + b'"')
    monkeypatch.setattr("supervisor.journal.ledger.PAGE_BYTES", 130_000)
    sizes, before = [], None
    while not sizes or before is not None:
        page = await journal.effects.page(before=before)
        sizes.append(len(page.records))
        before = page.before
    assert sizes == [2, 2]
    monkeypatch.setattr("supervisor.journal.ledger.PAGE_BYTES", 1)
    assert len((await journal.effects.page()).records) == 1


@pytest.mark.parametrize(
    ("filters", "index"),
    [
        ("job = 1 AND state NOT IN ('settled')", "effects_job"),
        ("state = 'unknown'", "effects_state"),
        ("crew_id = 'c'", "effects_crew"),
    ],
)
async def test_filters_are_served_by_an_index(journal: Journal, filters: str, index: str) -> None:
    query = f"EXPLAIN QUERY PLAN SELECT rowid FROM effects WHERE {filters} ORDER BY rowid DESC LIMIT 5"
    plan = await journal.read(lambda connection: connection.execute(query).fetchall())
    assert index in str(plan)


# --- damage and faults -----------------------------------------------------------------------------------------------

DAMAGE = [
    "state = 'paid'", "policy = 'twice'", "version = 'x'", "preimage = x'00'", "claimed_at = 'x'", "decision = 'maybe'",
    "receipt = 7",
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
async def test_a_row_that_cannot_be_read_refuses_its_key(path: Path, damage: str) -> None:
    async with opened(path) as journal:
        row = await start(journal)
        await settle(journal, await claim(journal, job=row))
        await claim(journal, "other", job=row)
    change(path, f"UPDATE effects SET {damage} WHERE key_id = ?", key_of().key_id)
    async with opened(path) as journal:
        for attempt in (
            journal.effects.claim(claim_of()),
            journal.effects.get(key_of().key_id),
            journal.effects.reconcile(key_of().key_id, decision(Decision.ABANDONED), versions={1}, by="x"),
        ):
            with pytest.raises(EffectQuarantined, match="stays blocked"):
                await attempt
        assert [record.key_id for record in (await journal.effects.page()).records] == [key_of("other").key_id]
        await journal.finish(row, sample_ending())
        assert (await known(journal, "other")).state is EffectState.UNKNOWN
    findings = check_journal(path).findings
    assert [finding.code for finding in findings] == ["effect_unreadable"]
    done = command("export", path)
    effects = json.loads(done.stdout)["effects"]
    assert [effect["key_id"] for effect in effects] == [key_of().key_id, key_of("other").key_id]
    assert "quarantined" in effects[0]


async def test_a_row_in_a_state_that_nobody_knows_keeps_its_job(path: Path) -> None:
    async with opened(path) as journal:
        row = await start(journal)
        await settle(journal, await claim(journal, job=row))
        await journal.finish(row, sample_ending())
    change(path, "UPDATE effects SET state = 'paid'")
    async with opened(path) as journal:
        with pytest.raises(EffectsOpen):
            await journal.archive("a-1", actor="ops")


@pytest.mark.effect_case(13)
@pytest.mark.parametrize("text", [FULL, BROKEN])
@pytest.mark.parametrize("point", ["begin", "op", "commit"])
async def test_a_claim_that_cannot_be_written_is_refused_and_leaves_nothing(
    path: Path, point: str, text: str
) -> None:
    gate = Gate()
    async with opened(path, faults=gate) as journal:
        gate.fail(point, text)
        with pytest.raises(JournalUnavailable):
            await journal.effects.claim(claim_of())
        with pytest.raises(EffectNotFound):
            await known(journal)
        assert (await claim(journal)).attempt == 1


@pytest.mark.effect_case(13)
async def test_on_a_full_disk_reports_go_into_the_reserve_and_claims_do_not(path: Path) -> None:
    gate = Gate()
    async with opened(path, faults=gate, reserve_bytes=65_536) as journal:
        record = await claim(journal)
        blocker = await gate.hold(journal)
        refused = journal.effects.claim(claim_of("new"))
        settling = journal.effects.settle(who(), record.key_id, epoch=record.epoch, args_hash=ARGS, receipt=RECEIPT)
        gate.fail("commit", FULL)
        gate.errors["commit"] = iter([None, sqlite3.OperationalError(FULL)])
        gate.go.set()
        with pytest.raises(JournalUnavailable):
            await refused
        assert isinstance(await settling, EffectRecord)
        await blocker


async def test_the_count_of_unknown_outcomes_follows_what_was_committed(path: Path) -> None:
    gate = Gate()
    async with opened(path, faults=gate) as journal:
        one, two = await claim(journal, "one"), await claim(journal, "two")
        gate.fail("commit", BROKEN)
        with pytest.raises(JournalUnavailable):
            await journal.effects.lose_all(who(), {one.key_id: (one.epoch, "x")})
        assert journal.effects.unknown == 0
        lost = {record.key_id: (record.epoch, "x") for record in (one, two)}
        assert (await journal.effects.lose_all(who(), lost), journal.effects.unknown) == (2, 2)
    async with opened(path) as journal:
        assert journal.effects.unknown == 2
        assert journal.retained == 0
        await journal.admit(new_job("a-9"), retained_limit=LIMIT)
        assert (journal.retained, journal.effects.unknown) == (1, 2)


# --- commands --------------------------------------------------------------------------------------------------------


@pytest.mark.effect_case(46)
async def test_check_recomputes_keys_and_finds_claims_of_jobs_that_ended(path: Path) -> None:
    async with opened(path) as journal:
        row = await start(journal)
        record = await claim(journal, job=row)
        await settle(journal, record)
        await journal.finish(row, sample_ending())
        view = effect_view(await known(journal))
        assert key_id_of(view.preimage.encode("utf-8")) == view.key_id
    done = command("check", path)
    assert (done.returncode, "1 effects" in done.stdout) == (0, True)
    change(path, "UPDATE effects SET state = 'claimed', scope_id = 'x'")
    found = json.loads(command("check", path, "--json").stdout)
    assert [finding["code"] for finding in found["findings"]] == ["effect_unreadable", "effect_left_claimed"]


async def test_a_journal_without_effects_moves_forward_and_is_read_as_it_is(path: Path) -> None:
    async with opened(path) as journal:
        await admit(journal)
    make_older(path, 2)
    assert json.loads(command("export", path).stdout)["effects"] == []
    assert command("check", path).returncode == 0
    async with opened(path) as journal:
        assert (await claim(journal)).state is EffectState.CLAIMED
    assert path.with_name("journal.db.v2.bak").exists()


async def test_a_backup_has_the_effects(path: Path, tmp_path: Path) -> None:
    async with opened(path) as journal:
        await settle(journal, await claim(journal))
        assert command("backup", path, tmp_path / "copy.db").returncode == 0
    report = check_journal(tmp_path / "copy.db")
    assert (report.effects, report.findings) == (1, ())


async def test_a_repeat_under_the_policy_provider_is_granted(journal: Journal) -> None:
    record = await claim(journal, policy=Policy.PROVIDER)
    await journal.effects.lose(who(), record.key_id, epoch=record.epoch, reason="TimeoutError")
    again = await claim(journal, policy=Policy.PROVIDER, action_id="a-2", job=2)
    assert (again.attempt, again.action_id, journal.effects.unknown) == (2, "a-2", 0)
