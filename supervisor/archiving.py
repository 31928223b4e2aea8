"""Archiving a finished job: its material goes to the archive file, then its rows go, a tombstone stays."""

from __future__ import annotations

import asyncio
import time

import msgspec

from protocol import points
from protocol.api import effect_view
from protocol.errors import ActionRetained, ActionRunning, UnknownAction
from protocol.states import TERMINAL
from supervisor.capture import read_end
from supervisor.journal import ArchiveFile, JobRecord, Journal
from supervisor.journal.transactions import refuse_open_effects
from supervisor.workspace import Workspace

PAGE_EVENTS = 500
#: Captured output that goes to the archive file: its last bytes.
LOG_BYTES = 4 << 20


class Archiver:
    """Archives one job at a time."""

    def __init__(self, journal: Journal, workspace: Workspace, *, min_retention_s: float) -> None:
        self._journal = journal
        self._workspace = workspace
        self._min_retention_s = min_retention_s
        self._file = ArchiveFile(journal.path.with_name(journal.path.name + ".archive.jsonl"))
        self._lock = asyncio.Lock()

    async def archive(self, action_id: str, *, actor: str) -> None:
        """Archive a job. Raises UnknownAction, ActionRunning, ActionRetained, EffectsOpen, JournalUnavailable."""
        async with self._lock:
            record = await self._archivable(action_id)
            await asyncio.to_thread(self._file.append, await self._material(record, actor))
            row = await self._journal.archive(action_id, actor=actor)
            points.reach("archive.recorded")
            await asyncio.to_thread(self._workspace.forget, row)

    async def _archivable(self, action_id: str) -> JobRecord:
        record = await self._journal.get(action_id)
        if record is None:
            raise UnknownAction(f"no retained job has Action id {action_id}", action_id=action_id)
        if record.status not in TERMINAL:
            raise ActionRunning(f"Action {action_id} is still running; cancel it or wait", action_id=action_id)
        left_s = (record.ended_at or 0.0) + self._min_retention_s - time.time()
        if left_s > 0:
            raise ActionRetained(
                f"Action {action_id} ended less than min_retention_s = {self._min_retention_s:g} s ago",
                action_id=action_id,
                retry_after_s=int(left_s) + 1,
            )
        refuse_open_effects(action_id, *await self._journal.effects.open_keys(record.row))
        return record

    async def _material(self, record: JobRecord, actor: str) -> list[bytes]:
        """The archive line in pieces: who, when, the record, every event, effects, the audit, the log."""
        head = msgspec.json.encode({"archived_at": time.time(), "archived_by": actor, "record": record})
        pieces = [head[:-1], b',"events":[']
        sequence = 0
        while sequence < record.event_count:
            page = await self._journal.events(record.row, sequence, limit=PAGE_EVENTS)
            if not page:
                break
            for event in page:
                note = msgspec.json.encode({"event": event.name, "sequence": event.seq, "at": event.at})
                pieces += [b"," if event.seq else b"", note[:-1], b',"data":', event.data, b"}"]
            sequence = page[-1].seq + 1
        audit = [
            {"at": entry.at, "actor": entry.actor, "act": entry.act, "detail": msgspec.Raw(entry.detail or b"null")}
            for entry in await self._journal.audit_of(record.action_id)
        ]
        decided = (await self._journal.reconciliations([record])).get(record.row, [])
        log, omitted = await asyncio.to_thread(read_end, self._workspace.log(record.row), LOG_BYTES)
        rest = {
            "audit": audit,
            "reconciliations": decided,
            "log": log.decode("utf-8", "replace"),
            "log_omitted_bytes": omitted,
        }
        pieces += [b'],"effects":[', *await self._effects(record.row)]
        return [*pieces, b"],", msgspec.json.encode(rest)[1:]]

    async def _effects(self, row: int) -> list[bytes]:
        pieces: list[bytes] = []
        before: int | None = None
        while True:
            page = await self._journal.effects.page(job=row, before=before)
            for effect in page.records:
                pieces += [b"," if pieces else b"", msgspec.json.encode(effect_view(effect))]
            before = page.before
            if before is None:
                return pieces
