"""What DPD promises as an agent: when it distils and when not, what it takes from its peer, and saving."""

import logging

import numpy as np
import pytest
import torch
from contracts.sentences import assert_one_sentence
from learning.agent_cases import CONFIGS, make, tiny
from learning.dpd_cases import ONES, PEER_ID, Board, dpd_of, shift_values
from learning.td3_cases import CPU, SCHEMA, M, as_batch, assert_same, columns

from dase_grpc.config.algorithms import LARGEST
from dase_grpc.errors import ConfigError
from dase_grpc.learning.agents.dpd import NO_VERSION, PEER_VERSION, terms
from dase_grpc.learning.agents.policy import policy_tensors
from dase_grpc.learning.agents.registry import Agent, load_policy

NAMES = ("td3", "ddpg", "sac normalised")


@pytest.fixture(params=NAMES)
def config(request):
    return CONFIGS[request.param]


def pair_of(config, *, peer_config=None, autograd=None, **settings):
    """An agent that learns by DPD, the algorithm in it, its peer and the board."""
    own, board = make(config, autograd=autograd), Board()
    peer = make(peer_config or config, seed=2, agent_id=PEER_ID)
    agent = dpd_of(own, board, peer_config=peer_config, **settings)
    return agent, own, peer, board


def raised(peer, config, by: float):
    """The peer, with all its values raised."""
    shift_values(peer, config, by)
    return peer


# When it distils


def test_without_a_policy_of_the_peer_it_is_the_algorithm_alone(config):
    agent, plain = pair_of(config)[0], make(config)
    for step in range(4):
        batch = as_batch(columns(step))
        assert_same(agent.update(batch, ONES), plain.update(batch, ONES))
    state = agent.state_dict()
    assert_same({name: state[name] for name in plain.state_dict()}, plain.state_dict())
    assert agent.take_statistics() == {
        "distillation_loss": None,
        "distilled_share": None,
        "confidence": None,
        "peer_lag": None,
        "undistilled_updates": 4,
        "refused_policies": 0,
    }


@pytest.mark.parametrize("after_others", [False, True])
def test_no_state_is_distilled_on_where_the_peer_is_nowhere_better(config, after_others):
    agent, _, peer, board = pair_of(config)
    plain = make(config)
    if after_others:  # then Adam has moments that would move the actor without any gradient
        board.show(raised(peer, config, 1e3))
        agent.update(as_batch(columns(7)), ONES)
        agent.take_statistics()
        saved = agent.state_dict()
        plain.load_state_dict({name: saved[name] for name in plain.state_dict()})
        assert saved["distillation_optimizer.weight.0.exp_avg"].any()
    board.show(raised(peer, config, -1e6), version=2)
    optimizer = {n: t for n, t in agent.state_dict().items() if n.startswith("distillation_optimizer")}
    for step in range(3):
        batch = as_batch(columns(step))
        losses, alone = agent.update(batch, ONES), plain.update(batch, ONES)
        assert losses.pop("distillation_loss").item() == 0
        assert_same(losses, alone)
    state = agent.state_dict()
    assert_same({name: state[name] for name in plain.state_dict()}, plain.state_dict())
    assert_same({name: state[name] for name in optimizer}, optimizer)
    statistics = agent.take_statistics()
    assert (statistics["distilled_share"], statistics["confidence"]) == (0, None)


def test_a_peer_that_is_the_agent_itself_is_nowhere_better(config):
    agent, own, _, board = pair_of(config)
    for step in range(3):
        own.update(as_batch(columns(step)), ONES)
    board.show(own)
    observation = as_batch(columns(5)).observation
    agent._look_at_peer()
    before = {name: tensor.clone() for name, tensor in own.judgement.items()}
    assert agent._distil(observation, ONES).item() == 0
    assert_same(own.judgement, before)


@pytest.mark.slow
def test_every_state_is_distilled_on_where_the_peer_is_everywhere_better(config):
    agent, _, peer, board = pair_of(config, lr_factor=0.1)
    board.show(raised(peer, config, 1e6))
    batch = as_batch(columns())
    losses = [agent.update(batch, ONES)["distillation_loss"].item() for _ in range(200)]
    statistics = agent.take_statistics()
    assert statistics["distilled_share"] == 1
    assert statistics["confidence"] == pytest.approx(100)
    assert statistics["distillation_loss"] == pytest.approx(np.mean(losses))
    assert statistics["undistilled_updates"] == 0


@pytest.mark.slow
def test_distillation_alone_makes_the_policies_agree(config):
    agent, own, peer, board = pair_of(config)
    board.show(raised(peer, config, 1e3))
    agent._look_at_peer()
    observation = as_batch(columns()).observation
    losses = [agent._distil(observation, ONES).item() for _ in range(1_000)]
    assert losses[-1] < losses[0] / 100
    apart = own.policy_actions(observation) - peer.policy_actions(observation)
    assert apart.abs().max() < 0.3


