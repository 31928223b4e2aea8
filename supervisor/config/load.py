"""Reading the settings: defaults, then the TOML file, then the environment; then what they must satisfy together."""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Mapping, Sequence
from ipaddress import IPv4Network, IPv6Address, ip_address
from pathlib import Path
from typing import Any

import msgspec

from protocol.errors import ConfigError
from protocol.operations import Operation
from supervisor import tokens
from supervisor.config import credentials
from supervisor.config.kinds import Refused, suggest
from supervisor.config.settings import CrewSettings, FleetSettings, Settings
from supervisor.config.table import (
    BEARER_TOKEN,
    BEARER_TOKEN_FILE,
    CONFIG_VARIABLE,
    CREW_SETTINGS,
    FLEET_SETTINGS,
    MAX_SHUTDOWN_S,
    MORE_TOKEN_FILES,
    READ_TOKEN_FILES,
    SETTINGS,
    TEMPLATE_SETTINGS,
    Setting,
)

MAX_CONFIG_BYTES = 1_048_576
MAX_CREW_ID_CHARS = 256

_LOOPBACK_V4 = IPv4Network("127.0.0.0/8")
_LOOPBACK_V6 = IPv6Address("::1")
#: Never repeated in a message.
_SECRET = frozenset({"bearer_token", "database", "environment"})
#: Tables of the file beside the top level.
_TABLES = ("template", "crews", "fleet")
#: A connection string with a password in it, as libpq's URIs and its ``name=value`` form have them.
_PASSWORD = re.compile(r"://[^/@]*:[^/@]+@|\bpassword\s*=", re.IGNORECASE)


def load(argv_config: Path | None, environ: Mapping[str, str]) -> Settings:
    """Return the settings in force; nothing on disk is changed.

    The file is ``argv_config``, else the one that CREW_SUPERVISOR_CONFIG names, else none. Relative paths in it start
    from its own directory, those in the environment from the working directory. Raises ConfigError saying which
    setting, which value, and what to set instead.
    """
    named = argv_config or environ.get(CONFIG_VARIABLE, "").strip() or None
    config_file = Path.cwd() / named if named else None
    values: dict[str, Any] = {}
    if config_file is not None:
        values |= _from_file(_read_toml(config_file), config_file)
    values |= _from_environment(environ, SETTINGS)
    fleet = values.pop("fleet", {}) | _from_environment(environ, FLEET_SETTINGS)
    token = _resolve_token(values, environ)
    more, read_only = (
        tuple(tokens.read_token_file(path) for path in values.pop(setting.name, ()))
        for setting in (MORE_TOKEN_FILES, READ_TOKEN_FILES)
    )
    read_only += credentials.read(credentials.READ_TOKEN, environ)
    if not values.get("registry"):
        raise ConfigError("registry (AIP_CREWAI_REGISTRY) is not set; set it to module:attribute")
    values.setdefault("max_queue", values.get("max_retained_runs", _default("max_retained_runs")))
    state_file = values.get("state_file")
    if state_file is not None:
        values.setdefault("work_dir", state_file.parent / "work")
    settings = Settings(
        **values,
        tokens=((token,) if token else ()) + more,
        read_tokens=read_only,
        fleet=_fleet(fleet, environ),
        config_file=config_file,
    )
    _check_together(settings, environ)
    return settings


def is_loopback(host: str) -> bool:
    """Whether ``host`` is ``localhost`` or an address in 127.0.0.0/8 or ::1; other names never are."""
    if host.lower() == "localhost":
        return True
    try:
        address = ip_address(host)
    except ValueError:
        return False
    return address == _LOOPBACK_V6 if isinstance(address, IPv6Address) else address in _LOOPBACK_V4


