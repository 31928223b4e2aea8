"""The ``[fleet]`` table: all of it or nothing, its secret out of sight, its name and address checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli_w

from protocol.errors import ConfigError
from supervisor.config import FleetSettings, Settings, load
from supervisor.config.table import FLEET_SETTINGS

PASSWORD = "a-secret-that-nobody-may-see"
DATABASE = f"postgresql://crew:{PASSWORD}@db/crew"
FLEET = {"database": DATABASE, "replica": "replica-0", "url": "http://replica-0:8090/"}


def write(tmp_path: Path, fleet: dict[str, Any], *, mode: int = 0o600, **settings: Any) -> Path:
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("token")
    required = {"registry": "crews:registry", "state_file": "/s/j.db", "bearer_token_file": str(token)}
    chosen = {name: value for name, value in {**required, **settings, "fleet": fleet}.items() if value is not None}
    path = tmp_path / "supervisor.toml"
    path.touch(mode=0o600)
    path.write_text(tomli_w.dumps(chosen))
    path.chmod(mode)
    return path


def refusal(path: Path, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, environ or {})
    assert PASSWORD not in caught.value.detail
    assert ";" in caught.value.detail, "a refusal says what to do"
    return caught.value.detail


def fleet_of(settings: Settings) -> FleetSettings:
    assert settings.fleet is not None
    return settings.fleet


def test_without_the_table_a_supervisor_stands_alone(tmp_path: Path) -> None:
    settings = load(write(tmp_path, {}), {})
    assert settings.fleet is None
    assert "fleet" not in settings.public()


def test_the_table_is_read(tmp_path: Path) -> None:
    fleet = fleet_of(load(write(tmp_path, FLEET), {}))
    assert (fleet.database, fleet.replica, fleet.url) == (DATABASE, "replica-0", "http://replica-0:8090")
    assert fleet.lease_s == 15.0


def test_the_environment_wins(tmp_path: Path) -> None:
    environ = {
        "CREW_SUPERVISOR_FLEET_DATABASE": "service=crew",
        "CREW_SUPERVISOR_FLEET_REPLICA": "pod-3",
        "CREW_SUPERVISOR_FLEET_URL": "http://pod-3:1",
        "CREW_SUPERVISOR_FLEET_LEASE_S": "4",
    }
    assert {row.variable for row in FLEET_SETTINGS} == environ.keys()
    fleet = fleet_of(load(write(tmp_path, FLEET), environ))
    assert (fleet.database, fleet.replica, fleet.url, fleet.lease_s) == ("service=crew", "pod-3", "http://pod-3:1", 4.0)


def test_a_credential_is_the_database(tmp_path: Path) -> None:
    credential = tmp_path / "fleet_database"
    credential.touch(mode=0o600)
    credential.write_text(DATABASE)
    path = write(tmp_path, {name: value for name, value in FLEET.items() if name != "database"})
    assert fleet_of(load(path, {"CREDENTIALS_DIRECTORY": str(tmp_path)})).database == DATABASE


@pytest.mark.parametrize("missing", ["database", "replica", "url"])
def test_a_part_of_it_is_refused(tmp_path: Path, missing: str) -> None:
    path = write(tmp_path, {name: value for name, value in FLEET.items() if name != missing})
    assert f"fleet.{missing} (CREW_SUPERVISOR_FLEET_{missing.upper()}) is not set" in refusal(path)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("database", 7), ("database", " "), ("replica", "a/b"), ("replica", "a" * 65), ("replica", "-a"),
        ("url", "replica-0:8090"), ("url", "ftp://replica-0"), ("url", "http://"), ("url", "http://u:p@replica-0"),
        ("url", "http://replica-0/?x=1"), ("lease_s", 0.5), ("lease_s", 3601), ("lease_s", True), ("leases", 3),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_by_name(tmp_path: Path, name: str, wrong: Any) -> None:
    assert refusal(write(tmp_path, {**FLEET, name: wrong})).startswith(f"fleet.{name}")


def test_a_replica_needs_a_journal_and_a_token(tmp_path: Path) -> None:
    alone = {"host": "127.0.0.1", "allow_ephemeral": True, "allow_unauthenticated": True}
    assert "state_file" in refusal(write(tmp_path, FLEET, **alone, state_file=None))
    assert "bearer_token_file" in refusal(write(tmp_path, FLEET, **alone, bearer_token_file=None))


def test_nothing_shows_the_connection_string(tmp_path: Path) -> None:
    settings = load(write(tmp_path, FLEET), {})
    assert settings.public()["fleet"] == {"replica": "replica-0", "url": "http://replica-0:8090", "lease_s": 15.0}
    for text in (repr(settings), repr(settings.fleet), str(settings.public())):
        assert PASSWORD not in text
        assert "postgresql" not in text


@pytest.mark.parametrize("database", [DATABASE, f"host=db password={PASSWORD}"])
def test_a_password_needs_a_private_file(tmp_path: Path, database: str) -> None:
    path = write(tmp_path, {**FLEET, "database": database}, mode=0o644)
    assert "holds a password in fleet.database" in refusal(path)


def test_a_database_without_a_password_does_not(tmp_path: Path) -> None:
    path = write(tmp_path, {**FLEET, "database": "postgresql://crew@db/crew"}, mode=0o644)
    assert load(path, {}).fleet is not None
