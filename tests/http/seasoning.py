"""Makes generated requests meaningful: real credentials, crews, operations and Action ids in a good share of them."""

from __future__ import annotations

import random
from typing import Any

from schemathesis import Case

from tests.support.effects import key_of
from tests.support.server import TOKEN

#: Crews that end by themselves, soon; and one that nobody has.
CREWS = ("instant", "echo", "streaming", "failing", "batch_of_one", "async_knowledge", "factory_raises", "not_a_crew",
         "crash", "sleeper", "nobody")  # fmt: skip
#: Runs until it is cancelled; nobody waits for it.
LONG = "async_sleeper"
ACTIONS = 600
#: Effects that wait for a decision when the requests begin.
KEYS = [key_of(f"seasoned-{number}") for number in range(40)]
INPUTS: dict[str, dict[str, Any]] = {
    "run": {"seconds": 0.1, "chunks": 3},
    "batch_run": {"inputs": [{}, {"x": 1}]},
    "replay": {"task_id": "t"},
    "train": {"n_iterations": 1, "artifact_name": "m.pkl", "overwrite": True},
    "test": {"n_iterations": 1, "eval_llm": "judge"},
    "knowledge_query": {"query": ["what"]},
    "memory_reset": {"command_type": "memory"},
}
CREDENTIALS = (f"Bearer {TOKEN}",) * 18 + ("Bearer wrong", None)
#: The share of requests that stay as they were generated, credentials aside.
AS_GENERATED = 0.2


def season(case: Case[Any], dice: random.Random) -> None:
    """Make of a generated request one that a client with some sense would send, more often than not."""
    _set_header(case, "Authorization", dice.choice(CREDENTIALS))
    if case.path_parameters and case.path_parameters.get("action_id") in {".", ".."}:
        case.path_parameters["action_id"] = "dots"  # no client can send them
    if dice.random() < AS_GENERATED:
        return
    if case.path.endswith("/log"):
        case.query = {"tail": dice.choice((0, 10, 10_000)), "follow": dice.choice((0, 1))}
    if case.path.startswith("/effects/{"):
        _season_effect(case, dice)
        return
    number = dice.randrange(ACTIONS)
    name, crew = f"a-{number}", CREWS[number % len(CREWS)]
    if number % 3 == 0 and not case.path.endswith(("/stream", "/events", "/log")):
        name, crew = f"long-{number % 60}", LONG
    if case.path_parameters:
        case.path_parameters["action_id"] = name
        _set_header(case, "X-AIP-Crew-ID", dice.choice((None, None, crew, "another")))
    if case.path.endswith("/cancel") and isinstance(case.body, dict):
        case.body = {**case.body, "action_id": name, "crew_id": crew}
        _set_header(case, "Prefer", dice.choice((None, None, "wait=0")))
    elif case.path.endswith("/reconcile") and isinstance(case.body, dict):
        decision = dice.choice(("applied", "partly_applied", "not_applied", "abandoned"))
        case.body = {"actor": "ops", "evidence": "the provider's answer", "decision": decision}
    elif case.method == "POST" and isinstance(case.body, dict):
        _season_start(case, case.body, dice, (name, crew))
    elif case.method == "DELETE":
        _set_header(case, "X-AIP-Archive-Confirmation", dice.choice((name, name, "another")))
    elif case.path.endswith("/events") and dice.random() < 0.5:
        _set_header(case, "Accept", "text/event-stream")


def _season_effect(case: Case[Any], dice: random.Random) -> None:
    """Keys that are there, often at the version that there is, with a decision that may be made."""
    case.path_parameters["key_id"] = dice.choice(KEYS).key_id
    if case.method == "POST" and isinstance(case.body, dict):
        _set_header(case, "If-Match", dice.choice(('"2"', '"2"', '"3"', None)))
        decision = dice.choice(("settled", "not_applied", "abandoned"))
        case.body = {"actor": "ops", "evidence": "the provider's answer", "decision": decision}
        if decision == "settled":
            case.body["receipt"] = {"paid": True}


def _season_start(case: Case[Any], body: dict[str, Any], dice: random.Random, who: tuple[str, str]) -> None:
    name, crew = who
    operation = dice.choice((*("run",) * 12, *INPUTS))
    given = INPUTS[operation] if dice.random() < 0.8 else body.get("input", {})
    timeout_ms = dice.choice((*(None,) * 8, 5000, body.get("timeout_ms")))
    sent = {"action_id": name, "crew_id": crew, "operation": operation, "input": given, "timeout_ms": timeout_ms}
    _set_header(case, "Idempotency-Key", dice.choice((*("k",) * 9, "other")))
    _set_header(case, "Prefer", dice.choice((None, None, "respond-async")))
    if crew == "sleeper":
        sent["timeout_ms"] = 50
    if crew == LONG:
        sent |= {"operation": "run", "input": {"seconds": 30}, "timeout_ms": None}
        _set_header(case, "Prefer", "respond-async")
    case.body = sent


def _set_header(case: Case[Any], name: str, value: str | None) -> None:
    if value is None:
        case.headers.pop(name, None)
    else:
        case.headers[name] = value
