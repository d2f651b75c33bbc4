"""What has become of each cell, told by files alone; and who may write."""

import fcntl
import json
import os
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from contracts.sentences import assert_one_sentence
from launch.experiment_cases import lose_an_agent, lose_the_last_evaluation, small_cells, state, trained
from patience import PATIENCE_S

from dase_grpc.config.presets import layered
from dase_grpc.config.resolve import read_toml, resolve
from dase_grpc.errors import RunDirectoryError
from dase_grpc.launch.experiments import locks
from dase_grpc.launch.experiments.file import parse_experiment
from dase_grpc.launch.experiments.folder import FINISHED_FILE, OWN_FOLDER, ExperimentFolder, Reading, score
from dase_grpc.launch.experiments.matrix import cells_of
from dase_grpc.runs.files import FolderLock


def refusal(folder, cell) -> RunDirectoryError:
    with pytest.raises(RunDirectoryError) as refused:
        folder.states([cell])
    return refused.value


# -- states -------------------------------------------------------------------------------------------


def test_a_cell_waits_until_something_is_there(folder, cell):
    assert state(folder, cell).kind == "waiting"
    folder.run(cell).mkdir()
    assert state(folder, cell).kind == "waiting"


def test_asking_for_states_makes_nothing(tmp_path, cell):
    assert state(ExperimentFolder(tmp_path / "none"), cell).kind == "waiting"
    assert list(tmp_path.iterdir()) == []


def test_a_run_counts_as_finished_only_once_it_is_marked(folder, cell):
    trained(folder.path, cell)
    assert (state(folder, cell).kind, state(folder, cell).text) == ("unfinished", "finished")
    assert folder.finish(cell, seconds=1.5) is None
    assert state(folder, cell).kind == "finished"
    assert json.loads((folder.run(cell) / FINISHED_FILE).read_text())["seconds"] == 1.5


@pytest.mark.parametrize("kept", [False, True])
def test_a_run_that_is_marked_loses_its_buffer_unless_it_is_to_be_kept(folder, cell, kept):
    folder = ExperimentFolder(folder.path, keep_buffers=kept)
    run = trained(folder.path, cell)
    run.replay.mkdir()
    (run.replay / "rows").write_bytes(bytes(9))
    assert folder.finish(cell, seconds=1.0) is None
    assert (run.replay / "rows").exists() == kept
    assert state(folder, cell).kind == "finished"


def lose_all_evaluations(run):
    run.agent(1).evaluations.path.write_text("")


@pytest.mark.parametrize(
    ("step", "lose", "said"),
    [
        (70, None, "ended early, stopped at step 70 of 120"),
        (None, lose_an_agent, "ended early, "),
        (None, lose_the_last_evaluation, "ended early, without an evaluation of agent 1 at its last step"),
        (None, lose_all_evaluations, "ended early, without an evaluation of agent 1 at its last step"),
    ],
)
def test_a_run_that_is_not_complete_is_not_marked_and_keeps_its_buffer(folder, cell, step, lose, said):
    run = trained(folder.path, cell, step=step)
    run.replay.mkdir()
    if lose is not None:
        lose(run)
    assert folder.finish(cell, seconds=1.0).startswith(said)
    assert not (folder.run(cell) / FINISHED_FILE).exists()
    assert run.replay.exists()
    if lose is None:
        assert state(folder, cell).text == "stopped at step 70 of 120"


def test_a_run_of_another_configuration_is_not_marked_and_did_not_end_early(folder, cell):
    other = replace(cell, config=small_cells(seed=[7])[0].config)
    trained(folder.path, other, name=cell.name)
    said = "is a run of another configuration (train.seed is 7 there and 0 here)"
    assert folder.finish(cell, seconds=1.0) == said
    assert not (folder.run(cell) / FINISHED_FILE).exists()


def test_a_finished_run_counts_under_any_name(folder, cell):
    other = small_cells(seed=[0, 1])
    trained(folder.path, cell, name="run")
    assert folder.finish(cell, seconds=1.0) is None
    states = folder.states(other)
    assert [states[each.name].kind for each in other] == ["finished", "waiting"]
    assert states[other[0].name].path == folder.path / "run"


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        ({"settings": {"train.steps": 130}}, "train.steps is 120 there and 130 here"),
        ({"mode": "cluster"}, "its mode is lockstep, and cluster here"),
    ],
)
def test_a_finished_run_of_another_configuration_is_never_taken_for_the_cell(
    folder, cell, changed, difference
):
    trained(folder.path, cell)
    folder.finish(cell, seconds=1.0)
    assert_one_sentence(
        refusal(folder, small_cells(**changed)[0]),
        f"is a finished run of another configuration ({difference}); give the experiment another name",
    )


