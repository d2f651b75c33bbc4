"""K agents updated at once against K agents of which each is updated by itself, by passes written out."""

import numpy as np
import pytest
import torch
from learning.agent_cases import AGENTS, CONFIGS, assert_near, noises, tiny
from learning.td3_cases import CPU, SCHEMA, B, as_batch, assert_same, columns, weights

from dase_grpc.learning.agents.batch import Batch
from dase_grpc.learning.agents.memory import StackedMemory
from dase_grpc.learning.agents.optimiser import Steps

K = 3
MORE = {
    "td3 delayed": tiny("td3", policy_delay=2, critic_weight_decay=0.1, hidden=(6,)),
    "ddpg with three hidden layers": tiny("ddpg", hidden=(6, 5, 4)),
}
ALL = range(K)


@pytest.fixture(params=CONFIGS | MORE)
def config(request):
    return (CONFIGS | MORE)[request.param]


class Pair:
    """A stack of K agents, and as many equal agents, each by itself."""

    def __init__(self, config, dtype=torch.float64):
        self.config, self.dtype = config, dtype
        self.memory = StackedMemory(K)
        make = AGENTS[config.algorithm]
        settings = {"seed": 1, "device": CPU, "dtype": dtype}
        self.agents = [
            make(config, SCHEMA, agent_id=k, memory=self.memory.of(k), **settings) for k in range(K)
        ]
        self.twins = [make(config, SCHEMA, agent_id=k, **settings) for k in range(K)]
        self.stack = self.agents[0].stack_of(self.memory)

    def batches(self, step):
        return [as_batch(columns(step * K + k), self.dtype) for k in range(K)]

    def update(self, step, *, live=ALL, spoil=lambda batches: None):
        """Updates both; what each of the live ones gives, by agent."""
        batches, dtype = self.batches(step), self.dtype
        spoil(batches)
        weight = [torch.from_numpy(np.roll(weights(), step + k)).to(dtype) for k in range(K)]
        noise = [
            [torch.from_numpy(drawn).to(dtype) for drawn in noises(self.config, step * K + k)]
            for k in range(K)
        ]
        turn = [k in live for k in range(K)]
        for k in live:
            self.agents[k].updates += 1
        moves = [turn[k] and self.agents[k]._moves_actor(self.agents[k].updates) for k in range(K)]
        found = self.stack.learn(
            stacked(batches),
            torch.stack(weight),
            [torch.stack(drawn) for drawn in zip(*noise, strict=True)],
            live=torch.tensor(turn),
            moves=torch.tensor(moves) if any(moves) else None,
        )
        expected = {k: self.twins[k].update_with(batches[k], weight[k], *noise[k]) for k in live}
        return {k: {name: found[name][k] for name in expected[k]} for k in live}, expected

    def assert_near(self, *, rel=1e-9, abs_=1e-10):
        for agent, twin in zip(self.agents, self.twins, strict=True):
            assert_near(agent.state_dict(), twin.state_dict(), rel=rel, abs_=abs_)


def stacked(batches):
    fields = vars(batches[0])
    return Batch(**{name: torch.stack([getattr(each, name) for each in batches]) for name in fields})


def test_stacked_agents_begin_as_they_would_by_themselves(config):
    pair = Pair(config, torch.float32)
    for agent, twin in zip(pair.agents, pair.twins, strict=True):
        assert_same(agent.state_dict(), twin.state_dict())


@pytest.mark.slow
def test_in_float64_many_updates_at_once_are_those_of_each_by_itself(config):
    pair = Pair(config)
    for step in range(50):
        found, expected = pair.update(step)
        for k in ALL:
            assert_near(found[k], expected[k], rel=1e-9, abs_=1e-10)
    pair.assert_near()


@pytest.mark.slow
def test_in_float32_many_updates_stay_by_those_of_each_by_itself_as_rounding_allows(config):
    small = config.model_copy(update={"actor_lr": 1e-4, "critic_lr": 1e-4, "critic_weight_decay": 0.0})
    pair = Pair(small, torch.float32)
    for step in range(50):
        pair.update(step % 20)
    pair.assert_near(rel=1e-3, abs_=1e-4)


def test_agents_whose_turn_it_is_not_stay_as_they_are_to_the_bit_and_the_others_learn(config):
    pair = Pair(config)
    for step in range(12):
        live = [k for k in ALL if k != step % K]
        before = pair.agents[step % K].state_dict()
        found, expected = pair.update(step, live=live)
        assert_same(pair.agents[step % K].state_dict(), before)
        for k in live:
            assert_near(found[k], expected[k], rel=1e-9, abs_=1e-10)
    pair.assert_near()


def test_a_step_that_is_not_finite_is_left_out_for_its_agent_alone(config):
    def spoil(batches):
        batches[1].reward[5] = float("nan")

    pair = Pair(config)
    pair.update(0)
    before = pair.agents[1].state_dict()
    pair.update(1, spoil=spoil)
    after = pair.agents[1].state_dict()
    unmoved = [name for name in after if name.startswith(("critic.", "critic_optimizer."))]
    assert_same({n: before[n] for n in unmoved}, {n: after[n] for n in unmoved})
    pair.update(2)
    pair.assert_near()
    assert [twin.take_steps()["critic"].left_out for twin in pair.twins] == [0, 1, 0]
    assert [int(agent.take_steps()["critic"].left_out) for agent in pair.agents] == [0, 1, 0]
    assert pair.agents[1].take_steps()["critic"] == Steps(0, 0)


def test_a_loss_too_large_for_adams_second_moment_is_left_out_too():
    pair = Pair(tiny("ddpg"), torch.float32)
    batches = pair.batches(0)
    batches[2].reward.fill_(1e17)
    ones = torch.ones(K, B)
    live = torch.ones(K, dtype=torch.bool)
    pair.stack.learn(stacked(batches), ones, [], live=live, moves=live)
    assert [agent.take_steps()["critic"].left_out for agent in pair.agents] == [0, 0, 1]


def test_each_agents_policy_is_asked_about_observations_of_its_own(config):
    pair = Pair(config)
    pair.update(0)
    batches = pair.batches(7)
    actions = pair.stack.policy_actions(torch.stack([each.observation for each in batches]))
    for k in ALL:
        torch.testing.assert_close(actions[k], pair.agents[k].policy_actions(batches[k].observation))


def test_a_stacked_agent_goes_on_from_what_one_by_itself_saved(config):
    pair = Pair(config)
    for step in range(3):
        for k, twin in enumerate(pair.twins):
            drawn = [torch.from_numpy(each) for each in noises(config, step)]
            twin.update_with(pair.batches(step)[k], torch.ones(B, dtype=torch.float64), *drawn)
    for agent, twin in zip(pair.agents, pair.twins, strict=True):
        agent.load_state_dict(twin.state_dict())
    for step in range(3, 6):
        pair.update(step)
    pair.assert_near()


def test_agents_of_other_sizes_do_not_fit_into_one_memory():
    memory = StackedMemory(2)
    make = AGENTS["td3"]
    make(tiny("td3"), SCHEMA, seed=1, agent_id=0, device=CPU, memory=memory.of(0))
    with pytest.raises(ValueError, match="of the others"):
        make(tiny("td3", hidden=(9, 5)), SCHEMA, seed=1, agent_id=1, device=CPU, memory=memory.of(1))
