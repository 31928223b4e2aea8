"""Steps for the crews of ``tests.crews.effect_crews``, and what a test does with their jobs over HTTP."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from protocol.effects import EffectKey, Policy
from tests.support import procs
from tests.support.client import Answer, Client
from tests.support.effects import ARGS, RECEIPT, key_of

REGISTRY = "tests.crews.effect_crews:CREWS"
WAIT_S = 20.0
Step = dict[str, Any]


def claim(key: EffectKey | None = None, *, args_hash: str = ARGS, policy: Policy = Policy.ONCE) -> Step:
    """Claim a key."""
    preimage = (key or key_of()).preimage.decode()
    return {"do": "claim", "preimage": preimage, "args_hash": args_hash, "policy": policy.value}


def settle(key: EffectKey | None = None, *, receipt: str | None = RECEIPT.decode(), epoch: int | None = None) -> Step:
    """Report that it happened."""
    return {"do": "settle", "key_id": (key or key_of()).key_id, "args_hash": ARGS, "receipt": receipt, "epoch": epoch}


def touch(path: Path) -> Step:
    """Say by a file how far it is."""
    return {"do": "touch", "path": str(path)}


def wait(path: Path) -> Step:
    """Wait for the test's file."""
    return {"do": "wait", "path": str(path)}


SLEEP: Step = {"do": "sleep"}


def perform(client: Client, action_id: str, *steps: Step, crew_id: str = "scripted", **options: Any) -> Answer:
    """Run a script to its end."""
    return client.start(action_id, crew_id, input={"steps": list(steps)}, **options)


def begin(client: Client, action_id: str, *steps: Step, crew_id: str = "scripted", **options: Any) -> None:
    """Start a script and wait for nothing."""
    headers = {"Prefer": "respond-async"}
    client.start(action_id, crew_id, input={"steps": list(steps)}, headers=headers, **options).expect(202)


def effect(client: Client, key: EffectKey | None = None) -> Answer:
    """One effect."""
    return client.request("GET", f"/effects/{(key or key_of()).key_id}")


def until_state(client: Client, state: str, key: EffectKey | None = None) -> dict[str, Any]:
    """Wait until an effect is in that state, and return its view."""
    found: list[dict[str, Any]] = []

    def there() -> bool:
        answer = effect(client, key)
        found[:] = [answer.json()] if answer.status == 200 else []
        return bool(found) and found[0]["state"] == state

    procs.wait_until(there, WAIT_S, f"the effect is {state}")
    return found[0]


def reconcile(
    client: Client, key: EffectKey | None = None, *, etag: str | None = None, **body: Any
) -> Answer:
    """Send a decision on the version that ``etag`` names, by default the one there is."""
    tag = effect(client, key).headers["etag"] if etag is None else etag
    sent = {"actor": "ops", "decision": "abandoned", "evidence": "nobody knows", **body}
    body = {name: value for name, value in sent.items() if value is not ...}
    headers = {"If-Match": tag} if tag else {}
    return client.request("POST", f"/effects/{(key or key_of()).key_id}/reconcile", body=body, headers=headers)


def make_unknown(client: Client, key: EffectKey, *, action_id: str) -> dict[str, Any]:
    """Have a job claim the key and die; returns the effect's view."""
    perform(client, action_id, claim(key), {"do": "die"}).expect(502)
    return until_state(client, "unknown", key)


def at_once(*calls: Any) -> list[Any]:
    """What calls return that are made by a thread each, all let go at one instant."""
    barrier, results = threading.Barrier(len(calls)), [None] * len(calls)

    def run(number: int) -> None:
        barrier.wait(WAIT_S)
        results[number] = calls[number]()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    return results


def milliseconds_until_unknown(client: Client, key: EffectKey, since: float) -> float:
    """From ``since`` (monotonic) to the answer that shows the effect unknown."""
    while effect(client, key).json()["state"] != "unknown":
        assert time.monotonic() - since < WAIT_S, "the effect stays claimed"
    return (time.monotonic() - since) * 1000
