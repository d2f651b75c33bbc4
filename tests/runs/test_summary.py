"""What a run's files say about how far it came."""

from pathlib import Path

import pytest

from dase_grpc.config.resolve import resolve
from dase_grpc.progress import duration
from dase_grpc.runs.curves import AgentFiles, status
from dase_grpc.runs.directory import AgentDirectory, RunDirectory

SETTINGS = {"train": {"agents": 2, "steps": 5_000, "checkpoint_every": 1_000}}


def make_run(root: Path, mode: str = "cluster") -> RunDirectory:
    return RunDirectory.create(root, mode, resolve(SETTINGS), mode=mode)


def write(agent: AgentDirectory, step: int, *, checkpoint: int | None) -> None:
    """The last files of an agent after `step` steps."""
    agent.metrics.append({"step": step, "wall_seconds": step / 10})
    if checkpoint is not None:
        (agent.checkpoints / f"step-{checkpoint:09d}").mkdir(parents=True)


def said(run: RunDirectory) -> str:
    return status(run, {agent.agent_id: AgentFiles.read(agent) for agent in run.agents()})


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ((5_000, 5_000), (5_000, 5_000), "finished"),
        ((5_000, 5_000), (4_321, 4_321), "stopped at step 4,321 of 5,000"),
        ((0, 0), (0, 0), "stopped at step 0 of 5,000"),
        ((5_000, 5_000), (4_321, 4_000), "running or failed at step 4,321 of 5,000"),
        ((5_000, 5_000), (4_000, 4_000), "running or failed at step 4,000 of 5,000"),
        ((5_000, 5_000), (400, None), "running or failed at step 400 of 5,000"),
    ],
)
def test_the_status_follows_from_the_steps_and_the_last_checkpoint(
    tmp_path: Path, first: tuple[int, int], second: tuple[int, int | None], expected: str
) -> None:
    run = make_run(tmp_path)
    for agent, (step, checkpoint) in enumerate((first, second)):
        write(run.agent(agent), step, checkpoint=checkpoint)
    assert said(run) == expected


def test_an_agent_that_has_written_nothing_counts_as_running_unless_nodes_run_alone(tmp_path: Path) -> None:
    for mode, expected in (("cluster", "running or failed at step 0 of 5,000"), ("node", "finished")):
        run = make_run(tmp_path, mode)
        assert said(run) == "running or failed at step 0 of 5,000"
        write(run.agent(1), 5_000, checkpoint=5_000)
        assert said(run) == expected


def test_a_folder_of_an_evaluator_has_finished_with_the_evaluation_of_the_last_step(tmp_path: Path) -> None:
    run = make_run(tmp_path, "evaluator")
    for step, expected in ((4_000, "running or failed at step 4,000 of 5,000"), (5_000, "finished")):
        run.agent(1).evaluations.append(
            step=step, return_mean=0.0, return_std=0.0, episodes=1, wall_seconds=1.0
        )
        assert said(run) == expected


def test_the_duration_is_the_largest_time_of_any_file(tmp_path: Path) -> None:
    agent = make_run(tmp_path).agent(0)
    assert AgentFiles.read(agent).seconds == 0
    agent.evaluations.append(step=0, return_mean=0, return_std=0, episodes=1, wall_seconds=130)
    assert AgentFiles.read(agent).seconds == 130
    write(agent, 2_000, checkpoint=None)
    assert AgentFiles.read(agent).seconds == 200
    assert [duration(seconds) for seconds in (5, 130, 7_260)] == ["5 s", "2 min 10 s", "2 h 1 min"]
