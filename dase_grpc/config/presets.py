"""Named settings: the paper's tables, and a quick start for a first run (smaller networks, faster rates).

Source of `paper/*`: Saglam et al. 2022, arXiv 2207.13453, hyper-parameter tables.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from dase_grpc.config.algorithms import ALGORITHMS, READ_BY_ONE, is_own
from dase_grpc.config.resolve import (
    MEMBERS_DIFFER,
    RunConfig,
    listed_members,
    parse_assignments,
    read_toml,
    resolve,
)
from dase_grpc.config.sections import MAX_AGENTS, SINGLE, whole_number
from dase_grpc.errors import ConfigError
from dase_grpc.progress import several

ALGORITHM: Final = "agent.algorithm"
AGENTS_OF: Final[Mapping[str, int]] = {"single": 1, "dpd": 2}
"""The number of agents that a method trains, where it leaves no choice."""

_SHARED: Final[dict[str, Any]] = {
    "train": {"agents": 2, "steps": 1_000_000},
    "dps": {"divergence": "jeffreys", "scope": "pooled", "reference_variance": 0.1},
    "replay": {"capacity": 1_000_000},
    "eval": {"every": 1_000, "episodes": 10},
}
_SHARED_AGENT: Final[dict[str, Any]] = {
    "gamma": 0.99,
    "n_step": 1,
    "batch_size": 256,
    "start_steps": 25_000,
    "exploration_noise": 0.1,
    "products": "float32",
    "hidden": [256, 256],
    "actor_lr": 3e-4,
    "critic_lr": 3e-4,
    "critic_weight_decay": 0.0,
    "tau": 5e-3,
    "reward_scale": 1.0,
    "normalise_observations": False,
}
_AGENTS: Final[Mapping[str, dict[str, Any]]] = {
    "td3": {"policy_delay": 2, "target_noise": 0.2, "target_noise_clip": 0.5},
    "ddpg": {
        "hidden": [400, 300],
        "actor_lr": 1e-4,
        "critic_lr": 1e-3,
        "critic_weight_decay": 1e-2,
        "tau": 1e-3,
        "normalise_observations": True,
    },
    "sac": {"reward_scale": 5.0, "policy_noise": 0.1, "policy_noise_clip": 0.25},
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
    """The settings of a named preset; another name is a ConfigError."""
    if not isinstance(name, str) or name not in PRESETS:
        raise ConfigError(
            f"there is no preset {name!r}; there are {', '.join(sorted(BASE_PRESETS))} and, for the paper's "
            f"environments, paper/ALGO/ENV with ENV one of {', '.join(sorted(ENVIRONMENTS))}"
        )
    return PRESETS[name]


def paper_preset(algorithm: str, env_id: str | None) -> str:
    """The paper's preset for an algorithm, its own for an environment of the paper's in any version.

    For one of the user's it is that for TD3.
    """
    if is_own(algorithm):
        algorithm = "td3"
    environment = str(env_id or "").partition("-v")[0]
    return f"paper/{algorithm}/{environment}" if environment in ENVIRONMENTS else f"paper/{algorithm}"


def layered(
    *,
    preset_name: str | None = None,
    file: Path | None = None,
    flags: Mapping[str, Any] = MappingProxyType({}),
    assignments: Sequence[str] = (),
    method: str | None = None,
) -> RunConfig:
    """The configuration a command line asks for: preset, then file, then flags, then `--set`.

    flags maps `section.key` to a value; None stands for a flag that was not given. The flag
    `agent.algorithm` chooses the paper's preset for that algorithm and the environment; several, as in
    "td3,sac", make a mixed ensemble, dealt out to the agents in turn. Where no preset, no algorithm and no
    file is given, an environment that is named, by its flag or by `--set`, chooses the paper's preset for
    TD3 in it, and none the quick start. `method`, a flag too, is `single` (one agent), `dase` or `dpd`.
    What cannot be is a ConfigError in one sentence.
    """
    given: dict[str, Any] = {}
    for key, value in flags.items():
        section, _, name = key.partition(".")
        if value is not None and key != ALGORITHM:
            given.setdefault(section, {})[name] = value
    layers = [{} if file is None else read_toml(file), given, parse_assignments(assignments)]
    if method is not None:
        layers.insert(2, {"train": _of_method(method, _last(layers, "train", "agents"))})
    if _last(layers, "train", "method") == SINGLE and _last(layers, "train", "agents") is None:
        layers.append({"train": {"agents": 1}})  # a preset has another number, which nobody asked for
    algorithms = _algorithms(flags.get(ALGORITHM), preset_name, method)
    if len(algorithms) == 1:
        given.setdefault("agent", {})["algorithm"] = algorithms[0]
    env = _last(layers, "env", "id")
    if algorithms:
        preset_name = paper_preset(algorithms[0], env)
    elif preset_name is None and file is None:
        preset_name = "quickstart" if env is None else paper_preset("td3", env)
    base = {} if preset_name is None else preset(preset_name)
    if len(algorithms) > 1:
        base = {**base, **_ensemble(algorithms, env, _last(layers, "train", "agents"))}
    return resolve(*_for_members([base, *layers]))


def _ensemble(algorithms: Sequence[str], env_id: str | None, agents: Any) -> dict[str, Any]:
    """As many `agents` that use these algorithms in turn, or else one of each, with the paper's settings."""
    given = whole_number(str(agents))
    count = given if isinstance(given, int) and 0 < given <= MAX_AGENTS else len(algorithms)
    if count < len(algorithms):
        raise ConfigError(
            f"--algo {','.join(algorithms)} names {len(algorithms)} algorithms for "
            f"{several(count, 'agent')}; give at least as many --agents"
        )
    settings = [
        {**preset(paper_preset(algorithm, env_id))["agent"], "algorithm": algorithm}
        for algorithm in algorithms
    ]
    members = [settings[index % len(settings)] for index in range(count)]
    train = {**_SHARED["train"], "agents": count}  # a number that cannot be is `resolve`'s to refuse
    return {"agent": members[0], "train": train, "members": members}


