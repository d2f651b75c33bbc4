"""What is DDPG's own: one late-action critic, no noise, no delay, L2 on all of the critic."""

import numpy as np
import torch
from learning.agent_cases import CONFIGS, make, noises, tiny, update_by
from learning.td3_cases import B, as_batch, columns, weights

from dase_grpc.config.algorithms import AgentConfig
from dase_grpc.config.presets import preset
from dase_grpc.config.resolve import resolve
from dase_grpc.learning.agents.ddpg import target_value

DDPG = CONFIGS["ddpg"]


def test_there_is_one_critic_and_no_noise_in_the_state():
    state = make(DDPG).state_dict()
    assert state["critic.weight.0"].shape == (3, 6)
    assert state["critic.weight.1"].shape == (6, 5)
    assert state["critic.action_weight"].shape == (2, 5)
    assert not [name for name in state if "noise" in name]


def test_the_paper_preset_builds_400_and_300_units_with_the_action_beside_the_400():
    config = resolve(preset("paper/ddpg")).agent
    state = make(config).state_dict()
    assert state["actor.weight.1"].shape == (300, 400)
    assert state["critic.weight.1"].shape == (400, 300)
    assert state["critic.action_weight"].shape == (2, 300)
    assert "normaliser.mean" in state


def test_the_target_bootstraps_after_truncation_and_not_after_termination():
    agent, data = make(CONFIGS["ddpg raw"], dtype=torch.float64), columns()
    networks = agent._target_actor_pass, agent._target_critic_pass
    for bootstrap in (0.0, 1.0):
        batch = as_batch(data | {"bootstrap": np.full(B, bootstrap)}, torch.float64)
        value = networks[1].value(batch.next_observation, networks[0].actions(batch.next_observation))
        target = target_value(*networks, batch, config=AgentConfig(algorithm="ddpg"))
        torch.testing.assert_close(target, batch.reward + 0.99 * bootstrap * value)
        assert not target.requires_grad


def test_weight_decay_pulls_weights_and_biases_of_the_critic_alone():
    plain, decayed = (make(tiny("ddpg", critic_weight_decay=d), dtype=torch.float64) for d in (0.0, 1e3))
    start = decayed.state_dict()
    for agent in (plain, decayed):
        update_by(agent, columns(), weights(), noises(DDPG))
    moved = decayed.state_dict()
    for name in [name for name in start if name.startswith("critic.")]:
        assert (moved[name].abs() < start[name].abs()).float().mean() > 0.9, name
    gradient = (
        moved["critic_optimizer.bias.0.exp_avg"] - plain.state_dict()["critic_optimizer.bias.0.exp_avg"]
    )
    torch.testing.assert_close(gradient, 0.1 * 1e3 * start["critic.bias.0"])


def test_rewards_are_scaled_in_the_target_alone():
    data = columns()
    scaled, given = make(tiny("ddpg", reward_scale=4.0)), make(tiny("ddpg"))
    a = scaled.update(as_batch(data), torch.ones(B))
    b = given.update(as_batch(data | {"reward": 4 * data["reward"]}), torch.ones(B))
    for name in a:
        torch.testing.assert_close(a[name], b[name])
