"""The cells of an experiment: every combination of its axes, resolved, each once, with a readable name."""

import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dase_grpc.config.presets import AGENTS_OF, ALGORITHM, layered
from dase_grpc.config.resolve import RunConfig
from dase_grpc.errors import ConfigError, DaseError
from dase_grpc.launch.experiments.file import METHOD, PRESET, ExperimentFile, Settings
from dase_grpc.launch.experiments.sites import Mode
from dase_grpc.learning.envs.ids import with_resolved_id
from dase_grpc.progress import several

NAME_LENGTH: Final = 120
DIGEST_LENGTH: Final = 8

_SAID_BY_VALUE: Final = (ALGORITHM, METHOD, PRESET, "env.id")
"""Settings whose value alone says what it is."""

_READ_BY_ONE: Final[Mapping[str, str]] = {"dps": "dase", "dpd": "dpd"}
"""Sections of the configuration that one method alone reads, and which."""


@dataclass(frozen=True)
class RunCell:
    """One run of an experiment: its folder's name, and everything that decides it."""

    name: str
    config: RunConfig
    mode: Mode

    @property
    def identity(self) -> str:
        """Equal for two cells exactly if they are the same run."""
        return identity(self.config, self.mode)

    @property
    def weight(self) -> int:
        """How many cores its processes keep busy: a replay, K learners and their actors, or one for all."""
        train = self.config.train
        return 1 + train.agents * (train.threads + train.actors) if self.mode == "cluster" else train.threads

    @property
    def steps(self) -> int:
        """Environment steps of all its agents."""
        return self.config.train.agents * self.config.train.steps


@dataclass(frozen=True)
class Matrix:
    """The cells in the order in which they are run, and what to know about them, in sentences."""

    cells: Sequence[RunCell]
    notes: Sequence[str]


@dataclass(frozen=True)
class _Resolved:
    shown: Settings
    ignored: bool
    config: RunConfig


def identity(config: RunConfig, mode: str) -> str:
    """A hash of everything that decides a run; where its buffer is kept and how it is read do not."""
    settings = config.model_dump(mode="json", exclude={"replay": {"storage", "in_place"}})
    text = json.dumps([mode, settings], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def cells_of(file: ExperimentFile) -> Matrix:
    """Every cell of an experiment, resolved and checked; refuses the first that cannot be, by its name.

    Combinations that lead to the same configuration are one cell, named after the first of them. What a
    cell's method does not read (`dps`, `dpd`, and the number of agents where the method fixes it) is left out
    of it, so that cells that differ in nothing else are the same.
    """
    combinations = _combinations(file)
    if not combinations:
        raise ConfigError("[[exclude]] leaves no cell")
    varying = _varying(combinations)
    found: dict[str, _Resolved] = {}
    for combination in combinations:
        try:
            resolved = _resolve({**file.common, **combination}, file.mode)
        except DaseError as error:
            raise type(error)(f"cell {_name(combination, varying)}: {error}") from None
        found.setdefault(identity(resolved.config, file.mode), resolved)
    names = _unique({key: _name(each.shown, varying) for key, each in found.items()})
    cells = [RunCell(names[key], each.config, file.mode) for key, each in found.items()]
    return Matrix(cells, _notes(len(combinations), list(found.values())))


def _combinations(file: ExperimentFile) -> list[Settings]:
    """What each cell sets beyond the common settings; variants vary fastest, then the last axis."""
    crossed = itertools.product(*file.axes.values(), file.variants or [{}])
    combinations: list[Settings] = []
    if file.axes or file.variants:
        combinations = [
            {**dict(zip(file.axes, values, strict=True)), **variant} for *values, variant in crossed
        ]
    kept = [each for each in combinations if not any(out.items() <= each.items() for out in file.exclude)]
    return [*kept, *file.include]


def _resolve(settings: Settings, mode: Mode) -> _Resolved:
    method = _layered(_read_by(None, settings)).method
    shown = _read_by(method, settings)
    config = _layered(shown)
    if unread := {key: value for key, value in settings.items() if key not in shown}:
        _check_unread(unread)
    if mode == "cluster" and config.metrics.port:
        raise ConfigError(
            f"metrics.port = {config.metrics.port} would be the port of several runs at once; leave it out"
        )
    if config.eval.by == "evaluator":
        raise ConfigError("eval.by = evaluator needs a node that an experiment does not start; leave it out")
    return _Resolved(shown, len(shown) < len(settings), with_resolved_id(config))


def _check_unread(unread: Settings) -> None:
    """Checks what a cell does not read: it means nothing there, and yet a wrong value is a mistake."""
    of_dpd = {key: value for key, value in unread.items() if key.startswith("dpd.")}
    _layered({key: value for key, value in unread.items() if key not in of_dpd})
    _layered({**of_dpd, METHOD: "dpd"})


def _read_by(method: str | None, settings: Settings) -> Settings:
    """The settings that a method reads; None is what all do. Some fix the number of agents."""
    unread = [f"{section}." for section, reader in _READ_BY_ONE.items() if reader != method]
    unread += ["train.agents"] if str(settings.get(METHOD)) in AGENTS_OF else []
    return {key: value for key, value in settings.items() if not key.startswith(tuple(unread))}


def _layered(settings: Settings) -> RunConfig:
    flags = {key: value for key, value in settings.items() if key not in (METHOD, PRESET)}
    texts = {key: settings.get(key) for key in (METHOD, PRESET, ALGORITHM)}
    for key, value in texts.items():
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"{key} = {value!r} must be a text")
    return layered(preset_name=texts[PRESET], file=None, flags=flags, assignments=[], method=texts[METHOD])


_REPEATED: Final = (
    "has the configuration of another and is run once",
    "have the configuration of another and are run once",
)


def _notes(combinations: int, cells: Sequence[_Resolved]) -> list[str]:
    notes = []
    if any(each.ignored for each in cells):
        notes.append("settings of dps, dpd and agents are left out of cells whose method does not read them")
    if folded := combinations - len(cells):
        notes.append(
            f"{combinations} combinations are {several(len(cells), 'cell')}: {several(folded, *_REPEATED)}"
        )
    return notes


# -- names --------------------------------------------------------------------------------------------


def _varying(combinations: Sequence[Settings]) -> list[str]:
    """The settings that are not the same in all combinations, in order."""
    keys = dict.fromkeys(key for each in combinations for key in each)
    return [key for key in keys if len({json.dumps(each.get(key), default=str) for each in combinations}) > 1]


def _name(settings: Settings, varying: Sequence[str]) -> str:
    short = Counter(key.rpartition(".")[2] for key in varying)
    parts = []
    for key in filter(settings.__contains__, varying):
        value, last = _text(settings[key]) or "none", key.rpartition(".")[2]
        label = last if short[last] == 1 else key.replace(".", "-")
        parts.append(value if key in _SAID_BY_VALUE else f"{label}-{value}")
    name = re.sub(r"[^\w.+-]+", "-", "_".join(parts).replace(",", "+"), flags=re.ASCII)
    return name.lstrip(".-")[:NAME_LENGTH] or "run"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "-".join(f"{key}-{_text(part)}" for key, part in value.items())
    return "x".join(map(_text, value)) if isinstance(value, list) else str(value)


def _unique(names: Mapping[str, str]) -> dict[str, str]:
    """The names by identity, with the beginning of that where several cells would have the same name."""
    count = Counter(name.casefold() for name in names.values())
    return {
        key: name if count[name.casefold()] == 1 else f"{name}-{key[:DIGEST_LENGTH]}"
        for key, name in names.items()
    }
