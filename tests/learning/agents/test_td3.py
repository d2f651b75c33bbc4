"""TD3 against the paper's equations worked out by hand (td3_oracle)."""

import numpy as np
import pytest
import torch
from learning.agent_cases import as_stack
from learning.td3_cases import TINY, B, N, as_batch, assert_same, columns, make, numpy_state, weights
from learning.td3_oracle import OracleTD3

from dase_grpc.learning.agents.td3 import actor_loss, critic_loss, target_value


@pytest.mark.parametrize("delay", [1, 2, 3])
def test_updates_agree_with_the_equations_worked_out_by_hand(delay):
    config = TINY.model_copy(update={"policy_delay": delay})
    agent = make(config, dtype=torch.float64)
    oracle = OracleTD3(numpy_state(agent), config)
    rng = np.random.default_rng(5)
    for step in range(1, 8):
        data, weight, noise = columns(step), weights(step), rng.normal(scale=0.6, size=(B, N))
        assert (np.abs(noise) > config.target_noise_clip).any()
        losses = agent.update_with(
            as_batch(data, torch.float64), torch.from_numpy(weight), torch.from_numpy(noise)
        )
        expected = oracle.update(data, weight, noise)
        assert losses.keys() == expected.keys()
        for name, value in expected.items():
            assert losses[name].item() == pytest.approx(value, rel=1e-9, abs=1e-12), (step, name)
        state = numpy_state(agent)
        for name, value in oracle.tensors().items():
            np.testing.assert_allclose(state[name], value, rtol=1e-9, atol=1e-11, err_msg=f"{step} {name}")
        assert state["critic_optimizer.weight.0.step"] == step
        assert state["actor_optimizer.weight.0.step"] == step // delay


def test_one_float32_update_agrees_with_the_float64_equations():
    agent = make()
    oracle = OracleTD3(numpy_state(agent), TINY)
    data, weight, noise = columns(), weights(), np.random.default_rng(2).normal(size=(B, N))
    batch = as_batch(data)
    rounded = {name: getattr(batch, name).numpy().astype(float) for name in data}
    weight, noise = weight.astype(np.float32), noise.astype(np.float32)
    target = target_value(
        agent._target_actor_pass, agent._target_critic_pass, batch, torch.from_numpy(noise), config=TINY
    )
    np.testing.assert_allclose(target.numpy(), oracle.target(rounded, noise), atol=1e-6)
    losses = agent.update_with(batch, torch.from_numpy(weight), torch.from_numpy(noise))
    expected = oracle.update(rounded, weight.astype(float), noise.astype(float))
    assert losses["critic_loss"].item() == pytest.approx(expected["critic_loss"], rel=1e-6)


def test_the_target_bootstraps_after_truncation_and_not_after_termination():
    agent = make(dtype=torch.float64)
    data = columns() | {"bootstrap": np.zeros(B)}
    noise = torch.zeros(B, N, dtype=torch.float64)
    networks = agent._target_actor_pass, agent._target_critic_pass
    terminated = target_value(*networks, as_batch(data, torch.float64), noise, config=TINY)
    np.testing.assert_array_equal(terminated, data["reward"])
    truncated = target_value(
        *networks, as_batch(data | {"bootstrap": np.ones(B)}, torch.float64), noise, config=TINY
    )
    s = torch.from_numpy(data["next_observation"])
    both = networks[1].both(torch.cat((s, networks[0].actions(s)), dim=1))
    torch.testing.assert_close(truncated, torch.from_numpy(data["reward"]) + 0.99 * both.amin(dim=0))


def test_target_noise_beyond_its_clip_has_no_further_effect():
    agent, batch = make(), as_batch(columns())
    networks = agent._target_actor_pass, agent._target_critic_pass
    at, beyond, below = (
        target_value(*networks, batch, torch.full((B, N), x), config=TINY) for x in (0.5, 9.0, 0.4)
    )
    assert torch.equal(at, beyond)
    assert not torch.equal(at, below)


def test_target_actions_stay_within_bounds_whatever_the_noise():
    config = TINY.model_copy(update={"target_noise_clip": 50.0})
    agent, batch = make(config), as_batch(columns())
    s = batch.next_observation
    networks = agent._target_actor_pass, agent._target_critic_pass
    highest = networks[1].both(torch.cat((s, torch.ones(B, N)), dim=1)).amin(dim=0)
    target = target_value(*networks, batch, torch.full((B, N), 40.0), config=config)
    torch.testing.assert_close(target, batch.reward + 0.99 * batch.bootstrap * highest)


def test_the_gradient_of_the_actor_loss_agrees_with_finite_differences():
    agent = make(dtype=torch.float64)
    observation = torch.from_numpy(columns()["observation"])
    share = torch.from_numpy(weights() / weights().sum())

    def loss() -> torch.Tensor:
        return actor_loss(*as_stack(agent), observation[None], share[None]).sum()

    loss().backward()
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


# Weights


def test_rows_of_weight_zero_have_exactly_no_influence():
    weight = torch.ones(B)
    weight[::3] = 0
    data, other = columns(), columns(9)
    mixed = {k: np.where((weight.numpy() == 0).reshape(-1, *[1] * (v.ndim - 1)), other[k], v)
             for k, v in data.items()}  # fmt: skip
    first, second = make(), make()
    for _ in range(4):
        a, b = first.update(as_batch(data), weight), second.update(as_batch(mixed), weight)
        assert_same(a, b)
    assert_same(first.state_dict(), second.state_dict())


def test_leaving_rows_of_weight_zero_out_gives_the_same_losses():
    data, weight, noise = columns(), torch.ones(B), torch.randn(B, N, generator=torch.Generator())
    weight[B // 2 :] = 0
    half = {name: values[: B // 2] for name, values in data.items()}
    config = TINY.model_copy(update={"policy_delay": 1})
    whole = make(config).update_with(as_batch(data), weight, noise)
    part = make(config).update_with(as_batch(half), torch.ones(B // 2), noise[: B // 2])
    for name in whole:
        torch.testing.assert_close(whole[name], part[name])


def test_weights_of_one_give_the_plain_means():
    agent, batch = make(), as_batch(columns())
    (actor, critic), whole = as_stack(agent), batch.as_stack()
    both, target = critic.both(whole.state_action)[:, 0], torch.randn(B, generator=torch.Generator())
    share = torch.ones(B) / B
    torch.testing.assert_close(
        critic_loss(both, target, share),
        torch.nn.functional.mse_loss(both[0], target) + torch.nn.functional.mse_loss(both[1], target),
    )
    action = agent.policy_actions(batch.observation)
    plain = -critic.both(torch.cat((batch.observation, action), dim=1)[None])[0, 0].mean()
    torch.testing.assert_close(actor_loss(actor, critic, whole.observation, share[None])[0], plain)


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e30])
def test_only_the_ratios_of_the_weights_matter(scale):
    weight = torch.from_numpy(weights()).float()
    first, second = make(dtype=torch.float64), make(dtype=torch.float64)
    batch = as_batch(columns(), torch.float64)
    for _ in range(2):
        a, b = first.update(batch, weight.double()), second.update(batch, weight.double() * scale)
    for name in a:
        torch.testing.assert_close(a[name], b[name])


def test_one_row_of_tiny_weight_among_zeros_gives_finite_numbers():
    weight = torch.zeros(B)
    weight[4] = 1e-37
    agent = make()
    for _ in range(4):
        losses = agent.update(as_batch(columns()), weight)
    assert all(torch.isfinite(value) for value in losses.values())
    assert all(torch.isfinite(value).all() for value in agent.state_dict().values())
