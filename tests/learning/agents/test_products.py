"""Updates whose large products are of bfloat16 numbers: near, exact where it counts, and nobody else's."""

from itertools import pairwise

import pytest
import torch
from learning.agent_cases import gradients, make, noises, tiny, update_drawn
from learning.td3_cases import B, as_batch, assert_same, columns

from dase_grpc.config.algorithms import DpsConfig
from dase_grpc.learning.agents.passes import EXACT, ROUNDED, WORTH_ROUNDING, Buffers, Dense, Linear
from dase_grpc.learning.similarity.weigher import SimilarityWeigher, weighed

LARGE, STEP = (WORTH_ROUNDING, WORTH_ROUNDING + 5, WORTH_ROUNDING), 2.0**-8
ALGORITHMS = {
    "td3": {"policy_delay": 1},
    "ddpg": {"critic_weight_decay": 0.1, "normalise_observations": True},
    "sac": {"reward_scale": 5.0},
}


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def settings(algorithm, products="bfloat16", **more):
    given = {"hidden": LARGE, "actor_lr": 1e-3, "critic_lr": 1e-3, **ALGORITHMS[algorithm], **more}
    return tiny(algorithm, products=products, **given)


@pytest.fixture(params=ALGORITHMS)
def algorithm(request):
    return request.param


def stack(parameters, dtype, products):
    layers = []
    for weight, bias in ((w.to(dtype), b.to(dtype)) for w, b in parameters):
        gradients = torch.empty_like(weight), torch.empty_like(bias)
        layers.append(Linear(weight, bias, *gradients, values=products, gradients=products))
    return Dense(layers, Buffers([len(layer.bias) for layer in layers[:-1]], layers[0].weight))


def distance(ours, theirs):
    return float((ours.double() - theirs).norm() / theirs.norm())


def assert_gradients_near(agent, exact):
    """A unit within rounding of its kink takes its part of the gradient with it: 1 % of them are 10 %."""
    found = list(gradients(agent, exact))
    for ours, theirs in found:
        assert distance(ours, theirs) < 0.2
        assert float((ours.double() * theirs).sum() / ours.norm() / theirs.norm()) > 0.98
    assert distance(*found[-1]) < 1e-2


# One product


@pytest.mark.parametrize("turned", [(), ("a",), ("b",), ("out",), ("a", "b", "out")], ids=str)
def test_a_rounded_product_is_that_of_the_rounded_matrices_rounded_once_more(turned):
    sizes = {"a": (40, 30), "b": (30, 50), "out": (40, 50)}
    a, b, out = (drawn(*(s[::-1] if n in turned else s)) for n, s in sizes.items())
    a, b, out = (m.T if n in turned else m for n, m in zip(sizes, (a, b, out), strict=True))
    exact = a.bfloat16().double() @ b.bfloat16().double()
    assert ROUNDED.plain(a, b, out=out) is out
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), exact, rtol=STEP, atol=1e-5)
    assert not torch.allclose(out.double(), a.double() @ b.double(), rtol=1e-5)


@pytest.mark.parametrize("shape", [(50,), (40, 50)], ids=str)
def test_what_is_added_to_a_rounded_product_is_not_rounded(shape):
    a, b, added, out = drawn(40, 30), drawn(30, 50, seed=1), drawn(*shape, seed=2), torch.empty(40, 50)
    alone = ROUNDED.plain(a, b, out=torch.empty(40, 50))
    assert ROUNDED.added(added, a, b, out=out) is out
    assert torch.equal(out, alone + added)


def test_gradients_are_as_near_as_rounding_is_where_no_unit_is_by_its_kink():
    sizes, x, upstream = (5, *LARGE, 1), drawn(16, 5), drawn(16, 1, seed=1)
    parameters = [(drawn(i, o, seed=i) / i, drawn(o, seed=o) + 6) for i, o in pairwise(sizes)]
    kinds = ((torch.float32, ROUNDED), (torch.float64, EXACT))
    found, exact = (stack(parameters, dtype, products) for dtype, products in kinds)
    for each, dtype in ((found, torch.float32), (exact, torch.float64)):
        values = each.forward(x.to(dtype))
        each.backward(upstream.to(dtype))
    for ours, theirs in zip(found.layers, exact.layers, strict=True):
        assert distance(ours.weight_gradient.double(), theirs.weight_gradient) < 1e-2
        assert distance(ours.bias_gradient.double(), theirs.bias_gradient) < 1e-2
    torch.testing.assert_close(found.forward(x).double(), values, rtol=1e-2, atol=0.0)


