"""The actor and the twin critics against the plain modules they stand for."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from dase_grpc.learning.agents.networks import (
    Actor,
    LateActionCritic,
    Sizes,
    Start,
    TwinCritic,
    restore,
    xavier_bounds,
)
from dase_grpc.learning.agents.stack import StackedLate, StackedTwins, of_one

CPU = torch.device("cpu")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def start(seed: int = 0, **given: Any) -> Start:
    return Start(seeded(seed), CPU, **given)


def make_actor(m: int, *hidden: int, n: int = 2, **given: Any) -> Actor:
    return Actor(Sizes(m, n, hidden), start(**given))


def make_critic(m: int, *hidden: int, **given: Any) -> TwinCritic:
    return TwinCritic(Sizes(m - 1, 1, hidden), start(**given))


def make_late_critic(m: int, *hidden: int, n: int = 2, **given: Any) -> LateActionCritic:
    return LateActionCritic(Sizes(m, n, hidden), start(**given))


def plain_actor(actor: Actor) -> nn.Sequential:
    layers: list[nn.Module] = []
    for weight, bias in zip(actor.weight, actor.bias, strict=True):
        linear = nn.Linear(weight.shape[1], weight.shape[0], dtype=weight.dtype)
        linear.load_state_dict({"weight": weight.detach(), "bias": bias.detach()})
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1], nn.Tanh())


def plain_critic(critic: TwinCritic, index: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for weight, bias in zip(critic.weight, critic.bias, strict=True):
        linear = nn.Linear(weight.shape[1], weight.shape[2], dtype=weight.dtype)
        linear.load_state_dict({"weight": weight.detach()[index].T, "bias": bias.detach()[index, 0]})
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def plain_late_critic(critic: LateActionCritic, s: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    linear = s @ critic.weight[0] + critic.bias[0]
    for k in range(1, len(critic.weight)):
        hidden = torch.relu(linear)
        linear = hidden @ critic.weight[k] + critic.bias[k]
        if k == 1:
            linear = linear + a @ critic.action_weight
    return linear[:, 0]


@pytest.mark.parametrize("hidden", [(5,), (6, 5), (6, 5, 4)])
def test_the_actor_is_relu_layers_and_a_tanh(hidden):
    actor = make_actor(3, *hidden, dtype=torch.float64)
    x = torch.randn(7, 3, dtype=torch.float64, generator=seeded(1))
    torch.testing.assert_close(actor.actions(x), plain_actor(actor)(x))


@pytest.mark.parametrize("hidden", [(5,), (6, 5), (6, 5, 4)])
def test_the_twin_critics_are_two_separate_networks(hidden):
    critic = make_critic(4, *hidden, dtype=torch.float64)
    x = torch.randn(7, 4, dtype=torch.float64, generator=seeded(1))
    separate = torch.stack([plain_critic(critic, i)(x)[:, 0] for i in range(2)])
    twins = of_one(StackedTwins, critic)
    both = twins.both(x[None])[:, 0]
    assert both.shape == (2, 7)
    torch.testing.assert_close(both, separate)
    torch.testing.assert_close(twins.first(x[None])[0], separate[0])
    assert not torch.equal(both[0], both[1])


def test_gradients_of_the_twin_critics_are_those_of_two_separate_networks():
    critic = make_critic(4, 6, 5, dtype=torch.float64)
    x = torch.randn(7, 4, dtype=torch.float64, generator=seeded(1))
    of_one(StackedTwins, critic).both(x[None]).square().sum().backward()
    for index in range(2):
        plain = plain_critic(critic, index)
        plain(x).square().sum().backward()
        linears = [layer for layer in plain if isinstance(layer, nn.Linear)]
        for linear, weight, bias in zip(linears, critic.weight, critic.bias, strict=True):
            torch.testing.assert_close(weight.grad[index], linear.weight.grad.T)
            torch.testing.assert_close(bias.grad[index, 0], linear.bias.grad)


def test_the_first_critic_alone_sends_gradients_to_its_input_only():
    critic = make_critic(4, 6)
    x = torch.randn(7, 4, generator=seeded(1), requires_grad=True)
    of_one(StackedTwins, critic).first(x[None]).sum().backward()
    assert x.grad is not None
    assert all(parameter.grad is None for parameter in critic.parameters())


def test_the_lower_critic_sends_gradients_to_its_input_only():
    critic = make_critic(4, 6, 5, dtype=torch.float64)
    x = torch.randn(9, 4, dtype=torch.float64, generator=seeded(1), requires_grad=True)
    twins = of_one(StackedTwins, critic)
    lowest = twins.lowest(x[None])
    torch.testing.assert_close(lowest, torch.minimum(*twins.both(x[None])))
    lowest.sum().backward()
    assert all(parameter.grad is None for parameter in critic.parameters())
    gradient = x.grad.clone()
    x.grad = None
    torch.minimum(*twins.both(x[None])).sum().backward()
    torch.testing.assert_close(x.grad, gradient)


@pytest.mark.parametrize("hidden", [(5,), (6, 5), (6, 5, 4)])
def test_the_action_enters_the_late_critic_at_its_second_layer(hidden):
    critic = make_late_critic(3, *hidden, dtype=torch.float64)
    s, a = (torch.randn(7, size, dtype=torch.float64, generator=seeded(size)) for size in (3, 2))
    s.requires_grad_()
    a.requires_grad_()
    value = of_one(StackedLate, critic).value(s[None], a[None])[0]
    assert value.shape == (7,)
    torch.testing.assert_close(value, plain_late_critic(critic, s, a))
    names, parameters = zip(*critic.named_parameters(), strict=True)
    assert "action_weight" in names
    ours = torch.autograd.grad(value.square().sum(), (s, a, *parameters))
    theirs = torch.autograd.grad(plain_late_critic(critic, s, a).square().sum(), (s, a, *parameters))
    for first, second in zip(ours, theirs, strict=True):
        torch.testing.assert_close(first, second)


def test_the_fixed_value_of_the_late_critic_sends_gradients_to_its_inputs_only():
    critic = make_late_critic(3, 6, 5)
    s, a = (torch.randn(7, size, generator=seeded(size), requires_grad=True) for size in (3, 2))
    late, inputs = of_one(StackedLate, critic), (s[None], a[None])
    assert torch.equal(late.fixed_value(*inputs), late.value(*inputs))
    late.fixed_value(*inputs).sum().backward()
    assert s.grad.any()
    assert a.grad.any()
    assert all(parameter.grad is None for parameter in critic.parameters())


def test_the_second_layer_of_the_late_critic_is_drawn_as_one_layer_of_both_inputs():
    critic = make_late_critic(17, 400, 300, n=6)
    bound = 1 / math.sqrt(406)
    for values in (critic.weight[1], critic.action_weight, critic.bias[1]):
        assert 0.95 * bound < values.abs().max() <= bound
        assert values.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.06)


def test_xavier_bounds_depend_on_both_sides_of_a_layer_and_leave_biases_zero():
    actor = make_actor(17, 256, n=6, bounds=xavier_bounds)
    for weight, bias, (inputs, outputs) in zip(actor.weight, actor.bias, [(17, 256), (256, 6)], strict=True):
        bound = math.sqrt(6 / (inputs + outputs))
        assert 0.95 * bound < weight.abs().max() <= bound
        assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
        assert not bias.any()


def test_a_strided_view_of_packed_rows_is_an_input_like_any_other():
    twins = of_one(StackedTwins, make_critic(4, 6, 5))
    rows = torch.randn(1, 7, 11, generator=seeded(1))
    torch.testing.assert_close(twins.both(rows[..., :4]), twins.both(rows[..., :4].contiguous()))


def test_initial_values_are_spread_like_those_of_a_torch_linear_layer():
    for network in (make_actor(17, 256, 256, n=6), make_critic(17, 256, 256)):
        for weight, bias, inputs in zip(network.weight, network.bias, (17, 256, 256), strict=True):
            bound = 1 / math.sqrt(inputs)
            for values in (weight, bias):
                assert values.abs().max() <= bound
            assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)


def test_every_initial_number_is_drawn_anew():
    values = torch.cat([p.flatten() for p in make_critic(4, 6, 5).parameters()])
    assert len(values.unique()) == len(values)


def test_initial_values_depend_on_the_generator_and_on_no_global_state():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = make_actor(3, 8)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again, other = make_actor(3, 8), make_actor(3, 8, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.weight[0], other.weight[0])


def test_a_frozen_copy_is_equal_shares_no_memory_and_takes_no_gradient():
    for network in (make_actor(3, 8), make_critic(3, 8), make_late_critic(3, 8, 8)):
        frozen = network.frozen_copy()
        for ours, theirs in zip(network.parameters(), frozen.parameters(), strict=True):
            assert torch.equal(ours, theirs)
            assert ours.data_ptr() != theirs.data_ptr()
            assert not theirs.requires_grad
    actor = make_actor(3, 8)
    frozen, x = actor.frozen_copy(), torch.ones(1, 3)
    before = frozen.actions(x)
    with torch.no_grad():
        for parameter in frozen.parameters():
            parameter.add_(1)
    assert not torch.equal(frozen.actions(x), before)


def test_restore_changes_nothing_when_one_tensor_does_not_fit():
    ours = {"a": torch.zeros(2), "b": torch.zeros(3)}
    with pytest.raises(ValueError, match=r"float32\[4\] for b, not float32\[3\]"):
        restore(ours, {"a": torch.ones(2), "b": torch.ones(4)})
    assert torch.equal(ours["a"], torch.zeros(2))
