"""TD errors beside an update: those of the definition, alike in both forms of an update."""

import math

import numpy as np
import pytest
import torch
from learning.agent_cases import CONFIGS, ORACLES, make, update_drawn
from learning.ddpg_oracle import late_forward
from learning.td3_cases import B, columns, weights

from dase_grpc.learning.agents.equations import td_error


def told(config, weight, **options) -> torch.Tensor:
    """What an update with these weights says of its rows."""
    agent = make(config, dtype=torch.float64, **options)
    agent.tells_errors = True
    update_drawn(agent, 3, torch.from_numpy(weight), torch.float64)
    return agent.td_error


@pytest.mark.parametrize("name", CONFIGS)
def test_a_row_that_weighs_something_has_the_same_error_whichever_form_the_update_has(name):
    weight = weights(3)
    by_passes, by_autograd = (told(CONFIGS[name], weight, autograd=autograd) for autograd in (False, True))
    assert by_passes.shape == (B,)
    torch.testing.assert_close(by_passes, by_autograd, rtol=1e-9, atol=1e-12)
    assert ((by_passes > 0) == torch.from_numpy(weight > 0)).all()


def test_it_is_the_distance_of_the_value_from_the_target():
    config, data = CONFIGS["ddpg raw"], columns(3)
    state = make(config, dtype=torch.float64).state_dict()
    oracle = ORACLES["ddpg"]({name: tensor.numpy() for name, tensor in state.items()}, config)
    value, _ = late_forward(oracle.critic, data["observation"], data["action"])
    expected = np.abs(value - oracle.target(data))
    np.testing.assert_allclose(told(config, np.ones(B)).numpy(), expected, rtol=1e-9)


def test_of_twins_it_is_the_mean_of_both():
    config = CONFIGS["td3"]
    of_each = []
    for which in range(2):  # with one twin as good as its target only the other one is wrong
        agent = make(config, dtype=torch.float64)
        agent.tells_errors = True
        with torch.no_grad():
            for network in (agent._critic, agent._target_critic):
                for parameter in network.parameters():
                    parameter[1 - which] = parameter[which]
        weight = np.zeros(B)
        weight[2] = 1.0
        loss = update_drawn(agent, 3, torch.from_numpy(weight), torch.float64)["critic_loss"]
        of_each.append((float(agent.td_error[2]), float(loss)))
    for error, loss in of_each:  # twins that are alike: the loss is twice the squared error
        assert error == pytest.approx(math.sqrt(loss / 2))
    values, target = torch.tensor([[1.0, 5.0], [4.0, 5.5]]), torch.tensor([2.0, 5.0])
    assert td_error(values, target).tolist() == [1.5, 0.25]


@pytest.mark.parametrize("autograd", [False, True])
def test_a_row_that_hardly_weighs_has_none(autograd):
    weight = np.ones(B)
    weight[4] = 2.0**-41
    error = told(CONFIGS["td3"], weight, autograd=autograd)
    assert error[4] == 0
    assert (error[:4] > 0).all()


def test_who_does_not_ask_pays_nothing():
    agent = make(CONFIGS["td3"])
    assert "td_error" not in update_drawn(agent)
    assert agent.td_error is None
