"""The runs to compare: found on disk, each read as one curve, and grouped into experiments with names."""

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, Final

import numpy as np

from dase_grpc.config.algorithms import algorithm_name
from dase_grpc.config.resolve import RunConfig
from dase_grpc.config.texts import json_value
from dase_grpc.errors import RunDirectoryError
from dase_grpc.runs.curves import LARGEST, Series, mean_of, returns, shared_curves
from dase_grpc.runs.directory import RUN_FILE, RunDirectory
from dase_grpc.runs.logs import read_evaluations
from dase_grpc.runs.lookup import WHAT_IT_IS, require_folders

SAME_EXPERIMENT: Final = frozenset(
    {
        "train.steps",
        "train.seed",
        "train.log_every",
        "train.checkpoint_every",
        "train.threads",
        "replay.storage",
        "replay.in_place",
        "metrics.port",
    }
)
"""Settings that do not change what an agent learns up to a step; the total does where β grows until there."""
_ALGORITHMS, _METHOD, _AGENTS, _BUFFER = "agent.algorithm", "train.method", "train.agents", "replay.capacity"
_STEPS: Final = "train.steps"
_BARE: Final = re.compile(r"[^\s\"=,;()\[\]{}]+( [^\s\"=,;()\[\]{}]+)*")
"""Texts that end where what is around them begins."""
_LEADING: Final = (_ALGORITHMS, _METHOD, _AGENTS, _BUFFER)
_METHOD_ORDER: Final = ("single", "dpd", "dase")


@dataclass(frozen=True)
class SourceRun:
    """One run, the unit of every statistic.

    Attributes:
        path: its folder, as it was found.
        mode: cluster, lockstep, stack or node.
        versions: of the software that made it, as in run.toml.
        curve: over the steps at which all its agents were evaluated, the mean over these agents.
        evaluated: how many of its agents have any evaluation.
        finished: whether each of its agents was evaluated at the run's last step.
    """

    path: Path
    name: str
    mode: str
    config: RunConfig
    versions: Mapping[str, str]
    curve: Series
    evaluated: int
    finished: bool

    @property
    def seed(self) -> int:
        """The run's one seed."""
        return self.config.train.seed

    @property
    def agents(self) -> int:
        """K."""
        return self.config.train.agents


