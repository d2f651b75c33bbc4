import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from children import until_ended
from patience import PATIENCE_S
from small import small_flags
from synthetic import flat, write_run

import dase_grpc
from dase_grpc.cli.main import main
from dase_grpc.config.resolve import resolve
from dase_grpc.errors import ConfigError
from dase_grpc.runs.directory import RunDirectory
from dase_grpc.runs.logs import read_evaluations, read_metrics
from dase_grpc.runs.reports.comparison_tables import FILES

COMMANDS = (
    "train",
    "resume",
    "verify",
    "drill",
    "experiment",
    "node",
    "status",
    "top",
    "config",
    "evaluate",
    "report",
    "compare",
    "certs",
    "version",
)


@pytest.fixture
def dase(monkeypatch, capsys, tmp_path):
    """Runs a command line in this process, in an empty folder; gives exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dase", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def node(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs a node as a process to its end, which must come by itself."""
    command = [sys.executable, "-m", "dase_grpc", "node", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


# -- the shape of the command line --------------------------------------------------------------------


def test_help_names_every_command(dase):
    code, out, _ = dase("--help")
    assert code == 0
    assert all(re.search(rf"^│ {command} ", out, re.MULTILINE) for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(dase, command):
    code, out, _ = dase(command, "--help")
    assert code == 0
    assert f"Usage: dase {command}" in out


def test_how_another_packages_environment_is_written_stands_in_the_help_the_readme_and_the_settings(dase):
    _, out, _ = dase("train", "--help")
    root = Path(__file__).parents[2]
    pages = [out, *((root / page).read_text() for page in ("README.md", "docs/configuration.md"))]
    assert ["package:Name-v0" in page for page in pages] == [True] * 3


def test_no_command_shows_the_help(dase):
    code, out, err = dase()
    assert code != 0
    assert "Commands" in out + err


@pytest.mark.parametrize(
    "flag", ["--env", "--algo", "--agents", "--steps", "--gpu", "--lockstep", "--set", "--config"]
)
def test_train_has_the_flags_that_the_documents_name(dase, flag):
    assert flag in dase("train", "--help")[1]


@pytest.mark.parametrize(
    "flag",
    ["--role", "--listen", "--capacity", "--data-dir", "--replay", "--env", "--gpu", "--agent", "--insecure"],
)
def test_node_has_the_flags_that_the_documents_name(dase, flag):
    assert flag in dase("node", "--help")[1]


def test_the_leash_is_not_for_people(dase):
    for command in ("node", "train"):
        assert "leash" not in dase(command, "--help")[1]


def test_the_version_is_that_of_the_package(dase):
    for way in ("version", "--version"):
        assert dase(way) == (0, f"{version('dase-grpc')}\n", "")


def test_python_dash_m_is_the_same_command():
    command = [sys.executable, "-m", "dase_grpc", "version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout == f"{version('dase-grpc')}\n"


# -- the configuration --------------------------------------------------------------------------------


def test_config_prints_toml_that_reads_back_to_the_same_configuration(dase, tmp_path):
    arguments = ("--env", "HalfCheetah-v5", "--agents", 3, "--steps", 9_000, "--seed", 4)
    code, out, _ = dase("config", *arguments, "--set", "dps.divergence=kl", "--set", "replay.capacity=64MiB")
    assert code == 0
    config = resolve(tomllib.loads(out))
    assert (config.env.id, config.train.agents, config.train.steps) == ("HalfCheetah-v5", 3, 9_000)
    assert (config.train.seed, config.dps.divergence, config.replay.capacity) == (4, "kl", "64MiB")
    (tmp_path / "again.toml").write_text(out)
    assert dase("config", "--config", "again.toml") == (0, out, "")


def test_without_an_environment_the_quick_start_is_configured_and_with_one_the_paper(dase):
    quick = resolve(tomllib.loads(dase("config")[1]))
    paper = resolve(tomllib.loads(dase("config", "--env", "Hopper-v5")[1]))
    assert quick == resolve(tomllib.loads(dase("config", "--preset", "quickstart")[1]))
    assert quick.train.steps < 100_000
    assert paper.agent.start_steps == 25_000


def test_an_algorithm_brings_the_papers_settings(dase):
    for arguments, preset in (
        (("--algo", "ddpg"), "paper/ddpg"),
        (("--algo", "sac", "--env", "Humanoid-v5"), "paper/sac/Humanoid"),
        (("--env", "Ant-v5"), "paper/td3/Ant"),
    ):
        code, out, _ = dase("config", *arguments)
        assert (code, out) == (0, dase("config", "--preset", preset)[1])


def test_flags_win_over_the_file_and_set_over_both(dase, tmp_path):
    (tmp_path / "run.toml").write_text("[train]\nsteps = 10\nseed = 1\nagents = 1\n")
    code, out, _ = dase("config", "--config", "run.toml", "--steps", 20, "--seed", 2, "--set", "train.seed=3")
    train = resolve(tomllib.loads(out)).train
    assert (code, train.agents, train.steps, train.seed) == (0, 1, 20, 3)


@pytest.mark.parametrize("text", ["100000", "100_000", "1e5", "100000.0"])
@pytest.mark.parametrize("way", ["--steps={}", "--set=train.steps={}", '--set=train.steps="{}"'])
def test_whole_numbers_may_be_written_with_an_exponent_or_underscores(dase, way, text):
    code, out, err = dase("config", way.format(text))
    assert (code, err) == (0, "")
    assert resolve(tomllib.loads(out)).train.steps == 100_000


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("train", "--name", ""), "--name"),
        (("train", "--name="), "--name"),
        (("train", "--name", "  "), "--name"),
        (("train", "--runs", ""), "--runs"),
        (("train", "--steps", ""), "--steps"),
        (("config", "--config", ""), "--config"),
        (("config", "--preset", ""), "--preset"),
        (("config", "--set", ""), "--set"),
        (("node", "--role", "replay", "--data-dir", ""), "--data-dir"),
        (("node", "--role", "replay", "--run-id", "", "--listen", "127.0.0.1:0"), "--run-id"),
        (("node", "--role", "learner", "--replay", ""), "--replay"),
        (("resume", ""), "an argument"),
        (("compare", "runs/a", ""), "an argument"),
    ],
)
def test_an_empty_value_is_not_taken_for_a_flag_that_was_left_out(dase, arguments, named):
    told = f"error: {named} is empty; give it a value, or leave it out\n"
    assert dase(*arguments) == (2, "", told)


