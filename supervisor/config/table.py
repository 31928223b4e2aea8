"""The table of settings: name in the file, environment variable, what is accepted. Defaults are in ``Settings``."""

from __future__ import annotations

from typing import NamedTuple

from protocol.api import MAX_TIMEOUT_MS
from supervisor.config.kinds import (
    Choice,
    Directory,
    Flag,
    Host,
    Integer,
    Kind,
    Modules,
    Number,
    Operations,
    Paths,
    RegistrySpec,
    ReplicaName,
    Text,
    Url,
    Variables,
)
from supervisor.config.tools import ToolPolicies

#: Names the configuration file where no ``--config`` is given.
CONFIG_VARIABLE = "CREW_SUPERVISOR_CONFIG"
#: A supervisor must be gone this many seconds after SIGTERM: drain, then grace, then the stop itself.
MAX_SHUTDOWN_S = 30.0

MIB = 1_048_576
_LARGEST = 2**53 - 1


class Setting(NamedTuple):
    """One row; ``variable`` is None for what only the file can say."""

    name: str
    variable: str | None
    kind: Kind


def _theirs(name: str, kind: Kind) -> Setting:
    return Setting(name, f"AIP_CREWAI_{name.upper()}", kind)


def _ours(name: str, kind: Kind) -> Setting:
    return Setting(name, f"CREW_SUPERVISOR_{name.upper()}", kind)


BEARER_TOKEN = _theirs("bearer_token", Text())
BEARER_TOKEN_FILE = _theirs("bearer_token_file", Directory())
#: More tokens, valid beside the first: for a rotation, or one a caller.
MORE_TOKEN_FILES = _ours("more_token_files", Paths())
#: Tokens that may read and not change anything.
READ_TOKEN_FILES = _ours("read_token_files", Paths())

#: Top level of the file, and the environment.
SETTINGS: tuple[Setting, ...] = (
    _theirs("host", Host()),
    _theirs("port", Integer(0, 65_535)),
    _theirs("registry", RegistrySpec(optional=True)),
    _theirs("state_file", Directory()),
    BEARER_TOKEN,
    BEARER_TOKEN_FILE,
    MORE_TOKEN_FILES,
    READ_TOKEN_FILES,
    _theirs("allow_unauthenticated", Flag()),
    _theirs("allow_ephemeral", Flag()),
    _theirs("allowed_operations", Operations()),
    _theirs("training_dir", Directory()),
    _theirs("max_concurrency", Integer(1, 1024)),
    _theirs("max_retained_runs", Integer(1, 100_000, toml_high=10_000_000)),
    _theirs("max_events_per_run", Integer(2, 100_000)),
    _theirs("max_event_bytes", Integer(1024, 4_194_304)),
    _theirs("max_state_bytes", Integer(MIB, 4_294_967_296)),
    _theirs("stream_checkpoint_events", Integer(1, 10_000)),
    Setting("tracing", "CREWAI_TRACING_ENABLED", Flag()),
    _ours("work_dir", Directory()),
    _ours("launch", Choice("auto", "fork", "spawn")),
    _ours("stop_method", Choice("auto", "cgroup", "keeper", "group")),
    _ours("cgroup_root", Directory()),
    _ours("worker_user", Text(optional=True)),
    _ours("pid_namespace", Choice("auto", "off")),
    _ours("grace_s", Number(0, MAX_SHUTDOWN_S)),
    _ours("linger_s", Number(0, 600)),
    _ours("stop_timeout_s", Number(0.1, MAX_SHUTDOWN_S)),
    _ours("launch_timeout_s", Number(1, 600)),
    _ours("registry_timeout_s", Number(1, 3600)),
    _ours("drain_s", Number(0, MAX_SHUTDOWN_S)),
    _ours("standby", Integer(0, 64)),
    _ours("log_bytes", Integer(4096, 1024 * MIB)),
    _ours("log_total_bytes", Integer(4096, _LARGEST)),
    _ours("log_exceptions", Flag()),
    _ours("max_queue", Integer(0, 10_000_000)),
    _ours("max_effects_per_run", Integer(1, 1_000_000)),
    _ours("default_timeout_ms", Integer(1, MAX_TIMEOUT_MS)),
    _ours("min_retention_s", Number(0, 10 * 366 * 86_400)),
    _ours("dashboard", Flag()),
)

#: The ``[template]`` table of the file.
TEMPLATE_SETTINGS: tuple[Setting, ...] = (
    Setting("preload", None, Modules()),
    Setting("recycle_growth_bytes", None, Integer(0, _LARGEST)),
)

#: The ``[fleet]`` table of the file; without it and its variables a supervisor stands alone.
FLEET_SETTINGS: tuple[Setting, ...] = (
    Setting("database", "CREW_SUPERVISOR_FLEET_DATABASE", Text(optional=True)),
    Setting("replica", "CREW_SUPERVISOR_FLEET_REPLICA", ReplicaName(optional=True)),
    Setting("url", "CREW_SUPERVISOR_FLEET_URL", Url(optional=True)),
    Setting("lease_s", "CREW_SUPERVISOR_FLEET_LEASE_S", Number(1, 3600)),
)

#: Each ``[crews."<id>"]`` table of the file.
CREW_SETTINGS: tuple[Setting, ...] = (
    Setting("grace_s", None, Number(0, MAX_SHUTDOWN_S)),
    Setting("linger_s", None, Number(0, 600)),
    Setting("max_concurrency", None, Integer(1, 1024)),
    Setting("memory_bytes", None, Integer(16 * MIB, _LARGEST)),
    Setting("open_files", None, Integer(64, 1_048_576)),
    Setting("processes", None, Integer(1, 4_194_304)),
    Setting("file_bytes", None, Integer(0, _LARGEST)),
    Setting("cpu_weight", None, Integer(1, 10_000)),
    Setting("log_bytes", None, Integer(4096, 1024 * MIB)),
    Setting("timeout_ms", None, Integer(1, MAX_TIMEOUT_MS)),
    Setting("environment", None, Variables()),
    Setting("effects", None, ToolPolicies()),
)
