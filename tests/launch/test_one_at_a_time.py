"""A run is trained, or gone on with, by one process at a time; others may look at it meanwhile."""

from contextlib import closing

import pytest
from contracts.sentences import assert_one_sentence
from rich.console import Console
from small import new_run, small_config

from dase_grpc.errors import RunDirectoryError
from dase_grpc.launch import resume, train
from dase_grpc.launch.checks import verify_here
from dase_grpc.launch.resume import ResumeOptions, resume_here
from dase_grpc.launch.train import TrainOptions, train_here
from dase_grpc.runs.directory import RUN_FILE, RunDirectory
from dase_grpc.runs.files import FolderLock
from dase_grpc.runs.reports.report import write_report


def require_taken(path):
    with pytest.raises(RunDirectoryError, match="another process is still writing to"):
        FolderLock.acquire(path)


@pytest.mark.parametrize("mode", ["lockstep", "cluster"])
def test_who_goes_on_with_a_run_that_another_works_on_is_refused_and_changes_nothing(tmp_path, mode):
    run = RunDirectory.create(tmp_path, "run", small_config(), mode=mode)
    before = (run.path / RUN_FILE).read_bytes()
    with closing(FolderLock.acquire(run.path)), pytest.raises(RunDirectoryError) as refusal:
        resume_here(ResumeOptions(run.path, steps=500))
    assert_one_sentence(refusal.value, f"another process is still writing to {run.path}")
    assert refusal.value.exit_code == 2
    assert [path.name for path in run.path.iterdir()] == [RUN_FILE]
    assert (run.path / RUN_FILE).read_bytes() == before


def test_to_go_on_with_what_is_no_run_makes_no_folder(tmp_path):
    with pytest.raises(RunDirectoryError, match="is not a run"):
        resume_here(ResumeOptions(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_run_is_its_own_while_it_is_trained_and_may_be_looked_at(tmp_path, monkeypatch, capsys):
    async def look(cluster, **_):
        config, directory = cluster.config, cluster.directory
        require_taken(directory.path)
        with pytest.raises(RunDirectoryError, match="another process is still writing to"):
            resume_here(ResumeOptions(directory.path))
        with pytest.raises(RunDirectoryError, match="exists and is not empty"):
            train_here(TrainOptions(config, tmp_path, name="run"))
        assert verify_here(directory.path, Console()) == 2  # nothing is kept yet
        assert write_report(directory).exists()

    monkeypatch.setattr(train, "run_cluster", look)
    train_here(TrainOptions(small_config(), tmp_path, name="run"))
    FolderLock.acquire(tmp_path / "run").close()
    assert "results:" in capsys.readouterr().out


def test_a_run_is_its_own_from_before_it_is_checked_until_it_has_gone_on(tmp_path, monkeypatch):
    run = new_run(tmp_path, small_config())
    looked = []

    def look(options, directory):
        require_taken(directory.path)
        looked.append(directory)

    monkeypatch.setattr(resume, "_resume", look)
    resume_here(ResumeOptions(run.path))
    FolderLock.acquire(run.path).close()
    assert looked == [RunDirectory.open(run.path)]