@dataclass(frozen=True)
class LeftOut:
    """A run that takes no part in a comparison, and why, in words that follow its path."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path} is left out: {self.reason}"


@dataclass(frozen=True)
class Group:
    """The runs of one experiment, seeds aside.

    Attributes:
        settings: every setting that can tell experiments apart, by `section.key`.
        runs: by seed.
    """

    settings: Mapping[str, Any]
    runs: tuple[SourceRun, ...]

    @property
    def environment(self) -> str:
        """The environment's id and its arguments."""
        return environment(self.runs[0].config)

    @property
    def algorithms(self) -> str:
        """Such as "td3", or "td3+sac" for a mixed ensemble, each once."""
        return str(self.settings[_ALGORITHMS])

    @property
    def algorithm_names(self) -> str:
        """Such as "TD3" or "TD3+SAC"."""
        return "+".join(map(algorithm_name, self.algorithms.split("+")))

    @property
    def method(self) -> str:
        """One of single, dase and dpd."""
        return str(self.settings[_METHOD])

    @property
    def agents(self) -> int:
        """K."""
        return self.runs[0].agents

    @property
    def method_name(self) -> str:
        """Such as "single", "DPD" or "DASE K=2"."""
        return {"single": "single", "dpd": "DPD"}.get(self.method, f"DASE K={self.agents}")

    @property
    def buffer(self) -> int | str:
        """Transitions, or a size such as "512MiB"."""
        return self.runs[0].config.replay.capacity

    def values(self, keys: Iterable[str]) -> list[Any]:
        """These settings, None for what is not there."""
        return [self.settings.get(key) for key in keys]


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """The folders of runs among `paths` and, recursively, inside them; each once, in a fixed order.

    Raises:
        RunDirectoryError: one of the paths is no folder, holds no run, or cannot be read.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        require_folders([path])
        inside = list(_below(path))
        if not inside:
            raise RunDirectoryError(f"{path} holds no run; {WHAT_IT_IS}")
        for run in inside:
            found.setdefault(run.resolve(), run)
    return list(found.values())


def read_runs(paths: Iterable[Path], *, unfinished: bool = False) -> tuple[list[SourceRun], list[LeftOut]]:
    """Reads the runs that can be compared; the second list says which cannot, and why.

    With `unfinished`, a run that has not reached its last step is used up to where it is.
    """
    runs: list[SourceRun] = []
    left_out: list[LeftOut] = []
    for path in paths:
        try:
            run = _read(path)
            reason = _unusable(run, unfinished=unfinished) or _copied(run, runs)
        except (RunDirectoryError, OSError) as error:
            left_out.append(LeftOut(path, str(error)))
            continue
        if reason:
            left_out.append(LeftOut(path, reason))
        else:
            runs.append(run)
    return runs, left_out


def grouped(runs: Sequence[SourceRun]) -> list[Group]:
    """The runs by what was run, in a fixed order."""
    groups: dict[str, list[SourceRun]] = {}
    for run in runs:
        groups.setdefault(_identity(run.config), []).append(run)
    found = [
        Group(settings(members[0].config), tuple(sorted(members, key=lambda run: (run.seed, str(run.path)))))
        for _, members in sorted(groups.items())
    ]
    return sorted(found, key=_order)


def _identity(config: RunConfig) -> str:
    return json.dumps([environment(config), settings(config)], sort_keys=True)


def environment(config: RunConfig) -> str:
    """The environment's id, with its arguments where it has any; others for each others of these."""
    if not config.env.kwargs:
        return config.env.id
    arguments = ", ".join(f"{_text(key)}={_text(each)}" for key, each in sorted(config.env.kwargs.items()))
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
    found |= {_ALGORITHMS: "+".join(config.algorithms), _METHOD: config.method}
    left_out = SAME_EXPERIMENT - {_STEPS} if config.anneals else SAME_EXPERIMENT
    return {key: value for key, value in found.items() if key not in left_out}


def labels(groups: Sequence[Group]) -> list[str]:
    """A name for each group that says what tells it apart from the others in its environment, and no more.

    Groups of several environments that are alike in what is told have the same name.
    """
    keys = _telling(groups)
    return [
        _label(group, keys, groups) or f"{group.algorithm_names}, {group.method_name}" for group in groups
    ]


def differing(groups: Sequence[Group]) -> list[str]:
    """Every setting in which any two groups of one environment differ, of the sections that both have."""
    sections = {id(group): {key.rpartition(".")[0] for key in group.settings} for group in groups}
    rivals = [(left, right, sections[id(left)] & sections[id(right)]) for left, right in _rivals(groups)]
    return [
        key
        for key in _all_keys(groups)
        if any(
            key.rpartition(".")[0] in shared and left.values([key]) != right.values([key])
            for left, right, shared in rivals
        )
    ]


def described(group: Group, keys: Sequence[str]) -> str:
    """These settings of a group, as `section.key = value`; those it does not have are left out."""
    return "; ".join(f"{key} = {_text(group.settings[key])}" for key in keys if key in group.settings)


def _below(path: Path) -> Iterable[Path]:
    """A run holds no other runs, so the search ends where it finds one; hidden folders hold none to compare.

    Runs that are being made and tries that an experiment has set aside lie in hidden folders. Links are
    followed, after what lies there itself, and no folder is entered twice, so a link to one above ends.
    """
    entered: set[str] = set()
    for folder, inner, files in os.walk(path, onerror=_require_readable, followlinks=True):
        here, place = Path(folder), os.path.realpath(folder)
        if RUN_FILE in files:
            yield here
        ends = RUN_FILE in files or place in entered
        shown = [] if ends else [here / name for name in inner if not name.startswith(".")]
        inner[:] = [each.name for each in sorted(shown, key=lambda each: (each.is_symlink(), each))]
        entered.add(place)