@pytest.mark.parametrize("name", [".", "..", "a/b", "/tmp", "a\nb", "x" * 201])
def test_a_name_that_is_no_folder_name_is_refused_before_anything_is_made(dase, tmp_path, name):
    code, _, err = dase("train", "--lockstep", "--name", name, *small_flags())
    assert code == 2
    assert "cannot name a run; use a plain folder name of at most 200 bytes" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flag", ["--steps", "--agents", "--seed"])
@pytest.mark.parametrize("text", ["1.5", "many", "1e-3", "inf", "nan"])
def test_what_is_no_whole_number_is_refused_in_one_sentence(dase, flag, text):
    assert dase("config", flag, text) == (
        2,
        "",
        f"error: {flag} {text!r} is not a whole number; write it like 100000 or 1e5\n",
    )


def test_an_environment_named_by_set_brings_the_papers_settings_as_its_flag_does(dase):
    assert dase("config", "--set", "env.id=Hopper-v5") == dase("config", "--env", "Hopper-v5")


# -- refusals: one sentence, no traceback, nothing left behind ----------------------------------------


def world(name: str, *more: object) -> tuple[object, ...]:
    return ("train", "--env", f"worlds:{name}", *more)


def breach(name: str, **kwargs: str) -> tuple[object, ...]:
    given = ", ".join(f'{key} = "{value}"' for key, value in kwargs.items())
    return ("train", "--env", f"breaches:{name}", "--set", f"env.kwargs={{{given}}}")


