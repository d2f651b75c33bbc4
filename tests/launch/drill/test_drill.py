"""What a drill is told and what it says; the drill itself runs in tests/faults."""

import json
import random
import socket
import sys
from types import SimpleNamespace

import pytest
from contracts.sentences import refuses
from small import small_config

from dase_grpc.config.resolve import resolve
from dase_grpc.errors import (
    EnvironmentSpecError,
    NodeFailedError,
    RunDirectoryError,
    StaleLeaseError,
    UsageError,
)
from dase_grpc.launch.checks import check
from dase_grpc.launch.drill.cluster import DrillLearner, reserved_port
from dase_grpc.launch.drill.drill import (
    DrillOptions,
    DrillResult,
    drill_config,
    drill_here,
    expected,
    faults_of,
    sentence,
)
from dase_grpc.launch.drill.faults import STRIKES, Fault, FaultOutcome, one_round, strike
from dase_grpc.launch.processes import start_node

RECOVERED = FaultOutcome("cut", (0, 1), 2.5, 1.25, "heal")
STUCK = FaultOutcome("learner killed", (1,), 0.0, None, "", "agents 1 made no update within 120 s")


def test_a_run_is_made_ready_for_a_drill_and_keeps_what_is_the_users_own(tmp_path):
    config = small_config("worlds:EndpointAction", env__kwargs={"upper": True}, agent__hidden=[7])
    ready = drill_config(config, tmp_path)
    assert ready.env.kwargs["env_id"] == "worlds:EndpointAction"
    assert ready.env.kwargs["kwargs"] == {"upper": True}
    assert ready.agent.hidden == (7,)
    assert ready.train.agents == 2
    assert ready.train.steps > 10**8
    assert check(ready).observation_size == 2 + 3


def test_each_member_of_a_mixed_ensemble_starts_early_and_stores_single_steps(tmp_path):
    members = [
        {"algorithm": name, "start_steps": 500, "batch_size": 16, "n_step": 3} for name in ("td3", "sac")
    ]
    settings = small_config().model_dump(mode="json", exclude={"agent"})
    ready = drill_config(resolve(settings, {"members": members}), tmp_path)
    assert [(member.start_steps, member.n_step) for member in ready.members] == [(100, 1)] * 2
    assert ready.algorithms == ("td3", "sac")


def test_a_reserved_port_is_nobody_else_s_and_its_owner_may_listen_there_again_and_again():
    with reserved_port() as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        for _ in range(2):
            socket.create_server(("127.0.0.1", port)).close()
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))


@pytest.mark.parametrize("agents", [1, 2, 5])
def test_a_round_kills_every_node_and_does_each_other_harm_once(agents):
    plan = one_round(range(agents), random.Random(1))
    killed = [fault.agents for fault in plan if fault.kind == "learner killed"]
    assert killed == [(agent_id,) for agent_id in range(agents)]
    rest = [fault.kind for fault in plan if fault.kind != "learner killed"]
    assert sorted(rest) == sorted(["replay killed", "frozen, replaced", "black hole", "cut"])
    assert {fault.kind for fault in plan} <= set(STRIKES)


def test_the_faults_follow_from_the_seed():
    config = small_config()
    assert faults_of(config, rounds=2, seed=1) == faults_of(config, rounds=2, seed=1)
    assert faults_of(config, rounds=2, seed=1) != faults_of(config, rounds=2, seed=2)
    assert len(faults_of(config, rounds=3, seed=1)) == 3 * 6


@pytest.mark.parametrize(
    ("result", "good"),
    [
        (DrillResult([RECOVERED], problems=[]), True),
        (DrillResult([RECOVERED, STUCK], problems=[]), False),
        (DrillResult([RECOVERED], problems=["a transition is lost"]), False),
        (DrillResult([RECOVERED]), False),
        (DrillResult([RECOVERED], stopped=True), False),
    ],
)
def test_it_is_good_only_if_all_recovered_and_the_buffer_was_found_right(result, good):
    assert result.good is good
    assert json.loads(json.dumps(result.to_json()))["good"] is good


def test_an_outcome_is_one_line():
    assert sentence(RECOVERED) == "cut (agents 0, 1 for 2.5 s): trains again 1.2 s after the heal"
    assert "learner killed (agent 1): did not recover: agents 1 made no update" in sentence(STUCK)


def test_a_folder_that_exists_is_refused(tmp_path):
    with pytest.raises(RunDirectoryError, match="exists; choose another --dir"):
        drill_here(DrillOptions(small_config(), tmp_path))


