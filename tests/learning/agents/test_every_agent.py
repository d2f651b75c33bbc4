"""What every algorithm promises as an agent, with and without a normaliser."""

from dataclasses import fields

import numpy as np
import pytest
import torch
from learning.agent_cases import AGENTS, CONFIGS, make, noises, tiny, update_by
from learning.td3_cases import CPU, SCHEMA, B, M, N, as_batch, assert_same, columns, weights

from dase_grpc.learning.agents.policy import policy_tensors
from dase_grpc.learning.agents.registry import Agent, load_policy, make_agent

ones = torch.ones(B)


@pytest.fixture(params=CONFIGS)
def config(request):
    return CONFIGS[request.param]


def test_the_table_builds_the_configured_agent(config):
    agent: Agent = make_agent(config, SCHEMA, seed=1, agent_id=0, device=CPU)
    assert type(agent) is AGENTS[config.algorithm]
    assert_same(agent.state_dict(), make(config).state_dict())


# Updates


def test_everything_moves_at_every_update(config):
    agent, beginnings = make(config), make(config).state_dict()
    for name in [n for n in beginnings if n.startswith("target_") and n != "target_noise.generator"]:
        assert torch.equal(beginnings[name], beginnings[name.removeprefix("target_")])
    for step in (1, 2, 3):
        before = agent.state_dict()
        agent.update(as_batch(columns(step)), ones)
        after = agent.state_dict()
        assert not [name for name in after if torch.equal(before[name], after[name])]
        assert agent.updates == step


def test_an_update_on_another_device_never_reads_a_tensor_on_the_host(config, unread):
    agent, batch = make(config, autograd=True), as_batch(columns())
    with unread():
        losses = [agent.update(batch, ones) for _ in range(3)]
    assert all(value.shape == () and not value.requires_grad for loss in losses for value in loss.values())
    assert {name for loss in losses for name in loss} == {"critic_loss", "actor_loss", "q_mean"}


def test_rows_stay_raw_and_weights_untouched(config):
    batch, weight = as_batch(columns()), ones.clone()
    before = {field.name: getattr(batch, field.name).clone() for field in fields(batch)}
    agent = make(config)
    agent.update(batch, weight)
    agent.policy_actions(batch.observation)
    assert_same({field.name: getattr(batch, field.name) for field in fields(batch)}, before)
    assert torch.equal(weight, ones)


@pytest.mark.parametrize("autograd", [False, True])
def test_the_actors_step_leaves_no_gradient_of_its_own_on_the_critic(config, autograd, monkeypatch):
    agent, batch = make(config, autograd=autograd), as_batch(columns())
    after_its_own_step: list[torch.Tensor] = []
    parameters = list(agent._critic.parameters())
    steps, name = (agent._alone._critic_steps, "_step") if autograd else (agent._critic_steps, "step")
    step = getattr(steps, name)

    def stepped(*args, **settings):
        step(*args, **settings)
        after_its_own_step.extend(parameter.grad.clone() for parameter in parameters)

    monkeypatch.setattr(steps, name, stepped)
    agent.update(batch, ones)
    for parameter, gradient in zip(parameters, after_its_own_step, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_target_networks_take_no_gradient_and_move_only_towards_their_networks(config):
    agent = make(config)
    before = agent.state_dict()
    agent.update(as_batch(columns()), ones)
    after = agent.state_dict()
    targets = [name for name in after if name.startswith(("target_actor.", "target_critic."))]
    assert {name.split(".")[0] for name in targets} >= {"target_critic"}
    for name in targets:
        moved = before[name] + config.tau * (after[name.removeprefix("target_")] - before[name])
        torch.testing.assert_close(after[name], moved, atol=1e-6, rtol=1e-5)
        assert not torch.equal(after[name], before[name])


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e30])
def test_only_the_ratios_of_the_weights_matter(config, scale):
    first, second = make(config, dtype=torch.float64), make(config, dtype=torch.float64)
    for step in range(3):
        noise = noises(config, step)
        update_by(first, columns(step), weights(), noise)
        update_by(second, columns(step), weights() * scale, noise)
    for name, value in first.state_dict().items():
        torch.testing.assert_close(value, second.state_dict()[name], atol=1e-9, rtol=1e-7)


def test_one_row_of_tiny_weight_among_zeros_gives_finite_numbers(config):
    weight = torch.zeros(B)
    weight[4] = 1e-37
    agent = make(config)
    for _ in range(4):
        losses = agent.update(as_batch(columns()), weight)
    assert all(torch.isfinite(value) for value in losses.values())
    assert all(torch.isfinite(value).all() for value in agent.state_dict().values())


# Seeds


def test_the_same_seed_gives_the_same_bits_and_leaves_global_random_state_alone(config):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    agents, batch = (make(config), make(config)), as_batch(columns())
    for _ in range(4):
        for agent in agents:
            agent.update(batch, ones)
    assert torch.equal(torch.get_rng_state(), before)
    assert_same(agents[0].state_dict(), agents[1].state_dict())


def test_another_agent_and_another_seed_give_other_numbers(config):
    states = [make(config, seed=s, agent_id=i).state_dict() for s, i in ((1, 0), (1, 1), (2, 0))]
    drawn = {"actor.weight.0", "critic.weight.0", "target_noise.generator"} & states[0].keys()
    assert len(drawn) == (2 if config.algorithm == "ddpg" else 3)
    for name in drawn:
        assert len({tuple(state[name].flatten().tolist()) for state in states}) == 3


# Acting