EXPERIMENTS = {
    "empty.toml": "",
    "discrete.toml": '[matrix]\nenv = ["worlds:PointGoal", "worlds:DiscreteAction"]\n',
    "breaks.toml": '[set]\nenv.id = "worlds:RaisesAtStep"\n[matrix]\nenv.kwargs = [{at = 2}, {at = 1}]\n',
    "small.toml": (
        '[set]\nenv = "worlds:PointGoal"\nagent.start_steps = 9\n'
        '[matrix]\nreplay.capacity = ["1MiB", "1KiB"]\n'
    ),
}

REFUSED = {
    "an unbounded action": (world("UnboundedAction"), r"action dimension 1 has the bounds \[-1\.0, inf\]"),
    "a huge action": (world("HugeAction"), r"action dimension 0 has the bounds"),
    "a discrete action": (
        world("DiscreteAction"),
        r"has the action space Discrete\(3\), but agents here act",
    ),
    "a discrete observation": (world("DiscreteObservation"), r"has the observation space Discrete\(5\)"),
    "an environment that cannot be made": (world("RefusesToStart"), r"failed with ValueError: no licence"),
    "an environment that leaves the process while it is made": (
        breach("Raises", how="leaves", where="making"),
        r"failed with SystemExit, that is, sys\.exit\(3\) \(breaches\.py, line \d+\)",
    ),
    "an environment that leaves the process in its step": (
        breach("Raises", how="leaves", where="step"),
        r"the environment's step raised SystemExit, that is, sys\.exit\(3\) \(breaches\.py, line \d+\) when",
    ),
    "an environment whose step returns something else": (
        breach("Breaks", how="terminated is an array of two"),
        r"returned terminated = ndarray of shape \(2,\), which is neither true nor false; in Gymnasium's",
    ),
    "an observation without one of its keys": (
        breach("Observes", how="a key is missing"),
        r"returned an observation that lacks 'more', so it is not of its space",
    ),
    "a space of a package's own": (
        breach("Observes", how="a space of a package's own"),
        r"has an observation space whose \['say'\] is a Mission, which has no fixed number of components",
    ),
    "a missing environment": (
        ("train", "--env", "HalfCheeta-v5"),
        r"there is no environment 'HalfCheeta-v5'; did you mean 'HalfCheetah-v5'\?",
    ),
    "a missing module": (("train", "--env", "no_such_package:Env-v0"), r"no module 'no_such_package'"),
    "a missing package": (
        ("train", "--env", "lacking:Env"),
        r"needs 'robot_simulator', which is not installed",
    ),
    "a GPU that is not there": (world("PointGoal", "--gpu", 9), r"--gpu 9: torch finds .* on this machine"),
    "a negative GPU": (world("PointGoal", "--gpu", -1), r"--gpu -1: torch finds"),
    "a capacity of one": (
        world("PointGoal", "--set", "replay.capacity=1"),
        r"= \d+ exceeds replay\.capacity = 1;",
    ),
    "a capacity in bytes that holds too little": (
        world("PointGoal", "--set", "replay.capacity=1KiB"),
        r"exceeds replay\.capacity = 36;",
    ),
    "an unreadable capacity": (world("PointGoal", "--set", "replay.capacity=lots"), r"neither a number of"),
    "no steps": (world("PointGoal", "--steps", 0), r"train\.steps = 0 must be greater than 0"),
    "no agents": (world("PointGoal", "--agents", 0), r"train\.agents = 0 must be greater than 0"),
    "an unknown setting": (
        ("config", "--set", "dps.divergance=kl"),
        r"unknown setting dps\.divergance; did you mean dps\.divergence\?",
    ),
    "an unknown divergence": (("config", "--set", "dps.divergence=tv"), r"dps\.divergence = \"tv\" must be"),
    "a setting without a value": (
        ("config", "--set", "dps.divergence"),
        r"not of the form section\.key=value",
    ),
    "an unknown preset": (("config", "--preset", "paper/ppo"), r"there is no preset 'paper/ppo'; there are"),
    "an unknown algorithm": (("config", "--algo", "ppo"), r"there is no algorithm 'ppo'; there are"),
    "an algorithm and a preset": (
        ("config", "--algo", "sac", "--preset", "quickstart"),
        r"--algo sac and --preset quickstart both choose",
    ),
    "a setting of another algorithm": (
        ("config", "--algo", "sac", "--set", "agent.policy_delay=3"),
        r"agent\.policy_delay = 3 is read by td3 only",
    ),
    "a file that is no TOML": (("config", "--config", "bad.toml"), r"bad\.toml is not valid TOML"),
    "a file that is not there": (
        ("config", "--config", "missing.toml"),
        r"cannot read .* missing\.toml: No such",
    ),
    "an unknown role": (
        ("node", "--role", "nonsense"),
        r"--role 'nonsense' is none of the roles: replay, learner, actor",
    ),
    "no address": (("node", "--role", "replay", "--listen", "here"), r"'here' is not an address of the form"),
    "an unreadable capacity of a node": (
        ("node", "--role", "replay", "--capacity", "lots"),
        r"--capacity: 'lots' is neither",
    ),
    "no address of the replay": (
        ("node", "--role", "learner", "--replay", "here"),
        r"'here' is not an address",
    ),
    "evaluating no run": (("evaluate", "nothing"), r"there is no nothing"),
    "evaluating another folder": (("evaluate", "empty"), r"empty is neither a run, an agent's directory nor"),
    "resuming no run": (("resume", "empty"), r"empty is not a run: it has no run\.toml"),
    "resuming to no number": (
        ("resume", "empty", "--steps", "many"),
        r"--steps 'many' is not a whole number",
    ),
    "verifying no run": (("verify", "empty"), r"empty is not a run: it has no run\.toml"),
    "an explore that is no truth": (
        ("node", "--role", "learner", "--explore", "maybe"),
        r"--explore 'maybe' is neither true nor false",
    ),
    "actors in lockstep": (
        ("train", "--lockstep", "--actors", 2, "--set", "env.id=worlds:PointGoal"),
        r"which neither --lockstep, --stack nor dase drill starts",
    ),
    "actors of a stack": (
        ("train", "--stack", "--actors", 2, "--set", "env.id=worlds:PointGoal"),
        r"which neither --lockstep, --stack nor dase drill starts",
    ),
    "a stack in lockstep": (
        ("train", "--stack", "--lockstep", "--set", "env.id=worlds:PointGoal"),
        r"--lockstep updates one agent after the other and --stack all at once",
    ),
    "a stack of several algorithms": (
        ("train", "--stack", "--algo", "td3,sac", "--set", "env.id=worlds:PointGoal"),
        r"all have to be alike",
    ),
    "actors of learners that explore": (
        ("config", "--set", "train.actors=2"),
        r"is read with explore = false only",
    ),
    "nobody who explores": (
        ("train", "--set", "train.explore=false", "--set", "env.id=worlds:PointGoal"),
        r"have them started with --actors N",
    ),
    "lockstep without exploring": (
        ("train", "--lockstep", "--set", "train.explore=false", "--set", "env.id=worlds:PointGoal"),
        r"train.explore = false leaves exploring to actor nodes",
    ),
    "a pace that would stand still": (
        ("config", "--set", "train.explore=false", "--set", "train.step_error_buffer=1"),
        r"steps and updates would wait for each other",
    ),
    "a pace in vain": (
        ("config", "--set", "train.updates_per_step=2"),
        r"is read with explore = false only",
    ),
    "an actor of nobody": (("node", "--role", "actor"), r"give it an agent id with --agent"),
    "an actor of an agent that is not": (
        ("node", "--role", "actor", "--agent", 7, "--agents", 2),
        r"--agent 7 is not of this run, whose agents are 0\.\.1; choose one of them",
    ),
    "a learner of an agent that is not": (
        ("node", "--role", "learner", "--agent", 2, "--agents", 2),
        r"--agent 2 is not of this run, whose agents are 0\.\.1; choose one of them, or say how many",
    ),
    "an evaluator of an agent that is not": (
        ("node", "--role", "evaluator", "--agent", 0, "--agent", 7, "--agents", 2),
        r"--agent 7 is not of this run, whose agents are 0\.\.1; choose one of them",
    ),
    "a learner of two agents": (
        ("node", "--role", "learner", "--agent", 0, "--agent", 1),
        r"--agent is given 2 times, and a learner is of one agent; give it once",
    ),
    "lockstep without evaluations": (
        world("PointGoal", "--lockstep", "--set", "eval.by=evaluator"),
        r"eval\.by = evaluator is for nodes; --lockstep has none, so leave it out",
    ),
    "a pair that an evaluator evaluates": (
        ("config", "--method", "dpd", "--set", "eval.by=evaluator"),
        r"eval\.by = evaluator is not for train\.method = dpd",
    ),
    "a replay that resumes": (("node", "--role", "replay", "--resume"), r"--resume is not for --role replay"),
    "reporting on no run": (("report", "empty"), r"empty is not a run: it has no run\.toml"),
    "no experiment": (("experiment", "missing.toml"), r"cannot read the experiment missing\.toml: No such"),
    "an experiment without cells": (("experiment", "empty.toml"), r"empty\.toml: there are no cells"),
    "an experiment with a bad cell": (
        ("experiment", "discrete.toml"),
        r"cell worlds-DiscreteAction: environment 'worlds:DiscreteAction' has the action space Discrete\(3\)",
    ),
    "an experiment with a cell that breaks when it is tried out": (
        ("experiment", "breaks.toml"),
        r"cell kwargs-at-1: the environment's step raised RuntimeError: the simulator broke at step 1 when",
    ),
    "an experiment whose buffer is too small": (
        ("experiment", "small.toml"),
        r"cell capacity-1KiB: agent\.batch_size = 256 exceeds replay\.capacity = 36;",
    ),
    "a run name that is a path": (world("PointGoal", "--name", "a/b"), r"'a/b' cannot name a run"),
    "a run name that is taken": (
        world("PointGoal", "--name", "taken"),
        r"runs/taken exists and is not empty",
    ),
}


