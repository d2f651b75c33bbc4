"""What is TD3's own: the order of an update, smoothed targets, and what is saved, down to the sentences."""

import numpy as np
import pytest
import torch
from learning.td3_cases import (
    CPU,
    SCHEMA,
    TINY,
    B,
    N,
    as_batch,
    assert_same,
    columns,
    make,
    numpy_state,
    weights,
)
from learning.td3_oracle import OracleTD3

from dase_grpc.learning.agents.batch import Batch
from dase_grpc.learning.agents.td3 import TD3, target_value
from dase_grpc.learning.envs.steps import NStep

ONES = torch.ones(B)


def networks_of(agent):
    return agent._target_actor_pass, agent._target_critic_pass


def test_one_float32_update_agrees_with_the_float64_equations():
    agent = make()
    oracle = OracleTD3(numpy_state(agent), TINY)
    data, weight, noise = columns(), weights(), np.random.default_rng(2).normal(size=(B, N))
    batch = as_batch(data)
    rounded = {name: getattr(batch, name).numpy().astype(float) for name in data}
    weight, noise = weight.astype(np.float32), noise.astype(np.float32)
    target = target_value(*networks_of(agent), batch, torch.from_numpy(noise), config=TINY)
    np.testing.assert_allclose(target.numpy(), oracle.target(rounded, noise), atol=1e-6)
    losses = agent.update_with(batch, torch.from_numpy(weight), torch.from_numpy(noise))
    expected = oracle.update(rounded, weight.astype(float), noise.astype(float))
    assert losses["critic_loss"].item() == pytest.approx(expected["critic_loss"], rel=1e-6)


@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_the_target_of_rows_of_n_steps_is_the_n_step_return_worked_out_by_hand(scale):
    """An episode of B steps that terminates: r_t + γ r_t+1 + ... + γ^k min Q' where it has not ended."""
    n, config = 3, TINY.model_copy(update={"reward_scale": scale})
    agent, steps = make(config), NStep(SCHEMA, n=n, discount=config.gamma)
    data = columns() | {"bootstrap": (np.arange(B) < B - 1).astype(float)}
    single, rows = as_batch(data), []
    for at in range(B):
        row = np.concatenate([np.atleast_1d(data[name][at]) for name in data] + [np.zeros(2)])
        rows += steps.step(row.astype(np.float32), ended=at == B - 1)
    batch, noise = Batch.from_rows(SCHEMA, torch.from_numpy(np.array(rows))), np.zeros((B, N), np.float32)
    assert torch.equal(batch.state_action, single.state_action)
    target = target_value(*networks_of(agent), batch, torch.from_numpy(noise), config=config)
    values = {**data, "reward": np.zeros(B), "bootstrap": np.ones(B)}
    then = OracleTD3(numpy_state(agent), config).target(values, noise.astype(float)) / config.gamma  # min Q'
    for at in range(B):
        k = min(n, B - at)
        expected = sum(scale * config.gamma**j * data["reward"][at + j] for j in range(k))
        if at + k < B:
            expected += config.gamma**k * then[at + k - 1]
        assert target[at].item() == pytest.approx(expected, abs=3e-6)


def test_target_actions_stay_within_bounds_whatever_the_noise():
    config = TINY.model_copy(update={"target_noise_clip": 50.0})
    networks, batch = networks_of(make(config)), as_batch(columns())
    highest = networks[1].both(torch.cat((batch.next_observation, torch.ones(B, N)), dim=1)).amin(dim=0)
    target = target_value(*networks, batch, torch.full((B, N), 40.0), config=config)
    torch.testing.assert_close(target, batch.reward + 0.99 * batch.bootstrap * highest)


def test_the_actor_and_the_targets_move_every_second_update():
    agent, batch = make(), as_batch(columns())
    for step in range(1, 7):
        before = agent.state_dict()
        losses = agent.update(batch, ONES)
        after = agent.state_dict()
        moved = {name.split(".")[0] for name in after if not torch.equal(before[name], after[name])}
        always = {"critic", "critic_optimizer", "updates", "target_noise"}
        delayed = {"actor", "actor_optimizer", "target_actor", "target_critic"}
        assert moved == (always | delayed if step % 2 == 0 else always)
        assert ("actor_loss" in losses) == (step % 2 == 0)
        assert agent.updates == step


def test_the_smoothing_noise_has_the_configured_deviation_and_is_new_each_time():
    config, batch, seen = TINY.model_copy(update={"target_noise": 0.2}), as_batch(columns()), []

    class Recording(TD3):
        def update_with(self, batch, weight, noise, *, actions):
            seen.append(noise.clone())
            return super().update_with(batch, weight, noise, actions=actions)

    agent = Recording(config, SCHEMA, seed=1, agent_id=0, device=CPU)
    for _ in range(300):
        agent.update(batch, ONES)
    values = torch.stack(seen)
    assert values.std().item() == pytest.approx(0.2, rel=0.03)
    assert values.mean().item() == pytest.approx(0, abs=0.01)
    assert not torch.equal(seen[0], seen[1])


def test_a_state_that_does_not_fit_is_refused_in_one_sentence_and_changes_nothing():
    agent = make()
    good = agent.state_dict()
    wider = make(TINY.model_copy(update={"hidden": (7, 5)}))
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
