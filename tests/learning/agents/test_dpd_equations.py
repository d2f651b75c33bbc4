"""DPD against its equations worked out by hand, in float64, for every pair of algorithms."""

import numpy as np
import pytest
import torch
from learning.agent_cases import CONFIGS, ORACLES, make, noises
from learning.dpd_cases import Board, advantage_of, dpd_of, numbers, shift_values, trained, with_noise
from learning.dpd_oracle import OracleDPD
from learning.td3_cases import B, as_batch, columns, weights

from dase_grpc.config.algorithms import DpdConfig
from dase_grpc.learning.agents.dpd import confidence, distillation_loss

PAIRS = [
    ("td3", "td3"),
    ("ddpg", "ddpg"),
    ("sac", "sac"),
    ("td3 normalised", "sac"),
    ("sac normalised", "ddpg"),
    ("ddpg raw", "td3 normalised"),
]
SETTINGS = {
    "default": {},
    "all states": {"states": "all"},
    "steep and clipped": {"alpha": 30.0, "max_confidence": 5.0},
    "every second, slowly": {"distil_every": 2, "lr_factor": 0.3},
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("pair", PAIRS, ids=" from ".join)
def test_updates_agree_with_the_equations_worked_out_by_hand(pair, settings):
    own_config, peer_config = (CONFIGS[name] for name in pair)
    chosen = SETTINGS[settings]
    own, peer, board = make(own_config, dtype=torch.float64), trained(peer_config), Board()
    observation = torch.from_numpy(columns(1)["observation"])
    shift_values(peer, peer_config, -float(advantage_of(peer, own, observation).median()))
    board.show(peer)
    agent = dpd_of(own, board, peer_config=peer_config, dtype=torch.float64, **chosen)
    by_hand = OracleDPD(
        ORACLES[own_config.algorithm](numbers(own.state_dict()), own_config),
        twin_of(peer, peer_config),
        DpdConfig(**chosen),
    )
    counts = []
    for step in range(1, 7):
        data, weight, noise = columns(step), weights(step), noises(own_config, step)
        with_noise(own, noise)
        losses = agent.update(as_batch(data, torch.float64), torch.from_numpy(weight))
        expected = by_hand.update(data, weight, noise)
        assert losses.keys() == expected.keys()
        for key, value in expected.items():
            assert losses[key].item() == pytest.approx(value, rel=1e-9, abs=1e-12), (step, key)
        state = numbers(agent.state_dict())
        for key, value in by_hand.tensors().items():
            np.testing.assert_allclose(state[key], value, rtol=1e-8, atol=1e-10, err_msg=f"{step} {key}")
        if "distillation_loss" in losses:
            counts.append(len(by_hand.chosen) / B)
    statistics = agent.take_statistics()
    assert statistics["distilled_share"] == pytest.approx(np.mean(counts), rel=1e-12)
    if not {"states", "distil_every"} & chosen.keys():
        assert 0 < np.mean(counts) < 1, "the case says nothing: all states are alike"


def twin_of(peer, config):
    """The peer's twin, with the normaliser that the peer has learned by now."""
    state = numbers(peer.state_dict())
    twin = ORACLES[config.algorithm](state, config)
    if twin.normaliser is not None:
        twin.normaliser.means = [state["normaliser.mean"]]
        twin.normaliser.variances = [state["normaliser.variance"]]
    return twin


def test_confidence_by_hand():
    advantage = torch.tensor([-2.0, 0.0, 1.0, 2.0, 100.0, float("nan")], dtype=torch.float64)
    config = DpdConfig(alpha=0.5, max_confidence=20)
    e = np.e
    assert confidence(advantage, config).tolist() == pytest.approx([0, 0, e**0.5, e, 20, 0])
    everywhere = config.model_copy(update={"states": "all"})
    assert confidence(advantage, everywhere).tolist() == pytest.approx([e**-1, 1, e**0.5, e, 20, 0])
    assert confidence(-advantage, everywhere)[4].item() == pytest.approx(1 / 20)


def test_an_alpha_of_zero_weighs_every_chosen_state_alike():
    weight = confidence(torch.tensor([-1.0, 3.0, 0.1]), DpdConfig(alpha=0.0))
    assert weight.tolist() == [0, 1, 1]


def test_the_loss_by_hand():
    actions = torch.tensor([[0.5, 0.0], [1.0, 1.0]])
    peers = torch.tensor([[0.0, 0.0], [0.0, -1.0]])
    assert distillation_loss(actions, peers, torch.tensor([0.2, 0.8])).item() == pytest.approx(
        0.2 * 0.25 / 2 + 0.8 * 5 / 2
    )


def test_the_gradient_of_the_loss_is_that_of_finite_differences():
    rng = np.random.default_rng(0)
    actions, peers = (torch.from_numpy(rng.uniform(-1, 1, (5, 2))) for _ in range(2))
    share = torch.from_numpy(rng.uniform(size=5))
    assert torch.autograd.gradcheck(lambda a: distillation_loss(a, peers, share), actions.requires_grad_())