def _for_members(layers: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Layers in which what is said of `agent`, once there are `members`, is said of each that reads it."""
    members: Sequence[Mapping[str, Any]] = ()
    for layer in layers:
        said, listed = layer.get("agent"), listed_members(layer)
        if listed and said not in (None, listed[0]):
            raise ConfigError(MEMBERS_DIFFER)
        if listed:
            members = listed
        elif members and isinstance(said, Mapping):
            members = [_said_of(member, members, said) for member in members]
        else:
            yield layer
            continue
        yield {key: value for key, value in layer.items() if key != "agent"} | {"members": members}


def _said_of(
    member: Mapping[str, Any], members: Sequence[Mapping[str, Any]], said: Mapping[str, Any]
) -> dict[str, Any]:
    if "algorithm" in said:
        raise ConfigError(
            f"agent.algorithm = {said['algorithm']} and a mixed ensemble contradict each other; "
            f"name the algorithm of each agent, as in --algo td3,sac"
        )
    algorithm, used = member.get("algorithm"), {each.get("algorithm") for each in members}
    unread = {key for key, reader in READ_BY_ONE.items() if reader in used and reader != algorithm}
    if is_own(str(algorithm)):
        unread = set()
    return {**member, **{key: value for key, value in said.items() if key not in unread}}


def _algorithms(flag: str | None, preset_name: str | None, method: str | None) -> list[str]:
    """The algorithms that `--algo` names, which a preset does as well and a method may limit in number."""
    if flag is None:
        return []
    if not isinstance(flag, str):
        raise ConfigError(f"--algo {flag!r} is no text; name algorithms as in td3,sac")
    names = [name.strip() for name in flag.split(",")]
    if preset_name is not None:
        own = f"{preset_name} --set {ALGORITHM}={names[0]}"
        raise ConfigError(
            f"--algo {flag} and --preset {preset_name} both choose the settings to start from; "
            f"give one, e.g. --preset {own if is_own(names[0]) else f'paper/{names[0]}'}"
        )
    for name in names:
        if name not in ALGORITHMS and not is_own(name):
            raise ConfigError(
                f"--algo {flag!r}: there is no algorithm {name!r}; there are {', '.join(ALGORITHMS)}, your "
                f"own as package.module:Class, or several for a mixed ensemble, as in td3,sac"
            )
    if len(names) > AGENTS_OF.get(str(method), len(names)):
        raise ConfigError(
            f"--method {method} trains {several(AGENTS_OF[str(method)], 'agent')}, and --algo "
            f"{','.join(names)} names {len(names)} algorithms; leave some out, or choose --method dase"
        )
    return names


def _of_method(method: str, agents: Any) -> dict[str, Any]:
    """The settings of `train` that a method is, where so many agents are asked for."""
    count = whole_number(str(agents))  # what is no number is `resolve`'s to refuse
    if method == "single":
        if isinstance(count, int) and count != 1:
            raise ConfigError(
                f"--method single trains one agent, and {agents} are asked for; "
                f"give --agents 1, or leave train.agents out"
            )
        return {"agents": 1 if agents is None else agents, "method": "dase"}
    if method == "dase":
        if count == 1:
            raise ConfigError("--method dase shares experience between agents; give at least --agents 2")
        return {"method": "dase"}
    if method == "dpd":
        return {"method": "dpd"} if agents is not None else {"method": "dpd", "agents": 2}
    raise ConfigError(f"--method {method!r} is none of single, dase and dpd")


def _last(layers: Sequence[Mapping[str, Any]], section: str, key: str) -> Any:
    """The value of the last layer that sets a key; None if none does."""
    tables = (layer.get(section) for layer in reversed(layers))
    return next((table[key] for table in tables if isinstance(table, Mapping) and key in table), None)
