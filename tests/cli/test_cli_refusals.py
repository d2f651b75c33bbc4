"""What the command line refuses: in one sentence, with no traceback, leaving nothing behind.

Where a sentence is made there is a test of it; here it is one of a kind.
"""

import re
import shlex
import socket
import subprocess
import sys

import pytest
from patience import PATIENCE_S
from small import small_flags
from synthetic import flat, write_run

REFUSED = {
    "train --env worlds:DiscreteObservation": r"has the observation space Discrete\(5\)",
    "train --env worlds:RefusesToStart": "failed with ValueError: no licence",
    "train --env breaches:Raises --set \"env.kwargs={how='leaves', where='making'}\"": (
        r"failed with SystemExit, that is, sys\.exit\(3\) \(breaches\.py, line \d+\)"
    ),
    "train --env breaches:Raises --set \"env.kwargs={how='leaves', where='step'}\"": (
        r"the environment's step raised SystemExit, that is, sys\.exit\(3\) \(breaches\.py, line \d+\) when"
    ),
    "train --env breaches:Breaks --set \"env.kwargs={how='terminated is an array of two'}\"": (
        r"returned terminated = ndarray of shape \(2,\), which is neither true nor false; in Gymnasium's"
    ),
    "train --env breaches:Observes --set \"env.kwargs={how='a key is missing'}\"": (
        "returned an observation that lacks 'more', so it is not of its space"
    ),
    """train --env breaches:Observes --set 'env.kwargs={how="a space of a package'"'"'s own"}'""": (
        r"has an observation space whose \['say'\] is a Mission, which has no fixed number of components"
    ),
    "train --env HalfCheeta-v5": r"there is no environment 'HalfCheeta-v5'; did you mean 'HalfCheetah-v5'\?",
    "train --env no_such_package:Env-v0": "no module 'no_such_package'",
    "train --env lacking:Env": "needs 'robot_simulator', which is not installed",
    "train --env worlds:PointGoal --gpu 9": "--gpu 9: torch finds .* on this machine",
    "train --env worlds:PointGoal --gpu 98,99": "--gpu 98,99: torch finds .* on this machine",
    "train --gpu -1": "--gpu '-1' names no GPUs; give indices from 0 on",
    "train --gpu 0,1,0": "--gpu 0,1,0 names 0 more than once",
    "train --lockstep --env worlds:PointGoal --gpu 0,1": (
        r"--gpu 0,1 is for learners with processes of their own; a run in one process \(lockstep, stack\)"
    ),
    "train --stack --env worlds:PointGoal --gpu all": "--gpu all is for learners with processes of their own",
    "train --env worlds:PointGoal --set replay.capacity=1KiB": r"exceeds replay\.capacity = 36;",
    "train --env worlds:PointGoal --name a/b": "'a/b' cannot name a run",
    "train --env worlds:PointGoal --name taken": "runs/taken exists and is not empty",
    "train --env worlds:PointGoal --agents 0": r"train\.agents = 0 must be greater than 0",
    "train --lockstep --actors 2 --set env.id=worlds:PointGoal": (
        "which neither --lockstep, --stack nor dase drill starts"
    ),
    "train --stack --actors 2 --set env.id=worlds:PointGoal": (
        "which neither --lockstep, --stack nor dase drill starts"
    ),
    "train --stack --lockstep --set env.id=worlds:PointGoal": (
        "--lockstep updates one agent after the other and --stack all at once"
    ),
    "train --stack --algo td3,sac --set env.id=worlds:PointGoal": "all have to be alike",
    "train --set train.explore=false --set env.id=worlds:PointGoal": "have them started with --actors N",
    "train --lockstep --set train.explore=false --set env.id=worlds:PointGoal": (
        "train.explore = false leaves exploring to actor nodes"
    ),
    "train --lockstep --env worlds:PointGoal --set eval.by=evaluator": (
        r"eval\.by = evaluator is for nodes; --lockstep has none, so leave it out"
    ),
    "config --set dps.divergance=kl": r"unknown setting dps\.divergance; did you mean dps\.divergence\?",
    "config --preset paper/ppo": "there is no preset 'paper/ppo'; there are",
    "config --algo ppo": "there is no algorithm 'ppo'; there are",
    "config --config bad.toml": r"bad\.toml is not valid TOML",
    "config --config missing.toml": r"cannot read .* missing\.toml: No such",
    "evaluate nothing": "there is no nothing",
    "evaluate empty": "empty is neither a run, an agent's directory nor",
    "resume empty": r"empty is not a run: it has no run\.toml",
    "resume empty --steps many": "--steps 'many' is not a whole number",
    "verify empty": r"empty is not a run: it has no run\.toml",
    "report empty": r"empty is not a run: it has no run\.toml",
    "experiment missing.toml": r"cannot read the experiment missing\.toml: No such",
    "experiment empty.toml": r"empty\.toml: there are no cells",
    "experiment discrete.toml": (
        r"cell worlds-DiscreteAction: environment 'worlds:DiscreteAction' has the action space Discrete\(3\)"
    ),
    "experiment breaks.toml": (
        "cell kwargs-at-1: the environment's step raised RuntimeError: the simulator broke at step 1 when"
    ),
    "experiment small.toml": r"cell capacity-1KiB: agent\.batch_size = 256 exceeds replay\.capacity = 36;",
    "node --role nonsense": "--role 'nonsense' is none of the roles: replay, learner, actor",
    "node --role replay --listen here": "'here' is not an address of the form",
    "node --role replay --listen .example.com:0 --insecure": (
        r"'\.example\.com:0' is no address, for a host's name has 1 to 63"
    ),
    "node --role replay --metrics-host .example.com": r"--metrics-host '\.example\.com' is no host, for",
    "status --replay replay..svc:50051": r"'replay\.\.svc:50051' is no address, for a host's name",
    "node --role replay --capacity lots": "--capacity: 'lots' is neither",
    "node --role replay --resume": "--resume is not for --role replay",
    "node --role learner --replay here": "'here' is not an address",
    "node --role learner --explore maybe": "--explore 'maybe' is neither true nor false",
    "node --role learner --agent 0 --agent 1": (
        "--agent is given 2 times, and a learner is of one agent; give it once"
    ),
    "node --role learner --agent 2 --agents 2": (
        r"--agent 2 is not of this run, whose agents are 0\.\.1; choose one of them, or say how many"
    ),
    "node --role actor": "give it an agent id with --agent",
    "node --role actor --agent 7 --agents 2": r"--agent 7 is not of this run, whose agents are 0\.\.1",
    "node --role evaluator --agent 0 --agent 7 --agents 2": "--agent 7 is not of this run, whose agents are",
}
FILES = {
    "bad.toml": "[train\n",
    "empty.toml": "",
    "lacking.py": "import robot_simulator\n",
    "discrete.toml": '[matrix]\nenv = ["worlds:PointGoal", "worlds:DiscreteAction"]\n',
    "breaks.toml": '[set]\nenv.id = "worlds:RaisesAtStep"\n[matrix]\nenv.kwargs = [{at = 2}, {at = 1}]\n',
    "small.toml": (
        '[set]\nenv = "worlds:PointGoal"\nagent.start_steps = 9\n'
        '[matrix]\nreplay.capacity = ["1MiB", "1KiB"]\n'
    ),
}


