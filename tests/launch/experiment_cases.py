"""Small experiments, and runs that look as if a cell had been trained."""

from pathlib import Path
from typing import Any

import torch
from small import SETTINGS

from dase_grpc.launch.experiments.file import parse_experiment
from dase_grpc.launch.experiments.folder import ExperimentFolder, State
from dase_grpc.launch.experiments.matrix import RunCell, cells_of
from dase_grpc.runs.checkpoint import save_checkpoint
from dase_grpc.runs.directory import RunDirectory


def small_cells(
    *, mode: str = "lockstep", settings: dict[str, Any] | None = None, **axes: Any
) -> list[RunCell]:
    """The cells of a small experiment; an axis is given as `section__key=values`."""
    values = {f"{section}.{key}": value for section, keys in SETTINGS.items() for key, value in keys.items()}
    values |= settings or {}
    matrix = {key.replace("__", "."): value for key, value in axes.items()} or {"seed": [0]}
    common = {key: value for key, value in values.items() if key not in matrix}
    return list(cells_of(parse_experiment({"mode": mode, "set": common, "matrix": matrix}, name="e")).cells)


def trained(root: Path, cell: RunCell, *, step: int | None = None, name: str | None = None) -> RunDirectory:
    """The run that training a cell until `step`, or to its end, leaves; its folder may have another name."""
    run = RunDirectory.create(root, name or cell.name, cell.config, mode=cell.mode)
    step = cell.config.train.steps if step is None else step
    for agent_id in range(cell.config.train.agents):
        agent = run.agent(agent_id)
        for each, mean in ((0, -10.0), (step, -1.0 - agent_id)):
            agent.evaluations.append(
                step=each, return_mean=mean, return_std=0.0, episodes=2, wall_seconds=1.0
            )
        agent.metrics.append({"step": step})
        save_checkpoint(agent.checkpoints, step=step, tensors={"a": torch.zeros(1)}, metadata={})
    return run


def state(folder: ExperimentFolder, cell: RunCell) -> State:
    return folder.states([cell])[cell.name]


def lose_an_agent(run: RunDirectory) -> None:
    run.agent(1).path.rename(run.path / "elsewhere")


def lose_the_last_evaluation(run: RunDirectory) -> None:
    run.agent(1).evaluations.path.write_text("step,return_mean,return_std,episodes,wall_seconds\n0,1,0,2,1\n")