@pytest.mark.parametrize(("arguments", "sentence"), REFUSED.values(), ids=REFUSED.keys())
def test_refuses_in_one_sentence(dase, tmp_path, arguments, sentence):
    (tmp_path / "bad.toml").write_text("[train\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "runs" / "taken").mkdir(parents=True)
    (tmp_path / "runs" / "taken" / "mine.txt").touch()
    (tmp_path / "lacking.py").write_text("import robot_simulator\n")
    for name, text in EXPERIMENTS.items():
        (tmp_path / name).write_text(text)
    code, out, err = dase(*arguments)
    assert code == 2
    assert re.fullmatch(rf"error: .*{sentence}.*\n", err)
    assert out == ""
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["taken"]


def test_a_flag_that_does_not_exist_is_a_usage_error(dase):
    code, _, err = dase("train", "--stepz", 5)
    assert code == 2
    assert "No such option: --stepz" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_port_in_use_is_told_in_one_sentence():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = node("--role", "replay", "--listen", f"127.0.0.1:{port}")
    assert done.returncode == 2
    assert f"error: cannot listen on 127.0.0.1:{port} (in use" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_listening_where_others_can_connect_needs_a_word():
    done = node("--role", "replay", "--listen", "0.0.0.0:0")
    assert done.returncode == 2
    assert "error: 0.0.0.0:0 can be reached from other machines" in done.stderr
    assert "--insecure" in done.stderr
    assert "Traceback" not in done.stderr


# -- training in lockstep -----------------------------------------------------------------------------


def trained(dase, *arguments: object) -> tuple[RunDirectory, str]:
    code, out, err = dase("train", "--lockstep", "--name", "run", *arguments)
    assert (code, err) == (0, "")
    return RunDirectory.open(Path("runs/run")), out


@pytest.mark.slow
def test_lockstep_says_what_it_does_and_where_the_results_are(dase):
    directory, out = trained(dase, *small_flags())
    assert out.startswith("2 TD3 agents sharing one replay on worlds:PointGoal, 120 steps each, seed 0\n")
    assert re.search(
        r"^agent 1: evaluation return -[\d.]+ at step 0, -[\d.]+ at step 120$", out, re.MULTILINE
    )
    assert "results: runs/run\n" in out
    assert "report:  runs/run/report.html\n" in out
    assert out.endswith("next:    dase evaluate runs/run\n")
    assert directory.report.is_file()
    assert directory.run["mode"] == "lockstep"
    assert directory.run["command"].startswith("dase train --lockstep --name run")
    assert [read_evaluations(agent.evaluations.path).step.tolist() for agent in directory.agents()] == [
        [0, 50, 100, 120]
    ] * 2


@pytest.mark.slow
def test_what_was_trained_can_be_evaluated_and_reported(dase):
    trained(dase, *small_flags(train__agents=1))
    code, out, _ = dase("evaluate", "runs/run", "--episodes", 2)
    assert code == 0
    assert re.fullmatch(r"agent 0 in worlds:PointGoal after 120 steps: mean return .* over 2 episodes\n", out)
    assert dase("report", "runs/run") == (0, "runs/run/report.html\n", "")


@pytest.mark.slow
def test_a_run_whose_steps_are_all_random_says_so(dase):
    _, out = trained(dase, *small_flags(train__steps=20))
    assert "note: agent.start_steps = 20 covers the whole run, so hardly anything is learned\n" in out


@pytest.mark.slow
def test_a_run_whose_layers_are_too_small_for_its_products_says_so(dase, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"bf16": True})
    flags = small_flags(train__steps=20, train__agents=1, agent__products="bfloat16")
    _, out = trained(dase, *flags)
    assert "note: agent.products = bfloat16 changes nothing in layers of fewer than 96 units, and" in out
    code, out, _ = dase("train", "--lockstep", *flags, "--set=agent.hidden=[8, 96]")
    assert code == 0
    assert "agent.products" not in out