@pytest.mark.parametrize("command", REFUSED)
def test_refuses_in_one_sentence(dase, tmp_path, command):
    (tmp_path / "empty").mkdir()
    (tmp_path / "runs" / "taken").mkdir(parents=True)
    (tmp_path / "runs" / "taken" / "mine.txt").touch()
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    code, out, err = dase(*shlex.split(command))
    assert (code, out) == (2, "")
    assert re.fullmatch(rf"error: .*{REFUSED[command]}.*\n", err)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["taken"]


def test_a_flag_that_does_not_exist_is_a_usage_error(dase):
    code, _, err = dase("train", "--stepz", 5)
    assert code == 2
    assert "No such option: --stepz" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("flag", ["--steps", "--agents", "--seed"])
@pytest.mark.parametrize("text", ["1.5", "many", "1e-3", "inf", "nan"])
def test_what_is_no_whole_number_is_refused_in_one_sentence(dase, flag, text):
    told = f"error: {flag} {text!r} is not a whole number; write it like 100000 or 1e5\n"
    assert dase("config", flag, text) == (2, "", told)


@pytest.mark.parametrize("name", [".", "..", "a/b", "/tmp", "a\nb", "x" * 201])
def test_a_name_that_is_no_folder_name_is_refused_before_anything_is_made(dase, tmp_path, name):
    code, _, err = dase("train", "--lockstep", "--name", name, *small_flags())
    assert code == 2
    assert "cannot name a run; use a plain folder name of at most 200 bytes" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "command", [("train", "--lockstep"), ("train",), ("experiment", "cells.toml"), ("resume", "by\udcff/run")]
)
def test_a_folder_in_which_no_run_can_be_kept_is_refused_before_anything_is_made(dase, tmp_path, command):
    write_run(tmp_path / "by\udcff", "run", flat(1))
    (tmp_path / "cells.toml").write_text("[matrix]\nseeds = 1\n")
    before = sorted(tmp_path.rglob("*"))
    code, _, err = dase(*command, *([] if "resume" in command else ["--runs", "by\udcff"]))
    assert code == 2
    assert f"error: the path {tmp_path}/by\\udcff" in err
    assert "is not UTF-8, so no run can be kept there; choose another one\n" in err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("train --name ''", "--name"),
        ("train --name=", "--name"),
        ("train --name '  '", "--name"),
        ("train --runs ''", "--runs"),
        ("train --steps ''", "--steps"),
        ("config --config ''", "--config"),
        ("config --preset ''", "--preset"),
        ("config --set ''", "--set"),
        ("node --role replay --data-dir ''", "--data-dir"),
        ("node --role replay --run-id '' --listen 127.0.0.1:0", "--run-id"),
        ("node --role learner --replay ''", "--replay"),
        ("resume ''", "an argument"),
        ("compare runs/a ''", "an argument"),
    ],
)
def test_an_empty_value_is_not_taken_for_a_flag_that_was_left_out(dase, command, named):
    told = f"error: {named} is empty; give it a value, or leave it out\n"
    assert dase(*shlex.split(command)) == (2, "", told)


