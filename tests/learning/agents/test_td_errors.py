"""TD errors beside an update: those of the definition, alike in both forms of an update."""

import numpy as np
import pytest
import torch
from learning.agent_cases import CONFIGS, ORACLES, make, update_drawn
from learning.ddpg_oracle import late_forward
from learning.td3_cases import B, columns, weights


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
    config, weight = CONFIGS["td3"], np.zeros(B)
    weight[2] = 1.0  # then the loss is the sum of both squared errors of this row
    agent = make(config, dtype=torch.float64)
    agent.tells_errors = True
    loss = update_drawn(agent, 3, torch.from_numpy(weight), torch.float64)["critic_loss"]
    error = agent.td_error[2]
    assert loss / 4 <= error**2 <= loss / 2 + 1e-12


def test_who_does_not_ask_pays_nothing():
    agent = make(CONFIGS["td3"])
    assert "td_error" not in update_drawn(agent)
    assert agent.td_error is None
