"""The catalogue of capabilities (wire contract, 16.8), the manifest, and the readiness that a host asks for (16.9)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from supervisor.client import (
    CATALOGUE,
    Client,
    Crew,
    InvalidRequest,
    capability_id,
    lacks,
    manifest,
    read_crews,
    resolve,
)
from supervisor.client.answers import Health

ALL = tuple(CATALOGUE)


def crew(crew_id: str, *allowed: str) -> Crew:
    return Crew(id=crew_id, name=f"The {crew_id}", description="What it does.", allowed_operations=allowed or ALL)


#: As the contract lists them: kind, risk, effect, then key, stream and cancel where they are.
CONTRACT = {
    "run": ("agent", "medium", "mutation", "key", "stream", "cancel"),
    "status": ("tool", "low", "read"),
    "events": ("tool", "low", "read", "stream"),
    "cancel": ("tool", "medium", "mutation", "key"),
    "batch_run": ("agent", "medium", "mutation", "key", "stream", "cancel"),
    "replay": ("agent", "medium", "mutation", "key", "stream"),
    "train": ("workflow", "high", "mutation", "key", "stream"),
    "test": ("workflow", "medium", "mutation", "key", "stream"),
    "knowledge_query": ("tool", "low", "read", "key"),
    "memory_reset": ("tool", "high", "mutation", "key"),
}


def test_the_catalogue_is_the_contracts() -> None:
    for name, traits in CATALOGUE.items():
        flags = (flag for flag in ("key", "stream", "cancel") if getattr(traits, flag))
        assert (traits.kind, traits.risk, traits.effect, *flags) == CONTRACT[name]
    assert CATALOGUE.keys() == CONTRACT.keys()


def test_ids_and_what_they_mean() -> None:
    crews = [crew("a"), crew("a:train"), crew("b", "run", "status"), crew("c:status", "events")]
    for one in crews:
        for operation in one.allowed_operations:
            text = capability_id(one.id, operation)
            meant = resolve(text, crews)
            if text != "cap:crewai:a:train":
                assert (meant.id, meant.crew_id, meant.operation) == (text, one.id, operation)
    assert capability_id("a", "run") == "cap:crewai:a"
    exact = resolve("cap:crewai:a:train", crews)
    assert (exact.crew_id, exact.operation) == ("a:train", "run"), "a crew's own id wins"
    longest = resolve("cap:crewai:a:train:train", crews)
    assert (longest.crew_id, longest.operation) == ("a:train", "train")


@pytest.mark.parametrize("text", ["cap:crewai:z", "cap:crewai:b:train", "cap:crewai:a:fly", "a", "cap:crewai:", ""])
def test_what_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        resolve(text, [crew("a"), crew("b", "run")])


def test_the_manifest() -> None:
    entries = {entry["id"]: entry for entry in manifest([crew("a"), crew("a:train", "run")])["capabilities"]}
    assert len(entries) == len(ALL), "the run of a:train stands where the train of a would be"
    assert entries["cap:crewai:a:train"]["crew_id"] == "a:train"
    assert entries["cap:crewai:a"] == {
        "id": "cap:crewai:a",
        "crew_id": "a",
        "operation": "run",
        "name": "The a",
        "description": "What it does.",
        "kind": "agent",
        "risk": "medium",
        "effect": "mutation",
        "approval": {"required": True, "ttl_s": 900},
        "idempotency": {"key_required": True, "ttl_s": 86_400},
        "streaming": True,
        "cancellable": True,
        "sla": {"timeout_ms": 600_000, "max_queue_delay_ms": 10_000, "availability_percent": 99.5},
    }
    status = entries["cap:crewai:a:status"]
    assert (status["approval"]["required"], status["idempotency"]["key_required"]) == (False, False)
    for text, entry in entries.items():
        meant = resolve(text, [crew("a"), crew("a:train", "run")])
        assert (meant.crew_id, meant.operation) == (entry["crew_id"], entry["operation"])
    json.dumps(list(entries.values()))


def described(**changes: Any) -> dict[str, Any]:
    return {"id": "a", "name": "n", "description": "d", **changes}


def test_crews_are_read() -> None:
    crews = read_crews(json.dumps([described(), described(id="b", allowed_operations=["train"])]).encode())
    assert [(one.id, one.allowed_operations) for one in crews] == [
        ("a", ("run", "status", "events", "cancel")),
        ("b", ("train",)),
    ]


@pytest.mark.parametrize(
    "document",
    [
        [], {}, [described(id="")], [described(id="x" * 257)], [described(id="a\n")], [described(name="x" * 513)],
        [described(description="x" * 16_385)], [described(allowed_operations=[])], [described(), described()],
        [described(allowed_operations=["fly"])], [described(other=1)], [{"id": "a"}],
        [described(id=str(number)) for number in range(1001)],
    ],
)  # fmt: skip
def test_crews_out_of_bounds_are_refused(document: Any) -> None:
    with pytest.raises(InvalidRequest):
        read_crews(json.dumps(document).encode())


@pytest.mark.parametrize("document", [b"", b"[", b'[{"id":"a","id":"b"}]', b" " * ((4 << 20) + 1)])
def test_crews_that_are_no_strict_json_are_refused(document: bytes) -> None:
    with pytest.raises(InvalidRequest):
        read_crews(document)


HEALTH = Health(status="ready", crews=("a",), operations=ALL, durable_journal=True)


@pytest.mark.parametrize(
    ("health", "missing"),
    [
        (HEALTH, []),
        (Health(status="not_ready", crews=("a",), operations=ALL, durable_journal=False), 2),
        (Health(status="ready", crews=(), operations=ALL, durable_journal=True), ["crew a"]),
        (Health(status="ready", crews=("a",), operations=ALL[1:], durable_journal=True), ["operation run"]),
    ],
)
def test_what_a_server_lacks(health: Health, missing: Any) -> None:
    found = lacks(health, [crew("a")])
    assert found == missing or len(found) == missing


async def test_the_real_server_lacks_nothing(client: Client) -> None:
    health = await client.health()
    assert lacks(health, [crew("witness"), crew("echo", "run")]) == []
    assert lacks(health, [crew("nobody", "run")]) == ["crew nobody"]
