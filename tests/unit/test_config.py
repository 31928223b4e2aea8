"""Settings: three layers, every bound on both sides, crews, secrets and the digest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from protocol.errors import ConfigError
from protocol.operations import Operation
from supervisor.config import CrewSettings, FleetSettings, Settings, load
from supervisor.config.table import CREW_SETTINGS, FLEET_SETTINGS, SETTINGS, TEMPLATE_SETTINGS

SECRET = "a-secret-that-nobody-may-see"
BASE = {"AIP_CREWAI_REGISTRY": "crews:registry", "AIP_CREWAI_BEARER_TOKEN": SECRET, "AIP_CREWAI_STATE_FILE": "/s/j.db"}

WriteToml = Callable[..., Path]


@pytest.fixture
def write_toml(tmp_path: Path) -> WriteToml:
    """Write settings, over a complete set of required ones, to a private file."""

    def write(**settings: Any) -> Path:
        required = {"registry": "crews:registry", "state_file": "/s/j.db", "bearer_token": SECRET}
        path = tmp_path / "supervisor.toml"
        path.write_text(tomli_w.dumps(required | settings))
        path.chmod(0o600)
        return path

    return write


def from_env(**changes: str | None) -> Settings:
    """Load from the base environment with changes; None removes a variable."""
    return load(None, {name: value for name, value in {**BASE, **changes}.items() if value is not None})


def refusal(load_it: Callable[..., object], *arguments: Any, **keywords: Any) -> str:
    """The message with which a load is refused; it never repeats the secret."""
    with pytest.raises(ConfigError) as caught:
        load_it(*arguments, **keywords)
    assert SECRET not in caught.value.detail
    assert ";" in caught.value.detail, "a refusal says what to do"
    return caught.value.detail


def test_defaults_are_those_of_the_contract() -> None:
    settings = from_env()
    assert (settings.host, settings.port, settings.allowed_operations) == ("0.0.0.0", 8090, (Operation.RUN,))
    assert (settings.max_concurrency, settings.max_retained_runs, settings.max_events_per_run) == (4, 2000, 1000)
    assert (settings.max_event_bytes, settings.max_state_bytes) == (262_144, 268_435_456)
    assert (settings.stream_checkpoint_events, settings.default_timeout_ms) == (128, 600_000)
    assert (settings.tracing, settings.ephemeral) == (False, False)
    assert settings.tokens == (SECRET,)


def test_defaults_of_ours() -> None:
    settings = from_env()
    assert (settings.launch, settings.stop_method, settings.cgroup_root) == ("auto", "auto", None)
    assert (settings.grace_s, settings.linger_s, settings.stop_timeout_s, settings.drain_s) == (0.5, 2, 10, 15)
    assert (settings.launch_timeout_s, settings.registry_timeout_s, settings.standby) == (30, 120, 1)
    assert (settings.log_bytes, settings.max_queue, settings.preload) == (1_048_576, 2000, ("crewai",))
    assert (settings.log_total_bytes, settings.log_exceptions) == (1 << 30, False)
    assert settings.work_dir == Path("/s/work")


def test_the_environment_wins_over_the_file_and_the_file_over_the_defaults(write_toml: WriteToml) -> None:
    path = write_toml(max_concurrency=7, max_event_bytes=2048, grace_s=1)
    settings = load(path, {"AIP_CREWAI_MAX_CONCURRENCY": "9", "CREW_SUPERVISOR_GRACE_S": "0.25"})
    assert (settings.max_concurrency, settings.max_event_bytes, settings.grace_s) == (9, 2048, 0.25)
    assert settings.max_events_per_run == 1000
    assert settings.config_file == path


def test_blank_paths_in_the_environment_are_not_set(write_toml: WriteToml) -> None:
    settings = load(write_toml(training_dir="/t"), {"AIP_CREWAI_TRAINING_DIR": " ", "AIP_CREWAI_BEARER_TOKEN_FILE": ""})
    assert settings.training_dir == Path("/t")


def test_the_file_can_be_named_by_the_environment_and_the_argument_wins(write_toml: WriteToml, tmp_path: Path) -> None:
    path = write_toml(port=1111)
    assert load(None, {"CREW_SUPERVISOR_CONFIG": str(path)}).port == 1111
    assert load(path, {"CREW_SUPERVISOR_CONFIG": str(tmp_path / "missing.toml")}).port == 1111


def test_relative_paths_start_from_their_file_or_the_working_directory(
    write_toml: WriteToml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_toml(state_file="state/j.db")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert load(path, {}).state_file == tmp_path / "state/j.db"
    assert load(path, {"AIP_CREWAI_STATE_FILE": "x.db"}).state_file == elsewhere / "x.db"


def test_max_queue_follows_max_retained_runs(write_toml: WriteToml) -> None:
    assert from_env(AIP_CREWAI_MAX_RETAINED_RUNS="50").max_queue == 50
    assert from_env(AIP_CREWAI_MAX_RETAINED_RUNS="50", CREW_SUPERVISOR_MAX_QUEUE="0").max_queue == 0
    assert load(write_toml(max_queue=3), {}).max_queue == 3


ENVIRONMENT_BOUNDS = [
    ("AIP_CREWAI_PORT", 0, 65_535),
    ("AIP_CREWAI_MAX_CONCURRENCY", 1, 1024),
    ("AIP_CREWAI_MAX_RETAINED_RUNS", 4, 100_000),
    ("AIP_CREWAI_MAX_EVENTS_PER_RUN", 2, 100_000),
    ("AIP_CREWAI_MAX_EVENT_BYTES", 1024, 4_194_304),
    ("AIP_CREWAI_MAX_STATE_BYTES", 1_048_576, 4_294_967_296),
    ("AIP_CREWAI_STREAM_CHECKPOINT_EVENTS", 1, 10_000),
    ("CREW_SUPERVISOR_STANDBY", 0, 64),
    ("CREW_SUPERVISOR_LOG_BYTES", 4096, 1_073_741_824),
    ("CREW_SUPERVISOR_LOG_TOTAL_BYTES", 4096, 2**53 - 1),
    ("CREW_SUPERVISOR_MAX_QUEUE", 0, 10_000_000),
    ("CREW_SUPERVISOR_MAX_EFFECTS_PER_RUN", 1, 1_000_000),
    ("CREW_SUPERVISOR_DEFAULT_TIMEOUT_MS", 1, 3_600_000),
]


@pytest.mark.case(12)
@pytest.mark.parametrize(("variable", "low", "high"), ENVIRONMENT_BOUNDS)
def test_an_integer_in_the_environment_has_both_bounds(variable: str, low: int, high: int) -> None:
    name = variable.removeprefix("AIP_CREWAI_").removeprefix("CREW_SUPERVISOR_").lower()
    assert getattr(from_env(**{variable: str(low)}), name) == low
    assert getattr(from_env(**{variable: str(high)}), name) == high
    for outside in (low - 1, high + 1):
        message = refusal(from_env, **{variable: str(outside)})
        assert name in message
        assert variable in message
        assert str(outside) in message


@pytest.mark.case(12)
@pytest.mark.parametrize("variable", [row[0] for row in ENVIRONMENT_BOUNDS])
@pytest.mark.parametrize("text", ["abc", "", " ", "1.5", "0x10", "9" * 5000])
def test_what_int_refuses_is_refused(variable: str, text: str) -> None:
    assert variable in refusal(from_env, **{variable: text})


@pytest.mark.case(12)
def test_what_int_accepts_is_accepted() -> None:
    assert from_env(AIP_CREWAI_MAX_CONCURRENCY=" 4 ").max_concurrency == 4
    assert from_env(AIP_CREWAI_MAX_RETAINED_RUNS="1_000").max_retained_runs == 1000


@pytest.mark.case(12)
def test_every_integer_setting_of_the_table_is_tested() -> None:
    from supervisor.config.kinds import Integer

    assert {row.variable for row in SETTINGS if isinstance(row.kind, Integer)} == {row[0] for row in ENVIRONMENT_BOUNDS}


@pytest.mark.case(12)
def test_retained_runs_go_further_in_the_file_only(write_toml: WriteToml) -> None:
    assert load(write_toml(max_retained_runs=10_000_000), {}).max_retained_runs == 10_000_000
    assert "max_retained_runs" in refusal(load, write_toml(max_retained_runs=10_000_001), {})
    assert "100000" in refusal(from_env, AIP_CREWAI_MAX_RETAINED_RUNS="100001")


@pytest.mark.case(12)
def test_retained_runs_are_at_least_the_concurrency(write_toml: WriteToml) -> None:
    assert load(write_toml(max_concurrency=8, max_retained_runs=8), {}).max_retained_runs == 8
    assert "max_retained_runs" in refusal(load, write_toml(max_concurrency=8, max_retained_runs=7), {})


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("grace_s", 0, 5),
        ("linger_s", 0, 600),
        ("stop_timeout_s", 0.1, 14.5),
        ("launch_timeout_s", 1, 600),
        ("registry_timeout_s", 1, 3600),
        ("drain_s", 0, 19.5),
    ],
)
def test_seconds_have_both_bounds(name: str, low: float, high: float, write_toml: WriteToml) -> None:
    variable = f"CREW_SUPERVISOR_{name.upper()}"
    for value in (low, high):
        assert getattr(load(write_toml(**{name: value}), {}), name) == value
        assert getattr(from_env(**{variable: str(value)}), name) == value
    for value in (low - 0.01, high + 0.01):
        assert name in refusal(load, write_toml(**{name: value}), {})
        assert name in refusal(from_env, **{variable: str(value)})
    for text in ("nan", "inf", "-inf", "x", ""):
        assert name in refusal(from_env, **{variable: text})
    for wrong in (True, "1", float("nan"), float("inf"), 10**400, [1]):
        assert name in refusal(load, write_toml(**{name: wrong}), {})


def test_shutdown_fits_into_thirty_seconds(write_toml: WriteToml) -> None:
    assert load(write_toml(drain_s=15, grace_s=5, stop_timeout_s=10), {}).drain_s == 15
    message = refusal(load, write_toml(drain_s=15, grace_s=5.1, stop_timeout_s=10), {})
    assert "30.1" in message
    crews = {"slow": {"grace_s": 5.1}}
    assert "30.1" in refusal(load, write_toml(drain_s=15, stop_timeout_s=10, crews=crews), {})


@pytest.mark.parametrize(
    ("wrong", "meant"), [("max_concurency", "max_concurrency"), ("Host", "host"), ("crew", "crews")]
)
def test_an_unknown_key_is_refused_with_the_closest_one(wrong: str, meant: str, write_toml: WriteToml) -> None:
    message = refusal(load, write_toml(**{wrong: 1}), {})
    assert wrong in message
    assert repr(meant) in message


def test_unknown_keys_below_are_refused_with_their_path(write_toml: WriteToml) -> None:
    assert "template.preloads" in refusal(load, write_toml(template={"preloads": []}), {})
    message = refusal(load, write_toml(crews={"a.b": {"memory": 1}}), {})
    assert "'a.b'" in message
    assert "'memory_bytes'" in message
    assert "zzz" in refusal(load, write_toml(zzz=1), {})


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("port", "80"), ("port", True), ("port", 1.0), ("host", 1), ("host", ""), ("host", "a b"),
        ("registry", "crews"), ("registry", "crews:"), ("registry", ":x"), ("registry", "a-b:c"),
        ("registry", "a:b:c"), ("registry", "a..b:c"),
        ("state_file", ""), ("state_file", "a\0b"), ("allow_ephemeral", "true"), ("allow_ephemeral", 1),
        ("allowed_operations", "run"), ("allowed_operations", [1]), ("launch", "vfork"), ("stop_method", "kill"),
        ("tracing", 1), ("template", 1), ("template", {"preload": "crewai"}), ("template", {"preload": ["a b"]}),
        ("crews", []), ("crews", {"a": 1}), ("crews", {"": {}}), ("crews", {"x" * 257: {}}),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_kind_is_refused_by_name(name: str, wrong: Any, write_toml: WriteToml) -> None:
    assert refusal(load, write_toml(**{name: wrong}), {}).startswith(name)


def test_a_missing_registry_is_refused() -> None:
    assert "AIP_CREWAI_REGISTRY" in refusal(from_env, AIP_CREWAI_REGISTRY=None)
    assert "AIP_CREWAI_REGISTRY" in refusal(from_env, AIP_CREWAI_REGISTRY=" ")


def test_files_that_are_no_configuration_are_refused(tmp_path: Path) -> None:
    missing, broken, binary, large = (tmp_path / name for name in ("missing", "broken", "binary", "large"))
    broken.write_text("host = ")
    binary.write_bytes(b"host = '\xff'")
    large.write_text("#" * 1_048_577)
    for path in (missing, broken, binary, large, tmp_path):
        assert str(path) in refusal(load, path, BASE)


def test_an_inline_token_needs_a_private_file(write_toml: WriteToml) -> None:
    path = write_toml()
    path.chmod(0o640)
    assert "0640" in refusal(load, path, {})


# --- crews, tracing, digest, secrets -----------------------------------------------------------------------------

CREW_BOUNDS = {
    "grace_s": (0, 5),
    "linger_s": (0, 600),
    "max_concurrency": (1, 1024),
    "memory_bytes": (16_777_216, 2**53 - 1),
    "open_files": (64, 1_048_576),
    "processes": (1, 4_194_304),
    "file_bytes": (0, 2**53 - 1),
    "cpu_weight": (1, 10_000),
    "log_bytes": (4096, 1 << 30),
    "timeout_ms": (1, 3_600_000),
}


@pytest.mark.parametrize("name", CREW_BOUNDS)
def test_a_crews_limits_have_both_bounds(name: str, write_toml: WriteToml) -> None:
    low, high = CREW_BOUNDS[name]
    for value in (low, high):
        assert getattr(load(write_toml(crews={"c": {name: value}}), {}).crew("c"), name) == value
    for value in (low - 1, high + 1):
        assert name in refusal(load, write_toml(crews={"c": {name: value}}), {})


def test_every_crew_setting_is_in_the_struct_and_tested() -> None:
    names = {*CREW_BOUNDS, "environment", "effects"}
    assert {row.name for row in CREW_SETTINGS} == set(CrewSettings.__struct_fields__) == names


def test_every_setting_is_in_the_struct() -> None:
    files = {"bearer_token", "bearer_token_file", "more_token_files", "read_token_files"}
    rows = {row.name for row in SETTINGS} - files
    template = {row.name for row in TEMPLATE_SETTINGS}
    tables = {"tokens", "read_tokens", "crews", "fleet", "config_file"}
    assert rows | template == set(Settings.__struct_fields__) - tables
    assert {row.name for row in FLEET_SETTINGS} == set(FleetSettings.__struct_fields__)


def test_a_crew_without_a_table_has_the_supervisors_settings(write_toml: WriteToml) -> None:
    settings = load(write_toml(grace_s=1, linger_s=3, crews={"c": {"grace_s": 0, "open_files": 100}}), {})
    assert (settings.grace_s_of("c"), settings.grace_s_of("other")) == (0, 1)
    assert (settings.linger_s_of("c"), settings.linger_s_of("other")) == (3, 3)
    assert settings.crew("c").limits.open_files == 100
    assert settings.crew("other").limits.open_files is None


def test_a_crew_may_lower_the_time_that_its_jobs_have_and_never_raise_it(write_toml: WriteToml) -> None:
    crews = {"short": {"timeout_ms": 1000}, "long": {"timeout_ms": 3_000_000}}
    settings = load(write_toml(default_timeout_ms=5000, crews=crews), {})
    assert [settings.timeout_ms_of("short", asked) for asked in (None, 400, 1000, 9000)] == [1000, 400, 1000, 1000]
    assert [settings.timeout_ms_of("long", asked) for asked in (None, 9000)] == [5000, 9000]
    assert settings.timeout_ms_of("other", None) == 5000


@pytest.mark.parametrize("wrong", [{"A=B": "x"}, {"": "x"}, {"1A": "x"}, {"A": 1}, {"A": "a\0b"}, ["A"], "A"])
def test_a_crews_environment_is_names_with_text(wrong: Any, write_toml: WriteToml) -> None:
    assert "environment" in refusal(load, write_toml(crews={"c": {"environment": wrong}}), {})


@pytest.mark.parametrize(
    ("text", "on"), [("true", True), ("1", True), ("TRUE", True), ("yes", False), ("false", False)]
)
def test_tracing_is_the_references_variable(text: str, on: bool) -> None:
    assert from_env(CREWAI_TRACING_ENABLED=text).tracing is on


def test_nothing_shows_a_secret(write_toml: WriteToml) -> None:
    settings = load(write_toml(crews={"c": {"environment": {"API_KEY": SECRET}}}), {})
    assert settings.tokens == (SECRET,)
    assert settings.crew("c").environment == {"API_KEY": SECRET}
    shown = [repr(settings), str(settings), repr(settings.crews), str(settings.public()), str(settings.__rich_repr__())]
    assert not any(SECRET in text for text in shown)
    assert all("API_KEY" in text for text in shown)


def test_the_digest_is_over_all_but_secrets(write_toml: WriteToml) -> None:
    settings = load(write_toml(), {})
    assert len(settings.digest) == 64
    assert load(write_toml(bearer_token="another"), {}).digest == settings.digest
    assert load(write_toml(), {"AIP_CREWAI_MAX_CONCURRENCY": "4"}).digest == settings.digest
    changed: list[dict[str, Any]] = [{"port": 1}, {"grace_s": 0.4}, {"crews": {"c": {}}}, {"template": {"preload": []}}]
    assert len({settings.digest, *(load(write_toml(**change), {}).digest for change in changed)}) == 5