def note(run):
    with (run.path / "run.toml").open("a") as file:
        file.write("# a note\n")


DAMAGE = {
    "another run file": (note, "run.toml has changed since the run finished; move"),
    "no agent": (lose_an_agent, "is marked as finished and yet is running or failed"),
    "no evaluation": (lose_all_evaluations, "is marked as finished and yet is without an evaluation of"),
    "no last one": (lose_the_last_evaluation, "is marked as finished and yet is without an evaluation of"),
    **{
        f"a mark of {mark[:5]!r}": (
            lambda run, mark=mark: (run.path / FINISHED_FILE).write_text(mark),
            "finished.json is damaged; move",
        )
        for mark in ("[" * 100_000, "[]", "5", "", "{}")
    },
}


@pytest.mark.parametrize(("damage", "said"), DAMAGE.values(), ids=DAMAGE.keys())
def test_a_finished_run_that_is_not_as_it_was_marked_is_told(folder, cell, damage, said):
    run = trained(folder.path, cell)
    folder.finish(cell, seconds=1.0)
    damage(run)
    assert_one_sentence(refusal(folder, cell), said)


def test_a_reason_may_name_a_path_that_is_no_utf8(folder, cell):
    folder.run(cell).parent.joinpath(".experiment").mkdir(exist_ok=True)
    folder.fail(cell, "cannot write " + b"by\xff".decode(errors="surrogateescape"))
    assert folder.states([cell])[cell.name].text == "cannot write by\\udcff"


def test_what_is_no_run_is_not_touched(folder, cell):
    folder.run(cell).mkdir()
    (folder.run(cell) / "mine.txt").touch()
    assert_one_sentence(refusal(folder, cell), "is in the way of a cell and is no run; move it away")


# -- tries --------------------------------------------------------------------------------------------


def test_a_new_try_sets_aside_what_there_was_with_its_log(folder, cell):
    for number in (1, 2):
        trained(folder.path, cell, step=70)
        folder.log(cell).parent.mkdir(exist_ok=True)
        folder.log(cell).write_text(f"try {number}")
        aside = folder.path / OWN_FOLDER / "set-aside" / f"run-{number}"
        assert folder.begin(cell) == f"run starts over; what there was of it is in {aside}"
        assert (aside / "run.toml").is_file()
        assert aside.with_name(f"run-{number}.log").read_text() == f"try {number}"
        assert not folder.run(cell).exists()


@pytest.mark.parametrize(
    "settings",
    [{}, {"agent.tau": 0.1 + 0.2}, {"env.kwargs": {"length": 30, "render_mode": "rgb_array"}}],
    ids=["plain", "a number of many digits", "arguments"],
)
def test_a_first_try_finds_the_whole_configuration(folder, settings):
    (cell,) = small_cells(settings=settings)
    assert folder.begin(cell) is None
    assert resolve(read_toml(folder.config(cell))) == cell.config


def test_a_mixed_ensemble_reaches_its_process_as_it_is(folder):
    (cell,) = cells_of(parse_experiment({"matrix": {"algo": ["td3,sac"], "agents": [3]}}, name="e")).cells
    folder.begin(cell)
    told = layered(file=folder.config(cell))
    assert told == cell.config
    assert told.algorithms == ("td3", "sac")


def test_a_disk_that_refuses_is_told(folder, cell):
    (folder.path / OWN_FOLDER / "configs").touch()
    (folder.path / OWN_FOLDER / "failed").touch()
    for attempt in (lambda: folder.begin(cell), lambda: folder.fail(cell, "it broke")):
        with pytest.raises(RunDirectoryError) as refused:
            attempt()
        assert_one_sentence(refused.value, f"cannot write to {folder.path}: ")


def test_why_a_cell_failed_is_kept_until_it_is_tried_again(folder, cell):
    folder.fail(cell, "exit code 1, the gear is stuck")
    found = state(folder, cell)
    assert (found.kind, found.text) == ("failed", "exit code 1, the gear is stuck")
    (folder.path / OWN_FOLDER / "failed" / f"{cell.name}.txt").write_bytes(b"exit code 1, \xff\n")
    assert state(folder, cell).text == "exit code 1, \ufffd"
    folder.begin(cell)
    assert state(folder, cell).kind == "waiting"


