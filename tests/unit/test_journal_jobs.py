"""A job's life in the journal: admission, start, events, stop, terminal record, archive."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from protocol.api import JobDecision, JobReconciliation
from protocol.errors import (
    ActionArchived,
    ActionConflict,
    ActionRunning,
    IllegalTransition,
    JournalFull,
    OutcomeCertain,
    UnknownAction,
)
from protocol.states import Phase, Status
from supervisor.journal import AuditEntry, Journal
from tests.support.journals import (
    LIMIT,
    admit,
    make_older,
    new_job,
    opened,
    sample_ending,
    sample_stop,
    sample_worker,
    start,
)


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[Journal]:
    async with opened(tmp_path / "journal.db") as journal:
        yield journal


async def test_an_admitted_job_is_queued_and_audited(journal: Journal) -> None:
    job = new_job(registry_digest="r", config_digest="c")
    admission = await journal.admit(job, retained_limit=1)
    assert admission.fresh
    assert admission.record == await journal.get("a-1") == await journal.get_row(admission.record.row)
    assert (admission.record.status, admission.record.phase) == (Status.RUNNING, Phase.QUEUED)
    assert [(entry.act, entry.actor) for entry in await journal.audit_of("a-1")] == [("admitted", "tester")]
    assert journal.retained == 1


@pytest.mark.case(21)
async def test_an_exact_repeat_gets_the_record_that_is_there(journal: Journal) -> None:
    row = await start(journal)
    again = await journal.admit(new_job(admitted_at=9.9), retained_limit=LIMIT)
    assert not again.fresh
    assert (again.record.row, again.record.phase) == (row, Phase.RUNNING)
    assert journal.retained == 1
    assert len(await journal.audit_of("a-1")) == 1


async def test_other_material_under_a_known_id_is_refused(journal: Journal) -> None:
    await admit(journal)
    with pytest.raises(ActionConflict):
        await journal.admit(new_job(request_hash="2" * 64), retained_limit=LIMIT)


@pytest.mark.case(27)
async def test_a_full_journal_refuses_new_jobs_and_answers_repeats(journal: Journal) -> None:
    await journal.admit(new_job("one"), retained_limit=2)
    await journal.admit(new_job("two"), retained_limit=2)
    with pytest.raises(JournalFull, match="limit is 2"):
        await journal.admit(new_job("three"), retained_limit=2)
    assert not (await journal.admit(new_job("one"), retained_limit=2)).fresh
    assert (journal.retained, await journal.get("three")) == (2, None)


async def test_a_start_records_worker_and_event_together(journal: Journal) -> None:
    row = await admit(journal)
    record = await journal.record_start(row, sample_worker(), b'{"status":"running"}', 2.5)
    assert (record.phase, record.started_at, record.event_count) == (Phase.RUNNING, 2.5, 1)
    assert record == await journal.get_row(row)
    [item] = await journal.unfinished()
    assert (item.record, item.worker, item.dispatched) == (record, sample_worker(), True)
    [event] = await journal.events(row, 0)
    assert (event.seq, event.name, event.data, event.at) == (0, "started", b'{"status":"running"}', 2.5)


async def test_the_worker_of_the_last_attempt_is_the_one_to_look_for(journal: Journal) -> None:
    row = await admit(journal)
    assert [(item.worker, item.dispatched) for item in await journal.unfinished()] == [(None, False)]
    assert (await journal.record_worker(row, sample_worker(pid=10))).phase is Phase.STARTING
    second = sample_worker(attempt=2, pid=11, leaf=None)
    await journal.record_worker(row, second)
    assert [(item.worker, item.dispatched) for item in await journal.unfinished()] == [(second, False)]


async def test_events_continue_at_the_event_count_only(journal: Journal) -> None:
    row = await start(journal)
    assert await journal.append_events(row, 1, [("chunk", b"{}"), ("chunk", b'{"n":1}')], 3.0) == 3
    for wrong in (2, 4):
        with pytest.raises(IllegalTransition, match="3 events"):
            await journal.append_events(row, wrong, [("chunk", b"{}")], 3.0)
    assert [(event.seq, event.data) for event in await journal.events(row, 1)] == [(1, b"{}"), (2, b'{"n":1}')]
    assert (await journal.get_row(row)).event_count == 3


async def test_pages_of_events_are_bounded_in_number_and_bytes(journal: Journal) -> None:
    row = await start(journal)
    await journal.append_events(row, 1, [("chunk", b"x" * 100)] * 9, 3.0)

    async def seqs(first: int, limit: int, limit_bytes: int) -> list[int]:
        return [event.seq for event in await journal.events(row, first, limit=limit, limit_bytes=limit_bytes)]

    assert await seqs(1, 3, 10_000) == [1, 2, 3]
    assert await seqs(1, 100, 250) == [1, 2]
    assert await seqs(5, 100, 1) == [5]
    assert await seqs(10, 100, 1000) == []


async def test_a_completed_job_gives_its_output_and_its_tasks(journal: Journal) -> None:
    row = await start(journal)
    assert await journal.output(row) is None
    ending = sample_ending(pending=(("chunk", b"{}"),), task_ids=("t-1", "t-2", "t-1"))
    record = (await journal.finish(row, ending)).record
    assert record == await journal.get("a-1")
    assert (record.status, record.phase, record.event_count) == (Status.COMPLETED, Phase.DONE, 3)
    assert (record.uncertain, record.ended_at, record.stop) == (False, 4.0, sample_stop())
    assert [event.name for event in await journal.events(row, 0)] == ["started", "chunk", "completed"]
    assert await journal.output(row) == b'{"raw":"done"}'
    assert await journal.task_owner("crew", "t-2") == row
    assert await journal.task_owner("other", "t-2") is None
    assert await journal.unfinished() == []
    assert [entry.act for entry in await journal.audit_of("a-1")] == ["admitted", "completed"]


async def test_a_task_belongs_to_the_latest_job_that_ran_it(journal: Journal) -> None:
    rows = [await start(journal, name) for name in ("one", "two")]
    for row in reversed(rows):
        await journal.finish(row, sample_ending(task_ids=("t",)))
    assert await journal.task_owner("crew", "t") == rows[1]


async def test_a_job_cancelled_in_the_queue_has_one_event(journal: Journal) -> None:
    row = await admit(journal)
    ending = sample_ending(status=Status.CANCELLED, first_seq=0, event_data=b'{"by":"user"}', uncertain=None, stop=None)
    record = (await journal.finish(row, ending)).record
    assert (record.status, record.event_count, record.started_at, record.stop) == (Status.CANCELLED, 1, None, None)
    assert [(event.seq, event.name) for event in await journal.events(row, 0)] == [(0, "cancelled")]
    assert await journal.output(row) is None


async def test_a_stop_is_recorded_once_and_audited_each_time(journal: Journal) -> None:
    row = await start(journal)
    record = await journal.record_stop_request(row, "cancel", "alice", 3.0, "too slow")
    assert record.phase is Phase.STOPPING
    await journal.record_stop_request(row, "cancel", "bob", 3.1)
    entries = [entry for entry in await journal.audit_of("a-1") if entry.act == "stop_requested"]
    assert [entry.actor for entry in entries] == ["alice", "bob"]
    assert entries[0].detail == b'{"reason":"cancel","detail":"too slow"}'
    assert await journal.append_events(row, 1, [("chunk", b"{}")], 3.2) == 2


async def test_open_stop_evidence_can_be_replaced_until_the_end(journal: Journal) -> None:
    row = await start(journal)
    open_stop = sample_stop(confirmed=False, confirmed_at=None, processes_left=1)
    with pytest.raises(IllegalTransition):
        await journal.update_stop(row, open_stop)
    await journal.record_stop_request(row, "cancel", "alice", 3.0)
    assert (await journal.update_stop(row, open_stop)).stop == open_stop == (await journal.get_row(row)).stop
    await journal.finish(row, sample_ending())
    with pytest.raises(IllegalTransition):
        await journal.update_stop(row, open_stop)


CHANGES: dict[str, Callable[[Journal, int], Awaitable[object]]] = {
    "finish": lambda journal, row: journal.finish(row, sample_ending(first_seq=2, status=Status.FAILED)),
    "record_worker": lambda journal, row: journal.record_worker(row, sample_worker(attempt=2)),
    "record_start": lambda journal, row: journal.record_start(row, sample_worker(), b"{}", 9.0),
    "append_events": lambda journal, row: journal.append_events(row, 2, [("chunk", b"{}")], 9.0),
    "record_stop_request": lambda journal, row: journal.record_stop_request(row, "cancel", "alice", 9.0),
    "update_stop": lambda journal, row: journal.update_stop(row, sample_stop(confirmed=False)),
}


@pytest.mark.parametrize("name", CHANGES)
async def test_a_terminal_record_never_changes(journal: Journal, name: str) -> None:
    row = await start(journal)
    ended = (await journal.finish(row, sample_ending())).record
    before = (await journal.events(row, 0), await journal.audit_of("a-1"))
    with pytest.raises(IllegalTransition):
        await CHANGES[name](journal, row)
    assert await journal.get_row(row) == ended
    assert (await journal.events(row, 0), await journal.audit_of("a-1")) == before


@pytest.mark.parametrize("name", CHANGES)
async def test_a_row_that_does_not_exist_cannot_change(journal: Journal, name: str) -> None:
    with pytest.raises(UnknownAction):
        await CHANGES[name](journal, 77)


async def test_events_before_the_start_are_refused(journal: Journal) -> None:
    row = await admit(journal)
    with pytest.raises(IllegalTransition, match="queued"):
        await journal.append_events(row, 0, [("chunk", b"{}")], 3.0)


async def test_a_job_starts_once(journal: Journal) -> None:
    row = await start(journal)
    with pytest.raises(IllegalTransition):
        await journal.record_start(row, sample_worker(attempt=2), b"{}", 3.0)
    assert [event.seq for event in await journal.events(row, 0)] == [0]


async def test_an_ending_at_the_wrong_sequence_leaves_the_job_running(journal: Journal) -> None:
    row = await start(journal)
    with pytest.raises(IllegalTransition):
        await journal.finish(row, sample_ending(first_seq=0))
    record = await journal.get_row(row)
    assert (record.status, record.phase, record.event_count) == (Status.RUNNING, Phase.RUNNING, 1)
    await journal.finish(row, sample_ending())


@pytest.mark.case(66)
async def test_an_archived_job_leaves_a_tombstone_that_fences_its_id(journal: Journal) -> None:
    row = await start(journal)
    await journal.finish(row, sample_ending(task_ids=("t",)))
    assert await journal.archive("a-1", actor="alice", at=5.0) == row
    assert (await journal.get("a-1"), journal.retained) == (None, 0)
    assert await journal.events(row, 0) == []
    assert await journal.task_owner("crew", "t") is None
    left = await journal.read(
        lambda connection: [
            connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            for table in ("jobs", "events", "workers", "tasks")
        ]
    )
    assert left == [0, 0, 0, 0]
    tombstone = await journal.tombstone("a-1")
    assert tombstone is not None
    assert (tombstone.request_hash, tombstone.status, tombstone.archived_at) == ("1" * 64, "completed", 5.0)
    with pytest.raises(ActionArchived):
        await journal.admit(new_job(), retained_limit=LIMIT)
    with pytest.raises(ActionConflict):
        await journal.admit(new_job(request_hash="2" * 64), retained_limit=LIMIT)
    assert [entry.act for entry in await journal.audit_of("a-1")] == ["admitted", "completed", "archived"]


@pytest.mark.case(65)
async def test_what_is_running_or_unknown_is_not_archived(journal: Journal) -> None:
    await start(journal)
    with pytest.raises(ActionRunning):
        await journal.archive("a-1", actor="alice")
    with pytest.raises(UnknownAction):
        await journal.archive("never", actor="alice")
    assert await journal.get("a-1")


async def test_archiving_makes_room(journal: Journal) -> None:
    row = await start(journal, "old")
    await journal.finish(row, sample_ending())
    with pytest.raises(JournalFull):
        await journal.admit(new_job("new"), retained_limit=1)
    await journal.archive("old", actor="alice")
    admission = await journal.admit(new_job("new"), retained_limit=1)
    assert admission.record.row > row, "a row number is never used twice"


async def test_lists_are_filtered_and_paged_newest_first(journal: Journal) -> None:
    for number in range(7):
        row = await start(
            journal, f"a-{number}", crew_id=f"crew{number % 2}", operation="run" if number < 5 else "test"
        )
        if number % 3 == 0:
            await journal.finish(row, sample_ending(status=Status.FAILED))

    def names(records: list[object]) -> list[str]:
        return [str(getattr(record, "action_id", "")) for record in records]

    page = await journal.list_jobs(limit=4)
    assert names([*page.records]) == ["a-6", "a-5", "a-4", "a-3"]
    rest = await journal.list_jobs(limit=4, before=page.before)
    assert (names([*rest.records]), rest.before) == (["a-2", "a-1", "a-0"], None)
    assert names([*(await journal.list_jobs(status=Status.FAILED)).records]) == ["a-6", "a-3", "a-0"]
    both = await journal.list_jobs(status=Status.FAILED, crew_id="crew0", operation="run", limit=1)
    assert (names([*both.records]), both.before) == (["a-0"], None)
    assert names([*(await journal.list_jobs(crew_id="crew1")).records]) == ["a-5", "a-3", "a-1"]


async def test_audit_entries_are_kept_in_order(journal: Journal) -> None:
    entries = [AuditEntry(at=float(n), action_id="a-1", actor="op", act=f"act{n}", detail=b"{}") for n in range(3)]
    for entry in entries:
        await journal.audit(entry)
    assert await journal.audit_of("a-1") == entries
    assert await journal.audit_of("a-1", limit=2) == entries[1:]


async def test_nothing_stored_survives_only_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    async with opened(path) as journal:
        done = await start(journal, "done")
        await journal.finish(done, sample_ending(pending=(("chunk", b"{}"),)))
        live = await start(journal, "live")
        before = [await journal.get_row(row) for row in (done, live)], await journal.events(done, 0)
    async with opened(path) as journal:
        assert ([await journal.get_row(row) for row in (done, live)], await journal.events(done, 0)) == before
        assert [item.record.row for item in await journal.unfinished()] == [live]
        assert journal.retained == 2
        assert not (await journal.admit(new_job("live"), retained_limit=LIMIT)).fresh


def decision(at: float, decided: JobDecision = JobDecision.NOT_APPLIED) -> JobReconciliation:
    return JobReconciliation(at=at, decision=decided, actor="ops", evidence=f"statement {at:g}")


async def test_decisions_are_kept_beside_the_record_in_their_order(journal: Journal) -> None:
    row = await start(journal)
    with pytest.raises(ActionRunning):
        await journal.reconcile("a-1", decision(4.0), by="tester")
    ended = await journal.finish(row, sample_ending(status=Status.FAILED, uncertain=True))
    assert await journal.reconciliations([ended.record]) == {}
    made = [decision(5.0), decision(6.0, JobDecision.APPLIED)]
    for one in made:
        assert await journal.reconcile("a-1", one, by="tester") == ended.record
    assert await journal.reconciliations([ended.record]) == {row: made}
    assert await journal.get("a-1") == ended.record
    assert [entry.act for entry in await journal.audit_of("a-1")][-2:] == ["reconciled", "reconciled"]
    await journal.archive("a-1", actor="tester")
    assert await journal.reconciliations([ended.record]) == {}
    with pytest.raises(UnknownAction):
        await journal.reconcile("a-1", decision(7.0), by="tester")


async def test_a_certain_outcome_takes_no_decision_and_leaves_no_audit(journal: Journal) -> None:
    row = await start(journal)
    await journal.finish(row, sample_ending(status=Status.COMPLETED, uncertain=False))
    before = await journal.audit_of("a-1")
    with pytest.raises(OutcomeCertain):
        await journal.reconcile("a-1", decision(4.0), by="tester")
    assert await journal.audit_of("a-1") == before


async def test_a_journal_without_the_table_gets_it(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    async with opened(path) as journal:
        row = await start(journal)
        ended = await journal.finish(row, sample_ending(status=Status.FAILED, uncertain=True))
    make_older(path, 3)
    async with opened(path) as journal:
        await journal.reconcile("a-1", decision(5.0), by="tester")
        assert await journal.reconciliations([ended.record]) == {row: [decision(5.0)]}
    assert path.with_name("journal.db.v3.bak").exists()
