"""A run whose disk is full: one sentence, an exit code that says so, and it goes on once there is room."""

import os
from collections import deque
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
from dase_grpc.runs.logs import MetricsLog, read_metrics


@pytest.fixture(autouse=True)
def no_report(monkeypatch):
    monkeypatch.setattr("dase_grpc.runs.reports.report.write_report", lambda run: run.report)


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


@pytest.mark.slow
def test_a_run_that_fills_the_disk_up_ends_with_one_sentence_and_goes_on_to_the_same_end(
    small_disk, straight
):
    def on_round(run: LockstepRun) -> None:
        if run.learners[0].steps == 59:
            fill(small_disk)

    with pytest.raises(DiskFullError) as refusal:
        train(small_disk, config(), on_round=on_round)
    assert_one_sentence(refusal.value, "cannot write the checkpoint", "No space left on device; free space")
    assert refusal.value.exit_code == DISK_FULL_CODE
    free(small_disk)
    assert_equal(straight, resume(RunDirectory.open(small_disk / "run")))


def test_a_line_that_found_no_room_is_said_and_the_next_follows_the_last_whole_one(small_disk):
    log = MetricsLog(small_disk / "metrics.jsonl")
    log.append({"step": 0})
    fill(small_disk)
    with pytest.raises(DiskFullError) as refusal:  # a page has room for some more
        deque(map(log.append, ({"step": step} for step in range(1, 1_000))), maxlen=0)
    assert_one_sentence(refusal.value, "metrics.jsonl: No space left on device; free space")
    kept = len(read_metrics(log.path))
    free(small_disk)
    log.append({"step": kept})
    assert [each["step"] for each in read_metrics(log.path)] == [*range(kept + 1)]


@pytest.mark.slow
def test_a_full_disk_lets_no_run_be_resumed_loses_nothing_and_is_no_refusal_of_the_run(small_disk, straight):
    killed = train_killed_after(small_disk, config(), 85)
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


@pytest.mark.slow
def test_a_disk_that_fills_up_while_the_second_agent_is_rewound_loses_nothing(
    small_disk, straight, monkeypatch
):
    killed, rewind, rewound = train_killed_after(small_disk, config(), 85), resuming.rewind, []

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
