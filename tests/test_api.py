"""The public Python interface: runs from a script, a thread, a loop that is left; what comes out of them."""

import ast
import signal
import socket
import subprocess
import sys
import threading
import time
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium
import numpy as np
import pytest
import worlds
from children import importing
from contracts.sentences import refuses
from launch.resuming import assert_equal, config
from launch.resuming import train as train_lockstep
from patience import PATIENCE_S

import dase_grpc as dase
from dase_grpc import api
from dase_grpc.errors import ConfigError, DaseError, EnvironmentSpecError, RunDirectoryError, UsageError
from dase_grpc.runs.directory import RunDirectory

SMALL: dict[str, Any] = {
    "agents": 2,
    "steps": 120,
    "agent": {"start_steps": 20, "hidden": [8], "batch_size": 16},
    "eval.every": 60,
    "eval.episodes": 2,
    "train.log_every": 30,
    "train.checkpoint_every": 60,
}


def world() -> gymnasium.Env[Any, Any]:
    return worlds.PointGoal()


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> dase.Run:
    runs = tmp_path_factory.mktemp("runs")
    return dase.train("worlds:PointGoal", mode="lockstep", runs=runs, name="r", **SMALL)


def test_the_interface_is_what_it_says_and_loads_nothing_before_it_is_used():
    assert all(getattr(dase, name) is not None for name in dase.__all__)
    assert set(dase.__all__) <= set(dir(dase))
    assert set(api.__all__) == set(dase.__all__) - {"PolicyClient", "Session"}
    assert dase.__version__ == version("dase-grpc")
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        dase.trian  # noqa: B018
    code = "import sys, dase_grpc; sys.exit(bool({'torch', 'gymnasium', 'grpc'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=PATIENCE_S).returncode == 0


def test_everything_public_says_what_it_does():
    tree = ast.parse(Path(api.__file__).read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.ClassDef)
    public = [node for node in ast.walk(tree) if isinstance(node, kinds) and not node.name.startswith("_")]
    assert [node.name for node in public if not ast.get_docstring(node)] == []


# -- training -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_in_this_process_is_that_of_the_command_line_to_the_bit(tmp_path):
    expected = train_lockstep(tmp_path, config(), "expected")
    given = config().model_dump(mode="json", exclude={"members"})
    found = dase.train(mode="lockstep", runs=tmp_path, name="found", **given)
    assert_equal(expected, RunDirectory.open(found.path))


@pytest.mark.slow
@pytest.mark.parametrize("verbose", [True, False])
def test_a_run_in_this_process_says_that_it_learns_nothing(tmp_path, capsys, verbose):
    settings = {**SMALL, "steps": 20}
    dase.train("worlds:PointGoal", mode="lockstep", runs=tmp_path, verbose=verbose, **settings)
    said = capsys.readouterr().out
    assert said.startswith("note: agent.start_steps = 20 covers the whole run") if verbose else not said


@pytest.mark.parametrize("mode", ["lockstep", pytest.param("processes", marks=pytest.mark.slow)])
def test_events_tell_of_the_run_in_order(tmp_path, monkeypatch, mode):
    monkeypatch.setenv("PYTHONPATH", importing(Path(worlds.__file__).parent)["PYTHONPATH"])
    events = list(dase.iterate("worlds:PointGoal", mode=mode, runs=tmp_path, **SMALL))
    began = events[0]
    assert isinstance(began, dase.Began)
    assert (began.path / "report.html").is_file()
    assert events[-1] == dase.Ended({0: 120, 1: 120}, finished=True)
    for agent in (0, 1):
        of = [each for each in events if getattr(each, "agent", None) == agent]
        assert [each.step for each in of if isinstance(each, dase.Evaluated)] == [0, 60, 120]
        assert [each.step for each in of if isinstance(each, dase.Updated)] == [30, 60, 90, 120]
        kept = [each for each in of if isinstance(each, dase.Kept)]
        assert [each.step for each in kept] == [60, 120]
        assert kept[-1].path.is_dir()
    steps = [each.steps for each in events if isinstance(each, dase.Stepped)]
    assert [each[0] for each in steps if 0 in each] == sorted(each[0] for each in steps if 0 in each)
    found = dase.load(began.path).evaluations[1]
    told = [each for each in events if isinstance(each, dase.Evaluated) and each.agent == 1]
    assert found.return_mean.tolist() == [each.return_mean for each in told]


def test_a_loop_that_is_left_keeps_a_checkpoint_that_training_goes_on_from(tmp_path):
    for event in dase.iterate(world, mode="lockstep", runs=tmp_path, name="left", **SMALL):
        if isinstance(event, dase.Updated) and event.step == 30:
            break
    kept = sorted((tmp_path / "left" / "agents" / "1" / "checkpoints").iterdir())
    assert [path.name for path in kept] == ["step-000000030"]


