"""What a learner acts by: copies of its policy on the host, at most one update old."""

import numpy as np
import pytest
import torch
from learning.agent_cases import CONFIGS, make, tiny
from learning.lazy_lanes import World
from learning.td3_cases import CPU, SCHEMA, B, M, as_batch, columns

from dase_grpc.learning.agents.snapshots import LearnersGuide, Snapshots

ONES = torch.ones(B)
OBSERVATION = np.random.default_rng(1).normal(size=(4, M)).astype(np.float32)


def snapshots_of(agent, *, lag, lane=None):
    return Snapshots(agent, agent.config, SCHEMA, CPU, lag=lag, lane=lane)


def acts(guide):
    behaviour = guide.behaviour()
    return behaviour.version, behaviour.policy.act(OBSERVATION)


@pytest.fixture(params=["td3", "ddpg", "sac normalised"])
def agent(request):
    return make(CONFIGS[request.param])


@pytest.mark.parametrize("lag", [0, 1])
def test_it_acts_as_the_agent_did_so_many_updates_ago_and_says_which_version_that_is(agent, lag):
    guide = snapshots_of(agent, lag=lag)
    history = [agent.act(OBSERVATION)]
    for step in range(8):
        version, actions = acts(guide)
        assert version == max(0, step - lag)
        assert np.array_equal(actions, history[version])
        agent.update(as_batch(columns(step)), ONES)
        guide.updated()
        history.append(agent.act(OBSERVATION))


def test_the_agent_itself_is_what_is_acted_by_without_snapshots(agent):
    guide = LearnersGuide(agent)
    agent.update(as_batch(columns()), ONES)
    guide.updated()
    assert guide.behaviour().policy is agent
    assert guide.behaviour().version == 1
    assert guide.tensors() == {}


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("seed", range(8))
def test_copies_that_arrive_late_never_mix_two_versions(seed, lag):
    agent, world = make(tiny("td3", policy_delay=1)), World(seed)
    lane = world.lane()
    guide = snapshots_of(agent, lag=lag, lane=lane)
    values, history = agent.policy.flat.values, []
    values.fill_(0.0)  # every parameter of version k is k / 100
    for number in range(1, 12):
        version, actions = acts(guide)
        history.append(version)
        with torch.no_grad():
            expected = make(tiny("td3", policy_delay=1))
            expected.policy.flat.values.fill_(version / 100)
        assert np.array_equal(actions, expected.act(OBSERVATION))
        agent.updates = number
        lane.do(lambda number=number: values.fill_(number / 100))
        guide.updated()
    assert history == [max(0, number - lag) for number in range(11)]


def test_acting_one_update_behind_waits_for_no_update_but_the_one_before():
    agent, world = make(tiny("td3")), World(0)
    world.drift = lambda: None
    lane = world.lane()
    guide = snapshots_of(agent, lag=1, lane=lane)
    guide.behaviour()
    done = []
    for number in range(1, 6):
        lane.do(lambda number=number: done.append(number))
        agent.updates = number
        guide.updated()
        assert guide.behaviour().version == number - 1
        assert done == list(range(1, number))


def test_a_resumed_learner_acts_by_the_very_policy_that_the_saved_one_would_have(agent):
    guide = snapshots_of(agent, lag=1)
    acts(guide)
    for step in range(3):
        agent.update(as_batch(columns(step)), ONES)
        guide.updated()
    saved = {name: tensor.clone() for name, tensor in guide.tensors().items()}
    other = make(agent.config, seed=9)
    other.load_state_dict(agent.state_dict())
    resumed = snapshots_of(other, lag=1)
    for name, tensor in resumed.tensors().items():
        tensor.copy_(saved[name])
    resumed.resumed()
    for step in range(3, 6):
        (version, actions), (again, same) = acts(guide), acts(resumed)
        assert version == again == step - 1
        assert np.array_equal(actions, same)
        for each, its in ((agent, guide), (other, resumed)):
            each.update(as_batch(columns(step)), ONES)
            its.updated()
