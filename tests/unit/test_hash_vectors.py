"""The request hash, against vectors that were computed by running the reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from protocol import api, canonical
from protocol.errors import CrewError

VECTORS: dict[str, dict[str, Any]] = {
    vector["name"]: vector
    for vector in json.loads((Path(__file__).parents[1] / "data" / "hash-vectors.json").read_bytes())["vectors"]
}
#: Refused on purpose: not strict JSON, or an Action id that no URL can carry.
REFUSED = {"float-overflow", "nan-and-infinities", "lone-surrogate-value", "duplicate-keys", "unicode-ids"}
ADMITTED = sorted(VECTORS.keys() - REFUSED)


def parsed(vector: dict[str, Any]) -> api.StartRequest:
    """The request of a vector. Raises CrewError if it is refused."""
    return api.convert(canonical.parse(vector["request_json"].encode("utf-8")), api.StartRequest)


def hashed(vector: dict[str, Any]) -> str:
    """The digest of a vector's request under its key."""
    request = parsed(vector)
    key = bytes.fromhex(vector["idempotency_key_header_bytes_hex"]).decode("latin-1").strip(" \t")
    return canonical.request_hash(
        action_id=request.action_id,
        crew_id=request.crew_id,
        operation=request.operation,
        input=request.input,
        timeout_ms=request.timeout,
        idempotency_key=key,
    )


def test_the_file_is_whole() -> None:
    assert len(VECTORS) == 32
    assert VECTORS.keys() > REFUSED


@pytest.mark.case(34)
@pytest.mark.parametrize("name", ADMITTED)
def test_an_admissible_request_has_the_references_digest(name: str) -> None:
    assert hashed(VECTORS[name]) == VECTORS[name]["sha256"]


@pytest.mark.case(34)
@pytest.mark.parametrize("name", [name for name in ADMITTED if VECTORS[name]["same_hash_as"] in ADMITTED])
def test_requests_that_mean_the_same_have_the_same_digest(name: str) -> None:
    assert hashed(VECTORS[name]) == hashed(VECTORS[VECTORS[name]["same_hash_as"]])


@pytest.mark.case(34)
@pytest.mark.parametrize("name", [name for name in ADMITTED if VECTORS[name]["differs_from"] in ADMITTED])
def test_requests_that_differ_have_different_digests(name: str) -> None:
    assert hashed(VECTORS[name]) != hashed(VECTORS[VECTORS[name]["differs_from"]])


@pytest.mark.case(32)
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_the_others_are_refused(name: str) -> None:
    with pytest.raises(CrewError) as caught:
        parsed(VECTORS[name])
    assert 400 <= caught.value.status < 500


@pytest.mark.case(34)
def test_the_files_own_flags_agree_but_for_one() -> None:
    # The body of duplicate-keys-equivalent has no duplicate key any more, so it parses; the flag was copied over.
    assert {name for name in VECTORS if not VECTORS[name]["admissible"]} == REFUSED | {"duplicate-keys-equivalent"}