def test_an_exception_in_the_loop_keeps_a_checkpoint_too(tmp_path):
    def failing() -> None:
        for event in dase.iterate(world, mode="stack", runs=tmp_path, name="left", **SMALL):
            assert not isinstance(event, dase.Updated)

    with pytest.raises(AssertionError):
        failing()
    assert (tmp_path / "left" / "agents" / "0" / "checkpoints" / "step-000000030").is_dir()


@pytest.mark.slow
def test_a_callable_that_others_cannot_import_trains_in_this_process_only(tmp_path):
    def inner() -> gymnasium.Env[Any, Any]:
        return worlds.PointGoal()

    options = {"runs": tmp_path, **SMALL}
    assert dase.train(inner, mode="lockstep", **options).config.env.id == "dase_given_env:env"
    with refuses(ConfigError, "cannot be imported by other processes", "choose mode = 'lockstep' or 'stack'"):
        dase.train(inner, **options)
    assert dase.train(worlds.PointGoal, mode="stack", **options).config.env.id == "worlds:PointGoal"


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"mode": "procs"}, ConfigError, "mode = 'procs' is none of processes, lockstep, stack"),
        ({"mode": np.zeros(2)}, ConfigError, "mode = array([0., 0.]) is none of processes"),
        ({"agent.hidden": [2**63]}, ConfigError, "agent.hidden = [9223372036854775808] is too large"),
        ({"gpu": 10**5000}, ConfigError, "--gpu a number of thousands of digits names no GPUs"),
        ({"agents": 0}, ConfigError, "train.agents = 0 must be greater than 0"),
        ({"agent": 5}, ConfigError, "agent = 5 must be a table of settings, or is it train.agents?"),
        ({"dps": True}, ConfigError, "dps = true must be a table of settings"),
        ({"members": [{"hidden": [3]}]}, ConfigError, "members is read from files only; name the algorithms"),
        ({"agents": "x", "method": "single"}, ConfigError, 'train.agents = "x" must be a whole number'),
        ({"agent.batch": 3}, ConfigError, "unknown setting agent.batch; did you mean agent.batch_size?"),
        ({"agent": {"hiden": [3]}}, ConfigError, "unknown setting agent.hiden; did you mean agent.hidden?"),
        ({"agnet": {"hidden": [3]}}, ConfigError, "unknown setting agnet.hidden"),
        ({"gpu": "0 1"}, ConfigError, "--gpu '0 1' names no GPUs"),
        ({"gpu": [0, 1], "mode": "stack"}, ConfigError, "--gpu 0,1 is for learners with processes"),
        ({"algo": ["td3"]}, ConfigError, "--algo ['td3'] is no text"),
        ({"preset": ["paper/td3"]}, ConfigError, "there is no preset ['paper/td3']"),
        ({"name": 5}, ConfigError, "name = 5 is no text"),
        ({"env": {"kwargs": {"a": None}}}, ConfigError, "env.kwargs: {'a': None} cannot be kept in run.toml"),
        ({"env": {"kwargs": {"a": 2**70}}}, ConfigError, "numbers of at most 64 bits"),
        ({"env": "Nope-v1", "mode": "lockstep"}, EnvironmentSpecError, "there is no environment 'Nope-v1'"),
        ({"env": worlds.PointGoal(), "mode": "lockstep"}, EnvironmentSpecError, "name a class or a function"),
        pytest.param(
            {"env": "Nope-v1"}, UsageError, "there is no environment 'Nope-v1'", marks=pytest.mark.slow
        ),
        pytest.param({"gpu": (98, 99)}, UsageError, "--gpu 98,99: torch finds", marks=pytest.mark.slow),
    ],
)
def test_what_cannot_be_is_refused_as_on_the_command_line(tmp_path, given, error, said):
    with refuses(error, said):
        dase.train(runs=tmp_path / "runs", verbose=False, **given)
    assert not (tmp_path / "runs").exists()


SCRIPT = """
import dase_grpc as dase
run = dase.train("Pendulum-v1", agents=2, steps={steps}, name="s", verbose=False,
                 agent={{"start_steps": 50, "hidden": [8], "batch_size": 16}}, **{{"eval.episodes": 1}})
print(run.evaluations[1].step[-1])
"""


