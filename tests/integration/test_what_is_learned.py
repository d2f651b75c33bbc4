"""Whole runs in lockstep on worlds whose answer is known."""

import threading
from pathlib import Path

import pytest
from small import new_run, small_config

from dase_grpc.config.algorithms import ALGORITHMS
from dase_grpc.config.resolve import RunConfig
from dase_grpc.launch.evaluate import evaluate_checkpoint
from dase_grpc.launch.lockstep import open_lockstep, run_lockstep
from dase_grpc.runs.directory import AgentDirectory
from dase_grpc.runs.logs import read_evaluations, read_metrics

pytestmark = pytest.mark.slow


def trained(root: Path, config: RunConfig) -> list[AgentDirectory]:
    directory = new_run(root, config)
    with open_lockstep(config, directory) as run:
        run_lockstep(run, threading.Event(), lambda: None)
    return directory.agents()


def q_values(agent: AgentDirectory) -> list[float]:
    return [record["q_mean"] for record in read_metrics(agent.metrics.path) if record["q_mean"] is not None]


QUICK_CRITIC = {
    "agent__hidden": [32, 32],
    "agent__critic_lr": 3e-3,
    "agent__tau": 0.3,
    "agent__policy_delay": 1,
    "eval__every": 10_000,
    "train__log_every": 250,
}


def test_q_tends_to_one_over_one_minus_gamma_through_a_time_limit_that_is_not_observed(tmp_path):
    config = small_config("worlds:ConstantReward", train__steps=2_000, **QUICK_CRITIC)
    assert config.agent.gamma == 0.99
    for agent in trained(tmp_path, config):
        assert read_evaluations(agent.evaluations.path).return_mean.tolist() == [10.0, 10.0]
        assert q_values(agent)[-1] == pytest.approx(100, abs=4)


def test_q_stays_below_the_episode_length_where_episodes_are_terminated(tmp_path):
    config = small_config("worlds:Terminating", train__agents=1, train__steps=1_500, **QUICK_CRITIC)
    (agent,) = trained(tmp_path, config)
    assert 3 < q_values(agent)[-1] < 10


@pytest.mark.parametrize("upper", [False, True])
def test_actions_at_both_ends_of_an_uneven_box_are_reached(tmp_path, upper):
    config = small_config(
        "worlds:EndpointAction",
        env__kwargs={"upper": upper},
        train__steps=1_000,
        agent__hidden=[32, 32],
        agent__actor_lr=3e-3,
        agent__critic_lr=3e-3,
        agent__start_steps=200,
        eval__every=500,
        eval__episodes=1,
    )
    for agent in trained(tmp_path, config):
        first, *_, last = read_evaluations(agent.evaluations.path).return_mean
        assert first < -5
        assert last > -0.1  # ten steps, three components: each within 0.003 of its end


GOAL = {
    "td3": {"agent__actor_lr": 3e-3},
    "sac": {"agent__actor_lr": 3e-3},
    # Without delay and smoothing DDPG wants calmer settings than the other two to be sure of the goal.
    "ddpg": {
        "agent__actor_lr": 1e-3,
        "agent__hidden": [32, 32],
        "agent__batch_size": 64,
        "agent__gamma": 0.9,
        "agent__tau": 0.05,
        "agent__normalise_observations": True,
    },
}


@pytest.mark.parametrize(
    "algorithm", [pytest.param(name, marks=[] if name == "td3" else pytest.mark.long) for name in ALGORITHMS]
)
def test_two_agents_learn_to_reach_the_goal_and_what_is_kept_acts_alike(tmp_path, algorithm):
    settings = {"agent__algorithm": algorithm, "agent__critic_lr": 3e-3, **GOAL[algorithm]}
    config = small_config(train__steps=1_000, agent__start_steps=200, **settings)
    agents = trained(tmp_path, config)
    for agent, kept in zip(agents, evaluate_checkpoint(tmp_path / "run", config.eval.episodes), strict=True):
        curve = read_evaluations(agent.evaluations.path).return_mean
        assert curve[-3:].mean() > -3
        assert curve[-3:].mean() > curve[0] + 5
        assert kept.evaluation.return_mean == pytest.approx(curve[-1], rel=1e-5)
