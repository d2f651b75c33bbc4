"""Named settings: the paper's tables, and a quick start for a first run (smaller networks, faster rates).

Source of `paper/*`: Saglam et al. 2022, arXiv 2207.13453, hyper-parameter tables.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from dase_grpc.config import RunConfig, parse_assignments, read_toml, resolve
from dase_grpc.errors import ConfigError

_SHARED: Final[dict[str, Any]] = {
    "train": {"agents": 2, "steps": 1_000_000},
    "dps": {"divergence": "jeffreys", "scope": "pooled", "reference_variance": 0.1},
    "replay": {"capacity": 1_000_000},
    "eval": {"every": 1_000, "episodes": 10},
}
_SHARED_AGENT: Final[dict[str, Any]] = {
    "gamma": 0.99,
    "batch_size": 256,
    "start_steps": 25_000,
    "exploration_noise": 0.1,
}
_AGENTS: Final[Mapping[str, dict[str, Any]]] = {
    "td3": {
        "hidden": [256, 256],
        "actor_lr": 3e-4,
        "critic_lr": 3e-4,
        "critic_weight_decay": 0.0,
        "tau": 5e-3,
        "reward_scale": 1.0,
        "normalise_observations": False,
        "policy_delay": 2,
        "target_noise": 0.2,
        "target_noise_clip": 0.5,
    },
    "ddpg": {
        "hidden": [400, 300],
        "actor_lr": 1e-4,
        "critic_lr": 1e-3,
        "critic_weight_decay": 1e-2,
        "tau": 1e-3,
        "reward_scale": 1.0,
        "normalise_observations": True,
    },
    "sac": {
        "hidden": [256, 256],
        "actor_lr": 3e-4,
        "critic_lr": 3e-4,
        "critic_weight_decay": 0.0,
        "tau": 5e-3,
        "reward_scale": 5.0,
        "normalise_observations": False,
        "policy_noise": 0.1,
        "policy_noise_clip": 0.25,
    },
}
_QUICKSTART: Final[dict[str, Any]] = {
    "env": {"id": "InvertedDoublePendulum-v5"},
    "train": {"agents": 2, "steps": 20_000},
    "agent": {
        "algorithm": "td3",
        "hidden": [64, 64],
        "actor_lr": 1e-3,
        "critic_lr": 1e-3,
        "batch_size": 128,
        "start_steps": 1_000,
    },
    "replay": {"capacity": 100_000},
    "eval": {"every": 1_000, "episodes": 10},
}

ENVIRONMENTS: Final[Mapping[str, str]] = {
    "Ant": "Ant-v5",
    "HalfCheetah": "HalfCheetah-v5",
    "Hopper": "Hopper-v5",
    "Humanoid": "Humanoid-v5",
    "Swimmer": "Swimmer-v5",
    "Walker2d": "Walker2d-v5",
    "LunarLanderContinuous": "LunarLanderContinuous-v3",
    "BipedalWalker": "BipedalWalker-v3",
}
"""The paper's environments by the names they have in presets, in today's versions."""

BASE_PRESETS: Final[Mapping[str, dict[str, Any]]] = {
    **{
        f"paper/{algorithm}": {**_SHARED, "agent": {"algorithm": algorithm, **_SHARED_AGENT, **settings}}
        for algorithm, settings in _AGENTS.items()
    },
    "quickstart": _QUICKSTART,
}


def _in_environment(algorithm: str, environment: str) -> dict[str, Any]:
    base = BASE_PRESETS[f"paper/{algorithm}"]
    own = {"reward_scale": 20.0} if (algorithm, environment) == ("sac", "Humanoid") else {}
    return {"env": {"id": ENVIRONMENTS[environment]}, **base, "agent": {**base["agent"], **own}}


PRESETS: Final[Mapping[str, dict[str, Any]]] = {
    **BASE_PRESETS,
    **{f"paper/{a}/{env}": _in_environment(a, env) for a in _AGENTS for env in ENVIRONMENTS},
}


def preset(name: str) -> dict[str, Any]:
    """The settings of a named preset.

    Raises:
        ConfigError: no preset has this name.
    """
    if name not in PRESETS:
        raise ConfigError(
            f"there is no preset {name!r}; there are {', '.join(sorted(BASE_PRESETS))} and, for the paper's "
            f"environments, paper/ALGO/ENV with ENV one of {', '.join(sorted(ENVIRONMENTS))}"
        )
    return PRESETS[name]


def paper_preset(algorithm: str, env_id: str | None) -> str:
    """The name of the paper's preset for an algorithm, its own for an environment of the paper's.

    Any version of the environment counts, as in `Humanoid-v4`.
    """
    environment = (env_id or "").partition("-v")[0]
    return f"paper/{algorithm}/{environment}" if environment in ENVIRONMENTS else f"paper/{algorithm}"


def layered(
    *,
    preset_name: str | None,
    file: Path | None,
    flags: Mapping[str, Any],
    assignments: Sequence[str],
) -> RunConfig:
    """The configuration a command line asks for: preset, then file, then flags, then `--set`.

    flags maps `section.key` to a value; None stands for a flag that was not given. The flag
    `agent.algorithm` chooses the paper's preset for that algorithm and the environment. Where no
    preset, no algorithm and no file is given, an environment that is named, by its flag or by
    `--set`, chooses the paper's preset for TD3 in it, and none the quick start.

    Raises:
        ConfigError: in one sentence.
    """
    given: dict[str, Any] = {}
    for key, value in flags.items():
        section, _, name = key.partition(".")
        if value is not None:
            given.setdefault(section, {})[name] = value
    layers = [read_toml(file) if file else {}, given, parse_assignments(assignments)]
    algorithm = flags.get("agent.algorithm")
    if algorithm is not None:
        if preset_name is not None:
            raise ConfigError(
                f"--algo {algorithm} and --preset {preset_name} both choose the settings to start from; "
                f"give one, e.g. --preset paper/{algorithm}"
            )
        preset_name = paper_preset(algorithm, _environment(layers))
    if preset_name is None and file is None:
        env = _environment(layers)
        preset_name = "quickstart" if env is None else paper_preset("td3", env)
    base = preset(preset_name) if preset_name else {}
    return resolve(base, *layers)


def _environment(layers: Sequence[Mapping[str, Any]]) -> str | None:
    """The environment that the last of the layers which names one asks for."""
    sections = (layer.get("env") for layer in reversed(layers))
    named = (section["id"] for section in sections if isinstance(section, Mapping) and "id" in section)
    return next((str(name) for name in named), None)
