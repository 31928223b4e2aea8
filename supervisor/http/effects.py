"""What the routes about effects do, and the document of everything that is known of a job."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping

import msgspec
from aiohttp import hdrs, web

from protocol import canonical
from protocol.api import AuditView, EffectList, EffectView, JobEvidence, ReconcileRequest, convert, effect_view
from protocol.effects import MAX_RECEIPT_BYTES, EffectRecord, Reconciliation
from protocol.errors import EffectMalformed, IfMatchMissing
from supervisor.capture import read_end
from supervisor.http.edge import json_response, read_json
from supervisor.http.ground import Ground
from supervisor.http.query import EFFECT, SHARED_EFFECT, encode_cursor, read_effect_query
from supervisor.http.start import actor
from supervisor.journal import AuditEntry
from supervisor.log import get_log

log = get_log(__name__)
#: Effects and bytes of log that the evidence of a job has.
EVIDENCE_EFFECTS = 1000
LOG_TAIL_BYTES = 65_536
#: On answers of a replica: whether the effects are as its fleet has them, or as its own journal does.
SOURCE = "X-Crew-Fleet-Effects"
#: A strong entity tag of ours (RFC 9110, 8.8.3), not behind a weak one's mark.
_VERSION = re.compile(r'(?:^|[\s,])"([0-9]{1,15})"')


class EffectHandlers(Ground):
    """Handlers of effects and of evidence."""

    async def list_effects(self, request: web.Request) -> web.StreamResponse:
        """Effects, the newest key first, a page at a time."""
        query = read_effect_query(request)
        page = await self._means.effects.page(
            state=query.state,
            crew_id=query.crew_id,
            scope=query.scope,
            before=query.before,
            shared_before=query.shared_before,
            limit=query.limit,
        )
        kind = SHARED_EFFECT if page.shared else EFFECT
        return json_response(_listed(page.records, page.before, kind), headers=self._source(shared=page.shared))

    def _source(self, *, shared: bool) -> dict[str, str]:
        """What a replica says of where it has this from; one that is alone says nothing."""
        if self._means.settings.fleet is None:
            return {}
        return {SOURCE: "fleet" if shared else "replica"}

    async def job_effects(self, request: web.Request) -> web.StreamResponse:
        """The same for what one job claimed last."""
        record, _ = await self._read(request)
        query = read_effect_query(request, of_job=True)
        page = await self._journal.effects.page(job=record.row, before=query.before, limit=query.limit)
        return json_response(_listed(page.records, page.before))

    async def show_effect(self, request: web.Request) -> web.StreamResponse:
        """One effect; the ETag is its version."""
        found = await self._means.effects.look(request.match_info["key_id"])
        return _answer(found.record, self._source(shared=found.shared))

    async def reconcile_effect(self, request: web.Request) -> web.StreamResponse:
        """Record what somebody found out about an unknown outcome."""
        versions = _versions(request)
        body = convert(await read_json(request), ReconcileRequest)
        receipt = None if body.receipt is msgspec.UNSET else canonical.compact(body.receipt)
        if receipt is not None and len(receipt) > MAX_RECEIPT_BYTES:
            raise EffectMalformed(f"the receipt is above {MAX_RECEIPT_BYTES} bytes; send a shorter one")
        found = Reconciliation(decision=body.decision, actor=body.actor, evidence=body.evidence, receipt=receipt)
        key_id = request.match_info["key_id"]
        record = await self._means.effects.reconcile(key_id, found, versions=versions, by=actor(request))
        said = {"action_id": record.action_id, "crew_id": record.crew_id, "key_id": key_id}
        log.info("effect_reconciled", **said, decision=body.decision.value, actor=body.actor)
        return _answer(record)

    async def evidence(self, request: web.Request) -> web.StreamResponse:
        """What is known of a job, in one document."""
        record, job = await self._read(request)
        view = await self._view(record, job)
        page = await self._journal.effects.page(job=record.row, limit=EVIDENCE_EFFECTS)
        total = sum(msgspec.structs.astuple(view.effects))
        audit = await self._journal.audit_of(record.action_id)
        tail, _ = await asyncio.to_thread(read_end, self._means.workspace.log(record.row), LOG_TAIL_BYTES)
        decided = await self._journal.reconciliations([record])
        return json_response(
            JobEvidence(
                action_id=record.action_id,
                request_hash=record.request_hash,
                config_digest=record.config_digest,
                registry_digest=record.registry_digest,
                record=view,
                stop=view.stop,
                reconciliations=decided.get(record.row, []),
                effects=[effect_view(effect) for effect in page.records],
                effects_omitted=max(0, total - len(page.records)),
                log_tail=tail.decode("utf-8", "replace"),
                audit=[_audit_view(entry) for entry in audit],
            )
        )


def _listed(records: list[EffectRecord], before: int | None, kind: str = EFFECT) -> EffectList:
    return EffectList(effects=[effect_view(record) for record in records], next_cursor=encode_cursor(kind, before))


def _answer(record: EffectRecord, more: Mapping[str, str] | None = None) -> web.Response:
    view: EffectView = effect_view(record)
    return json_response(view, headers={hdrs.ETAG: f'"{record.version}"', **(more or {})})


def _versions(request: web.Request) -> frozenset[int]:
    """The versions that If-Match names; a tag that is none of ours matches nothing. Raises IfMatchMissing."""
    value = ",".join(request.headers.getall(hdrs.IF_MATCH, [])).strip()
    if not value or value == "*":
        raise IfMatchMissing("a reconciliation needs If-Match with the ETag of the effect that was looked at")
    return frozenset(int(version) for version in _VERSION.findall(value))


def _audit_view(entry: AuditEntry) -> AuditView:
    return AuditView(at=entry.at, actor=entry.actor, act=entry.act, detail=msgspec.Raw(entry.detail or b"null"))
