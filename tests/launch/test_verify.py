"""`dase verify`: what is sound, what is damaged, from where the run can be resumed."""

import shutil

import pytest
from resuming import config, flip, train, train_killed_after
from rich.console import Console

from dase_grpc.errors import RunDirectoryError
from dase_grpc.launch.checks import verify_here
from dase_grpc.launch.evaluate import find_checkpoints
from dase_grpc.runs.checkpoint import latest
from dase_grpc.runs.curves import AgentFiles
from dase_grpc.runs.directory import RUN_FILE, RunDirectory
from dase_grpc.runs.verify import verify


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> RunDirectory:
    return train(tmp_path_factory.mktemp("finished"), config())


@pytest.fixture
def run(finished, tmp_path) -> RunDirectory:
    shutil.copytree(finished.path, tmp_path / "run")
    return RunDirectory.open(tmp_path / "run")


def shown(run, capsys) -> tuple[int, str]:
    code = verify_here(run.path, Console(width=200))
    return code, capsys.readouterr().out


def test_of_a_sound_run_every_file_is_named_and_it_can_be_resumed(run, capsys):
    code, text = shown(run, capsys)
    assert code == 0
    checked = {each.path.relative_to(run.path).as_posix() for each in verify(run.path).findings}
    files = {path.relative_to(run.path).as_posix() for path in run.path.rglob("*") if path.is_file()}
    unchecked = {name for name in files if not any(name.startswith(each) for each in checked)}
    assert {name.split("/")[0] for name in unchecked} <= {"report.html", "agents"}
    assert all("tensorboard" in name for name in unchecked if name.startswith("agents"))
    assert "can be resumed: all agents and the buffer from step 120" in text
    assert "5 evaluations" in text
    assert "150 transitions in 3 files" in text
    assert "damaged" not in text


@pytest.mark.parametrize(
    ("damaged", "step"),
    [
        ("agents/0/checkpoints/step-000000120/state.safetensors", 90),
        ("agents/0/checkpoints/step-000000120/training.safetensors", 90),
        ("agents/1/checkpoints/step-000000090/checkpoint.json", 120),
        ("replay/round-000000120.json", 90),
        ("replay/rows-000000000180-000000000240.npy", 90),
        ("replay/rows-000000000000-000000000060.npy", 120),
    ],
)
def test_what_is_damaged_is_said_and_from_where_the_run_can_be_resumed_then(run, capsys, damaged, step):
    flip(run.path / damaged)
    code, text = shown(run, capsys)
    assert code == 1
    assert any(line.startswith("damaged: ") and str(run.path) in line for line in text.splitlines())
    assert f"can be resumed: all agents and the buffer from step {step}" in text
    assert text.count("is damaged") == 1


@pytest.mark.parametrize("name", ["evaluations.csv", "metrics.jsonl"])
@pytest.mark.parametrize("content", ["garbage", "\x00\x00"])
def test_a_file_of_results_that_is_something_else_is_damaged_although_no_line_of_it_ends(
    run, capsys, name, content
):
    (run.path / "agents/0" / name).write_text(content)
    code, text = shown(run, capsys)
    assert code == 1
    assert f"agents/0/{name} is damaged: it does not begin as it should" in text.replace("\n", " ")


@pytest.mark.parametrize("name", ["evaluations.csv", "metrics.jsonl"])
def test_a_line_that_a_killed_writer_left_is_said_and_no_damage(run, capsys, name):
    path = run.path / "agents/0" / name
    path.write_text(path.read_text() + path.read_text()[:3])
    code, text = shown(run, capsys)
    assert (code, "and one that is not finished" in text) == (0, True)


@pytest.mark.parametrize("what", ["agents/0", "agents/0/evaluations.csv", "agents/0/metrics.jsonl"])
def test_a_file_in_place_of_a_folder_and_the_other_way_round_are_damaged(run, capsys, what):
    path = run.path / what
    if path.is_dir():
        shutil.rmtree(path)
        path.write_text("")
    else:
        path.unlink()
        path.mkdir()
    code, text = shown(run, capsys)
    assert code > 0
    assert f"{what} is damaged: it is no " in text.replace("\n", " ")


def test_where_nothing_is_left_to_resume_from_that_is_said(run, capsys):
    flip(run.replay / "rows-000000000120-000000000180.npy")
    code, text = shown(run, capsys)
    assert code == 2
    assert "cannot be resumed: nothing in" in text


