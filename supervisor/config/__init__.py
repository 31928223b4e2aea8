"""Configuration: one struct of settings, read from defaults, a TOML file and the environment."""

from supervisor.config.load import check_training_dir, is_loopback, load, prepare_training_dir
from supervisor.config.settings import CrewSettings, FleetSettings, Settings
from supervisor.config.user import resolve_worker_user

__all__ = [
    "CrewSettings",
    "FleetSettings",
    "Settings",
    "check_training_dir",
    "is_loopback",
    "load",
    "prepare_training_dir",
    "resolve_worker_user",
]