# Whole updates


def test_losses_and_gradients_are_near_those_of_the_exact_twin(algorithm):
    agent, exact = make(settings(algorithm)), make(settings(algorithm), dtype=torch.float64, autograd=True)
    found, expected = update_drawn(agent), update_drawn(exact, dtype=torch.float64)
    for name in expected:
        torch.testing.assert_close(found[name].double(), expected[name], rtol=1e-2, atol=2e-3)
    assert_gradients_near(agent, exact)
    assert (
        max(distance(*pair) for pair in gradients(agent, exact)) > 1e-4
    )  # float32 is at 1e-6: it was rounded


def test_updates_stay_near_the_exact_twin_s(algorithm):
    agent, exact = make(settings(algorithm)), make(settings(algorithm), dtype=torch.float64, autograd=True)
    for step in range(30):
        found, expected = update_drawn(agent, step), update_drawn(exact, step, dtype=torch.float64)
    torch.testing.assert_close(found["critic_loss"].double(), expected["critic_loss"], rtol=0.05, atol=0.0)


def test_small_layers_are_exact_to_the_bit(algorithm):
    agent, plain = (
        make(settings(algorithm, kind, hidden=(WORTH_ROUNDING, WORTH_ROUNDING - 1)))
        for kind in ("bfloat16", "float32")
    )
    for step in range(3):
        assert_same(update_drawn(agent, step), update_drawn(plain, step))
    assert_same(agent.state_dict(), plain.state_dict())


def test_equal_agents_stay_equal_to_the_bit_and_a_restored_one_goes_on_so(algorithm):
    first, second = make(settings(algorithm)), make(settings(algorithm))
    for step in range(3):
        assert_same(update_drawn(first, step), update_drawn(second, step))
    restored = make(settings(algorithm), seed=9)
    restored.load_state_dict(first.state_dict())
    assert_same(update_drawn(first, 3), update_drawn(restored, 3))
    assert_same(first.state_dict(), restored.state_dict())


# Exact where it counts


def test_policy_and_similarity_weights_are_exact_to_the_bit(algorithm):
    agent, plain = make(settings(algorithm)), make(settings(algorithm, "float32"))
    for step in range(3):
        update_drawn(agent, step)
    plain.load_state_dict(agent.state_dict())
    batch = as_batch(columns(7))
    batch.agent_id[::2] = 1
    seen = batch.observation.numpy()
    assert (agent.act(seen) == plain.act(seen)).all()
    assert torch.equal(agent.policy_actions(batch.observation), plain.policy_actions(batch.observation))
    assert torch.equal(
        agent.value(batch.observation, batch.action), plain.value(batch.observation, batch.action)
    )
    weigher = SimilarityWeigher(DpsConfig(), own_id=0, agents=2)
    (found, _), (expected, _) = (weighed(each, weigher, batch) for each in (agent, plain))
    assert 0 < float(expected.similarity) < 1
    assert torch.equal(found.weight, expected.weight)


@pytest.mark.parametrize("asked", [False, True])
def test_rows_that_weigh_nothing_are_left_out(algorithm, asked):
    agent, exact = make(settings(algorithm)), make(settings(algorithm), dtype=torch.float64, autograd=True)
    weight, batch = torch.ones(B), as_batch(columns())
    weight[::2] = 0
    update_drawn(exact, 0, weight, torch.float64)
    batch.reward[::2] = float("nan")
    tensors = [torch.from_numpy(values).float() for values in noises(agent.config, 0)]
    actions = agent.policy_actions(batch.observation) if asked else None
    agent.update_with(batch, weight, *tensors, actions=actions)
    assert_gradients_near(agent, exact)


# Nobody else's


def test_an_agent_beside_it_and_the_caller_compute_as_before(algorithm):
    alone, beside, rounding = (make(settings(algorithm, kind)) for kind in ("float32", "float32", "bfloat16"))
    a, b = drawn(WORTH_ROUNDING, 300), drawn(300, WORTH_ROUNDING, seed=1)
    before = a @ b
    for step in range(3):
        update_drawn(rounding, step)
        assert torch.equal(a @ b, before)
        assert_same(update_drawn(beside, step), update_drawn(alone, step))
    assert_same(beside.state_dict(), alone.state_dict())
    assert torch.get_float32_matmul_precision() == "highest"


def test_by_default_products_are_torch_s_own():
    assert tiny("td3").products == "float32"
    assert (EXACT.plain, EXACT.added) == (torch.mm, torch.addmm)
