"""The ensemble's policy: the proposal that all critics together value highest, and no other."""

import numpy as np
import pytest
import torch
from learning.agent_cases import CONFIGS, make
from learning.dpd_cases import Board, dpd_of
from learning.td3_cases import CPU, SCHEMA

from dase_grpc.learning.agents.ensemble import EnsemblePolicy

M = SCHEMA.observation_size
OBSERVATIONS = np.random.default_rng(0).normal(size=(40, M)).astype(np.float32)


def agents(*names: str) -> list:
    return [make(CONFIGS[name], seed=9, agent_id=agent_id) for agent_id, name in enumerate(names)]


def test_it_acts_by_the_proposal_with_the_highest_mean_value():
    members = agents("td3", "td3", "td3")
    found = EnsemblePolicy(members).act(OBSERVATIONS)
    chosen = set()
    for row, observation in enumerate(OBSERVATIONS):
        proposals = [agent.act(observation[None])[0] for agent in members]
        seen = torch.from_numpy(observation[None])
        means = [
            np.mean([float(agent.value(seen, torch.from_numpy(each[None]))) for agent in members])
            for each in proposals
        ]
        best = int(np.argmax(means))
        chosen.add(best)
        assert found[row] == pytest.approx(proposals[best], rel=1e-4, abs=1e-6)
    assert len(chosen) > 1, "the case does not tell proposals apart"


def test_one_agent_alone_acts_as_ever():
    (agent,) = agents("sac")
    assert np.array_equal(EnsemblePolicy([agent]).act(OBSERVATIONS), agent.act(OBSERVATIONS))


@pytest.mark.parametrize("names", [("td3", "sac normalised"), ("ddpg", "ddpg raw", "td3 normalised")])
def test_agents_of_several_algorithms_judge_in_the_environments_rewards(names):
    members = agents(*names)
    states = [(agent.config, agent.state_dict()) for agent in members]
    loaded = EnsemblePolicy.load(states, SCHEMA, CPU)
    found = loaded.act(OBSERVATIONS)
    assert np.array_equal(found, EnsemblePolicy(members).act(OBSERVATIONS))
    assert found.dtype == np.float32
    assert found.shape == (40, SCHEMA.action_size)
    assert np.abs(found).max() <= 1


def test_agents_that_distil_act_as_what_they_have_learned():
    board, members = Board(), agents("td3 normalised", "td3 normalised")
    states = [
        (agent.config, dpd_of(agent, board, agent_id=agent_id).state_dict())
        for agent_id, agent in enumerate(members)
    ]
    loaded = EnsemblePolicy.load(states, SCHEMA, CPU)
    assert np.array_equal(loaded.act(OBSERVATIONS), EnsemblePolicy(members).act(OBSERVATIONS))


def test_a_policy_alone_is_not_enough():
    (agent,) = agents("td3")
    with pytest.raises(KeyError):
        EnsemblePolicy.load([(agent.config, dict(agent.policy.named_tensors()))], SCHEMA, CPU)
