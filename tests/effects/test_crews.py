"""Real crews of CrewAI, once as it is and twice with the guard; the provider counts the effects.

Three processes play the scenes: an unguarded one, a guarded one, and a guarded one of the same Action once more.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from demo.payments.provider import Provider
from protocol.states import EffectState
from tests.process.operation_child import ENVIRONMENT
from worker.ledger import LocalLedger

ROOT = Path(__file__).resolve().parents[2]
#: Scenes of retried_scenes.TABLE with their rows' names and what CrewAI 1.15 does without a guard. The module imports
#: CrewAI, which this process need not.
ROWS = {
    "react_raises": ("ReAct call whose body acts and raises", 6),
    "native_raises": ("native call, same tool", 1),
    "react_model_fails": ("model fails after the tool, ReAct", 2),
    "native_model_fails": ("model fails after the tool, native", 2),
    "guardrail": ("guardrail retry", 2),
    "slow_mcp": ("MCP call slower than its timeout", 3),
}
#: Scenes with the guard and how many effects they are to have.
EFFECTS = {
    "parallel": 2,
    "parallel_with_key": 1,
    "reworded": 1,
    "persistent": 1,
    "class_tool": 1,
    "undecorated_class_tool": 1,
    "decorated_above": 1,
    "async_tool": 1,
    "async_crew": 1,
    "direct_calls": 1,
    "delegated": 1,
    "two_tasks": 2,
    "batch": 2,
    "batch_async": 3,
    "batch_native_async": 3,
    "iterations": 2,
    "kickoff_repeated": 1,
    "duplicate_keys_react": 0,
    "duplicate_keys_native": 0,
    "block_in_a_tool": 1,
    "not_applied": 1,
    "usage_limit": 1,
    "key_as_argument": 5,
    "lone_agent": 2,
    "not_stored": 1,
}
UNKNOWN = "effect_outcome_unknown"
#: What the same Action does in another process; a tool's usage count is not part of it.
AGAIN = [*ROWS, *(scene for scene in EFFECTS if scene != "usage_limit")]

pytestmark = pytest.mark.timeout(240)


@dataclass
class Played:
    """What the scenes of one process came to. ``effects``: the count of its own provider, by scene."""

    answers: dict[str, Any]
    effects: Counter[str]

    def answer(self, scene: str) -> Any:
        found = self.answers[scene]
        assert not (isinstance(found, dict) and "failed" in found), found["failed"]
        return found

    def codes(self, scene: str) -> list[str]:
        codes: list[str] = self.answer(scene)["codes"]
        return codes


@dataclass
class Plays:
    unguarded: Played
    guarded: Played
    again: Played
    ledger: Path


def play_all(home: Path, plays: list[dict[str, Any]]) -> None:
    """Let a process play ``plays``."""
    log = home / "log"
    with log.open("wb") as output:
        done = subprocess.run(
            [sys.executable, "-m", "tests.effects.crew_child", *map(json.dumps, plays)],
            cwd=ROOT,
            env=os.environ | ENVIRONMENT | {"HOME": str(home), "CREWAI_STORAGE_DIR": str(home / "storage")},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            timeout=200,
            check=False,
        )
    assert done.returncode == 0, log.read_text(errors="replace")[-3000:]


@pytest.fixture(scope="module")
def plays(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plays]:
    home = tmp_path_factory.mktemp("crews")
    providers = {name: Provider(home / f"{name}.db").start() for name in ("unguarded", "guarded", "again")}
    ledger = home / "effects.db"

    def play(name: str, scenes: list[str]) -> dict[str, Any]:
        (home / name).mkdir()
        return {
            "out": str(home / f"{name}.json"),
            "url": providers[name].url,
            "ledger": None if name == "unguarded" else str(ledger),
            "scenes": scenes,
            "home": str(home / name),
            "after": name == "again",
        }

    def played(name: str) -> Played:
        effects = Counter(charge["invoice"] for charge in providers[name].charges())
        return Played(json.loads((home / f"{name}.json").read_text(encoding="utf-8")), effects)

    try:
        unguarded, guarded = play("unguarded", [*ROWS, "no_ledger"]), play("guarded", [*ROWS, *EFFECTS])
        play_all(home, [unguarded, guarded, play("again", AGAIN)])
        yield Plays(played("unguarded"), played("guarded"), played("again"), ledger)
    finally:
        for provider in providers.values():
            provider.kill()


def test_the_table_of_what_fires_without_the_guard_and_with_it(
    plays: Plays, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [f"{'effects at the provider':44}{'CrewAI':>8}{'guarded':>9}"]
    for scene, (name, _) in ROWS.items():
        lines.append(f"{name:44}{plays.unguarded.effects[scene]:8}{plays.guarded.effects[scene]:9}")
    with capsys.disabled():
        sys.stdout.write("\n" + "\n".join(lines) + "\n")
    for scene, (_, fires) in ROWS.items():
        plays.unguarded.answer(scene)
        plays.guarded.answer(scene)
        assert plays.unguarded.effects[scene] == fires, scene
        assert plays.guarded.effects[scene] == 1, scene


@pytest.mark.parametrize("scene", EFFECTS)
def test_each_scene_has_the_effects_that_it_is_to_have(scene: str, plays: Plays) -> None:
    plays.guarded.answer(scene)
    assert plays.guarded.effects[scene] == EFFECTS[scene]


@pytest.mark.effect_case(12)
def test_a_guarded_tool_without_any_ledger_does_not_run_and_one_that_only_reads_does(plays: Plays) -> None:
    heard = plays.unguarded.answer("no_ledger")
    assert heard["refused"]["codes"] == ["effect_ledger_unavailable"]
    assert (heard["read"]["codes"], heard["read"]["raw"].startswith("charged")) == ([], True)
    assert plays.unguarded.effects["no_ledger"] == 1


@pytest.mark.effect_case(17)
def test_two_equal_parallel_calls_without_a_key_are_two_effects(plays: Plays) -> None:
    assert plays.guarded.effects["parallel"] == 2
    assert plays.guarded.codes("parallel") == []


@pytest.mark.effect_case(18)
@pytest.mark.effect_case(19)
def test_in_the_loop_that_repeats_a_call_that_raised_every_repeat_is_refused(plays: Plays) -> None:
    assert plays.guarded.effects["react_raises"] == 1
    assert plays.guarded.codes("react_raises") == [UNKNOWN]


@pytest.mark.effect_case(18)
def test_a_model_that_calls_again_after_the_refusal_is_refused_again(plays: Plays) -> None:
    assert plays.guarded.effects["persistent"] == 1
    assert UNKNOWN in plays.guarded.codes("persistent")
    assert plays.guarded.answer("persistent")["raw"] == "gave up"


@pytest.mark.effect_case(20)
def test_natively_the_tools_own_exception_reaches_the_agent_as_it_was(plays: Plays) -> None:
    assert plays.guarded.effects["native_raises"] == 1
    assert plays.guarded.codes("native_raises") == ["ConnectionError"]


@pytest.mark.effect_case(21)
@pytest.mark.parametrize("scene", ["react_model_fails", "native_model_fails", "guardrail"])
def test_a_task_that_is_entered_again_gets_the_receipt(scene: str, plays: Plays) -> None:
    assert plays.guarded.effects[scene] == 1
    assert plays.guarded.answer(scene)["raw"].startswith("charged")
    assert plays.guarded.codes(scene) == []


@pytest.mark.effect_case(22)
@pytest.mark.parametrize("scene", AGAIN)
def test_the_same_action_in_a_new_process_has_no_effect(scene: str, plays: Plays) -> None:
    plays.again.answer(scene)
    assert plays.again.effects[scene] == 0


@pytest.mark.effect_case(22)
@pytest.mark.parametrize(
    "scene", ["two_tasks", "batch", "batch_async", "batch_native_async", "direct_calls", "delegated"]
)
def test_the_same_action_in_a_new_process_gets_the_same_receipts_in_the_same_places(scene: str, plays: Plays) -> None:
    first = plays.guarded.answer(scene)
    assert plays.again.answer(scene) == first
    if scene.startswith("batch"):
        assert len(set(first)) == EFFECTS[scene], "every item has its own"


@pytest.mark.effect_case(24)
def test_a_retry_with_another_amount_under_the_invoices_key_is_a_conflict(plays: Plays) -> None:
    assert plays.guarded.effects["reworded"] == 1
    assert plays.guarded.codes("reworded") == ["effect_conflict"]


@pytest.mark.effect_case(25)
@pytest.mark.parametrize(
    "scene", ["class_tool", "undecorated_class_tool", "decorated_above", "async_tool", "block_in_a_tool"]
)
def test_every_kind_of_tool_is_refused_after_its_outcome_was_lost(scene: str, plays: Plays) -> None:
    assert plays.guarded.effects[scene] == 1
    assert set(plays.guarded.codes(scene)) == {UNKNOWN}


@pytest.mark.effect_case(25)
def test_by_every_method_a_tool_gives_the_same_receipt(plays: Plays) -> None:
    assert len(plays.guarded.answer("direct_calls")) == 7
    assert len(set(plays.guarded.answer("direct_calls"))) == 1


@pytest.mark.effect_case(25)
def test_of_two_parallel_calls_under_one_key_one_acts(plays: Plays) -> None:
    assert plays.guarded.effects["parallel_with_key"] == 1
    assert set(plays.guarded.codes("parallel_with_key")) <= {"effect_in_flight"}


@pytest.mark.effect_case(26)
def test_a_tool_without_a_result_is_not_run_again_and_the_agent_is_told(plays: Plays) -> None:
    assert plays.guarded.effects["not_stored"] == 1
    assert "not stored" in plays.guarded.answer("not_stored")["raw"]
    assert plays.guarded.codes("not_stored") == []


@pytest.mark.effect_case(45)
@pytest.mark.parametrize("scene", ["duplicate_keys_react", "duplicate_keys_native"])
def test_text_with_a_key_twice_is_refused(scene: str, plays: Plays) -> None:
    assert plays.guarded.codes(scene) == ["effect_arguments_refused"]


def test_a_tool_that_says_that_nothing_happened_is_tried_until_something_does(plays: Plays) -> None:
    assert plays.guarded.effects["not_applied"] == 1
    assert plays.guarded.answer("not_applied")["raw"].startswith("charged")


def test_the_key_id_comes_as_an_argument_whatever_the_model_says(plays: Plays) -> None:
    assert plays.guarded.answer("key_as_argument") == [True, True, True, True, "True"]


def test_a_kickoff_of_an_agent_that_raised_is_met_again_and_one_that_did_not_is_another(plays: Plays) -> None:
    first, second = plays.guarded.answer("lone_agent")
    assert first != second
    assert plays.again.answer("lone_agent") == [first, second]


def test_a_spent_tool_is_no_unknown_outcome(plays: Plays) -> None:
    assert plays.guarded.answer("usage_limit") == "usage_limit"
    ledger = LocalLedger(plays.ledger)
    states = Counter(record.state for record in ledger.records() if b'"call",[]' in record.preimage)
    ledger.close()
    assert states == {EffectState.SETTLED: 1, EffectState.NOT_APPLIED: 1}
