"""From where a cell goes on, and which run counts as finished though nobody has marked it."""

import shutil
from contextlib import closing
from dataclasses import replace

import pytest
from contracts.sentences import assert_one_sentence
from launch.experiment_cases import lose_an_agent, lose_the_last_evaluation, small_cells, state, trained

from dase_grpc.errors import RunDirectoryError
from dase_grpc.launch.experiments import folder as experiments_folder
from dase_grpc.launch.experiments.folder import ExperimentFolder
from dase_grpc.runs.files import FolderLock

# -- going on ------------------------------------------------------------------------------------------


def begun(folder: ExperimentFolder, cell, *, step: int = 60):
    """A lockstep run that was interrupted after a round."""
    run = trained(folder.path, cell, step=step)
    run.replay.mkdir()
    (run.replay / f"round-{step:09d}.json").touch()
    return run


def test_a_run_that_was_interrupted_after_a_round_can_be_resumed_from_there(tmp_path):
    folder, (cell, roundless, done) = ExperimentFolder(tmp_path), small_cells(seed=[0, 1, 2])
    assert folder.resumable(cell) is None
    begun(folder, cell)
    trained(tmp_path, roundless, step=60)
    begun(folder, done, step=120)
    assert [folder.resumable(each) for each in (cell, roundless, done)] == [60, None, None]
    assert [folder.kept_step(each) for each in (cell, roundless, done)] == [60, 0, 120]


def test_a_run_that_failed_or_is_another_or_of_other_versions_starts_over(tmp_path, monkeypatch):
    folder, (cell,) = ExperimentFolder(tmp_path), small_cells()
    run = begun(folder, cell)
    (other,) = small_cells(seed=[7])
    assert folder.resumable(replace(other, name=cell.name)) is None
    (folder.path / experiments_folder.OWN_FOLDER).mkdir()
    folder.fail(cell, "it broke")
    assert folder.resumable(cell) is None
    folder._failure(cell).unlink()
    assert folder.resumable(cell) == 60
    monkeypatch.setattr(experiments_folder, "versions", lambda: {**run.versions, "numpy": "0.1"})
    assert folder.resumable(cell) is None


def test_a_cluster_is_resumed_where_its_buffer_and_checkpoints_of_all_agents_are_kept(tmp_path):
    folder, (cell,) = ExperimentFolder(tmp_path), small_cells(mode="cluster")
    run = trained(tmp_path, cell, step=60)
    assert folder.resumable(cell) is None
    run.replay.mkdir()
    (run.replay / "buffer.json").touch()
    assert folder.resumable(cell) == 60
    shutil.rmtree(run.agent(1).checkpoints)
    assert folder.resumable(cell) is None


# -- ends that nobody marked ---------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["lockstep", "cluster"])
def test_a_run_at_its_last_step_without_a_mark_is_marked_as_it_is(folder, mode):
    (cell,) = small_cells(mode=mode)
    run = trained(folder.path, cell)
    run.replay.mkdir()
    assert folder.conclude(cell) == 1.0  # as long as it has trained
    assert state(folder, cell).kind == "finished"
    assert (folder.took_s(cell), run.replay.exists()) == (1.0, False)


def other_versions(run):
    file = run.path / "run.toml"
    file.write_text(file.read_text().replace(run.versions["numpy"], "0.1"))


@pytest.mark.parametrize(
    ("step", "lose"),
    [(70, None), (None, lose_an_agent), (None, lose_the_last_evaluation), (None, other_versions)],
)
def test_a_run_that_is_not_complete_or_of_other_versions_is_not_taken_for_a_finished_one(
    folder, cell, step, lose
):
    run = trained(folder.path, cell, step=step)
    if lose is not None:
        lose(run)
    assert folder.conclude(cell) is None
    assert state(folder, cell).kind == "unfinished"


def test_a_run_that_failed_or_is_another_is_not_taken_for_a_finished_one(folder, cell):
    assert folder.conclude(cell) is None
    trained(folder.path, cell)
    for changed in ({"seed": [7]}, {"mode": "cluster"}):
        assert folder.conclude(replace(small_cells(**changed)[0], name=cell.name)) is None
    folder.fail(cell, "it broke")
    assert folder.conclude(cell) is None
    assert state(folder, cell).kind == "failed"


def test_a_run_whose_buffer_is_to_stay_and_is_not_whole_is_not_taken_for_a_finished_one(folder, cell):
    folder = ExperimentFolder(folder.path, keep_buffers=True)
    run = begun(folder, cell, step=120)
    (last,) = run.replay.iterdir()
    last.rename(run.replay / "round-000000060.json")
    assert (folder.conclude(cell), folder.resumable(cell)) == (None, 60)
    (run.replay / "round-000000060.json").rename(last)
    assert folder.conclude(cell) == 1.0
    assert last.exists()


def test_a_run_that_somebody_goes_on_with_by_hand_is_not_marked(folder, cell):
    run = trained(folder.path, cell)
    with closing(FolderLock.acquire(run.path)), pytest.raises(RunDirectoryError) as refused:
        folder.conclude(cell)
    assert_one_sentence(refused.value, f"another process is still writing to {run.path}")
    assert state(folder, cell).kind == "unfinished"