def test_a_run_that_never_finished_is_set_aside_if_it_is_another_or_damaged(folder, cell):
    trained(folder.path, cell, step=70)
    changed = small_cells(settings={"train.steps": 130})[0]
    assert state(folder, changed).kind == "unfinished"
    assert "starts over" in (folder.begin(changed) or "")
    run = trained(folder.path, cell, step=70)
    run.agent(0).evaluations.path.write_text("nonsense\n")
    assert "is damaged" in state(folder, cell).text
    assert folder.begin(cell) is not None


def test_a_run_that_somebody_goes_on_with_by_hand_is_not_set_aside(folder, cell):
    run = trained(folder.path, cell, step=70)
    with closing(FolderLock.acquire(run.path)), pytest.raises(RunDirectoryError) as refused:
        folder.begin(cell)
    assert_one_sentence(refused.value, f"another process is still writing to {run.path}")
    assert run.path.is_dir()
    assert folder.begin(cell) is not None


# -- runs in progress ---------------------------------------------------------------------------------


def test_how_far_a_run_is_is_that_of_its_slowest_agent(folder, cell):
    assert folder.reading(cell) == Reading()
    run = trained(folder.path, cell, step=70)
    assert folder.reading(cell) == Reading(70, -1.5)
    run.agent(0).metrics.append({"step": 90})
    assert folder.reading(cell).step == 70
    run.agent(1).metrics.append({"step": 80})
    assert folder.reading(cell).step == 80
    with run.agent(1).evaluations.path.open("a") as file:
        file.write("100,-0.")  # a line that is being written
    assert folder.reading(cell) == Reading(80, -1.5)
    lose_an_agent(run)
    assert folder.reading(cell) == Reading(0, -1.0)  # one has not begun


def test_a_score_is_the_mean_of_all_agents_last_evaluations(folder, cell):
    assert score(trained(folder.path, cell).path) == pytest.approx((-5.5 + -6.0) / 2)


# -- the lock -----------------------------------------------------------------------------------------


def test_a_second_experiment_is_kept_out(folder):
    with folder.locks.all_cells(print):
        with (
            pytest.raises(RunDirectoryError) as refused,
            ExperimentFolder(folder.path).locks.all_cells(print),
        ):
            pass
        assert_one_sentence(refused.value, "another dase experiment runs in")
    with folder.locks.all_cells(print):
        pass


HOLDS = "import sys; print('held', flush=True); sys.stdin.read()"


@pytest.fixture
def orphan(folder):
    """A process that keeps the children's lock, as one does whose parent was killed."""
    folder_lock = os.open(folder.path / OWN_FOLDER / "cells.lock", os.O_CREAT | os.O_WRONLY)
    fcntl.flock(folder_lock, fcntl.LOCK_EX)
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", HOLDS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=[folder_lock],
    )
    os.close(folder_lock)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.communicate()


def test_the_next_experiment_waits_for_the_children_of_a_killed_one(folder, orphan):
    said = []

    def say(text):
        said.append(text)
        orphan.stdin.close()  # now it ends
        orphan.stdin = None

    with folder.locks.all_cells(say):
        assert orphan.wait(PATIENCE_S) == 0
    assert said == ["waiting for the processes of an experiment that was killed here"]


def test_children_that_do_not_end_are_told(folder, orphan, monkeypatch):
    monkeypatch.setattr(locks, "ORPHANS_S", 0.2)
    with pytest.raises(RunDirectoryError) as refused, folder.locks.all_cells(lambda _: None):
        pass
    assert_one_sentence(refused.value, "still write to", "after 0.2 s; end them")


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(RunDirectoryError) as refused,
        ExperimentFolder(tmp_path / "file").locks.all_cells(print),
    ):
        pass
    assert_one_sentence(refused.value, "cannot write to")


def test_what_cannot_be_read_is_told(folder, cell, monkeypatch):
    run = trained(folder.path, cell)
    folder.finish(cell, seconds=1.0)
    read_bytes = Path.read_bytes

    def refuse(path):
        if path == run.path / "run.toml":
            raise PermissionError(13, "Permission denied", str(path))
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert_one_sentence(refusal(folder, cell), "cannot read", "Permission denied")
