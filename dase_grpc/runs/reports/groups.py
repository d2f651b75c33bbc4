"""Groups of runs that are the same experiment, seeds aside, and what tells experiments apart."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final

from dase_grpc.config.resolve import RunConfig
from dase_grpc.runs.reports.sources import SourceRun

SAME_EXPERIMENT: Final = frozenset(
    {
        "train.steps",
        "train.seed",
        "train.log_every",
        "train.checkpoint_every",
        "train.threads",
        "metrics.port",
    }
)
"""Settings that do not change what an agent learns up to a step."""
_ALGORITHMS, _METHOD, _AGENTS, _BUFFER = "agent.algorithm", "train.method", "train.agents", "replay.capacity"
_LEADING: Final = (_ALGORITHMS, _METHOD, _AGENTS, _BUFFER)
_METHOD_ORDER: Final = ("single", "dpd", "dase")


@dataclass(frozen=True)
class Group:
    """The runs of one experiment.

    Attributes:
        environment: the environment's id and its arguments.
        algorithms: "td3", or "td3+sac" for a mixed ensemble, each once.
        method: single, dase or dpd.
        agents: K.
        buffer: transitions, or a size such as "512MiB".
        settings: every setting that can tell experiments apart, by `section.key`.
        runs: by seed.
    """

    environment: str
    algorithms: str
    method: str
    agents: int
    buffer: int | str
    settings: Mapping[str, Any]
    runs: tuple[SourceRun, ...]


def grouped(runs: Sequence[SourceRun]) -> list[Group]:
    """The runs by what was run, in a fixed order."""
    groups: dict[str, list[SourceRun]] = {}
    for run in runs:
        identity = json.dumps([environment(run.config), settings(run.config)], sort_keys=True)
        groups.setdefault(identity, []).append(run)
    found = [_group(members) for _, members in sorted(groups.items())]
    return sorted(found, key=_order)


def environment(config: RunConfig) -> str:
    """The environment's id, with its arguments where it has any."""
    if not config.env.kwargs:
        return config.env.id
    arguments = ", ".join(f"{key}={_text(value)}" for key, value in sorted(config.env.kwargs.items()))
    return f"{config.env.id} ({arguments})"


def settings(config: RunConfig) -> dict[str, Any]:
    """Every setting that makes an experiment another one, but for the environment.

    What has no effect does not count: how others' transitions would be weighed where none are, and a least
    size of the buffer that the random steps reach anyway. Of a mixed ensemble, each member's settings count.
    """
    tables = config.model_dump(mode="json", exclude={"env", "members"})
    members = [each.model_dump(mode="json") for each in config.members]
    if config.method != "dase":
        del tables["dps"]
    if config.replay.min_size <= min(each.stored_before_updates for each in config.distinct_agents):
        del tables["replay"]["min_size"]
    if any(member != members[0] for member in members):
        del tables["agent"]
        tables |= {f"members.{index}": member for index, member in enumerate(members)}
    found = {f"{section}.{key}": value for section, table in tables.items() for key, value in table.items()}
    found |= {_ALGORITHMS: _algorithms(config), _METHOD: config.method}
    return {key: value for key, value in found.items() if key not in SAME_EXPERIMENT}


def labels(groups: Sequence[Group]) -> list[str]:
    """A name for each group that says what tells it apart from the others in its environment, and no more.

    Groups of several environments that are alike in what is told have the same name.
    """
    keys = _telling(groups)
    return [_label(group, keys, groups) or _full_name(group) for group in groups]


def differing(groups: Sequence[Group]) -> list[str]:
    """Every setting in which any two groups of one environment differ, of the sections that both have."""
    return [
        key
        for key in _all_keys(groups)
        if any(
            _values(left, [key]) != _values(right, [key])
            and {_section(key)} <= _sections(left) & _sections(right)
            for left, right in _rivals(groups)
        )
    ]


def described(group: Group, keys: Sequence[str]) -> str:
    """These settings of a group, as `section.key = value`; those it does not have are left out."""
    return "; ".join(f"{key} = {_text(group.settings[key])}" for key in keys if key in group.settings)


def _group(runs: Sequence[SourceRun]) -> Group:
    config = runs[0].config
    return Group(
        environment=environment(config),
        algorithms=_algorithms(config),
        method=config.method,
        agents=config.train.agents,
        buffer=config.replay.capacity,
        settings=settings(config),
        runs=tuple(sorted(runs, key=lambda run: (run.seed, str(run.path)))),
    )


def _order(group: Group) -> tuple[Any, ...]:
    method = _METHOD_ORDER.index(group.method)
    buffer = (0, group.buffer, "") if isinstance(group.buffer, int) else (1, 0, group.buffer)
    return group.environment, group.algorithms, method, group.agents, buffer


def _rivals(groups: Sequence[Group]) -> list[tuple[Group, Group]]:
    return [pair for pair in combinations(groups, 2) if pair[0].environment == pair[1].environment]


def _all_keys(groups: Sequence[Group]) -> list[str]:
    """The leading ones first, since a name is built from what comes first."""
    return list(dict.fromkeys([*_LEADING, *(key for group in groups for key in group.settings)]))


def _telling(groups: Sequence[Group]) -> list[str]:
    """Settings that together tell all rivals apart, each of which tells some apart that none before does."""
    alike = _rivals(groups)
    chosen = []
    for key in _all_keys(groups):
        still = [pair for pair in alike if pair[0].settings.get(key) == pair[1].settings.get(key)]
        if len(still) < len(alike):
            chosen.append(key)
        alike = still
    return chosen


def _label(group: Group, keys: Sequence[str], groups: Sequence[Group]) -> str:
    """Algorithm, method and buffer if they tell any groups apart; the rest only where the group needs it."""
    parts = []
    if _ALGORITHMS in keys:
        parts.append(_algorithms_name(group))
    if _METHOD in keys or _AGENTS in keys:
        parts.append(_method_name(group))
    if _BUFFER in keys:
        parts.append(_buffer_name(group))
    leading = [key for key in keys if key in _LEADING]
    alike = [other for other in groups if _values(other, leading) == _values(group, leading)]
    named = {key.rpartition(".")[2]: key for key in keys}
    for key in keys[len(leading) :]:
        still = [other for other in alike if _values(other, [key]) == _values(group, [key])]
        if len(still) < len(alike) and key in group.settings:
            short = key.rpartition(".")[2]
            plain = named[short] == key and not key.startswith("members.")
            parts.append(f"{short if plain else key}={_text(group.settings[key])}")
        alike = still
    return ", ".join(parts)


def _section(key: str) -> str:
    return key.rpartition(".")[0]


def _sections(group: Group) -> set[str]:
    return set(map(_section, group.settings))


def _values(group: Group, keys: Sequence[str]) -> list[Any]:
    return [group.settings.get(key) for key in keys]


def _full_name(group: Group) -> str:
    return f"{_algorithms_name(group)}, {_method_name(group)}"


def _algorithms_name(group: Group) -> str:
    return group.algorithms.upper()


def _method_name(group: Group) -> str:
    return {"single": "single", "dpd": "DPD"}.get(group.method, f"DASE K={group.agents}")


def _buffer_name(group: Group) -> str:
    return f"buffer {group.buffer:,}" if isinstance(group.buffer, int) else f"buffer {group.buffer}"


def _algorithms(config: RunConfig) -> str:
    return "+".join(config.algorithms)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