@pytest.mark.parametrize(
    ("env", "refused"),
    [("worlds:NanAtStep50", {"observation": 2}), ("worlds:HugeReward", {"reward": 10})],
    ids=["an observation that is NaN at step 50", "a reward of 1e300"],
)
@pytest.mark.slow
def test_what_is_not_finite_is_refused_and_counted_and_the_run_goes_on(dase, env, refused):
    directory, _ = trained(dase, *small_flags(env, train__steps=100, train__log_every=100))
    for agent in directory.agents():
        (record,) = read_metrics(agent.metrics.path)
        assert record["refused"] == refused
        assert record["updates"] >= 75
        assert record["critic_loss"] is not None


def test_an_error_of_the_environment_is_one_sentence_after_the_results_and_its_traceback_is_logged(
    dase, caplog
):
    flags = small_flags("worlds:RaisesAtStep", env__kwargs="{at=9}", eval__max_episode_steps=5)
    code, out, err = dase("train", "--lockstep", "--name", "run", "--set=env.max_restarts=0", *flags)
    assert code == 1
    assert "results: runs/run\n" in out
    assert (
        "error: agent 0 at step 8: the environment raised RuntimeError: the simulator broke at step 9" in err
    )
    assert "in reward" in caplog.text


@pytest.mark.parametrize(
    ("role", "flag", "value"),
    [
        ("replay", "--env", "Pendulum-v1"),
        ("replay", "--set", "replay.capacity=5"),
        ("replay", "--steps", 5),
        ("learner", "--capacity", 5),
        ("learner", "--data-dir", "d"),
        ("learner", "--sync-every", 5),
        ("learner", "--listen", "127.0.0.1:1"),
        ("learner", "--envs", 2),
        ("actor", "--run-dir", "d"),
        ("actor", "--gpu", 0),
        ("evaluator", "--gpu", 0),
        ("evaluator", "--envs", 2),
        ("replay", "--agent", 0),
    ],
)
def test_a_flag_of_another_role_is_refused_rather_than_ignored(dase, role, flag, value):
    code, _, err = dase("node", "--role", role, flag, value)
    assert code == 2
    assert f"{flag} is not for --role {role}" in err