def test_act_agrees_with_policy_actions_and_follows_every_update_and_load(config):
    agent, observation = make(config), np.random.default_rng(1).normal(size=(10, M)).astype(np.float32)
    start, saved = agent.act(observation), agent.state_dict()
    agent.update(as_batch(columns()), ones)
    actions, tensor = agent.act(observation), agent.policy_actions(torch.from_numpy(observation))
    assert actions.shape == (10, N)
    assert actions.dtype == np.float32
    assert np.abs(actions).max() <= 1
    assert not tensor.requires_grad
    np.testing.assert_allclose(actions, tensor.numpy(), atol=1e-6)
    assert not np.array_equal(actions, start)
    agent.load_state_dict(saved)
    assert np.array_equal(agent.act(observation), start)


def test_acting_changes_nothing(config):
    agent, batch = make(config), as_batch(columns())
    agent.update(batch, ones)
    before = agent.state_dict()
    agent.act(np.full((3, M), 50, np.float32))
    agent.policy_actions(batch.observation)
    assert_same(agent.state_dict(), before)


def test_the_exported_policy_acts_exactly_like_the_agent(config):
    agent, observation = make(config), np.random.default_rng(1).normal(size=(9, M)).astype(np.float32) * 8
    for step in range(3):
        agent.update(as_batch(columns(step)), ones)
    state = agent.state_dict()
    exported = policy_tensors(state)
    assert len(exported) < len(state) / 2
    for saved in (exported, state):
        policy = load_policy(config, SCHEMA, saved, CPU)
        assert np.array_equal(policy.act(observation), agent.act(observation))


def test_a_policy_without_one_of_its_tensors_is_refused(config):
    exported = policy_tensors(make(config).state_dict())
    for name in exported:
        with pytest.raises(KeyError, match=f"lacks {name}"):
            load_policy(config, SCHEMA, {k: v for k, v in exported.items() if k != name}, CPU)


def test_a_policy_with_a_normaliser_is_not_loaded_as_one_without_or_the_other_way_round():
    for saved, wanted in (("ddpg", "ddpg raw"), ("sac", "sac normalised")):
        with pytest.raises((KeyError, ValueError), match="normaliser"):
            load_policy(CONFIGS[wanted], SCHEMA, make(CONFIGS[saved]).state_dict(), CPU)


# Saving and going on


@pytest.mark.parametrize("config", [*CONFIGS.values(), tiny("td3", policy_delay=2)])
def test_training_goes_on_bit_for_bit_after_a_load(config):
    weight, straight = torch.from_numpy(weights()).float(), make(config)
    for step in range(5):
        straight.update(as_batch(columns(step)), weight)
    saved = straight.state_dict()
    resumed = make(config, seed=77, agent_id=5)
    resumed.load_state_dict(saved)
    assert_same(resumed.state_dict(), saved)
    for step in range(5, 10):
        batch = as_batch(columns(step))
        assert_same(straight.update(batch, weight), resumed.update(batch, weight))
    assert resumed.updates == 10
    assert_same(straight.state_dict(), resumed.state_dict())


def test_a_fresh_agent_saves_the_same_names_as_a_trained_one(config):
    agent = make(config)
    before = {name: (value.shape, value.dtype) for name, value in agent.state_dict().items()}
    agent.update(as_batch(columns()), ones)
    assert {name: (value.shape, value.dtype) for name, value in agent.state_dict().items()} == before
    assert before["updates"] == ((), torch.int64)
    assert any(name.startswith("normaliser.") for name in before) == config.normalise_observations


def test_a_saved_state_does_not_change_while_training_goes_on(config):
    agent = make(config)
    saved = agent.state_dict()
    kept = {name: value.clone() for name, value in saved.items()}
    agent.update(as_batch(columns()), ones)
    assert_same(saved, kept)


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(config):
    agent = make(config)
    agent.update(as_batch(columns()), ones)
    good = agent.state_dict()
    others = [make(other).state_dict() for other in CONFIGS.values() if other != config]
    lacking = [{k: v for k, v in good.items() if k != name} for name in good]
    for state in (*others, *lacking, good | {"actor.weight.9": torch.zeros(1)}):
        if state.keys() != good.keys():
            with pytest.raises((KeyError, ValueError)):
                agent.load_state_dict(state)
            assert_same(agent.state_dict(), good)


# Trivial environments


@pytest.mark.parametrize("algorithm", AGENTS)
@pytest.mark.parametrize(("bootstrap", "value"), [(1.0, 10.0), (0.0, 1.0)])
@pytest.mark.slow
def test_a_constant_reward_is_worth_its_discounted_sum(algorithm, bootstrap, value):
    agent = make(tiny(algorithm, hidden=(16, 16), gamma=0.9, tau=0.05, reward_scale=2.0))
    data = columns() | {name: np.zeros((B, M)) for name in ("observation", "next_observation")}
    batch = as_batch(data | {"reward": np.full(B, 0.5), "bootstrap": np.full(B, bootstrap)})
    for _ in range(1500):
        losses = agent.update(batch, ones)
    assert losses["q_mean"].item() == pytest.approx(value, rel=0.05)


@pytest.mark.parametrize("algorithm", AGENTS)
@pytest.mark.slow
def test_the_actor_finds_the_best_action_of_a_continuous_bandit(algorithm):
    agent, best = make(tiny(algorithm, hidden=(32, 32), actor_lr=1e-3, critic_lr=1e-2)), [0.3, -0.5]
    data = columns(count=256) | {name: np.zeros((256, M)) for name in ("observation", "next_observation")}
    reward = -np.square(data["action"] - best).sum(axis=1)
    batch = as_batch(data | {"reward": reward, "bootstrap": np.zeros(256)})
    for _ in range(1500):
        agent.update(batch, torch.ones(256))
    np.testing.assert_allclose(agent.act(np.zeros((1, M), np.float32))[0], best, atol=0.1)
