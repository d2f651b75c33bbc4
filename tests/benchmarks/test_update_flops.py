"""The count of an update's operations against torch's own, of what it really calls."""

import pytest
import torch
from learning.agent_cases import make, tiny
from learning.td3_cases import SCHEMA, B, as_batch, columns
from torch.utils.flop_counter import FlopCounterMode


def counted(agent, weight):
    with FlopCounterMode(display=False) as counter:
        agent.update(as_batch(columns()), weight)
    return counter.get_total_flops()


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["td3", "ddpg", "sac"])
@pytest.mark.parametrize("hidden", [(8, 8), (6, 5, 4)])
def test_the_operations_counted_are_those_of_the_products_called(script, algorithm, hidden):
    flops = script("update_flops").update_flops
    config = tiny(algorithm, hidden=hidden, **({"policy_delay": 1} if algorithm == "td3" else {}))
    assert counted(make(config), torch.ones(B)) == flops(config, SCHEMA, B)
    assert counted(make(config), (torch.arange(B) < 4).float()) == flops(config, SCHEMA, 4)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["td3", "ddpg", "sac"])
def test_the_reference_twin_calls_as_many_but_for_inputs_that_are_no_action_and_heads(script, algorithm):
    flops = script("update_flops").update_flops
    config = tiny(algorithm, hidden=(64, 64), **({"policy_delay": 1} if algorithm == "td3" else {}))
    assert counted(make(config, autograd=True), torch.ones(B)) == pytest.approx(
        flops(config, SCHEMA, B), rel=0.05
    )


def test_a_delayed_actor_counts_by_its_share(script):
    flops = script("update_flops").update_flops
    each, half, never = (flops(tiny("td3", policy_delay=delay), SCHEMA, B) for delay in (1, 2, 10**9))
    assert half == pytest.approx((each + never) / 2)


def test_papers_td3_needs_414_million_operations(script):
    from dase_grpc.config.algorithms import AgentConfig
    from dase_grpc.schema import TransitionSchema

    schema = TransitionSchema("Count-v0", 17, 6, (-1.0,) * 6, (1.0,) * 6)
    assert script("update_flops").update_flops(AgentConfig(), schema, 256) / 1e6 == pytest.approx(414, abs=1)