def test_a_learner_takes_its_metrics_port_from_the_configuration():
    from dase_grpc.config.resolve import resolve
    from dase_grpc.nodes.options import LearnerOptions

    config = resolve({"metrics": {"port": 9_000}, "train": {"agents": 3}})
    texts = {"replay": "127.0.0.1:1", "agent_id": [2], "gpu": None, "run_id": "", "run_dir": None}
    texts |= {"metrics_host": "127.0.0.1", "insecure": False, "command": ()}
    assert LearnerOptions.parse(config=config, metrics_port=None, **texts).metrics_port == 9_003
    assert LearnerOptions.parse(config=config, metrics_port=0, **texts).metrics_port == 0
    assert LearnerOptions.parse(config=config, metrics_port=7, **texts).metrics_port == 7


def test_metrics_beyond_loopback_need_insecure():
    ended = node(
        "--role", "replay", "--listen", "127.0.0.1:0", "--metrics-host", "0.0.0.0", "--metrics-port", 9_123
    )
    assert ended.returncode == 2
    assert "--insecure" in ended.stderr


# -- comparing runs -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_runs_are_compared_into_a_folder_named_comparison(dase):
    for seed in (0, 1):
        write_run(Path("runs"), f"run{seed}", flat(10 + seed), seed=seed)
    code, out, err = dase("compare", "runs")
    assert code == 0
    assert out.splitlines()[-1] == "comparison/comparison.html"
    assert all((Path("comparison") / name).is_file() for name in FILES)
    assert (
        "caution: fewer than 5 runs, so an interval that means little:\n  HalfCheetah-v5: TD3, single\n"
        in err
    )
    assert dase("compare", "runs/run0", "runs/run1", "--out", "other", "--unfinished")[0] == 0
    assert (Path("other") / "runs.csv").read_text().count("\n") == 3


