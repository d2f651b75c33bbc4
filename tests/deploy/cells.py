"""An experiment that takes a cluster a minute, and what is left of it to compare."""

import re
from pathlib import Path
from typing import Any

NAME = "cells"
"""The experiment's."""


def cells_file(count: int, *, long: int, **sites: dict[str, Any]) -> dict[str, Any]:
    """The experiment's file: `count` cells, the first one of `long` steps, and tables of sites."""
    common = {
        "env.id": "Pendulum-v1",
        "method": "dase",
        "agents": 2,
        "agent.hidden": [16],
        "agent.batch_size": 16,
        "agent.start_steps": 50,
        "train.log_every": 50,
        "train.checkpoint_every": 100,
        "replay.capacity": 2_000,
        "replay.min_size": 50,
        "eval.every": 150,
        "eval.episodes": 1,
    }
    cells = [{"steps": 300 if seed else long, "seed": seed} for seed in range(count)]
    return {"name": NAME, "set": common, "include": cells, **sites}


def table(said: str) -> list[str]:
    """The table of results in what `dase experiment` says, but for the times."""
    return re.findall(r"^(\S+ +finished +\S+)  \S.*$", said, re.MULTILINE)


def curves(folder: Path) -> dict[str, list[str]]:
    """All evaluations of all cells in an experiment's folder, but for the times."""
    return {
        str(file.relative_to(folder)): [line.rpartition(",")[0] for line in file.read_text().split()]
        for file in folder.glob("*/agents/*/evaluations.csv")
    }
