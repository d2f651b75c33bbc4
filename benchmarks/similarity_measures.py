"""What the similarity gate and the similarity study share: names of measures, results, intervals."""

import csv
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from scipy import stats

from dase_grpc.config.algorithms import DpsConfig
from dase_grpc.config.resolve import parse_assignments, resolve

CellT = TypeVar("CellT")
ResultT = TypeVar("ResultT")

SMALL_AGENT: Final[Mapping[str, Any]] = {
    "hidden": [64, 64],
    "batch_size": 64,
    "actor_lr": 1e-3,
    "critic_lr": 1e-3,
    "start_steps": 1_000,
}
OWN_SHARE: Final = "own_share"
NAMED: Final[Mapping[str, Mapping[str, Any]]] = {
    "isolated": {"divergence": "isolated"},
    "jeffreys": {},
    "none": {"divergence": "none"},
    "transition": {"scope": "transition"},
    "floor+normalise": {"floor": True, "normalise": True},
    "js": {"divergence": "js"},
    "normalise": {"normalise": True},
    "floor": {"floor": True},
    "transition+normalise": {"scope": "transition", "normalise": True},
    "shrinkage": {"shrinkage": 0.5},
    "kl": {"divergence": "kl"},
    "debias": {"debias": True},
    "agent": {"scope": "agent"},
    "agent+floor+normalise": {"scope": "agent", "floor": True, "normalise": True},
    "memory": {"memory": 10.0},
    "agent+memory": {"scope": "agent", "memory": 10.0},
    "relative": {"measure": "relative"},
    "relative+normalise": {"measure": "relative", "normalise": True},
    "relative_rows": {"measure": "relative_rows"},
    "advantage": {"measure": "advantage"},
    "own_share": {OWN_SHARE: 0.5},
    "none+own_share": {"divergence": "none", OWN_SHARE: 0.5},
    "normalise+own_share": {"normalise": True, OWN_SHARE: 0.5},
}
"""Measures that have a name, the `dps` settings of each; what is not said is the default."""


def label(settings: Mapping[str, Any]) -> str:
    """What tells a measure from others, as JSON: `dps` settings that are no default, and an own share."""
    share = {key: value for key, value in settings.items() if key == OWN_SHARE}
    chosen = resolve({"dps": _without_share(settings)}).dps.model_dump()
    default = DpsConfig().model_dump()
    changed = {key: value for key, value in chosen.items() if value != default[key]}
    return json.dumps({"divergence": chosen["divergence"], **changed, **share})


def settings_of(measure: str) -> dict[str, dict[str, Any]]:
    """The sections that a label stands for."""
    told = json.loads(measure)
    return {"dps": _without_share(told), "replay": {key: told[key] for key in told if key == OWN_SHARE}}


def _without_share(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key != OWN_SHARE}


def short(measure: str) -> str:
    """A measure's name where it has one, its settings otherwise."""
    return next((name for name, settings in NAMED.items() if label(settings) == measure), measure)


def chosen(names: Sequence[str], assignments: Sequence[str]) -> list[str]:
    """One measure for each name, with the `dps.KEY=VALUE` assignments on top of it.

    Raises:
        ConfigError: an assignment that is no setting of `dps`.
    """
    extra = parse_assignments(list(assignments))
    resolve(extra)
    wanted = [NAMED[name] for name in names] or [{}]
    return list(dict.fromkeys(label({**each, **extra.get("dps", {})}) for each in wanted))


# --- results ----------------------------------------------------------------------------------------------


def read_rows(path: Path) -> list[dict[str, str]]:
    """The lines of a CSV file; none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def append_row(path: Path, row: Mapping[str, object]) -> None:
    """Adds a line, with the names of its columns before the first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(row))
        if fresh:
            writer.writeheader()
        writer.writerow(row)


def run_missing(
    cells: Iterable[CellT],
    done: dict[CellT, ResultT],
    *,
    play: Callable[[CellT], ResultT],
    note: Callable[[CellT, ResultT], None],
    jobs: int,
) -> dict[CellT, ResultT]:
    """Plays the cells that are not done over `jobs` processes, in order, and notes each; returns all."""
    done = dict(done)
    missing = [cell for cell in dict.fromkeys(cells) if cell not in done]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(play, cell): cell for cell in missing}
        for future in as_completed(running):
            cell = running[future]
            done[cell] = future.result()
            note(cell, done[cell])
            print(f"{cell}: {done[cell]}", file=sys.stderr, flush=True)
    return done


# --- numbers ----------------------------------------------------------------------------------------------


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % bootstrap interval (BCa) of the mean; None for fewer than 3 values or one not finite."""
    sample = np.sort(np.asarray(values, np.float64))  # the interval does not depend on the runs' order
    if len(sample) < 3 or not np.isfinite(sample).all():
        return None
    if np.ptp(sample) == 0:
        return float(sample[0]), float(sample[0])
    found = stats.bootstrap(
        (sample,), np.mean, confidence_level=0.95, method="BCa", rng=np.random.default_rng(0)
    ).confidence_interval
    return float(found.low), float(found.high)


def with_interval(values: Sequence[float]) -> str:
    """For example "−336 [−520, −150]"; a dash without values."""
    if not len(values):
        return "–"
    mean, bounds = math.fsum(values) / len(values), interval(values)
    text = number(mean)
    return text if bounds is None else f"{text} [{number(bounds[0])}, {number(bounds[1])}]"


def number(value: float) -> str:
    """A whole number with a minus sign."""
    if not math.isfinite(value):
        return str(value).replace("-", "−")
    return f"{round(value):,}".replace("-", "−")  # rounding to an integer leaves no minus zero


def small(value: float) -> str:
    """A share or a weight, which may be far below 1."""
    return f"{value:.2f}" if value >= 0.01 or value == 0 else f"{value:.0e}"