def _require_readable(error: OSError) -> None:
    """A folder that cannot be read may hold runs; one that has gone meanwhile, or is a file, holds none."""
    if isinstance(error, PermissionError):
        raise RunDirectoryError(f"cannot read {error.filename}: {error.strerror}") from None


def _read(path: Path) -> SourceRun:
    run = RunDirectory.open(path)
    agents = [returns(read_evaluations(agent.evaluations.path)) for agent in run.agents()]
    evaluated = [curve for curve in agents if len(curve)]
    shared = shared_curves(evaluated)
    last = min((int(curve.step[-1]) for curve in evaluated), default=0)
    return SourceRun(
        path=path,
        name=run.name,
        mode=str(run.run.get("mode", "")),
        config=run.config,
        versions=run.versions,
        curve=Series(shared.step, mean_of(shared.value) if len(shared.value) else np.empty(0)),
        evaluated=len(evaluated),
        finished=len(evaluated) >= run.config.train.agents and last >= run.config.train.steps,
    )


def _unusable(run: SourceRun, *, unfinished: bool) -> str | None:
    if not len(run.curve):
        return "it has no evaluation yet"
    if not np.isfinite(run.curve.value).all():
        return "it has evaluations that are not finite"
    if np.abs(run.curve.value).max() > LARGEST:
        return f"it has evaluations beyond {LARGEST:g}, of which no statistics can be computed"
    if not (run.finished or unfinished):
        where = f"step {run.curve.step[-1]:,} of {run.config.train.steps:,}"
        if run.evaluated < run.agents:
            where = f"{run.evaluated} of {run.agents} agents have evaluations"
        return f"it has not finished ({where}); --unfinished uses it up to where it is"
    return None


def _copied(run: SourceRun, others: Sequence[SourceRun]) -> str | None:
    """Two lockstep runs of one seed are as equal as a run and its copy: one sample, not two."""
    for other in others:
        ours, theirs = run.curve, other.curve
        same = run.seed == other.seed and _identity(run.config) == _identity(other.config)
        if same and np.array_equal([ours.step, ours.value], [theirs.step, theirs.value]):
            return f"its seed, its settings and all its evaluations are those of {other.path}"
    return None


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
        still = [(left, right) for left, right in alike if left.values([key]) == right.values([key])]
        if len(still) < len(alike):
            chosen.append(key)
        alike = still
    return chosen


def _label(group: Group, keys: Sequence[str], groups: Sequence[Group]) -> str:
    """Algorithm, method and buffer if they tell any groups apart; the rest only where the group needs it."""
    parts = []
    if _ALGORITHMS in keys:
        parts.append(group.algorithm_names)
    if _METHOD in keys or _AGENTS in keys:
        parts.append(group.method_name)
    if _BUFFER in keys:
        parts.append(
            f"buffer {group.buffer:,}" if isinstance(group.buffer, int) else f"buffer {group.buffer}"
        )
    leading = [key for key in keys if key in _LEADING]
    alike = [other for other in groups if other.values(leading) == group.values(leading)]
    named = {key.rpartition(".")[2]: key for key in keys}
    for key in keys[len(leading) :]:
        still = [other for other in alike if other.values([key]) == group.values([key])]
        if len(still) < len(alike) and key in group.settings:
            short = key.rpartition(".")[2]
            plain = named[short] == key and not key.startswith("members.")
            parts.append(f"{short if plain else key}={_text(group.settings[key])}")
        alike = still
    return ", ".join(parts)


def _text(value: Any) -> str:
    """A value in JSON; a text is bare where it cannot be taken for anything else."""
    if isinstance(value, str) and value.isprintable() and _BARE.fullmatch(value) and not _is_json(value):
        return value
    written = partial(json.dumps, value, sort_keys=True)
    return text if (text := written(ensure_ascii=False)).isprintable() else written()


def _is_json(text: str) -> bool:
    try:
        json_value(text)
    except ValueError:
        return False
    return True