def test_a_run_without_a_checkpoint_cannot_be_resumed_although_all_is_sound(tmp_path, capsys):
    code, text = shown(train_killed_after(tmp_path, config(), 5), capsys)
    assert code == 2
    assert "cannot be resumed: " in text
    assert "has no checkpoint to resume from" in text


def test_the_checkpoints_of_a_cluster_are_each_their_agents_own(run, capsys):
    file = run.path / RUN_FILE
    file.write_text(file.read_text().replace('mode = "lockstep"', 'mode = "cluster"'))
    flip(run.agent(1).checkpoints / "step-000000120" / "state.safetensors")
    code, text = shown(run, capsys)
    assert code == 1
    assert "can be resumed: agent 0 from step 120, agent 1 from step 90; the buffer is not kept" in text
    shutil.rmtree(run.agent(1).checkpoints)
    anew = "agent 0 from step 120, agent 1 anew, since it has no whole checkpoint"
    assert anew in shown(run, capsys)[1]
    for agent in run.agents():
        shutil.rmtree(agent.checkpoints, ignore_errors=True)
    assert shown(run, capsys)[0] == 2


def test_damaged_tables_are_found(run, capsys):
    path = run.agent(0).evaluations.path
    path.write_text(path.read_text() + path.read_text().splitlines()[-1] + "\n")
    (run.agent(1).metrics.path).write_text("nonsense\n" + run.agent(1).metrics.path.read_text())
    (run.replay / "buffer.npy").write_bytes((run.replay / "buffer.npy").read_bytes()[:-9])
    code, text = shown(run, capsys)
    assert code == 1
    assert "step 120 does not follow a lower one" in text
    assert "metrics.jsonl is damaged: line 1 is no" in text
    assert "buffer.npy is damaged" in text


def test_a_checkpoint_in_another_agents_folder_or_of_other_settings_is_found(run, capsys):
    place = run.agent(1).checkpoints / "step-000000120"
    shutil.rmtree(place)
    shutil.copytree(run.agent(0).checkpoints / "step-000000120", place)
    code, text = shown(run, capsys)
    assert code == 1
    assert "is that of agent 0 after 120 steps, so it lies wrong" in text
    file = run.path / RUN_FILE
    file.write_text(file.read_text().replace("tau = 0.005", "tau = 0.01"))
    assert (
        "agent 0 at step 120 learned with other settings (agent.tau: 0.005 then, 0.01 now)"
        in shown(run, capsys)[1]
    )


@pytest.mark.parametrize("mode", ["lockstep", "cluster"])
@pytest.mark.parametrize(
    ("then", "now"), [("seed = 0", "seed = 5"), ('id = "worlds:PointGoal"', 'id = "Pendulum-v1"')]
)
def test_a_run_whose_settings_were_changed_cannot_be_resumed_as_resume_says(run, capsys, mode, then, now):
    file = run.path / RUN_FILE
    assert then in file.read_text()
    file.write_text(file.read_text().replace('mode = "lockstep"', f'mode = "{mode}"').replace(then, now, 1))
    code, text = shown(run, capsys)
    assert code == 2
    assert "cannot be resumed: agent 0 at step 120 learned with other settings" in text


def test_the_folder_of_an_agent_that_the_run_does_not_have_is_said_and_not_read(run, capsys):
    shutil.copytree(run.agent(0).path, run.agent(7).path)
    (run.agent(7).evaluations.path).write_text("nonsense\n")
    code, text = shown(run, capsys)
    assert code == 1
    assert "agents/7 is no agent's of this run, whose agents are 0..1, so nothing reads it; move it away" in (
        text.replace("\n", " ")
    )
    assert text.count("agents/7") == 2
    assert "can be resumed: all agents and the buffer from step 120" in text
    assert find_checkpoints(run.path) == [latest(run.agent(each).checkpoints) for each in (0, 1)]
    assert len(AgentFiles.read(run.agents()[-1]).evaluations) == 5


def test_a_damaged_run_toml_is_all_that_is_said(run, capsys):
    (run.path / RUN_FILE).write_text("[run")
    code, text = shown(run, capsys)
    assert code == 2
    assert "run.toml is damaged" in text


def test_another_folder_is_no_run(tmp_path):
    with pytest.raises(RunDirectoryError, match="is not a run"):
        verify(tmp_path)