def test_nothing_to_compare_is_one_sentence(dase):
    code, out, err = dase("compare", "nowhere")
    assert (code, out) == (2, "")
    assert err == "error: there is no nowhere; a run is a folder with a run.toml, such as runs/NAME\n"
    write_run(Path("runs"), "going", flat(1, 5), steps=100_000)
    code, out, err = dase("compare", "runs")
    assert (code, out) == (2, "")
    assert err.startswith("error: the run cannot be compared; runs/going is left out: it has not finished")
    assert not Path("comparison").exists()


@pytest.mark.slow
def test_a_run_is_resumed_to_a_larger_total_verified_and_its_best_evaluated(dase):
    flags = small_flags(train__steps=60, train__checkpoint_every=20, eval__every=20)
    assert dase("train", "--lockstep", "--name", "run", *flags)[0] == 0
    code, out, _ = dase("resume", "runs/run", "--steps", "8e1")
    assert code == 0
    assert "resuming runs/run from step 60 of 80\n" in out
    assert out.endswith("next:    dase evaluate runs/run\n")
    directory = RunDirectory.open(Path("runs/run"))
    assert read_evaluations(directory.agent(1).evaluations.path).step.tolist() == [0, 20, 40, 60, 80]
    code, out, _ = dase("verify", "runs/run")
    assert code == 0
    assert "can be resumed: all agents and the buffer from step 80" in out
    curve = read_evaluations(directory.agent(0).evaluations.path)
    best = max(range(1, 5), key=lambda index: (curve.return_mean[index], index))
    code, out, _ = dase("evaluate", "runs/run", "--best", "--episodes", 2)
    assert code == 0
    assert f"after {curve.step[best]} steps: mean return {curve.return_mean[best]:,.1f} " in out
    assert dase("resume", "runs/run")[0] == 2


