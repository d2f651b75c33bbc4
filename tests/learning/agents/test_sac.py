"""What is the deterministic SAC's own: noise inside the sample, no target actor, the lower critic."""

import pytest
import torch
from learning.agent_cases import CONFIGS, make
from learning.td3_cases import CPU, SCHEMA, B, N, as_batch, columns

from dase_grpc.config.presets import preset
from dase_grpc.config.resolve import resolve
from dase_grpc.learning.agents.sac import SAC, sample, target_value

CONFIG = CONFIGS["sac"]


def test_there_are_two_critics_and_no_target_actor():
    state = make(CONFIG).state_dict()
    assert state["critic.weight.0"].shape == (2, 5, 6)
    assert not torch.equal(*state["critic.weight.0"])
    assert not [name for name in state if name.startswith("target_actor")]


def test_a_sample_lies_within_the_clip_around_the_mean_and_within_the_bounds():
    agent, observation = make(CONFIG), 5 * torch.randn(500, 3, generator=torch.Generator())
    mean = agent.policy_actions(observation)
    noise = torch.randn(500, N, generator=torch.Generator())
    drawn = sample(agent._actor, observation, noise, config=CONFIG)
    torch.testing.assert_close(drawn, (mean + noise.clamp(-0.25, 0.25)).clamp(-1, 1))
    assert (drawn - mean).abs().max() <= 0.25 + 1e-6
    assert drawn.abs().max() <= 1
    bound = agent.policy_actions(1e4 * observation)
    edge = sample(agent._actor, 1e4 * observation, 9 * bound.sign(), config=CONFIG)
    assert torch.equal(edge, bound.sign())


def test_noise_is_of_the_configured_deviation_new_for_each_row_update_and_use():
    seen = []

    class Recording(SAC):
        def update_with(self, batch, weight, next_noise, noise, *, actions):
            seen.append(torch.stack((next_noise, noise)))
            return super().update_with(batch, weight, next_noise, noise, actions=actions)

    agent = Recording(CONFIG, SCHEMA, seed=1, agent_id=0, device=CPU)
    for _ in range(200):
        agent.update(as_batch(columns()), torch.ones(B))
    values = torch.stack(seen)
    assert values.shape == (200, 2, B, N)
    assert values.std().item() == pytest.approx(0.1, rel=0.03)
    assert values.mean().item() == pytest.approx(0, abs=0.005)
    assert len(values.unique()) > 0.99 * values.numel()


def test_the_target_takes_the_agents_own_actor_and_the_lower_target_critic():
    agent, batch = make(CONFIG, seed=4, dtype=torch.float64), as_batch(columns(), torch.float64)
    noise = torch.randn(B, N, dtype=torch.float64, generator=torch.Generator())
    target = target_value(agent._target_actor_pass, agent._target_critic_pass, batch, noise, config=CONFIG)
    action = sample(agent._target_actor_pass, batch.next_observation, noise, config=CONFIG)
    both = agent._target_critic_pass.both(torch.cat((batch.next_observation, action), dim=1))
    assert 0 < (both[0] < both[1]).sum() < B
    expected = 5 * batch.reward + 0.99 * batch.bootstrap * torch.minimum(*both)
    torch.testing.assert_close(target, expected)
    assert not target.requires_grad


def test_networks_start_by_xavier_with_biases_of_zero():
    state = make(resolve(preset("paper/sac")).agent).state_dict()
    for name, inputs, outputs in (("actor", 3, 256), ("critic", 5, 256)):
        bound = (6 / (inputs + outputs)) ** 0.5
        weight = state[f"{name}.weight.0"]
        assert 0.95 * bound < weight.abs().max() <= bound
        assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)
        biases = [value for key, value in state.items() if key.startswith(f"{name}.bias")]
        assert len(biases) == 3
        assert not any(bias.any() for bias in biases)
