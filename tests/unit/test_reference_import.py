"""A runs.json of the reference is imported once: what it accepts, what it refuses, and the way back."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import ActionConflict, StartError
from protocol.states import Status
from supervisor.journal import JobRecord, Journal, open_journal
from supervisor.journal.exporting import Format, export_to
from supervisor.journal.importing import import_file
from supervisor.journal.reference import NULLED, RENUMBERED, REPLACED, WRAPPED, read, records
from tests.support.journals import LIMIT, admit, make_older, new_job, opened, sample_ending, sample_worker, start
from tests.support.reference import encoded, event, parsed, record, running, write
from tests.unit.test_hash_vectors import ADMITTED, VECTORS
from tests.unit.test_hash_vectors import parsed as request_of
from tests.unit.test_journal_open import change


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "runs.json"


async def found(journal: Journal, action_id: str = "a-1") -> JobRecord:
    job = await journal.get(action_id)
    assert job is not None
    return job


async def shown(journal: Journal, row: int) -> list[dict[str, Any]]:
    """The events of a job as the reference stores them."""
    return [
        {"event": item.name, "sequence": item.seq, "data": json.loads(item.data)}
        for item in await journal.events(row, 0, limit=LIMIT)
    ]


async def changes_of(journal: Journal, action_id: str = "a-1") -> list[str]:
    (entry,) = await journal.audit_of(action_id)
    assert (entry.act, entry.actor) == ("imported", "import")
    changes: list[str] = json.loads(entry.detail or b"null")["changes"]
    return changes


@pytest.mark.case(68, 70)
async def test_a_runs_json_at_the_journal_s_path_becomes_the_journal_and_is_kept(path: Path) -> None:
    old = [record("a-1"), record("a-2", status="failed", output=None, events=[event("failed", 0, status="failed")])]
    content = write(path, old).read_bytes()
    async with opened(path) as journal:
        job = await found(journal)
        assert (job.crew_id, job.operation, job.request_hash) == ("instant", "run", "5" * 64)
        assert (job.status, job.phase, job.event_count, job.uncertain) == ("completed", "done", 3, False)
        assert await shown(journal, job.row) == old[0]["events"]
        assert json.loads(await journal.output(job.row) or b"") == old[0]["output"]
        assert [item.action_id for item in (await journal.list_jobs()).records] == ["a-2", "a-1"]
        assert await changes_of(journal) == []
    kept = path.with_name("runs.json.reference")
    assert kept.read_bytes() == content
    assert [stat.S_IMODE(file.stat().st_mode) for file in (path, kept)] == [0o600, 0o600]
    assert path.stat().st_nlink == kept.stat().st_nlink == 1
    assert sorted(os.listdir(path.parent)) == [f"runs.json{end}" for end in ("", ".lock", ".reference", ".reserve")]


async def test_it_is_imported_once(path: Path) -> None:
    write(path, [record()])
    async with opened(path) as journal:
        await admit(journal, "later")
    async with opened(path) as journal:
        assert journal.retained == 2
        assert journal.epoch == 2


@pytest.mark.case(70)
async def test_a_repeat_gets_the_stored_record_and_other_material_a_conflict_however_full_the_journal_is(
    path: Path,
) -> None:
    write(path, [record(f"a-{number}", input_hash="qualification-seed") for number in range(5)])
    async with opened(path) as journal:
        assert journal.retained == 5
        same = new_job("a-3", request_hash="qualification-seed")
        admission = await journal.admit(same, retained_limit=2)
        assert (admission.fresh, admission.record.status) == (False, Status.COMPLETED)
        with pytest.raises(ActionConflict):
            await journal.admit(new_job("a-3"), retained_limit=2)


# --- accepted ---------------------------------------------------------------------------------------------------------


@pytest.mark.case(70)
@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (record(operation=...), {"operation": "run"}),
        (record(colour="blue", version=3), {}),
        (record(crew_id="nobody knows it"), {"crew_id": "nobody knows it"}),
        (record(input_hash="qualification-seed"), {"request_hash": "qualification-seed"}),
        (record(operation="status"), {"operation": "status"}),
        (record(events=...), {"event_count": 0}),
        (record("an id / of old", output=...), {"action_id": "an id / of old"}),
    ],
)
async def test_what_the_reference_accepts_is_accepted(path: Path, made: Any, expected: dict[str, Any]) -> None:
    write(path, [made])
    async with opened(path) as journal:
        job = await found(journal, made["action_id"])
        assert {name: getattr(job, name) for name in expected} == expected
        assert json.loads(await journal.output(job.row) or b"x") == made.get("output")


@pytest.mark.case(70)
@pytest.mark.parametrize("content", [b"[]", b" \r\n\t[ ] \n"])
async def test_an_empty_array_is_an_empty_journal(path: Path, content: bytes) -> None:
    write(path, content)
    async with opened(path) as journal:
        assert journal.retained == 0
    assert path.with_name("runs.json.reference").read_bytes() == content


@pytest.mark.case(70)
async def test_the_order_of_keys_and_the_white_space_do_not_matter(path: Path) -> None:
    write(path, json.dumps([record("a-1"), record("a-2")], indent=2, ensure_ascii=False).encode())
    async with opened(path) as journal:
        assert await shown(journal, (await found(journal, "a-2")).row) == record("a-2")["events"]


@pytest.mark.case(70)
async def test_a_seed_made_by_hand_keeps_its_output_beside_its_single_event(path: Path) -> None:
    seed = record(input_hash="qualification-seed", events=[event("completed", 0, status="completed")])
    write(path, [seed])
    async with opened(path) as journal:
        job = await found(journal)
        assert json.loads(await journal.output(job.row) or b"") == seed["output"]
        assert await shown(journal, job.row) == seed["events"]


@pytest.mark.parametrize("output", [None, [1, 2], "text", 7])
async def test_an_output_that_is_no_object_is_the_view_s_output_too(path: Path, output: Any) -> None:
    write(path, [record(output=output)])
    async with opened(path) as journal:
        assert json.loads(await journal.output(1) or b"x") == output


@pytest.mark.case(70)
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400"])
async def test_numbers_that_are_not_finite_become_null_and_the_audit_says_so(path: Path, number: str) -> None:
    text = encoded([record(output={"n": 0.5}), record("a-2")]).replace(b"0.5", number.encode())
    write(path, text)
    async with opened(path) as journal:
        job = await found(journal)
        assert await journal.output(job.row) == b'{"n":null}'
        assert await changes_of(journal) == [NULLED]
        assert await changes_of(journal, "a-2") == []


async def test_a_lone_surrogate_is_replaced_and_a_pair_is_kept(path: Path) -> None:
    write(path, [record(output={"lone": "\ud800!", "pair": "🙂"})])
    async with opened(path) as journal:
        job = await found(journal)
        assert json.loads(await journal.output(job.row) or b"") == {"lone": "\ufffd!", "pair": "🙂"}
        assert await changes_of(journal) == [REPLACED]


async def test_events_of_odd_shape_are_kept_whole_under_a_name_that_can_be_streamed(path: Path) -> None:
    odd: list[Any] = ["text", {"event": "two\nlines", "data": 1}, {"event": "chunk", "sequence": 9, "data": None}]
    write(path, [record(events=[*odd, event("completed", 3, raw="x")])])
    async with opened(path) as journal:
        events = await shown(journal, 1)
        assert [item["sequence"] for item in events] == [0, 1, 2, 3]
        assert [item["event"] for item in events] == ["imported", "imported", "chunk", "completed"]
        assert [item["data"] for item in events[:3]] == [{"event": odd[0]}, {"event": odd[1]}, None]
        assert await changes_of(journal) == [RENUMBERED, WRAPPED]


@pytest.mark.case(67)
@pytest.mark.parametrize(
    ("made", "uncertain"),
    [
        (running(), True),
        (running(operation="memory_reset", events=[]), True),
        (running(operation="knowledge_query"), False),
    ],
)
async def test_a_running_record_becomes_failed_at_the_next_sequence(path: Path, made: Any, uncertain: bool) -> None:
    write(path, [made])
    async with opened(path) as journal:
        assert await journal.unfinished() == []
        job = await found(journal, "r-1")
        assert (job.status, job.phase, job.uncertain) == ("failed", "done", uncertain)
        assert job.ended_at is not None
        assert job.stop is not None
        assert (job.stop.confirmed, job.stop.reason) == (False, "imported")
        *before, fence = await shown(journal, job.row)
        assert before == made["events"]
        assert (fence["event"], fence["sequence"]) == ("failed", len(made["events"]))
        assert fence["data"]["status"] == "failed"
        assert fence["data"]["uncertain_outcome"] is uncertain
        assert await journal.output(job.row) is None


@pytest.mark.parametrize(
    ("status", "operation", "events", "uncertain"),
    [
        ("failed", "run", [event("failed", 0, status="failed", uncertain_outcome=False)], False),
        ("failed", "run", [event("failed", 0, status="failed")], True),
        ("failed", "knowledge_query", [event("failed", 0, status="failed")], False),
        ("cancelled", "run", [event("cancelled", 0, status="cancelled")], False),
        ("cancelled", "run", [event("started", 0), event("cancelled", 1, status="cancelled")], True),
        ("completed", "train", [event("started", 0), event("completed", 1)], False),
    ],
)
async def test_uncertainty_is_what_the_record_says_or_allows(
    path: Path, status: str, operation: str, events: list[Any], uncertain: bool
) -> None:
    write(path, [record(status=status, operation=operation, events=events, output=None)])
    async with opened(path) as journal:
        job = await found(journal)
        assert (job.status, job.uncertain) == (status, uncertain)


# --- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.case(70)
@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([record("same"), record("b"), record("same")], r"record 2 .*'same' of an earlier"),
        ([record(), record("x", operation="dance")], r"record 1 \(Action 'x'\) has the unknown operation 'dance'"),
        ([record("x", operation=None)], r"\(Action 'x'\) has the unknown operation"),
        ([record("x", status="flying")], r"\(Action 'x'\) has the unknown status 'flying'"),
        ([record("x", status=["failed"])], r"\(Action 'x'\) has a status that is no text"),
        ([record("x", input_hash=...)], r"\(Action 'x'\) lacks input_hash"),
        ([record("x", input_hash=None)], r"\(Action 'x'\) has a input_hash that is no text"),
        ([record("x", crew_id=...)], r"\(Action 'x'\) lacks crew_id"),
        ([record(action_id=...)], r"record 0 lacks action_id"),
        ([record(action_id="")], r"action_id that is no text, or empty"),
        ([record(action_id="\ud800")], r"not well-formed Unicode"),
        ([record("x", events={})], r"\(Action 'x'\) has events that are no array"),
        ([["x"]], r"record 0 is no object"),
        (b"[" + encoded(record()), r"Expecting ',' or '\]'"),
        (b"[1,]", r"record 0 is no object"),
        (encoded([record()]) + b"x", "Extra data"),
        (b"[" + b"[" * 100_000, "nested too deeply"),
        (b'[{"a":' + b"9" * 5000 + b"}]", "more digits"),
        (b'[{"a":"\xff"}]', "not UTF-8 at byte 7"),
    ],
)
def test_what_the_reference_refuses_is_refused_and_left_as_it_is(path: Path, content: Any, said: str) -> None:
    before = write(path, content).read_bytes()
    with pytest.raises(StartError, match=said) as caught:
        open_journal(path)
    assert str(path) in caught.value.detail
    assert path.read_bytes() == before
    assert sorted(os.listdir(path.parent)) == ["runs.json", "runs.json.lock"]


@pytest.mark.case(70)
@pytest.mark.parametrize("content", [b'{"a":1}', b'"text"', b"null"])
def test_what_is_no_list_is_refused(path: Path, content: bytes) -> None:
    write(path, content)
    with pytest.raises(StartError, match="not a journal"):
        open_journal(path)
    with pytest.raises(StartError, match="Not a JSON array"):
        import_file(path, path.with_name("new.db"))


@pytest.mark.case(70)
@pytest.mark.parametrize("bits", [0o640, 0o604, 0o660])
def test_a_file_that_others_can_read_is_refused(path: Path, bits: int) -> None:
    write(path, [record()]).chmod(bits)
    with pytest.raises(StartError, match=f"{bits:04o}"):
        open_journal(path)
    assert not path.with_name("runs.json.reference").exists()


@pytest.mark.case(70)
def test_a_symlink_is_refused_and_not_followed(path: Path) -> None:
    target = write(path.with_name("real.json"), [record()])
    path.symlink_to(target)
    for attempt in (lambda: open_journal(path), lambda: import_file(path, path.with_name("new.db"))):
        with pytest.raises(StartError, match="symlink"):
            attempt()
    assert target.read_bytes() == encoded([record()])


def test_a_file_above_the_bound_is_refused_with_both_sizes(path: Path) -> None:
    size = write(path, [record()]).stat().st_size
    with pytest.raises(StartError, match=rf"{size} bytes, the bound is {size - 1}"):
        open_journal(path, import_limit_bytes=size - 1)
    open_journal(path, import_limit_bytes=size, reserve_bytes=0).close_sync()


def test_the_original_of_an_earlier_import_is_never_replaced(path: Path) -> None:
    earlier = write(path.with_name("runs.json.reference"), [record("earlier")]).read_bytes()
    write(path, [record("later")])
    with pytest.raises(StartError, match="original of an earlier import"):
        open_journal(path)
    assert path.with_name("runs.json.reference").read_bytes() == earlier
    assert parsed(path)[0]["action_id"] == "later"


@pytest.mark.parametrize("suffix", ["-wal", "-journal"])
def test_a_log_of_another_journal_is_not_replayed_into_the_import(path: Path, suffix: str) -> None:
    write(path, [record()])
    write(path.with_name(f"runs.json{suffix}"), b"frames")
    with pytest.raises(StartError, match="another journal"):
        open_journal(path)
    assert path.read_bytes() == encoded([record()])


# --- the schema -------------------------------------------------------------------------------------------------------


async def test_a_journal_of_the_first_schema_moves_forward_and_keeps_its_outputs(path: Path) -> None:
    async with opened(path) as journal:
        row = await start(journal)
        await journal.finish(row, sample_ending())
    make_older(path, 1)
    async with opened(path) as journal:
        assert await journal.output(row) == b'{"raw":"done"}'
    assert path.with_name("runs.json.v1.bak").exists()


# --- and back ---------------------------------------------------------------------------------------------------------


def vector_records() -> list[dict[str, Any]]:
    """One record for each Action of the admissible hash vectors, with its digest; statuses in turn."""
    made: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(ADMITTED):
        request = request_of(VECTORS[name])
        # Several vectors are variants of one Action; a journal has an Action once.
        action_id = request.action_id if request.action_id not in made else f"{name}-{number}"
        endings: list[dict[str, Any]] = [
            {},
            {"status": "failed", "output": None, "events": [event("failed", 0, status="failed", message="é")]},
            {"status": "cancelled", "output": None, "events": [event("cancelled", 0, status="cancelled")]},
            {"events": [event("completed", 0, status="completed")], "output": {"n": 1e16, "big": 2**70, "x": None}},
        ]
        made[action_id] = record(
            action_id,
            crew_id=request.crew_id,
            operation=request.operation,
            input_hash=VECTORS[name]["sha256"],
            **endings[number % len(endings)],
        )
    return list(made.values())


@pytest.mark.case(34, 68)
def test_a_round_trip_through_the_journal_changes_nothing(path: Path) -> None:
    old = vector_records()
    assert len(old) == len(ADMITTED)
    write(path, old)
    open_journal(path, reserve_bytes=0).close_sync()
    back = path.with_name("back.json")
    report = export_to(path, Format.REFERENCE, back)
    assert (report.jobs, report.settings, report.running) == (len(old), {}, ())
    assert parsed(back) == old
    assert back.read_bytes() == path.with_name("runs.json.reference").read_bytes()
    assert list(records(read(back))) == list(records(read(path.with_name("runs.json.reference"))))


@pytest.mark.case(34)
def test_every_admissible_vector_has_its_digest_in_the_exported_journal(path: Path) -> None:
    write(path, vector_records())
    open_journal(path, reserve_bytes=0).close_sync()
    lines = path.with_name("lines")
    export_to(path, Format.JSON, lines)
    exported = [json.loads(line)["request_hash"] for line in lines.read_text(encoding="utf-8").splitlines()]
    assert exported == [VECTORS[name]["sha256"] for name in ADMITTED]


async def test_jobs_of_our_own_are_exported_as_the_reference_would_have_them(path: Path) -> None:
    async with opened(path) as journal:
        row = await start(journal, "done")
        await journal.append_events(row, 1, [("chunk", b'{"z":1,"a":"\\u00e9"}')], 3.0)
        await journal.finish(row, sample_ending(first_seq=2))
        await admit(journal, "queued")
        await journal.record_start(await admit(journal, "live"), sample_worker(), b'{"status":"running"}', 2.0)
        report = export_to(path, Format.REFERENCE, path.with_name("back.json"))
    assert set(report.running) == {"queued", "live"}
    content = path.with_name("back.json").read_bytes()
    assert content.isascii()
    assert content == encoded(json.loads(content))
    exported = {item["action_id"]: item for item in json.loads(content)}
    assert list(exported) == ["done", "queued", "live"]
    assert exported["done"] == {
        "action_id": "done",
        "crew_id": "crew",
        "operation": "run",
        "input_hash": "1" * 64,
        "status": "completed",
        "output": {"raw": "done"},
        "events": [
            event("started", 0, status="running"),
            event("chunk", 1, a="é", z=1),
            event("completed", 2, raw="done"),
        ],
    }
    assert (exported["queued"]["status"], exported["queued"]["events"]) == ("running", [])
    assert (exported["live"]["status"], exported["live"]["output"]) == ("running", None)


async def test_a_row_that_cannot_be_read_stays_a_fence_in_the_reference(path: Path) -> None:
    async with opened(path) as journal:
        await journal.finish(await start(journal), sample_ending())
    change(path, "UPDATE jobs SET phase = 'nowhere'")
    report = export_to(path, Format.REFERENCE, path.with_name("back.json"))
    assert report.quarantined == ("a-1",)
    (item,) = parsed(path.with_name("back.json"))
    assert (item["status"], item["input_hash"], item["output"]) == ("failed", "1" * 64, None)
    assert [one["event"] for one in item["events"]] == ["started", "completed", "failed"]
    assert item["events"][-1]["data"]["uncertain_outcome"] is True


async def test_the_settings_that_the_reference_needs_are_named(path: Path) -> None:
    async with opened(path) as journal:
        row = await start(journal)
        await journal.append_events(row, 1, [("chunk", b'{"channel":"messages"}')] * 1200, 3.0)
        big = b'{"raw":"%s"}' % (b"x" * 300_000)
        await journal.finish(row, sample_ending(first_seq=1201, event_data=big))
    report = export_to(path, Format.REFERENCE, path.with_name("back.json"))
    assert report.settings == {
        "AIP_CREWAI_MAX_EVENTS_PER_RUN": 1202,
        "AIP_CREWAI_MAX_EVENT_BYTES": len(encoded({"event": "completed", "sequence": 1201, "data": json.loads(big)})),
    }
