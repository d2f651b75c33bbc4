"""Run folders with made-up evaluations, for what reads runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w

from dase_grpc.config.resolve import resolve
from dase_grpc.runs.directory import RUN_FILE
from dase_grpc.runs.logs import COLUMNS

Curve = Sequence[float]


def write_run(
    root: Path,
    name: str,
    *agents: Curve,
    every: int = 1_000,
    settings: dict[str, Any] | None = None,
    versions: dict[str, str] | None = None,
    **train: Any,
) -> Path:
    """A run whose agents had these returns, one each `every` steps from step 0 on; it ends with the longest.

    TD3 in HalfCheetah-v5 with a buffer of 100,000 unless `settings` say otherwise; `train` are settings of
    the section of this name.
    """
    base = {
        "env": {"id": "HalfCheetah-v5"},
        "train": {"agents": len(agents), "steps": max(1, every * (max(map(len, agents)) - 1)), **train},
        "replay": {"capacity": 100_000},
        "eval": {"every": every},
    }
    config = resolve(base, settings or {}).model_dump(mode="json")
    run = root / name
    run.mkdir(parents=True)
    tables = {**config, "run": {"name": name, "mode": "test"}, "versions": versions or {}}
    (run / RUN_FILE).write_text(tomli_w.dumps(tables), encoding="utf-8")
    for agent, curve in enumerate(agents):
        write_curve(run, agent, curve, every=every)
    return run


def write_curve(run: Path, agent: int, curve: Curve, *, every: int = 1_000) -> None:
    """One agent's evaluations."""
    rows = [f"{index * every},{float(value)!r},0.0,10,{index}.0" for index, value in enumerate(curve)]
    folder = run / "agents" / str(agent)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "evaluations.csv").write_text("\n".join([",".join(COLUMNS), *rows, ""]), encoding="utf-8")


def flat(value: float, count: int = 101) -> list[float]:
    """The same return at each evaluation."""
    return [value] * count
