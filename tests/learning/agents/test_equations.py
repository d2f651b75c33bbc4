"""Every algorithm against its equations worked out by hand (the oracles), in float64."""

from functools import partial

import numpy as np
import pytest
import torch
from learning.agent_cases import CONFIGS, ORACLES, as_stack, make, noises, tiny, update_by
from learning.td3_cases import B, columns, numpy_state, weights

from dase_grpc.learning.agents import ddpg, sac, td3

MORE = {
    "td3 delayed": tiny("td3"),
    "td3 with everything": tiny(
        "td3", critic_weight_decay=0.2, reward_scale=3.0, normalise_observations=True, policy_delay=3
    ),
    "ddpg with one hidden layer": tiny("ddpg", hidden=(6,), critic_weight_decay=0.1),
    "ddpg with three hidden layers": tiny("ddpg", hidden=(6, 5, 4), reward_scale=0.5),
    "sac in the humanoid": tiny("sac", reward_scale=20.0),
    "sac with everything": tiny(
        "sac", hidden=(6, 5, 4), critic_weight_decay=0.2, normalise_observations=True, policy_noise_clip=0.4
    ),
}
ALL = CONFIGS | MORE


def uneven(seed: int, count: int = B) -> dict[str, np.ndarray]:
    """Columns whose observations lie off the origin, are of different scales and have outliers."""
    data = columns(seed, count)
    for name in ("observation", "next_observation"):
        data[name] = data[name] * [3.0, 0.02, 1.0] + [10.0, 0.0, -2.0]
        data[name][::7] *= 6
    return data


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("shape", ["normal", "uneven"])
def test_updates_agree_with_the_equations_worked_out_by_hand(name, shape):
    config = ALL[name]
    agent = make(config, dtype=torch.float64)
    oracle = ORACLES[config.algorithm](numpy_state(agent), config)
    for step in range(1, 8):
        data = columns(step) if shape == "normal" else uneven(step)
        weight, noise = weights(step), noises(config, step)
        losses = update_by(agent, data, weight, noise)
        expected = oracle.update(data, weight, *noise)
        assert losses.keys() == expected.keys()
        for key, value in expected.items():
            assert losses[key].item() == pytest.approx(value, rel=1e-9, abs=1e-12), (step, key)
        state, by_hand = numpy_state(agent), oracle.tensors()
        for key, value in by_hand.items():
            np.testing.assert_allclose(state[key], value, rtol=1e-8, atol=1e-10, err_msg=f"{step} {key}")
        delay = config.policy_delay if config.algorithm == "td3" else 1
        assert state["critic_optimizer.weight.0.step"] == step
        assert state["actor_optimizer.weight.0.step"] == step // delay
        counters = {"updates", "target_noise.generator"}
        unseen = {key for key in state if key not in by_hand and not key.endswith(".step")} - counters
        assert not unseen, "the oracle does not know all of the state"


@pytest.mark.parametrize("name", ALL)
def test_actions_agree_with_the_network_worked_out_by_hand_on_raw_observations(name):
    config = ALL[name]
    agent = make(config, dtype=torch.float64)
    oracle = ORACLES[config.algorithm](numpy_state(agent), config)
    for step in range(1, 4):
        noise = noises(config, step)
        update_by(agent, uneven(step), weights(step), noise)
        oracle.update(uneven(step), weights(step), *noise)
    observation = uneven(9)["observation"].astype(np.float32)
    expected = oracle.act(observation.astype(float))
    np.testing.assert_allclose(agent.act(observation), expected, atol=1e-6)
    exact = agent.policy_actions(torch.from_numpy(observation.astype(float)))
    np.testing.assert_allclose(exact, expected, atol=1e-10)


@pytest.mark.parametrize("module", [td3, ddpg, sac])
def test_the_gradient_of_the_actor_loss_agrees_with_finite_differences(module):
    config = tiny(module.__name__.rpartition(".")[2])
    agent, share = make(config, dtype=torch.float64), torch.from_numpy(weights() / weights().sum())[None]
    given = [torch.from_numpy(columns()["observation"])[None], share]
    of_loss = module.actor_loss
    if module is sac:
        given.insert(1, 0.2 * torch.randn(1, B, 2, dtype=torch.float64, generator=torch.Generator()))
        of_loss = partial(of_loss, config=config)

    def loss() -> torch.Tensor:
        return of_loss(*as_stack(agent), *given).sum()

    loss().backward()
    assert not any(parameter.grad.any() for parameter in agent._critic.parameters())
    for parameter in agent._actor.parameters():
        gradient, flat = parameter.grad.flatten(), parameter.detach().view(-1)
        for index in range(flat.numel()):
            value, h = flat[index].item(), 1e-6
            flat[index] = value + h
            above = loss().item()
            flat[index] = value - h
            below = loss().item()
            flat[index] = value
            assert gradient[index].item() == pytest.approx((above - below) / (2 * h), abs=1e-8)


@pytest.mark.parametrize("name", ALL)
def test_weights_of_one_are_the_plain_algorithm_on_the_mixed_batch(name):
    config = ALL[name]
    agent = make(config, dtype=torch.float64)
    plain = ORACLES[config.algorithm](numpy_state(agent), config)
    for step in range(1, 5):
        noise = noises(config, step)
        losses = update_by(agent, uneven(step), np.ones(B), noise)
        for key, value in plain.update(uneven(step), None, *noise).items():
            assert losses[key].item() == pytest.approx(value, rel=1e-9, abs=1e-12)
    state = numpy_state(agent)
    for key, value in plain.tensors().items():
        np.testing.assert_allclose(state[key], value, rtol=1e-8, atol=1e-10, err_msg=key)


@pytest.mark.parametrize("name", ALL)
def test_external_rows_of_weight_zero_leave_the_plain_algorithm_on_the_internal_ones(name):
    config, internal = ALL[name], np.arange(B) % 3 != 1
    agent = make(config, dtype=torch.float64)
    plain = ORACLES[config.algorithm](numpy_state(agent), config)
    for step in range(1, 5):
        data, noise = uneven(step), noises(config, step)
        update_by(agent, data, internal.astype(float), noise)
        own = {key: values[internal] for key, values in data.items()}
        plain.update(own, None, *(values[internal] for values in noise))
    state = numpy_state(agent)
    for key, value in plain.tensors().items():
        np.testing.assert_allclose(state[key], value, rtol=1e-8, atol=1e-10, err_msg=key)