@pytest.mark.parametrize(
    ("role", "flag", "value"),
    [
        ("replay", "--env", "Pendulum-v1"),
        ("replay", "--set", "replay.capacity=5"),
        ("replay", "--steps", 5),
        ("replay", "--agent", 0),
        ("learner", "--capacity", 5),
        ("learner", "--data-dir", "d"),
        ("learner", "--sync-every", 5),
        ("learner", "--listen", "127.0.0.1:1"),
        ("learner", "--envs", 2),
        ("actor", "--run-dir", "d"),
        ("actor", "--gpu", 0),
        ("evaluator", "--gpu", 0),
        ("evaluator", "--envs", 2),
    ],
)
def test_a_flag_of_another_role_is_refused_rather_than_ignored(dase, role, flag, value):
    code, _, err = dase("node", "--role", role, flag, value)
    assert code == 2
    assert f"{flag} is not for --role {role}" in err


def refusal_of_a_replay(*arguments: object) -> str:
    """What a replay says that ends by itself at its start."""
    command = [sys.executable, "-m", "dase_grpc", "node", "--role", "replay", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.mark.slow
def test_a_port_in_use_is_told_in_one_sentence():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert f"error: cannot listen on {address} (in use" in refusal_of_a_replay("--listen", address)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--listen", "0.0.0.0:0"), "error: 0.0.0.0:0 can be reached from other machines"),
        (("--listen", "127.0.0.1:0", "--metrics-host", "0.0.0.0", "--metrics-port", 9_123), "0.0.0.0:9123"),
    ],
)
def test_listening_where_others_can_connect_needs_a_word(arguments, says):
    told = refusal_of_a_replay(*arguments)
    assert says in told
    assert "--insecure" in told
