"""The settings of a supervisor, as the rest of the program sees them: checked, immutable, secrets out of sight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from protocol import canonical, frames
from protocol.api import DEFAULT_TIMEOUT_MS
from protocol.effects import ToolPolicy
from protocol.operations import Operation


class CrewSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one crew has differently; None means the supervisor's own setting, or no limit.

    ``environment`` is set in the crew's workers. Its values may be secrets: they are never shown. ``effects``: how
    tools are guarded, by their names.
    """

    grace_s: float | None = None
    linger_s: float | None = None
    max_concurrency: int | None = None
    memory_bytes: int | None = None
    open_files: int | None = None
    processes: int | None = None
    file_bytes: int | None = None
    cpu_weight: int | None = None
    log_bytes: int | None = None
    timeout_ms: int | None = None
    environment: dict[str, str] = msgspec.field(default_factory=dict)
    effects: dict[str, ToolPolicy] = msgspec.field(default_factory=dict)

    @property
    def limits(self) -> frames.Limits:
        """Resource limits to send with a launch."""
        return frames.Limits(
            memory_bytes=self.memory_bytes,
            open_files=self.open_files,
            processes=self.processes,
            file_bytes=self.file_bytes,
            cpu_weight=self.cpu_weight,
        )

    def public(self) -> dict[str, Any]:
        """JSON view: of the environment, only the names."""
        shown = {name: getattr(self, name) for name in self.__struct_fields__ if name not in ("environment", "effects")}
        policies: dict[str, Any] = msgspec.to_builtins(dict(sorted(self.effects.items())))
        return {**shown, "environment": sorted(self.environment), "effects": policies}

    def __repr__(self) -> str:
        return f"CrewSettings({self.public()!r})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return list(self.public().items())


class FleetSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How this supervisor is one of several that share a PostgreSQL database.

    ``database``: libpq's connection string or URI; it may hold a password, so it is never shown. ``replica``: this
    one's id, for ever. ``url``: where the others reach it. ``lease_s``: how long it counts as alive without a sign.
    """

    database: str
    replica: str
    url: str
    lease_s: float = 15.0

    def public(self) -> dict[str, Any]:
        """JSON view without the connection string."""
        return {"replica": self.replica, "url": self.url, "lease_s": self.lease_s}

    def __repr__(self) -> str:
        return f"FleetSettings({self.public()!r})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return list(self.public().items())


_NO_DIFFERENCES = CrewSettings()


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Every setting of one supervisor; made by ``supervisor.config.load``, which checks each and all together.

    Names ending in ``_s`` are seconds, ``_ms`` milliseconds, ``_bytes`` bytes. Defaults of the reference's settings are
    those of the wire contract, section 1.
    """

    registry: str
    host: str = "0.0.0.0"
    #: 0 lets the kernel pick a free port; the log line ``listening`` names it.
    port: int = 8090
    #: The journal; None only if ``ephemeral``.
    state_file: Path | None = None
    #: Secret. Empty only where unauthenticated callers are allowed.
    tokens: tuple[str, ...] = ()
    #: Secret. Tokens that may only read.
    read_tokens: tuple[str, ...] = ()
    allow_unauthenticated: bool = False
    allow_ephemeral: bool = False
    allowed_operations: tuple[Operation, ...] = (Operation.RUN,)
    training_dir: Path | None = None
    max_concurrency: int = 4
    max_retained_runs: int = 2000
    max_events_per_run: int = 1000
    max_event_bytes: int = 262_144
    #: Taken for compatibility and unused: it bounded the reference's whole-file journal.
    max_state_bytes: int = 268_435_456
    stream_checkpoint_events: int = 128
    #: Put on each crew object; the reference's CREWAI_TRACING_ENABLED.
    tracing: bool = False

    #: Crew and job directories. None only if ``ephemeral``: a temporary directory is made then.
    work_dir: Path | None = None
    launch: str = "auto"
    stop_method: str = "auto"
    #: Cgroup v2 directory to make leaves in; None: the supervisor's own.
    cgroup_root: Path | None = None
    #: Name of the user that templates and workers run as; None: the supervisor's own.
    worker_user: str | None = None
    #: ``auto``: a root supervisor without worker_user gives each worker a PID namespace where the kernel allows it.
    pid_namespace: str = "auto"
    grace_s: float = 0.5
    linger_s: float = 2.0
    stop_timeout_s: float = 10.0
    launch_timeout_s: float = 30.0
    registry_timeout_s: float = 120.0
    drain_s: float = 15.0
    #: Prewarmed interpreters where workers are spawned and not forked.
    standby: int = 1
    #: Captured output kept per job.
    log_bytes: int = 1_048_576
    #: Captured output kept of all jobs that have ended; above it the logs of those that ended first go.
    log_total_bytes: int = 1_073_741_824
    #: Whether a job's log has the texts of its exceptions, which may quote inputs and outputs, or their places only.
    log_exceptions: bool = False
    #: Jobs that may wait for a slot; by default as many as are retained.
    max_queue: int = 2000
    #: Claims of effects that a job may have granted.
    max_effects_per_run: int = 10_000
    default_timeout_ms: int = DEFAULT_TIMEOUT_MS
    #: A job cannot be archived before it has ended for this long.
    min_retention_s: float = 0.0
    #: Serve the dashboard, a page without data, at ``/``; it needs no token, what it asks for does.
    dashboard: bool = False
    #: Modules that the template imports before the registry.
    preload: tuple[str, ...] = ("crewai",)
    #: A template whose resident memory has grown by more than this is replaced; 0: never.
    recycle_growth_bytes: int = 268_435_456
    crews: dict[str, CrewSettings] = msgspec.field(default_factory=dict)
    #: None: this supervisor stands alone.
    fleet: FleetSettings | None = None
    #: The file these settings were read from, if any; not part of the digest.
    config_file: Path | None = None

    @property
    def ephemeral(self) -> bool:
        """Whether nothing is kept beyond this process's life."""
        return self.state_file is None

    @property
    def digest(self) -> str:
        """SHA-256, lower-case hex, of the canonical JSON of ``public()``."""
        return canonical.digest(canonical.canonical_bytes(self.public()))

    def crew(self, crew_id: str) -> CrewSettings:
        """Return what ``crew_id`` has differently; nothing for a crew without a table."""
        return self.crews.get(crew_id, _NO_DIFFERENCES)

    def grace_s_of(self, crew_id: str) -> float:
        """Seconds a cancelled job of ``crew_id`` may take to close its streams before the kill."""
        own = self.crew(crew_id).grace_s
        return self.grace_s if own is None else own

    def linger_s_of(self, crew_id: str) -> float:
        """Seconds a job's processes may go on after its result before the kill."""
        own = self.crew(crew_id).linger_s
        return self.linger_s if own is None else own

    def timeout_ms_of(self, crew_id: str, asked_ms: int | None) -> int:
        """Milliseconds that a job of ``crew_id`` may run: what was asked for, at most the crew's own limit."""
        wanted = self.default_timeout_ms if asked_ms is None else asked_ms
        own = self.crew(crew_id).timeout_ms
        return wanted if own is None else min(wanted, own)

    def log_bytes_of(self, crew_id: str) -> int:
        """Captured output kept of a job of ``crew_id``."""
        own = self.crew(crew_id).log_bytes
        return self.log_bytes if own is None else own

    def public(self) -> dict[str, Any]:
        """JSON view of the settings in force: no token, and of a crew's environment only the names."""
        hidden = {"tokens", "read_tokens", "crews", "fleet", "config_file"}
        shown = {name: _plain(getattr(self, name)) for name in self.__struct_fields__ if name not in hidden}
        shown |= {"authenticated": bool(self.tokens), "ephemeral": self.ephemeral}
        if self.fleet is not None:
            shown["fleet"] = self.fleet.public()
        return {**shown, "crews": {crew_id: crew.public() for crew_id, crew in sorted(self.crews.items())}}

    def __repr__(self) -> str:
        return f"Settings({self.public()!r})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return list(self.public().items())


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple):
        return [str(item) for item in value]
    return value