def test_only_states_with_weight_are_distilled_on(config):
    weight = ONES.clone()
    weight[::2] = 0
    data, other = columns(), columns(9)
    data["observation"][::2] = other["observation"][::2]
    states = []
    for rows in (columns(), data):
        agent, _, peer, board = pair_of(config)
        board.show(raised(peer, config, 1e3))
        agent._look_at_peer()
        agent._distil(as_batch(rows).observation, weight)
        states.append(agent.state_dict())
    assert_same(*states)


def test_a_nan_in_the_agents_own_critic_distils_nothing_and_spoils_no_actor():
    config = CONFIGS["td3"]
    agent, own, peer, board = pair_of(config)
    board.show(peer)
    agent._look_at_peer()
    with torch.no_grad():
        list(own._critic.bias)[-1].fill_(torch.nan)
    assert agent._distil(as_batch(columns()).observation, ONES).item() == 0
    assert all(tensor.isfinite().all() for name, tensor in own.judgement.items() if "actor" in name)


def test_updates_never_read_a_tensor_on_the_host_between_two_looks_at_the_peer(config, unread):
    # as on a device that one would wait for
    agent, _, peer, board = pair_of(config, autograd=True)
    board.show(peer)
    batch = as_batch(columns())
    agent.update(batch, ONES)

    with unread():
        losses = [agent.update(batch, ONES) for _ in range(3)]
    assert all(value.shape == () and not value.requires_grad for loss in losses for value in loss.values())


def test_by_autograd_it_learns_and_distils_as_by_passes_written_out(config):
    states = []
    for autograd in (False, True):
        agent, _, peer, board = pair_of(config, autograd=autograd, states="all")
        board.show(peer)
        for step in range(3):
            agent.update(as_batch(columns(step)), ONES)
        states.append(agent.state_dict())
    first, second = states
    assert first["distillation_optimizer.weight.0.step"] == 3
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(second[name], first[name], rtol=1e-2, atol=1e-3, msg=name)


# What it takes from its peer, and shows


def test_it_shows_its_actor_critic_and_normaliser_every_so_many_updates(config):
    agent, own, _, board = pair_of(config, publish_every=2)
    for step in range(1, 6):
        agent.update(as_batch(columns(step)), ONES)
        shown = board.table.get(0)
        assert (shown.version if shown else 0) == step // 2 * 2
        if step == 4:
            assert_same(shown.tensors, {**own.judgement, **terms(config)})
    assert {name.split(".")[0] for name in shown.tensors} == (
        {"actor", "critic", "terms"} | ({"normaliser"} if config.normalise_observations else set())
    )


def test_what_is_shown_is_what_the_peer_takes(config):
    board = Board()
    pair = [make(config, agent_id=agent_id) for agent_id in (0, 1)]
    teacher = dpd_of(pair[1], board, agent_id=1, publish_every=1)
    student = dpd_of(pair[0], board)
    teacher.update(as_batch(columns()), ONES)
    student.update(as_batch(columns(1)), ONES)
    state = student.state_dict()
    assert state[PEER_VERSION].item() == 1
    taken = {name.removeprefix("peer."): t for name, t in state.items() if name.startswith("peer.")}
    assert_same(taken, {name: tensor.detach() for name, tensor in pair[1].judgement.items()})


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_policy_that_is_not_finite_is_refused_counted_and_said(config, bad, caplog):
    agent, _, peer, board = pair_of(config)
    board.show(peer, version=5)
    agent.update(as_batch(columns()), ONES)
    kept = agent.state_dict()
    spoilt = peer.judgement["critic.bias.0"].detach().clone()
    spoilt.view(-1)[0] = bad
    board.show(make(config, seed=3), version=6, **{"critic.bias.0": spoilt})
    with caplog.at_level(logging.WARNING, "dase"):
        for _ in range(3):
            agent.update(as_batch(columns()), ONES)
    (record,) = caplog.records
    assert_one_sentence(record.getMessage(), "policy 6 of agent 1", "not finite")
    assert agent.take_statistics()["refused_policies"] == 1
    assert agent.take_statistics()["refused_policies"] == 0
    state = agent.state_dict()
    same = [name for name in state if name.startswith("peer")]
    assert_same({name: state[name] for name in same}, {name: kept[name] for name in same})
    board.show(peer, version=7)
    agent.update(as_batch(columns()), ONES)
    assert agent.state_dict()[PEER_VERSION].item() == 7


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (tiny("td3", hidden=(7, 5)), "for actor.weight.0"),
        (tiny("ddpg"), "the saved state"),
        (tiny("td3", normalise_observations=True), "holds normaliser.mean"),
        (tiny("td3", gamma=0.5), "its agent.gamma is another"),
        (tiny("td3", reward_scale=2.0), "its agent.reward_scale is another"),
        (tiny("sac"), "its agent.algorithm is another"),
    ],
)
def test_a_peer_with_other_networks_or_values_than_configured_ends_the_run_in_one_sentence(other, words):
    agent, _, _, board = pair_of(CONFIGS["td3"])
    board.show(make(other, agent_id=PEER_ID), version=3)
    before = agent.state_dict()
    with pytest.raises(ConfigError) as error:
        agent.update(as_batch(columns()), ONES)
    assert_one_sentence(error.value, "policy 3 of agent 1", words, "same settings")
    assert_same(agent.state_dict(), before)


