"""Runs that take a second: a tiny world, tiny networks, few steps."""

from pathlib import Path
from typing import Any

from dase_grpc.config.resolve import RunConfig, resolve
from dase_grpc.runs.directory import RunDirectory

SETTINGS: dict[str, dict[str, Any]] = {
    "env": {"id": "worlds:PointGoal"},
    "train": {"agents": 2, "steps": 120, "log_every": 50},
    "agent": {"hidden": [16, 16], "batch_size": 32, "start_steps": 20, "actor_lr": 1e-3, "critic_lr": 1e-3},
    "replay": {"capacity": 1_000, "min_size": 20},
    "eval": {"every": 50, "episodes": 2, "max_episode_steps": 50},
}


def small_config(env: str = "worlds:PointGoal", **settings: Any) -> RunConfig:
    """A small run's configuration; a setting is given as `section__key=value`."""
    layers = ({section: {key: value}} for (section, key), value in _split(settings))
    return resolve(SETTINGS, {"env": {"id": env}}, *layers)


def small_flags(env: str = "worlds:PointGoal", **settings: Any) -> list[str]:
    """The same for a command line."""
    values = {f"{section}.{key}": value for section, keys in SETTINGS.items() for key, value in keys.items()}
    values |= {"env.id": env} | {f"{section}.{key}": value for (section, key), value in _split(settings)}
    return [f"--set={key}={value}" for key, value in values.items()]


def new_run(root: Path, config: RunConfig, name: str = "run") -> RunDirectory:
    """A fresh run directory."""
    return RunDirectory.create(root, name, config, mode="test")


def _split(settings: dict[str, Any]) -> list[tuple[tuple[str, ...], Any]]:
    return [(tuple(name.split("__", 1)), value) for name, value in settings.items()]