@pytest.mark.slow
def test_where_no_checkpoint_was_evaluated_at_its_step_there_is_no_best(dase):
    flags = small_flags(train__steps=20, eval__every=50, train__checkpoint_every=7)
    assert dase("train", "--lockstep", "--name", "run", *flags)[0] == 0
    for path in Path("runs/run/agents").glob("*/checkpoints/step-000000020"):
        shutil.rmtree(path)
    code, _, err = dase("evaluate", "runs/run", "--best")
    assert code == 2
    assert "has no best checkpoint, because none was evaluated at its own step" in err


def test_a_folder_that_is_gone_is_one_sentence(tmp_path):
    gone = tmp_path / "gone"
    script = f"mkdir {gone} && cd {gone} && rmdir {gone} && exec {sys.executable} -m dase_grpc compare runs"
    path = str(Path(dase_grpc.__file__).parents[1])
    ended = subprocess.run(
        ["sh", "-c", script],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    sentence = "error: the current folder does not exist any more; change into one that does\n"
    assert (ended.returncode, ended.stderr) == (2, sentence)


@pytest.mark.slow
def test_a_path_that_is_no_utf8_and_a_terminal_that_is_none_do_no_harm(tmp_path):
    folder = os.fsencode(tmp_path) + b"/by\xfft"
    os.mkdir(folder)
    write_run(Path(os.fsdecode(folder)), "run", flat(1))
    ended = subprocess.run(
        [os.fsencode(sys.executable), b"-m", b"dase_grpc", b"compare", folder, b"--out", folder + b"/out"],
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert ended.returncode == 0, ended.stderr
    assert b"by\\udcfft/out/comparison.html" in ended.stdout
    assert sorted(map(os.fsdecode, os.listdir(folder + b"/out"))) == sorted(FILES)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_an_output_on_a_full_disk_is_one_sentence():
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "dase_grpc", "config"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    assert (ended.returncode, "Traceback" in ended.stderr) == (1, False)
    assert "No space left on device" in ended.stderr


def test_ctrl_c_while_modules_are_loaded_is_no_traceback(monkeypatch, capsys):
    from dase_grpc.__main__ import run

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("dase_grpc.cli.main.main", interrupted)
    monkeypatch.setattr("dase_grpc.__main__._bounded", lambda last_resort: None)
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as ended:
            run()
        os.kill(os.getpid(), signal.SIGINT)  # once more, while it ends
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.value.code == 130
    assert capsys.readouterr().err == ""


LEAVES_A_PROCESS = """
import multiprocessing, time
from dase_grpc import __main__
from dase_grpc.cli import main as cli

def main():
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    process.start()
    print(process.pid, flush=True)

cli.main, __main__.EXIT_S = main, 0.1
__main__.run()
"""


def test_a_process_that_an_environment_has_left_running_does_not_keep_a_command_from_ending():
    ended = subprocess.run(
        [sys.executable, "-c", LEAVES_A_PROCESS],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    until_ended(int(ended.stdout))


@pytest.mark.parametrize("command", [["train"], ["resume", "runs/run"], ["node", "--role=learner"]])
def test_what_runs_on_a_leash_heeds_it_before_it_loads_anything(command, monkeypatch, capsys):
    given = []

    def noted(*, stdin_is_leash):
        given.append(stdin_is_leash)
        raise ConfigError("noted")

    monkeypatch.setattr("dase_grpc.cli.flags.end_with_launcher", noted)
    for arguments in (command, [*command, "--stdin-is-leash"]):
        monkeypatch.setattr(sys, "argv", ["dase", *arguments])
        with pytest.raises(SystemExit):
            main()
    assert given == [False, True]
    assert capsys.readouterr().err == "error: noted\n" * 2