def prepare_training_dir(path: Path) -> None:
    """Create the training directory (mode 0700, parents too) where it is missing and check it. Raises ConfigError."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"training_dir {str(path)!r} cannot be created: {error.strerror}; create it with mode 0700"
        ) from None
    check_training_dir(path)


def check_training_dir(path: Path) -> None:
    """Check a training directory that exists; a missing one is fine. Raises ConfigError."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"training_dir {str(path)!r} cannot be examined: {error.strerror}; set another") from None
    if not stat.S_ISDIR(mode):
        raise ConfigError(f"training_dir {str(path)!r} is a symbolic link or no directory; name a real directory")
    if mode & 0o022:
        raise ConfigError(
            f"training_dir {str(path)!r} is writable by group or others (mode {stat.S_IMODE(mode):04o});"
            " take that away, for example with chmod 0700"
        )


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            body = file.read(MAX_CONFIG_BYTES + 1)
            mode = os.fstat(file.fileno()).st_mode
    except OSError as error:
        raise ConfigError(
            f"configuration file {str(path)!r} cannot be read: {error.strerror}; name another with --config"
        ) from None
    if len(body) > MAX_CONFIG_BYTES:
        raise ConfigError(f"configuration file {str(path)!r} is larger than {MAX_CONFIG_BYTES} bytes; shorten it")
    try:
        document = tomllib.loads(body.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"configuration file {str(path)!r} is not TOML: {error}; correct it") from None
    secret = _secret_of(document)
    if secret is not None and mode & 0o077:
        raise ConfigError(
            f"configuration file {str(path)!r} holds {secret} and is open to group or others"
            f" (mode {stat.S_IMODE(mode):04o}); chmod it to 0600 or use {_ELSEWHERE[secret]}"
        )
    return document


#: Where a secret of the file can be instead.
_ELSEWHERE = {
    "bearer_token": "bearer_token_file",
    "a password in fleet.database": "CREW_SUPERVISOR_FLEET_DATABASE",
}


def _secret_of(document: dict[str, Any]) -> str | None:
    if "bearer_token" in document:
        return "bearer_token"
    fleet = document.get("fleet")
    database = fleet.get("database") if isinstance(fleet, dict) else None
    return "a password in fleet.database" if isinstance(database, str) and _PASSWORD.search(database) else None


def _from_file(document: dict[str, Any], path: Path) -> dict[str, Any]:
    base = path.parent
    top = {name: value for name, value in document.items() if name not in _TABLES}
    known = [setting.name for setting in SETTINGS]
    values = _read_table(top, SETTINGS, base=base, prefix="", known=[*known, *_TABLES])
    template = _table(document.get("template", {}), "template")
    values |= _read_table(template, TEMPLATE_SETTINGS, base=base, prefix="template.")
    fleet = _table(document.get("fleet", {}), "fleet")
    if fleet:
        values["fleet"] = _read_table(fleet, FLEET_SETTINGS, base=base, prefix="fleet.")
    crews = _table(document.get("crews", {}), "crews")
    if crews:
        values["crews"] = {crew_id: _crew(crew_id, table, base) for crew_id, table in crews.items()}
    return values


def _crew(crew_id: str, table: Any, base: Path) -> CrewSettings:
    if not crew_id.strip() or len(crew_id) > MAX_CREW_ID_CHARS:
        raise ConfigError(f"crews.{crew_id[:64]!r} is no crew id; use 1 to {MAX_CREW_ID_CHARS} characters")
    prefix = f"crews.{crew_id!r}."
    return CrewSettings(**_read_table(_table(table, prefix[:-1]), CREW_SETTINGS, base=base, prefix=prefix))