def processes_of(folder: Path) -> list[str]:
    """The command lines in which a folder is named."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line = (process / "cmdline").read_text()
        except OSError:
            continue
        if str(folder) in line:
            found.append(line.replace("\0", " "))
    return found


@pytest.mark.slow
def test_a_script_without_a_main_guard_trains_in_processes(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT.format(steps=120))
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "120\n"), done.stderr
    assert processes_of(tmp_path / "runs") == []


@pytest.mark.slow
def test_ctrl_c_keeps_checkpoints_and_leaves_no_process(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT.format(steps=1_000_000))
    script = subprocess.Popen([sys.executable, "script.py"], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    agents = tmp_path / "runs" / "s" / "agents"
    until = time.monotonic() + PATIENCE_S
    while len(list(agents.glob("*/metrics.jsonl"))) < 2:
        assert time.monotonic() < until
        assert script.poll() is None
        time.sleep(0.1)
    script.send_signal(signal.SIGINT)
    _, said = script.communicate(timeout=PATIENCE_S)
    assert script.returncode != 0
    assert "KeyboardInterrupt" in said
    assert len(list(agents.glob("*/checkpoints/step-*"))) >= 2
    assert processes_of(tmp_path / "runs") == []


@pytest.mark.slow
def test_a_thread_may_train_in_processes_and_leave_the_loop(tmp_path):
    seen: list[dase.Event] = []

    def train() -> None:
        for event in dase.iterate("Pendulum-v1", steps=1_000_000, agents=2, runs=tmp_path, name="t"):
            seen.append(event)
            if isinstance(event, dase.Evaluated):
                break

    thread = threading.Thread(target=train)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert isinstance(seen[-1], dase.Evaluated)
    assert processes_of(tmp_path) == []
    assert not any(isinstance(each, dase.Ended) for each in seen)


@pytest.mark.slow
def test_a_run_in_processes_that_fails_says_why(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with refuses(DaseError, f"cannot serve metrics on 127.0.0.1:{port}", "choose another metrics port"):
            settings = {
                **SMALL,
                "agents": 1,
                "metrics.port": port - 1,
            }  # the replay's; the learner's comes next
            dase.train("Pendulum-v1", runs=tmp_path, verbose=False, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["processes", "lockstep"])
def test_a_folder_that_is_in_the_way_is_refused_as_on_the_command_line(tmp_path, mode):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    with refuses(UsageError, "mine exists and is not empty; choose another name or remove it"):
        dase.train("Pendulum-v1", mode=mode, runs=tmp_path, name="mine", **SMALL)


# -- a run that is there ------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_that_is_there_already_is_refused_and_not_told_of(run, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", importing(Path(worlds.__file__).parent)["PYTHONPATH"])
    events = []
    with refuses(UsageError, "exists and is not empty; choose another name"):
        events.extend(dase.iterate("worlds:PointGoal", runs=run.path.parent, name="r", **SMALL))
    assert events == []


@pytest.mark.slow
def test_two_runs_that_begin_at_once_have_a_directory_each(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", importing(Path(worlds.__file__).parent)["PYTHONPATH"])
    monkeypatch.setattr("dase_grpc.launch.events.run_name", lambda config: "same")
    settings = {**SMALL, "agents": 1}
    streams = [dase.iterate("worlds:PointGoal", runs=tmp_path, **settings) for _ in range(2)]
    found: dict[int, list[dase.Event]] = {}

    def taken(index: int) -> None:
        found[index] = list(streams[index])

    threads = [threading.Thread(target=taken, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    began = [each for index in range(2) for each in found[index] if isinstance(each, dase.Began)]
    assert sorted(each.path.name for each in began) == ["same", "same-2"]
    assert all(found[index][-1] == dase.Ended({0: 120}, finished=True) for index in range(2))


@pytest.mark.slow
def test_evaluations_and_metrics_are_arrays(run):
    assert run.evaluations[0].step.tolist() == [0, 60, 120]
    assert run.metrics[1]["step"].tolist() == [30, 60, 90, 120]
    assert run.metrics[1]["similarity.1"][-1] == 1.0
    assert np.isfinite(run.metrics[1]["critic_loss"][-1])
    assert run.config.train.steps == 120


def test_frames_need_pandas(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with refuses(ConfigError, "frames need pandas; install it with: pip install pandas"):
        run.frame()
    with refuses(ConfigError, "of = 'curves' is none of evaluations, metrics"):
        run.frame("curves")


def test_a_frame_holds_the_columns_of_all_agents(run, monkeypatch):
    class Pandas(ModuleType):
        """As much of pandas as makes frames out of columns."""

        @staticmethod
        def DataFrame(columns: dict[str, Any]) -> dict[str, Any]:
            return columns

        @staticmethod
        def concat(frames: list[dict[str, Any]], *, ignore_index: bool) -> list[dict[str, Any]]:
            assert ignore_index
            return frames

    monkeypatch.setitem(sys.modules, "pandas", Pandas("pandas"))
    assert [frame["agent"] for frame in run.frame()] == [0, 1]
    assert run.frame()[1]["step"].tolist() == [0, 60, 120]
    assert run.frame("metrics")[0]["step"].tolist() == [30, 60, 90, 120]


def test_a_policy_acts_in_the_environments_own_shapes_and_units(run):
    env = worlds.PointGoal()
    observation, _ = env.reset(seed=1)
    for agent in (0, "best", "ensemble"):
        policy = run.policy(agent)
        action = policy.act(observation)
        assert env.action_space.contains(action)
        batch = policy.act(np.stack([observation, observation]))
        assert batch.shape == (2, *env.action_space.shape)
        assert batch[1] == pytest.approx(action, abs=1e-6)
        assert np.array_equal(policy.act([observation])[0], action)
        assert policy.step == 120
    assert policy.observation_space == env.observation_space


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (np.zeros(3), "observations of shape (3,) were given; of worlds:PointGoal each has the shape (1,)"),
        ([], "observations of shape (0,) were given"),
        (None, "observations of shape () were given"),
        ("up", "what was given is no array of numbers"),
        ([np.nan], "component 0 of observation 0 is nan; every component has to be finite"),
        ([[0.0], [1e300]], "component 0 of observation 1 is inf"),
    ],
)
def test_what_is_no_observation_is_refused_in_the_callers_words(run, given, said):
    with refuses(EnvironmentSpecError, said):
        run.policy().act(given)
    assert run.policy().act([0.5]).shape == run.policy().act(np.array([0.5])).shape


def test_what_cannot_be_asked_of_a_run_is_refused(run):
    with refuses(UsageError, "episodes = 0 has to be a whole number of at least 1"):
        run.evaluate(0)
    with refuses(UsageError, "seed = -1 has to be a whole number of at least 0"):
        run.evaluate(1, seed=-1)
    with refuses(UsageError, "steps = True has to be a whole number of at least 1"):
        run.resume(True)
    with refuses(UsageError, "steps = a number of thousands of digits is too large"):
        run.resume(10**5000)
    with refuses(UsageError, "agent = '0' is neither an agent's id"):
        run.policy("0")
    for given in (None, 5, "a\0b"):
        with refuses(ConfigError, f"path = {given!r} is no path"):
            dase.load(given)


@pytest.mark.slow
def test_environments_that_were_given_alike_are_told_apart_later(tmp_path):
    ways = {worlds.PointGoal: (1,), worlds.PictureObservation: (2, 2, 3)}
    options = {"mode": "lockstep", "runs": tmp_path, **SMALL, "agents": 1, "steps": 40}
    runs = [dase.train(lambda made=made: made(), name=made.__name__, **options) for made in ways]
    assert [run.policy().observation_space.shape for run in runs] == list(ways.values())
    again = dase.train(world, name="again", **options)
    assert again.config.env.id == dase.train(world, name="more", **options).config.env.id


def test_a_policy_takes_observations_that_are_flattened_in_training(tmp_path):
    settings = {**SMALL, "agents": 1, "steps": 40}
    run = dase.train("worlds:DictObservation", mode="lockstep", runs=tmp_path, **settings)
    policy, env = run.policy(), worlds.DictObservation()
    observation, _ = env.reset(seed=1)
    assert isinstance(policy.observation_space, gymnasium.spaces.Dict)
    assert np.array_equal(policy.act([observation, observation])[1], policy.act(observation))
    for given in ([], None, 3.0):
        with pytest.raises(EnvironmentSpecError):
            policy.act(given)


@pytest.mark.slow
def test_a_run_is_evaluated_reported_and_shown(run):
    (best,) = run.evaluate(2, agent="best")
    assert best.evaluation.episodes == 2
    assert len(run.evaluate(1)) == 2
    assert run.report() == run.path / "report.html"
    assert repr(run) == f"Run({str(run.path)!r})"
    assert "<table>" in run._repr_html_()
    assert "worlds:PointGoal" in run._repr_html_()


@pytest.mark.slow
def test_a_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", importing(Path(worlds.__file__).parent)["PYTHONPATH"])
    run = dase.train("worlds:PointGoal", mode="lockstep", runs=tmp_path, name="r", **SMALL)
    again = run.resume(180, verbose=False)
    assert again.evaluations[0].step.tolist() == [0, 60, 120, 180]
    assert again.config.train.steps == 180
    with refuses(UsageError, "180 steps are done already"):
        again.resume(verbose=False)


def test_what_is_no_run_is_refused(tmp_path):
    with refuses(RunDirectoryError, "no run"):
        dase.load(tmp_path)
