"""From the flags of a command line to settings."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dase_grpc.config import RunConfig
from dase_grpc.errors import ConfigError


def refuse(flags: Mapping[str, object], role: str) -> None:
    """Refuses flags that mean nothing to this role, rather than ignoring them."""
    for flag, value in flags.items():
        if value is not None:
            raise ConfigError(f"--{flag} is not for --role {role}; leave it out, or start the node it is for")


def files(preset: str | None, config: Path | None, assignments: list[str] | None) -> dict[str, Any]:
    """The flags that bring settings by the dozen or one by one; None where a flag was not given."""
    return {"preset": preset, "config": config, "set": assignments}


def choices(
    algo: str | None, method: str | None, env: str | None, agents: int | None, steps: int | None
) -> dict[str, Any]:
    """The flags for what is chosen most; None where a flag was not given."""
    return {"algo": algo, "method": method, "env": env, "agents": agents, "steps": steps}


def configured(given: Mapping[str, Any], seed: int | None) -> RunConfig:
    """The paper's settings for what is named, else the quick start's, then what was given."""
    from dase_grpc.presets import layered

    return layered(
        preset_name=given["preset"],
        file=given["config"],
        flags={
            "env.id": given["env"],
            "agent.algorithm": given["algo"],
            "train.agents": given["agents"],
            "train.steps": given["steps"],
            "train.seed": seed,
        },
        assignments=given["set"] or [],
        method=given["method"],
    )