def _table(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{name} is {_show(value)}, which is not a table; write [{name}] and its settings below")
    return value


def _read_table(
    table: dict[str, Any], settings: Sequence[Setting], *, base: Path, prefix: str, known: list[str] | None = None
) -> dict[str, Any]:
    by_name = {setting.name: setting for setting in settings}
    known = known or list(by_name)
    values = {}
    for name, value in table.items():
        if name not in by_name:
            hint = suggest(name, known)
            raise ConfigError(f"{prefix}{name} is not a setting of the configuration file{hint or '; remove it'}")
        try:
            values[name] = by_name[name].kind.from_toml(value, base)
        except Refused as reason:
            raise ConfigError(_message(prefix + name, name, value, reason)) from None
    return values


def _fleet(values: dict[str, Any], environ: Mapping[str, str]) -> FleetSettings | None:
    """The fleet's settings; a credential stands in for the connection string. None where nothing is said of one."""
    credential = credentials.read(credentials.FLEET_DATABASE, environ)
    if credential and "database" not in values:
        values = {**values, "database": credential[0]}
    if not values:
        return None
    missing = [setting for setting in FLEET_SETTINGS if setting.name in _REQUIRED and setting.name not in values]
    if missing:
        raise ConfigError(
            f"fleet.{missing[0].name} ({missing[0].variable}) is not set, but other settings of the fleet are; set"
            f" {', '.join(_REQUIRED)}, or none of them"
        )
    return FleetSettings(**values)


_REQUIRED = ("database", "replica", "url")


def _from_environment(environ: Mapping[str, str], settings: Sequence[Setting]) -> dict[str, Any]:
    base = Path.cwd()
    values = {}
    for setting in settings:
        if setting.variable is None or setting.variable not in environ:
            continue
        text = environ[setting.variable]
        try:
            value = setting.kind.from_text(text, base)
        except Refused as reason:
            raise ConfigError(_message(f"{setting.name} ({setting.variable})", setting.name, text, reason)) from None
        if value is not None:
            values[setting.name] = value
    return values


def _message(shown_name: str, name: str, value: Any, reason: Refused) -> str:
    return f"{shown_name} {reason}" if name in _SECRET else f"{shown_name} is {_show(value)}: it {reason}"


def _show(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."


def _resolve_token(values: dict[str, Any], environ: Mapping[str, str]) -> str | None:
    """Take the two token settings out of ``values`` and return the token; a credential stands in for both."""
    inline, path = values.pop(BEARER_TOKEN.name, None), values.pop(BEARER_TOKEN_FILE.name, None)
    if inline is not None and path is not None:
        raise ConfigError(
            f"bearer_token ({BEARER_TOKEN.variable}) and bearer_token_file ({BEARER_TOKEN_FILE.variable}) are both set;"
            " keep one"
        )
    if path is not None:
        return tokens.read_token_file(path)
    if inline is not None:
        return tokens.check_token(inline, "bearer_token")
    return next(iter(credentials.read(credentials.BEARER_TOKEN, environ)), None)


def _default(name: str) -> Any:
    return next(field.default for field in msgspec.structs.fields(Settings) if field.name == name)


def _check_together(settings: Settings, environ: Mapping[str, str]) -> None:
    _check_exposure(settings, environ)
    if settings.max_retained_runs < settings.max_concurrency:
        raise ConfigError(
            f"max_retained_runs (AIP_CREWAI_MAX_RETAINED_RUNS) is {settings.max_retained_runs}, below max_concurrency"
            f" {settings.max_concurrency}; set it to at least that"
        )
    if Operation.TRAIN in settings.allowed_operations:
        if settings.training_dir is None:
            raise ConfigError(
                "training_dir (AIP_CREWAI_TRAINING_DIR) is not set, but train is in allowed_operations; set it or"
                " disallow train"
            )
        check_training_dir(settings.training_dir)
    _check_shutdown(settings)
    if settings.fleet is not None and (settings.ephemeral or not settings.tokens):
        raise ConfigError(
            "fleet is set, but a replica needs a journal that outlives it and a token that the others have too; set"
            " state_file and bearer_token_file"
        )


def _check_exposure(settings: Settings, environ: Mapping[str, str]) -> None:
    """Without a token or without a journal only explicitly and only on loopback (contract, section 1.1)."""
    loopback = is_loopback(settings.host)
    for missing, flag, without, remedy in (
        (not settings.tokens, "allow_unauthenticated", "without a bearer token", "bearer_token_file"),
        (settings.state_file is None, "allow_ephemeral", "without a journal (state_file)", "state_file"),
    ):
        if not missing or (loopback and getattr(settings, flag)):
            continue
        variable = f"AIP_CREWAI_{flag.upper()}"
        given = environ.get(variable)
        ignored = f" ({variable} is {_show(given)}, which does not mean yes; 1 and true do)" if given else ""
        if not loopback:
            raise ConfigError(
                f"host is {settings.host!r}, which is not loopback, so the server cannot run {without}; set {remedy},"
                " or host to 127.0.0.1"
            )
        raise ConfigError(
            f"{flag} is off, so the server cannot run {without}{ignored}; set {remedy}, or {flag} = true on loopback"
        )


def _check_shutdown(settings: Settings) -> None:
    slowest = max([settings.grace_s, *(settings.grace_s_of(crew_id) for crew_id in settings.crews)])
    total = settings.drain_s + slowest + settings.stop_timeout_s
    if total > MAX_SHUTDOWN_S:
        raise ConfigError(
            f"drain_s {settings.drain_s:g} + grace_s {slowest:g} + stop_timeout_s {settings.stop_timeout_s:g} is"
            f" {total:g}, above {MAX_SHUTDOWN_S:g} seconds; lower one of them"
        )