def test_a_folder_that_cannot_be_made_is_refused_and_one_to_which_nothing_came_is_taken_away(tmp_path):
    (tmp_path / "file").touch()
    with refuses(RunDirectoryError, "cannot write the drill's folder", "file/drill"):
        drill_here(DrillOptions(small_config(), tmp_path / "file" / "drill"))
    with pytest.raises(UsageError):
        drill_here(DrillOptions(small_config("nowhere:Env"), tmp_path / "drill"))
    assert not (tmp_path / "drill").exists()


@pytest.mark.parametrize(
    ("agents", "rounds", "said"), [(1, 1, "about 75 s"), (2, 1, "about 90 s"), (4, 3, "about 6 min")]
)
def test_it_is_said_about_how_long_it_will_take(agents, rounds, said):
    assert expected(agents, rounds) == said


@pytest.fixture
def stopped_drill(monkeypatch, tmp_path):
    """Runs a drill whose cluster is made up and which is stopped when these outcomes are known."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()

    def run(outcomes, path=None):
        async def stopped(options, path, plan, tell):
            (path / "logs").mkdir(parents=True, exist_ok=True)
            return DrillResult(outcomes, stopped=True)

        monkeypatch.setattr("dase_grpc.launch.drill.drill.run_drill", stopped)
        return drill_here(DrillOptions(small_config(), path))

    return run


def test_a_drill_that_is_stopped_says_what_it_has_found_and_names_nothing_that_is_gone(
    stopped_drill, capsys, tmp_path
):
    assert stopped_drill([RECOVERED, RECOVERED]) == 130
    first, *others = capsys.readouterr().out.splitlines()
    assert "6 faults, about 90 s" in first
    assert others[-1] == (
        "the drill was stopped after 2 of 6 faults: all recovered; the buffer was not checked"
    )
    assert "FAILED" not in "".join(others)
    assert str(tmp_path) not in "".join(others)
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_drill_that_is_stopped_before_the_first_fault_shows_no_empty_table(stopped_drill, capsys):
    assert stopped_drill([]) == 130
    assert capsys.readouterr().out.splitlines()[1:] == ["the drill was stopped before the first of 6 faults"]


def test_a_drill_that_is_stopped_after_a_failure_keeps_and_names_its_logs(stopped_drill, capsys, tmp_path):
    assert stopped_drill([RECOVERED, STUCK]) == 130
    (kept,) = (tmp_path / "temporary").iterdir()
    said = capsys.readouterr().out
    assert "after 2 of 6 faults: 1 recovered; the buffer was not checked" in said
    assert f"logs, buffer and checkpoints are kept in {kept}" in said


def test_a_folder_of_the_users_own_stays_when_a_drill_is_stopped(stopped_drill, capsys, tmp_path):
    assert stopped_drill([RECOVERED], tmp_path / "mine") == 130
    assert f"are kept in {tmp_path / 'mine'}" in capsys.readouterr().out
    assert (tmp_path / "mine/logs").is_dir()


BREAKS_AT_ONCE = (sys.executable, "-c", "raise SystemExit('no such node')")


def test_a_cluster_that_cannot_start_is_said_and_its_logs_are_kept(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(NodeFailedError, match=r"replay could not start \(exit code 1\); .*\nno such node"):
        drill_here(DrillOptions(small_config(), program=BREAKS_AT_ONCE))
    (kept,) = tmp_path.iterdir()
    assert f"logs, buffer and checkpoints are kept in {kept}" in capsys.readouterr().out


def test_settings_that_are_refused_leave_no_folder_behind(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(EnvironmentSpecError):
        drill_here(DrillOptions(small_config("worlds:DiscreteAction")))
    assert list(tmp_path.iterdir()) == []


class Trains:
    """A cluster that trains on whatever happens, with one learner, a process of its own."""

    def __init__(self, learner):
        self.agents = [0]
        self.learners = {0: learner}

    async def until_training(self, agents, *, epochs=None, since=None):
        return 1.0

    async def epochs(self):
        return {0: 1}

    async def note_acknowledged(self, agents):
        pass

    async def start_learner(self, agent_id, *, elsewhere):
        assert elsewhere


@pytest.mark.parametrize(
    ("code", "recovered_s"), [(StaleLeaseError("fenced off").exit_code, 1.0), (0, None), (1, None)]
)
async def test_a_frozen_learner_has_to_end_as_one_that_is_fenced_off(tmp_path, code, recovered_s):
    script = f"import sys; sys.stderr.write('error: fenced off'); sys.exit({code})"
    node = await start_node("learner-0", (sys.executable, "-c", script), log=tmp_path / "log", threads=1)
    cluster = Trains(DrillLearner(0, node, tmp_path, 0))
    at_once = SimpleNamespace(uniform=lambda least, most: 0.0)
    outcome = await strike(cluster, Fault("frozen, replaced", (0,)), at_once)
    assert outcome.recovered_s == recovered_s, outcome
