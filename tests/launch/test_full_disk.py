"""A run whose disk is full: one sentence, an exit code that says so, and it goes on once there is room."""

import os
from pathlib import Path

import pytest
from contracts.sentences import assert_one_sentence
from launch.resuming import assert_equal, config, files, resume, train, train_killed_after
from small import small_config

from dase_grpc.errors import DISK_FULL_CODE, ConfigError, DiskFullError
from dase_grpc.launch import resume as resuming
from dase_grpc.launch.lockstep import LockstepRun
from dase_grpc.launch.train import TrainOptions, train_here
from dase_grpc.runs.directory import RUN_FILE, RunDirectory


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> RunDirectory:
    return train(tmp_path_factory.mktemp("straight"), config())


def fill(disk: Path) -> None:
    """Takes all room."""
    with (disk / "other").open("wb", buffering=0) as other:
        try:
            while other.write(bytes(2**20)):
                pass
        except OSError:
            return


def free(disk: Path) -> None:
    (disk / "other").unlink()


def everything(folder: Path) -> dict[str, dict[str, bytes]]:
    return {str(path.relative_to(folder)): files(path) for path in folder.rglob("*") if path.is_dir()}


def test_a_buffer_that_does_not_fit_is_refused_before_anything_is_made(small_disk):
    with pytest.raises(ConfigError, match=r"the buffer takes .* MiB of disk in .* are free") as refusal:
        train_here(TrainOptions(small_config(replay__capacity=10**6), small_disk))
    assert_one_sentence(refusal.value)
    assert list(small_disk.iterdir()) == []


@pytest.mark.parametrize(
    ("step", "told"),
    [(59, "cannot write the checkpoint"), (79, "metrics.jsonl: No space left on device")],
    ids=["checkpoint", "metrics"],
)
def test_a_run_that_fills_the_disk_up_ends_with_one_sentence_and_goes_on_to_the_same_end(
    small_disk, straight, step, told
):
    def on_round(run: LockstepRun) -> None:
        if run.learners[0].steps == step:
            fill(small_disk)

    with pytest.raises(DiskFullError) as refusal:
        train(small_disk, config(), on_round=on_round)
    assert_one_sentence(refusal.value, told, "No space left on device; free space")
    assert refusal.value.exit_code == DISK_FULL_CODE
    free(small_disk)
    assert_equal(straight, resume(RunDirectory.open(small_disk / "run")))


def test_a_full_disk_lets_no_run_be_resumed_loses_nothing_and_is_no_refusal_of_the_run(small_disk, straight):
    killed = train_killed_after(small_disk, config(), 75)
    before, settings = everything(killed.path / "agents"), (killed.path / RUN_FILE).read_bytes()
    fill(small_disk)
    with pytest.raises(DiskFullError) as refusal:
        resume(killed)
    assert_one_sentence(refusal.value, "nothing is lost: No space left on device; free space")
    assert (killed.path / RUN_FILE).read_bytes() == settings
    after = everything(killed.path / "agents")
    assert {name: after[name] for name in before} == before
    free(small_disk)
    assert_equal(straight, resume(killed))


def test_a_disk_that_fills_up_while_the_second_agent_is_rewound_loses_nothing(
    small_disk, straight, monkeypatch
):
    killed, rewind, rewound = train_killed_after(small_disk, config(), 75), resuming.rewind, []

    def then_full(agent, checkpoint):
        rewound.append(rewind(agent, checkpoint))
        if len(rewound) == 1:
            fill(small_disk)
        return rewound[-1]

    monkeypatch.setattr(resuming, "rewind", then_full)
    with pytest.raises(DiskFullError):
        resume(killed)
    free(small_disk)
    assert_equal(straight, resume(killed))
    assert os.listdir(killed.agent(0).path / "before-resume-1")  # what the first attempt had put aside
