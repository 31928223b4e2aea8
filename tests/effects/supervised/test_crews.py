"""Real CrewAI crews under the supervisor, with a scripted model; the provider counts what they do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from demo.payments.provider import Provider
from tests.support.client import Answer, Client
from tests.support.payers import NONE, UNKNOWN
from tests.support.server import Server

REGISTRY = "tests.crews.charging_crews:CREWS"
#: Policies of the configuration file, for tools that nobody decorated.
EFFECTS: dict[str, dict[str, Any]] = {
    "third_party": {"Third Party": {"volatile": ["memo"]}},
    "read_only": {"third_party": {"policy": "read"}},
    "reworded": {"third_party": {"key": ["invoice"], "volatile": ["memo"], "scope": "crew"}},
    "wrong_tool": {"fourth_party": {"policy": "once"}},
    "wrong_argument": {"third_party": {"key": ["number"]}},
    "wrong_lookup": {"third_party": {"reconcile": "tests.nowhere:ask"}},
}
#: What CrewAI 1.15 does to a tool that acts and raises when nothing guards it.
UNGUARDED = 6

pytestmark = pytest.mark.timeout(240)


class Crews:
    """A server with the crews, and the provider."""

    def __init__(self, server: Server, provider: Provider) -> None:
        self.client: Client = server.client()
        self._provider = provider

    def run(self, crew_id: str, action_id: str = "") -> Answer:
        """Run a crew to its end; its invoice is its own id."""
        return self.client.start(action_id or crew_id, crew_id, input={"invoice": crew_id})

    def charges(self, crew_id: str) -> int:
        """How often a crew's invoice was charged."""
        return sum(charge["invoice"] == crew_id for charge in self._provider.charges())

    def effects(self, action_id: str) -> list[dict[str, Any]]:
        """Effects of an Action, the newest first."""
        found: list[dict[str, Any]] = self.client.request("GET", f"/jobs/{action_id}/effects").expect(200)["effects"]
        return found


@pytest.fixture(scope="module")
def crews(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crews]:
    home = tmp_path_factory.mktemp("charging")
    provider = Provider(home / "provider.db").start()
    settings = {"crews": {crew_id: {"effects": tools} for crew_id, tools in EFFECTS.items()}}
    environment = {"PAYMENTS_URL": provider.url}
    try:
        with Server(home / "server", registry=REGISTRY, settings=settings, environment=environment) as server:
            yield Crews(server, provider)
    finally:
        provider.kill()


def codes(answer: Answer) -> list[str]:
    """The codes of the tool failures that the agent's task had."""
    (task,) = answer.expect(200)["tasks_output"]
    return [record["failure"]["code"] for record in task["tool_failures"]]


@pytest.mark.effect_case(18)
@pytest.mark.effect_case(19)
def test_the_loop_that_repeats_a_react_call_has_one_effect(crews: Crews) -> None:
    assert codes(crews.run("react_raises")) == [UNKNOWN]
    assert crews.charges("react_raises") == 1
    (effect,) = crews.effects("react_raises")
    assert (effect["state"], effect["reason"], effect["tool"]) == ("unknown", "ConnectionError", "pay")
    assert crews.client.get("react_raises").expect(200)["effects"] == NONE | {"unknown": 1}


def test_the_same_loop_without_a_policy_has_six(crews: Crews) -> None:
    crews.run("unguarded").expect(200)
    assert crews.charges("unguarded") == UNGUARDED
    assert crews.effects("unguarded") == []


@pytest.mark.effect_case(20)
def test_a_native_call_that_raises_has_one_effect(crews: Crews) -> None:
    assert codes(crews.run("native_raises")) == ["ConnectionError"]
    assert crews.charges("native_raises") == 1
    (effect,) = crews.effects("native_raises")
    assert (effect["state"], effect["reason"]) == ("unknown", "ConnectionError")


@pytest.mark.effect_case(21)
@pytest.mark.parametrize("crew_id", ["react_model_fails", "native_model_fails"])
def test_a_task_that_is_entered_again_gets_the_receipt(crews: Crews, crew_id: str) -> None:
    answer = crews.run(crew_id)
    assert codes(answer) == []
    (effect,) = crews.effects(crew_id)
    assert answer.json()["raw"] == effect["receipt"]
    assert (effect["state"], effect["replays"], crews.charges(crew_id)) == ("settled", 1, 1)


@pytest.mark.effect_case(17)
def test_two_equal_parallel_calls_without_a_key_are_two_effects(crews: Crews) -> None:
    assert codes(crews.run("parallel")) == []
    effects = crews.effects("parallel")
    assert [effect["state"] for effect in effects] == ["settled", "settled"]
    assert sorted(effect["identity"][3] for effect in effects) == [0, 1]
    assert crews.charges("parallel") == 2


@pytest.mark.effect_case(25)
def test_of_two_parallel_calls_under_one_key_one_acts(crews: Crews) -> None:
    assert set(codes(crews.run("parallel_with_key"))) <= {"effect_in_flight"}
    assert crews.charges("parallel_with_key") == 1


@pytest.mark.effect_case(23)
def test_a_global_key_is_met_by_a_new_action(crews: Crews) -> None:
    first, second = (crews.run("across_actions", f"across-{at}").expect(200)["raw"] for at in range(2))
    assert first == second
    assert crews.charges("across_actions") == 1


@pytest.mark.effect_case(19)
@pytest.mark.effect_case(25)
def test_a_tool_of_somebody_else_is_guarded_by_the_configuration(crews: Crews) -> None:
    assert codes(crews.run("third_party")) == [UNKNOWN]
    assert crews.charges("third_party") == 1
    (effect,) = crews.effects("third_party")
    assert (effect["tool"], effect["policy"], effect["scope"]) == ("Third Party", "once", "action")


def test_the_configuration_may_say_that_a_tool_only_reads(crews: Crews) -> None:
    crews.run("read_only").expect(200)
    assert crews.effects("read_only") == []
    assert crews.charges("read_only") == UNGUARDED


def test_the_configuration_names_key_scope_and_what_may_be_reworded(crews: Crews) -> None:
    first, second = (crews.run("reworded", f"reworded-{at}").expect(200)["raw"] for at in range(2))
    (effect,) = crews.effects("reworded-0")
    assert first == second == effect["receipt"]
    assert (effect["scope"], effect["scope_id"], effect["identity"]) == ("crew", "reworded", ["key", "reworded"])
    assert (effect["replays"], crews.charges("reworded")) == (3, 1)


@pytest.mark.parametrize(
    ("crew_id", "named"),
    [("wrong_tool", "fourth_party"), ("wrong_argument", "number"), ("wrong_lookup", "tests.nowhere:ask")],
)
def test_a_policy_that_names_what_there_is_not_stops_the_job_before_its_crew_is_called(
    crews: Crews, crew_id: str, named: str
) -> None:
    assert crews.run(crew_id).status == 502
    view = crews.client.get(crew_id).expect(200)
    last = crews.client.events(crew_id).expect(200)["events"][-1]
    assert (view["status"], view["effects"]) == ("failed", NONE)
    assert (last["data"]["error_type"], last["data"]["uncertain_outcome"]) == ("EffectPolicyError", False)
    assert last["data"]["message"] == "the operation failed before the crew was called"
    evidence = crews.client.request("GET", f"/jobs/{crew_id}/evidence").expect(200)
    assert named in evidence["log_tail"]
    assert crews.charges(crew_id) == 0
