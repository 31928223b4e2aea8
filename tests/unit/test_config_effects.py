"""How tools are guarded: a crew's table of tools in the configuration file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from protocol.effects import Policy, Scope, ToolPolicy
from protocol.errors import ConfigError
from supervisor.config import CrewSettings, load


@pytest.fixture
def write(tmp_path: Path) -> Any:
    """Write a configuration with a table of tools; returns its path."""

    def write(effects: Any) -> Path:
        settings = {"registry": "crews:registry", "state_file": "j.db", "bearer_token": "a-token-of-a-test"}
        path = tmp_path / "supervisor.toml"
        path.write_text(tomli_w.dumps({**settings, "crews": {"yours": {"effects": effects}}}))
        path.chmod(0o600)
        return path

    return write


def test_every_field_of_a_policy_can_be_set(write: Any) -> None:
    table = {
        "policy": "provider",
        "scope": "global",
        "key": ["invoice", "payee"],
        "volatile": ["memo"],
        "reconcile": "payments.lookup:by_key",
        "pass_key_as": "idempotency_key",
    }
    assert table.keys() == set(ToolPolicy.__struct_fields__)
    settings = load(write({"send_payment": table, "Search the web": {"policy": "read"}, "mail": {}}), {})
    assert settings.crew("yours").effects == {
        "send_payment": ToolPolicy(
            policy=Policy.PROVIDER,
            scope=Scope.GLOBAL,
            key=("invoice", "payee"),
            volatile=("memo",),
            reconcile="payments.lookup:by_key",
            pass_key_as="idempotency_key",
        ),
        "Search the web": ToolPolicy(policy=Policy.READ),
        "mail": ToolPolicy(),
    }
    assert settings.crew("other").effects == {}


def test_policies_are_shown_and_part_of_the_digest(write: Any) -> None:
    one = load(write({"mail": {}}), {})
    shown = one.public()["crews"]["yours"]["effects"]
    assert json.loads(json.dumps(shown)) == {
        "mail": {
            "policy": "once", "scope": "action", "key": [], "volatile": [], "reconcile": None, "pass_key_as": None
        }
    }  # fmt: skip
    assert one.digest != load(write({"mail": {"policy": "read"}}), {}).digest
    assert "mail" in repr(one)
    assert CrewSettings().public()["effects"] == {}


@pytest.mark.parametrize(
    ("effects", "said"),
    [
        ("once", "table"),
        (["mail"], "table"),
        ({"mail": "once"}, "'mail'"),
        ({"": {}}, "tool name"),
        ({"x" * 257: {}}, "tool name"),
        ({"mail": {"polcy": "once"}}, "did you mean 'policy'?"),
        ({"mail": {"policy": "twice"}}, "once, provider, read"),
        ({"mail": {"policy": 1}}, "policy is not text"),
        ({"mail": {"scope": "world"}}, "action, crew, global"),
        ({"mail": {"key": "invoice"}}, "array of strings"),
        ({"mail": {"key": ["not a name"]}}, "name of an argument"),
        ({"mail": {"key": ["a", "a"]}}, "twice"),
        ({"mail": {"volatile": [1]}}, "array of strings"),
        ({"mail": {"reconcile": "lookup"}}, "module:attribute"),
        ({"mail": {"pass_key_as": "a b"}}, "name of an argument"),
        ({"mail": {"policy": "read", "key": ["a"]}}, "claims nothing"),
        ({"mail": {"scope": "crew"}}, "no key"),
        ({"mail": {"scope": "global"}}, "no key"),
        ({"mail": {"key": ["a"], "volatile": ["a"]}}, "key and in volatile"),
    ],
)
def test_what_makes_no_sense_refuses_the_start(write: Any, effects: Any, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(write(effects), {})
    assert "crews.'yours'.effects" in refused.value.detail
    assert said in refused.value.detail
    assert ";" in refused.value.detail, "a refusal says what to do"
