"""Named settings: the paper's tables, and a quick start for a first run (smaller networks, faster rates).

Source of `paper/*`: Saglam et al. 2022, arXiv 2207.13453, hyper-parameter tables.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from dase_grpc.config import RunConfig, parse_assignments, read_toml, resolve
from dase_grpc.errors import ConfigError

_PAPER_SHARED: Final[dict[str, Any]] = {
    "train": {"agents": 2, "steps": 1_000_000},
    "dps": {"divergence": "jeffreys", "scope": "pooled", "reference_variance": 0.1},
    "replay": {"capacity": 1_000_000},
    "eval": {"every": 1_000, "episodes": 10},
}

PRESETS: Final[Mapping[str, dict[str, Any]]] = {
    "paper/td3": {
        **_PAPER_SHARED,
        "agent": {
            "algorithm": "td3",
            "hidden": [256, 256],
            "actor_lr": 3e-4,
            "critic_lr": 3e-4,
            "gamma": 0.99,
            "tau": 5e-3,
            "batch_size": 256,
            "start_steps": 25_000,
            "exploration_noise": 0.1,
            "policy_delay": 2,
            "target_noise": 0.2,
            "target_noise_clip": 0.5,
        },
    },
    "quickstart": {
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
    },
}


def preset(name: str) -> dict[str, Any]:
    """The settings of a named preset.

    Raises:
        ConfigError: no preset has this name.
    """
    if name not in PRESETS:
        raise ConfigError(f"there is no preset {name!r}; there are {', '.join(sorted(PRESETS))}")
    return PRESETS[name]


def layered(
    *,
    preset_name: str | None,
    file: Path | None,
    flags: Mapping[str, Any],
    assignments: Sequence[str],
    otherwise: str,
) -> RunConfig:
    """The configuration a command line asks for: preset, then file, then flags, then `--set`.

    flags maps `section.key` to a value; None stands for a flag that was not given. `otherwise` names
    the preset to start from when neither a preset nor a file is given.

    Raises:
        ConfigError: in one sentence.
    """
    base = preset(preset_name or otherwise) if preset_name or file is None else {}
    given: dict[str, Any] = {}
    for key, value in flags.items():
        section, _, name = key.partition(".")
        if value is not None:
            given.setdefault(section, {})[name] = value
    return resolve(base, read_toml(file) if file else {}, given, parse_assignments(assignments))
