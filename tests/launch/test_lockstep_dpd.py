"""Pairs that distil each other's policies, in lockstep: own data only, and the same bits twice."""

import threading
from pathlib import Path

import pytest
import torch
from launch.resuming import mixed, records
from small import new_run, small_config

from dase_grpc.config.resolve import RunConfig
from dase_grpc.config.sections import EnvConfig
from dase_grpc.launch.lockstep import (
    BUFFER_FILE,
    open_lockstep,
    run_lockstep,
)
from dase_grpc.learning.agents.dpd import PEER_VERSION
from dase_grpc.learning.agents.registry import load_policy
from dase_grpc.runs.checkpoint import STATE_FILE, latest, load_checkpoint
from dase_grpc.runs.directory import RunDirectory


def pair(**settings) -> RunConfig:
    return small_config(train__method="dpd", dpd__publish_every=10, **settings)


def run(root: Path, config: RunConfig, name: str = "run", **options) -> tuple[RunDirectory, dict]:
    directory = new_run(root, config, name)
    with open_lockstep(config, directory, **options) as opened:
        run_lockstep(opened, threading.Event(), lambda: None)
        sampled = dict(opened.store.traffic.sampled)
    return directory, sampled


CONFIGS = {
    "td3": pair(),
    "ddpg": pair(agent__algorithm="ddpg"),
    "td3 and sac": mixed("dpd", {"dpd": {"publish_every": 10}}),
}


@pytest.fixture(scope="module", params=CONFIGS)
def case(request, tmp_path_factory):
    config = CONFIGS[request.param]
    return (config, *run(tmp_path_factory.mktemp("pair"), config))


@pytest.mark.slow
def test_the_same_seed_gives_the_same_files_to_the_last_bit(case, tmp_path):
    config, directory, _ = case
    again, _ = run(tmp_path, config)
    for agent_id in (0, 1):
        states = [latest(each.agent(agent_id).checkpoints) / STATE_FILE for each in (directory, again)]
        assert states[0].read_bytes() == states[1].read_bytes()
        assert records(directory.agent(agent_id)) == records(again.agent(agent_id))
    assert (directory.replay / BUFFER_FILE).read_bytes() == (again.replay / BUFFER_FILE).read_bytes()


@pytest.mark.slow
def test_each_agent_learns_from_its_own_transitions_alone(case):
    config, directory, sampled = case
    updates = config.train.steps - config.agent.start_steps + 1
    assert sampled == {(agent, agent): updates * config.agent.batch_size for agent in (0, 1)}
    for agent_id in (0, 1):
        for record in records(directory.agent(agent_id)):
            assert record["similarity"] == {}
            assert record["similarity_weight"] is None
            assert (record["external_share"] or 0) == 0


def test_each_agent_distils_from_when_its_peer_has_first_shown_a_policy(case):
    _, directory, _ = case
    for agent_id, alone in ((0, 10), (1, 9)):  # agent 1 takes its turn after agent 0 has published
        read = records(directory.agent(agent_id))
        assert sum(record["undistilled_updates"] for record in read) == alone
        last = read[-1]
        assert 0 <= last["distilled_share"] <= 1
        assert last["refused_policies"] == 0
        assert 0 <= last["peer_lag"] <= 10
        state = load_checkpoint(latest(directory.agent(agent_id).checkpoints)).tensors
        assert state[PEER_VERSION].item() == 100
        assert state["updates"].item() == 101


def test_the_peers_networks_are_those_it_had_when_it_showed_them(tmp_path):
    config = mixed("dpd", {"dpd": {"publish_every": 101}})  # at the very last update
    directory, _ = run(tmp_path, config)
    first, second = (load_checkpoint(latest(directory.agent(each).checkpoints)).tensors for each in (0, 1))
    assert (first[PEER_VERSION].item(), second[PEER_VERSION].item()) == (-1, 101)
    held = {name.removeprefix("peer."): value for name, value in second.items() if name.startswith("peer.")}
    assert {name.split(".")[0] for name in held} == {"actor", "critic"}
    assert all(torch.equal(value, first[name]) for name, value in held.items())


def test_a_checkpoint_of_a_pair_gives_a_policy_like_any_other(case):
    config, directory, _ = case
    for agent_id in (0, 1):
        checkpoint = load_checkpoint(latest(directory.agent(agent_id).checkpoints))
        assert checkpoint.run_config == config
        assert checkpoint.config == config.for_agent(agent_id)
        policy = load_policy(
            checkpoint.config.agent, checkpoint.schema, checkpoint.tensors, torch.device("cpu")
        )
        action = policy.act(torch.zeros(1, checkpoint.schema.observation_size).numpy())
        assert action.shape == (1, checkpoint.schema.action_size)


@pytest.mark.slow
def test_what_the_peer_collects_changes_nothing_as_long_as_it_shows_no_policy(tmp_path):
    config = small_config(train__method="dpd", dpd__publish_every=1_000)
    random = {"agent": config.agent.model_copy(update={"start_steps": 121})}
    short = {"env": EnvConfig(id="worlds:PointGoal", kwargs={"length": 7})}
    states = []
    for changed in ({}, random, short):
        configs = [config.for_agent(0), config.for_agent(1).model_copy(update=changed)]
        directory, _ = run(tmp_path, config, f"run{len(states)}", configs=configs)
        states.append((latest(directory.agent(0).checkpoints) / STATE_FILE).read_bytes())
        assert sum(record["undistilled_updates"] for record in records(directory.agent(0))) == 101
    assert states[0] == states[1] == states[2]


@pytest.mark.slow
def test_a_pair_learns_in_pendulum(tmp_path):
    config = small_config(
        "Pendulum-v1",
        train__method="dpd",
        train__steps=500,
        agent__start_steps=200,
        eval__every=250,
        eval__max_episode_steps=200,
    )
    directory, _ = run(tmp_path, config)
    for agent_id in (0, 1):
        last = records(directory.agent(agent_id))[-1]
        assert last["updates"] == 301
        assert last["distillation_loss"] > 0
        assert 0 < last["distilled_share"] < 1
        assert last["confidence"] >= 1
