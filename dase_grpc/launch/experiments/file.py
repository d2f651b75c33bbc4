"""An experiment's TOML file: read, checked, and every setting under its one name."""

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, get_args

from dase_grpc.config.presets import ALGORITHM
from dase_grpc.config.resolve import dotted, setting_names, unknown_setting
from dase_grpc.config.texts import PLAIN_FOLDER, names_a_folder, toml_file
from dase_grpc.errors import ConfigError
from dase_grpc.launch.experiments.sites import KubernetesSite, Mode, SlurmSite, read_site

MODES: Final[tuple[str, ...]] = get_args(Mode)

METHOD, PRESET, SEED = "method", "preset", "train.seed"
SHORT: Final[Mapping[str, str]] = {
    "algo": ALGORITHM,
    "method": METHOD,
    "preset": PRESET,
    "env": "env.id",
    "agents": "train.agents",
    "steps": "train.steps",
    "seed": SEED,
}
"""What may stand for a setting, as the flags of `dase train` do; method and preset choose several."""

SEEDS: Final = "seeds"
MAX_CELLS: Final = 10_000
"""Combinations of a matrix; each is resolved before anything starts."""
_SITES: Final = ("slurm", "kubernetes")
_KEYS: Final = ("name", "mode", "keep_buffers", "set", "matrix", "variant", "exclude", "include", *_SITES)

Settings = Mapping[str, Any]
"""Values by `section.key`, or by `method` and `preset`."""


@dataclass(frozen=True)
class ExperimentFile:
    """What the file says: common settings, axes in its order, combinations left out, further single cells.

    Each of `variants` is crossed with the axes, and may set what the common settings do. Where cells run
    decides nothing about them.
    """

    name: str
    mode: Mode
    common: Settings
    axes: Mapping[str, Sequence[Any]]
    exclude: Sequence[Settings]
    include: Sequence[Settings]
    variants: Sequence[Settings] = ()
    keep_buffers: bool = False
    slurm: SlurmSite = field(default_factory=SlurmSite)
    kubernetes: KubernetesSite | None = None


def read_experiment(path: Path) -> ExperimentFile:
    """Reads an experiment's file; without a name it has the file's."""
    try:
        tables = toml_file(path)
    except OSError as error:
        raise ConfigError(f"cannot read the experiment {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    try:
        return parse_experiment(tables, name=path.stem)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def parse_experiment(tables: Mapping[str, Any], *, name: str) -> ExperimentFile:
    """The experiment in a file's tables; `name` is for one that has none."""
    for key in tables:
        if key not in _KEYS:
            guess = difflib.get_close_matches(key, _KEYS, n=1)
            hint = f"did you mean {guess[0]}?" if guess else f"there are {', '.join(_KEYS)}"
            raise ConfigError(f"unknown key {key}; {hint}")
    name = tables.get("name", name)
    if not isinstance(name, str) or not names_a_folder(name):
        raise ConfigError(f"name = {name!r} cannot name an experiment; {PLAIN_FOLDER}")
    mode = tables.get("mode", "lockstep")
    if mode not in MODES:
        raise ConfigError(f"mode = {mode!r} is neither lockstep nor cluster")
    keep_buffers = tables.get("keep_buffers", False)
    if not isinstance(keep_buffers, bool):
        raise ConfigError(f"keep_buffers = {keep_buffers!r} is neither true nor false")
    common = _settings("set", tables.get("set", {}))
    axes = _axes(tables.get("matrix", {}))
    for key in axes:
        if key in common:
            raise ConfigError(f"{key} is in [set] and in [matrix]; leave it out of one of them")
    variants, exclude, include = (
        _list(key, tables.get(key, [])) for key in ("variant", "exclude", "include")
    )
    for key in axes:
        if any(key in variant for variant in variants):
            raise ConfigError(f"{key} is in [matrix] and in a [[variant]]; leave it out of one of them")
    for combination in exclude:
        _require_values_of_axes(combination, axes, variants)
    _require_size(axes, len(variants))
    if not axes and not variants and not include:
        raise ConfigError("there are no cells: give a [matrix] of lists, or an [[include]] for each cell")
    slurm = read_site(SlurmSite, "slurm", tables.get("slurm", {}), mode=mode)
    kubernetes = None
    if "kubernetes" in tables:
        kubernetes = read_site(KubernetesSite, "kubernetes", tables["kubernetes"], mode=mode)
    return ExperimentFile(
        name, mode, common, axes, exclude, include, variants, keep_buffers, slurm=slurm, kubernetes=kubernetes
    )


def _axes(table: Any) -> dict[str, Sequence[Any]]:
    if isinstance(table, Mapping) and SEEDS in table:
        count = table[SEEDS]
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ConfigError(f"matrix.seeds = {count!r} must be how many seeds there are, such as 5")
        if count > MAX_CELLS:
            raise ConfigError(f"matrix.seeds = {count} is more than the {MAX_CELLS:,} cells of an experiment")
        if "seed" in table:
            raise ConfigError("[matrix] has seed and seeds; leave one of them out")
        table = {("seed" if key == SEEDS else key): value for key, value in table.items()}
        table["seed"] = list(range(count))
    axes = _settings("matrix", table)
    for key, values in axes.items():
        if not isinstance(values, list):
            raise ConfigError(
                f"matrix.{key} = {values!r} must be a list of values; one value goes into [set]"
            )
        if not values:
            raise ConfigError(f"matrix.{key} is an empty list, so there would be no cells; give it a value")
    return axes


def _settings(table_name: str, table: Any) -> dict[str, Any]:
    """A table's settings by their one name each, whether it is nested or has dotted keys."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"{table_name} = {table!r} must be a table of settings")
    known = setting_names()
    found: dict[str, Any] = {}

    for given, value in dotted(table, known):
        name = SHORT.get(given, given)
        if name not in known and name not in (METHOD, PRESET):
            raise ConfigError(f"[{table_name}]: {unknown_setting(given, value, [*SHORT, *known])}")
        if name in found:
            raise ConfigError(f"[{table_name}] sets {name} twice; leave one of them out")
        found[name] = value
    return found


def _require_size(axes: Mapping[str, Sequence[Any]], variants: int) -> None:
    """Lists multiply, so a few long ones are more than any machine can train, or even write down."""
    counts = [*map(len, axes.values()), *([variants] if variants else [])]
    if math.prod(counts) > MAX_CELLS:
        lengths = " x ".join(map(str, counts))
        raise ConfigError(
            f"[matrix] has {lengths} combinations, more than {MAX_CELLS:,}; shorten its lists, or write "
            f"several files"
        )


def _list(name: str, tables: Any) -> list[Settings]:
    if not isinstance(tables, list):
        raise ConfigError(f"{name} must be a list of tables, each written as [[{name}]]")
    return [_settings(name, each) for each in tables]


def _require_values_of_axes(
    combination: Settings, axes: Mapping[str, Sequence[Any]], variants: Sequence[Settings]
) -> None:
    """An exclusion that cannot match anything is a slip of the pen."""
    if not combination:
        raise ConfigError("[[exclude]] names no setting, so it would leave out everything")
    for key, value in combination.items():
        values = [*axes.get(key, ()), *(variant[key] for variant in variants if key in variant)]
        if not values:
            raise ConfigError(f"[[exclude]] names {key}, which is not in [matrix]")
        if value not in values:
            raise ConfigError(f"[[exclude]] names {key} = {value!r}, which is not in [matrix]")
