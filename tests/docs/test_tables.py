"""The pages' tables say what the program says: settings, routes, phases, evidence, inputs, errors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from protocol.api import StopEvidence, WorkerExit
from protocol.operations import MAX_ITERATIONS, MEMORY_KINDS, RULES, Operation
from protocol.states import Method, Phase
from supervisor.config import CrewSettings, FleetSettings, Settings
from supervisor.config.kinds import Choice, Flag, Integer, Number
from supervisor.config.table import (
    CONFIG_VARIABLE,
    CREW_SETTINGS,
    FLEET_SETTINGS,
    SETTINGS,
    TEMPLATE_SETTINGS,
    Setting,
)
from supervisor.http.routes import Routes
from tests.support.page import ROOT, Page, plain

CONFIGURATION, HTTP, OPERATIONS, STOPPING = map(Page, ("configuration.md", "http.md", "operations.md", "stopping.md"))

#: How names of errors look that are written as text and are no exception's class.
ERROR_TYPE = re.compile(r'"([A-Z][A-Za-z]+(?:Error|Exists|Missing|Required|Retained|Stored|Died|Shutdown|Restart))"')

#: Defaults that are no constant of a struct: a rule, or a value that a struct writes as None.
DEFAULT_RULES = {
    "registry": "required",
    "state_file": "required unless ephemeral",
    "bearer_token": "required unless unauthenticated",
    "bearer_token_file": "required unless unauthenticated",
    "more_token_files": "none",
    "read_token_files": "none",
    "training_dir": "required for `train`",
    "work_dir": "`work` beside `state_file`",
    "cgroup_root": "own cgroup",
    "worker_user": "the supervisor's",
    "max_queue": "`max_retained_runs`",
    "fleet.database": "none",
    "fleet.replica": "none",
    "fleet.url": "none",
    "crews.<id>.grace_s": "as above",
    "crews.<id>.linger_s": "as above",
    "crews.<id>.max_concurrency": "no limit",
    "crews.<id>.memory_bytes": "no limit",
    "crews.<id>.open_files": "inherited",
    "crews.<id>.processes": "inherited",
    "crews.<id>.file_bytes": "no limit",
    "crews.<id>.cpu_weight": "none",
    "crews.<id>.log_bytes": "as above",
    "crews.<id>.timeout_ms": "no limit",
    "crews.<id>.environment": "none",
    "crews.<id>.effects": "none",
}


def settings() -> Iterator[tuple[str, Setting]]:
    """Every setting under the name that the page gives it."""
    yield from ((setting.name, setting) for setting in SETTINGS)
    yield from ((f"template.{setting.name}", setting) for setting in TEMPLATE_SETTINGS)
    yield from ((f"fleet.{setting.name}", setting) for setting in FLEET_SETTINGS)
    yield from ((f"crews.<id>.{setting.name}", setting) for setting in CREW_SETTINGS)


def default(name: str) -> str:
    """The default as the page writes it."""
    if name in DEFAULT_RULES:
        return DEFAULT_RULES[name]
    struct = FleetSettings if name.startswith("fleet.") else Settings
    value = next(field.default for field in msgspec.structs.fields(struct) if field.name == name.rpartition(".")[2])
    return f"`{_text(value)}`"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(_text(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(getattr(value, "value", value))


ROWS = {plain(row[0]): row for row in CONFIGURATION.table("setting", "environment variable")}


def test_the_table_of_settings_is_complete_and_in_order() -> None:
    assert list(ROWS) == [name for name, _ in settings()]


@pytest.mark.parametrize(("name", "setting"), list(settings()))
def test_a_setting_is_documented_as_it_is(name: str, setting: Setting) -> None:
    _, variable, written_default, accepts = ROWS[name]

    assert variable == (f"`{setting.variable}`" if setting.variable else "")
    assert written_default == default(name)
    match setting.kind:
        case Integer(low=low, high=high, toml_high=toml_high):
            assert re.match(rf"{low}\.\.{high}\b", accepts)
            assert toml_high == high or f"({toml_high} in the file)" in accepts
        case Number(low=low, high=high):
            assert re.match(rf"{low:g}\.\.{high:.15g}\b", accepts)
        case Choice(words=words):
            assert accepts == ", ".join(f"`{word}`" for word in words)
        case Flag():
            assert written_default in {"`true`", "`false`"}


def test_rules_for_defaults_are_about_settings_without_a_constant() -> None:
    defaults = {field.name: field.default for field in msgspec.structs.fields(Settings)}
    crew = {f"crews.<id>.{field.name}": field.default for field in msgspec.structs.fields(CrewSettings)}
    fleet = {f"fleet.{field.name}": field.default for field in msgspec.structs.fields(FleetSettings)}
    derived = {"max_queue", "registry"}
    tokens = ("bearer_token", "bearer_token_file", "more_token_files", "read_token_files")
    known = defaults | crew | fleet | dict.fromkeys(tokens)

    assert all(known[name] in (None, msgspec.NODEFAULT) for name in DEFAULT_RULES.keys() - derived)


def test_the_file_of_settings_is_named() -> None:
    assert f"`{CONFIG_VARIABLE}`" in CONFIGURATION.text


def test_every_route_is_listed() -> None:
    table_of_routes = Routes.table()

    listed = {plain(row[0]) for row in HTTP.table("route", "what")}

    assert listed == {f"{route.method} {route.path}" for route in table_of_routes}


def test_every_phase_and_stop_method_is_explained() -> None:
    assert [plain(row[0]) for row in HTTP.table("phase")] == [phase.value for phase in Phase]
    assert {plain(row[0]) for row in STOPPING.table("method", "where")} == {method.value for method in Method}


def test_every_field_of_the_evidence_is_explained() -> None:
    rows = {plain(row[0]): row[1] for row in STOPPING.table("field", "meaning")}

    assert list(rows) == list(StopEvidence.__struct_fields__)
    assert re.findall(r"`(\w+)`", rows["worker"]) == list(WorkerExit.__struct_fields__)


def test_inputs_of_operations_are_those_that_are_checked() -> None:
    rows = {plain(row[0]): row for row in OPERATIONS.table("operation", "required")}

    assert list(rows) == [operation.value for operation in Operation]
    for operation, (required, optional) in RULES.items():
        row = rows[operation.value]
        assert re.findall(r"`(\w+)`", row[1]) == list(required)
        assert re.findall(r"`(\w+)`", row[2]) == list(optional)
    assert re.findall(r"`(\w+)`", rows["memory_reset"][3]) == list(MEMORY_KINDS)
    assert f"1 to {MAX_ITERATIONS};" in rows["train"][3]


def test_every_operation_has_an_output() -> None:
    assert [plain(row[0]) for row in OPERATIONS.table("operation", "output")] == [item.value for item in Operation]


def test_every_error_type_that_we_make_ourselves_is_explained() -> None:
    explained = {name for row in OPERATIONS.table("`error_type`") for name in re.findall(r"`(\w+)`", row[0])}
    sources = [*(ROOT / "supervisor").rglob("*.py"), *(ROOT / "worker").rglob("*.py")]
    made = {name for path in sources for name in ERROR_TYPE.findall(path.read_text(encoding="utf-8"))}

    assert made
    assert made <= explained, made - explained