@pytest.mark.parametrize(
    "extreme",
    [{"max_confidence": LARGEST}, {"alpha": LARGEST}, {"alpha": LARGEST, "max_confidence": LARGEST}],
)
@pytest.mark.parametrize("by", [1e6, 0.0, -1e6])
def test_the_largest_settings_leave_the_networks_finite(extreme, by):
    config = CONFIGS["td3"]
    agent, own, peer, board = pair_of(config, states="all", **extreme)
    board.show(raised(peer, config, by))
    agent.update(as_batch(columns()), ONES)
    assert all(tensor.isfinite().all() for tensor in own.judgement.values())


def test_the_lag_is_how_many_updates_the_peers_policy_is_behind():
    agent, _, peer, board = pair_of(CONFIGS["td3"])
    board.show(peer, version=10)
    for _ in range(3):
        agent.update(as_batch(columns()), ONES)
    assert agent.take_statistics()["peer_lag"] == pytest.approx((-9 - 8 - 7) / 3)


# As any other agent


def test_it_is_an_agent_whose_exported_policy_acts_like_it(config):
    agent, own, peer, board = pair_of(config)
    typed: Agent = agent
    board.show(raised(peer, config, 1e3))
    for step in range(3):
        typed.update(as_batch(columns(step)), ONES)
    assert typed.updates == 3
    observation = np.random.default_rng(1).normal(size=(9, M)).astype(np.float32)
    state = agent.state_dict()
    for saved in (state, policy_tensors(state)):
        policy = load_policy(config, SCHEMA, saved, CPU)
        assert np.array_equal(policy.act(observation), agent.act(observation))
    assert policy_tensors(state).keys() == policy_tensors(own.state_dict()).keys()
    tensor = agent.policy_actions(torch.from_numpy(observation))
    np.testing.assert_allclose(tensor, agent.act(observation), atol=1e-6)


def test_training_goes_on_bit_for_bit_after_a_load(config):
    straight, _, peer, board = pair_of(config, peer_config=CONFIGS["sac"])
    board.show(raised(peer, CONFIGS["sac"], 0.1), version=4)
    for step in range(5):
        straight.update(as_batch(columns(step)), ONES)
    saved = straight.state_dict()
    resumed = pair_of(config, peer_config=CONFIGS["sac"])[0]  # its board is empty: the saved peer counts
    resumed.load_state_dict(saved)
    assert_same(resumed.state_dict(), saved)
    for step in range(5, 9):
        batch = as_batch(columns(step))
        assert_same(straight.update(batch, ONES), resumed.update(batch, ONES))
    assert_same(straight.state_dict(), resumed.state_dict())


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(config):
    agent, _, peer, board = pair_of(config)
    board.show(peer)
    fresh = pair_of(config)[0]
    agent.update(as_batch(columns()), ONES)
    saved, before = agent.state_dict(), fresh.state_dict()
    assert before[PEER_VERSION].item() == NO_VERSION
    for name in ("actor.weight.0", "peer.actor.weight.0", PEER_VERSION, "distillation_optimizer.bias.0.step"):
        with pytest.raises(KeyError, match=name):
            fresh.load_state_dict({key: value for key, value in saved.items() if key != name})
        with pytest.raises(ValueError, match=name):
            fresh.load_state_dict({**saved, name: torch.zeros(7, 7)})
        with pytest.raises(ValueError, match="stranger"):
            fresh.load_state_dict({**saved, f"{name.split('.')[0]}.stranger": ONES})
    assert_same(fresh.state_dict(), before)


def test_a_resumed_pair_goes_on_bit_for_bit_with_what_each_had_shown(config):
    """Agent 0 has not seen yet what agent 1 showed last, and totals are half full."""

    def pair(board):
        agents = [make(config, seed=each, agent_id=each) for each in (0, 1)]
        settings = {"publish_every": 3, "distil_every": 2}
        return [dpd_of(own, board, agent_id=each, **settings) for each, own in enumerate(agents)]

    def train(agents, steps):
        for step in steps:
            for agent_id, agent in enumerate(agents):
                agent.update(as_batch(columns(2 * step + agent_id)), ONES)

    straight = pair(Board())
    train(straight, range(9))
    resumed = pair(board := Board())
    for agent, saved in zip(resumed, straight, strict=True):
        agent.load_state_dict(saved.state_dict())
    assert {agent_id: shown.version for agent_id, shown in board.table.items()} == {0: 9, 1: 9}
    assert straight[0].state_dict()[PEER_VERSION] == 6
    for agents in (straight, resumed):
        train(agents, range(9, 16))
    for one, other in zip(straight, resumed, strict=True):
        assert_same(one.state_dict(), other.state_dict())
        assert one.take_statistics() == other.take_statistics()


def test_an_agent_that_has_shown_nothing_shows_nothing_when_resumed(config):
    agent, _, _, _ = pair_of(config)
    other, _, _, board = pair_of(config)
    other.load_state_dict(agent.state_dict())
    assert board.table == {}
