"""What TD3 promises as an agent: the order of an update, seeds, acting, saving, trivial environments."""

from dataclasses import fields

import numpy as np
import pytest
import torch
from learning.agent_cases import as_stack
from learning.td3_cases import (
    CPU,
    SCHEMA,
    TINY,
    B,
    M,
    N,
    as_batch,
    assert_same,
    columns,
    make,
    weights,
)

from dase_grpc.config.algorithms import AgentConfig
from dase_grpc.learning.agents.td3 import TD3, actor_loss

# The order of an update


def test_the_actor_and_the_targets_move_every_second_update():
    agent, batch = make(), as_batch(columns())
    for step in range(1, 7):
        before = agent.state_dict()
        losses = agent.update(batch, torch.ones(B))
        after = agent.state_dict()
        moved = {name.split(".")[0] for name in after if not torch.equal(before[name], after[name])}
        always = {"critic", "critic_optimizer", "updates", "target_noise"}
        delayed = {"actor", "actor_optimizer", "target_actor", "target_critic"}
        assert moved == (always | delayed if step % 2 == 0 else always)
        assert ("actor_loss" in losses) == (step % 2 == 0)
        assert agent.updates == step


def test_the_actor_update_leaves_no_gradient_on_the_critics():
    config = TINY.model_copy(update={"policy_delay": 1})
    agent, batch = make(config), as_batch(columns())
    agent.update(batch, torch.ones(B))
    gradients = [parameter.grad.clone() for parameter in agent._critic.parameters()]
    actor_loss(*as_stack(agent), batch.as_stack().observation, torch.ones(1, B) / B).sum().backward()
    for parameter, gradient in zip(agent._critic.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_an_update_on_another_device_never_reads_a_tensor_on_the_host(monkeypatch):
    agent, batch, weight = make(autograd=True), as_batch(columns()), torch.ones(B)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("an update synchronised with the host")

    names = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__", "__array__")
    for name in names:
        monkeypatch.setattr(torch.Tensor, name, refuse)
    losses = [agent.update(batch, weight) for _ in range(4)]
    monkeypatch.undo()
    assert all(value.shape == () and not value.requires_grad for loss in losses for value in loss.values())


def test_the_smoothing_noise_has_the_configured_deviation_and_is_new_each_time():
    config = TINY.model_copy(update={"target_noise": 0.2})
    agent, batch, seen = make(config), as_batch(columns()), []

    class Recording(TD3):
        def update_with(self, batch, weight, noise, *, actions):
            seen.append(noise.clone())
            return super().update_with(batch, weight, noise, actions=actions)

    agent = Recording(config, SCHEMA, seed=1, agent_id=0, device=CPU)
    for _ in range(300):
        agent.update(batch, torch.ones(B))
    values = torch.stack(seen)
    assert values.std().item() == pytest.approx(0.2, rel=0.03)
    assert values.mean().item() == pytest.approx(0, abs=0.01)
    assert not torch.equal(seen[0], seen[1])


def test_a_batch_is_used_as_it_is_and_not_written_to():
    batch = as_batch(columns())
    before = {field.name: getattr(batch, field.name).clone() for field in fields(batch)}
    weight = torch.ones(B)
    make().update(batch, weight)
    assert_same({field.name: getattr(batch, field.name) for field in fields(batch)}, before)
    assert torch.equal(weight, torch.ones(B))


# Seeds


def test_the_same_seed_gives_the_same_bits_and_leaves_global_random_state_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    agents, batch = (make(), make()), as_batch(columns())
    for _ in range(4):
        for agent in agents:
            agent.update(batch, torch.ones(B))
    assert torch.equal(torch.get_rng_state(), before)
    assert_same(agents[0].state_dict(), agents[1].state_dict())


def test_another_agent_and_another_seed_give_other_networks_and_other_noise():
    states = [make(seed=s, agent_id=i).state_dict() for s, i in ((1, 0), (1, 1), (2, 0))]
    for name in ("actor.weight.0", "critic.weight.0", "target_noise.generator"):
        assert len({tuple(state[name].flatten().tolist()) for state in states}) == 3


def test_targets_start_equal_to_their_networks_and_the_twins_differ():
    state = make().state_dict()
    for name in [n for n in state if n.startswith("target_") and n != "target_noise.generator"]:
        assert torch.equal(state[name], state[name.removeprefix("target_")])
    assert not torch.equal(*state["critic.weight.0"])


# Acting


def test_act_agrees_with_policy_actions():
    agent = make()
    for count in (1, 10):
        observation = np.random.default_rng(count).normal(size=(count, M)).astype(np.float32)
        actions, tensor = agent.act(observation), agent.policy_actions(torch.from_numpy(observation))
        assert actions.shape == (count, N)
        assert actions.dtype == np.float32
        assert not tensor.requires_grad
        np.testing.assert_allclose(actions, tensor.numpy(), atol=1e-6)


def test_act_follows_every_update_and_every_load():
    config = TINY.model_copy(update={"policy_delay": 1})
    agent, observation = make(config), np.ones((1, M), np.float32)
    start, saved = agent.act(observation), agent.state_dict()
    agent.update(as_batch(columns()), torch.ones(B))
    assert not np.array_equal(agent.act(observation), start)
    agent.load_state_dict(saved)
    assert np.array_equal(agent.act(observation), start)


# Saving and going on


def test_training_goes_on_bit_for_bit_after_a_load():
    batch, weight = as_batch(columns()), torch.from_numpy(weights()).float()
    straight = make()
    for _ in range(5):
        straight.update(batch, weight)
    saved = straight.state_dict()
    resumed = make(seed=77, agent_id=5)
    resumed.load_state_dict(saved)
    assert_same(resumed.state_dict(), saved)
    for _ in range(6):
        assert_same(straight.update(batch, weight), resumed.update(batch, weight))
    assert resumed.updates == 11
    assert_same(straight.state_dict(), resumed.state_dict())


def test_a_fresh_agent_saves_the_same_names_as_a_trained_one():
    agent = make()
    before = {name: (value.shape, value.dtype) for name, value in agent.state_dict().items()}
    for _ in range(2):
        agent.update(as_batch(columns()), torch.ones(B))
    assert {name: (value.shape, value.dtype) for name, value in agent.state_dict().items()} == before
    assert before["updates"] == ((), torch.int64)
    assert before["target_noise.generator"][1] == torch.uint8


def test_a_saved_state_does_not_change_while_training_goes_on():
    agent = make()
    saved = agent.state_dict()
    kept = {name: value.clone() for name, value in saved.items()}
    for _ in range(2):
        agent.update(as_batch(columns()), torch.ones(B))
    assert_same(saved, kept)


def test_a_state_that_does_not_fit_is_refused_in_one_sentence_and_changes_nothing():
    agent = make()
    good = agent.state_dict()
    wider = TD3(TINY.model_copy(update={"hidden": (7, 5)}), SCHEMA, seed=1, agent_id=0, device=CPU)
    broken = [
        (KeyError, "lacks critic.bias.1", {k: v for k, v in good.items() if k != "critic.bias.1"}),
        (KeyError, "lacks updates", {k: v for k, v in good.items() if k != "updates"}),
        (KeyError, "lacks target_noise.generator", {k: v for k, v in good.items() if "noise" not in k}),
        (ValueError, r"holds actor.weight.9", good | {"actor.weight.9": torch.zeros(1)}),
        (ValueError, r"float32\[7, 3\] for actor.weight.0, not float32\[6, 3\]", wider.state_dict()),
        (ValueError, r"a list for updates", good | {"updates": [1]}),
        (ValueError, r"for updates, not int64", good | {"updates": torch.tensor(1.5)}),
        (ValueError, r"target_noise.generator, not uint8", good | {"target_noise.generator": torch.zeros(3)}),
    ]
    for error, words, state in broken:
        with pytest.raises(error, match=words):
            agent.load_state_dict(state)
        assert_same(agent.state_dict(), good)


def test_a_noise_state_of_another_kind_of_device_starts_a_reproducible_stream():
    state = make().state_dict() | {"target_noise.generator": torch.zeros(16, dtype=torch.uint8)}
    first, second, fresh = make(), make(), make()
    for agent in (first, second):
        agent.load_state_dict(state | {"updates": torch.tensor(40)})
    assert_same(first.state_dict(), second.state_dict())
    assert first.updates == 40
    ours, theirs = (a.state_dict()["target_noise.generator"] for a in (first, fresh))
    assert not torch.equal(ours, theirs)


# Trivial environments


@pytest.mark.parametrize(("bootstrap", "value"), [(1.0, 10.0), (0.0, 1.0)])
@pytest.mark.slow
def test_a_constant_reward_is_worth_its_discounted_sum(bootstrap, value):
    config = AgentConfig(hidden=(16,), critic_lr=1e-2, gamma=0.9, tau=0.05)
    agent = make(config)
    data = columns() | {name: np.zeros((B, M)) for name in ("observation", "next_observation")}
    batch = as_batch(data | {"reward": np.ones(B), "bootstrap": np.full(B, bootstrap)})
    for _ in range(2500):
        losses = agent.update(batch, torch.ones(B))
    assert losses["q_mean"].item() == pytest.approx(value, rel=0.03)


@pytest.mark.slow
def test_the_actor_finds_the_best_action_of_a_continuous_bandit():
    config = AgentConfig(hidden=(32,), actor_lr=1e-3, critic_lr=1e-2)
    agent, best = make(config), np.array([0.3, -0.5])
    data = columns(count=256) | {name: np.zeros((256, M)) for name in ("observation", "next_observation")}
    reward = -np.square(data["action"] - best).sum(axis=1)
    batch = as_batch(data | {"reward": reward, "bootstrap": np.zeros(256)})
    for _ in range(1500):
        agent.update(batch, torch.ones(256))
    np.testing.assert_allclose(agent.act(np.zeros((1, M), np.float32))[0], best, atol=0.1)
