"""The actor and the critics against the plain modules they stand for."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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

HIDDEN = [(5,), (6, 5), (6, 5, 4)]
EXACT = {"dtype": torch.float64}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def made(kind: Any, *hidden: int, m: int = 3, n: int = 2, seed: int = 0, **given: Any) -> Any:
    return kind(Sizes(m, n, hidden), Start(seeded(seed), torch.device("cpu"), **given))


def drawn(*shape: int, **given: Any) -> Tensor:
    return torch.randn(*shape, generator=seeded(shape[-1]), **given)


def plain(layers: Any, last: nn.Module | None = None) -> nn.Sequential:
    """Linear layers of these (out, in) weights and biases, with ReLU between them."""
    modules: list[nn.Module] = []
    for weight, bias in layers:
        linear = nn.Linear(weight.shape[1], weight.shape[0], dtype=weight.dtype)
        linear.load_state_dict({"weight": weight.detach(), "bias": bias.detach()})
        modules += [linear, nn.ReLU()]
    return nn.Sequential(*modules[:-1], *([] if last is None else [last]))


def plain_critic(critic: TwinCritic, index: int) -> nn.Sequential:
    return plain((w[index].T, b[index, 0]) for w, b in zip(critic.weight, critic.bias, strict=True))


def plain_late_critic(critic: LateActionCritic, s: Tensor, a: Tensor) -> Tensor:
    linear = s @ critic.weight[0] + critic.bias[0]
    for k in range(1, len(critic.weight)):
        linear = torch.relu(linear) @ critic.weight[k] + critic.bias[k]
        if k == 1:
            linear = linear + a @ critic.action_weight
    return linear[:, 0]


def assert_untouched(network: nn.Module) -> None:
    assert all(parameter.grad is None for parameter in network.parameters())


@pytest.mark.parametrize("hidden", HIDDEN)
def test_the_actor_is_relu_layers_and_a_tanh(hidden):
    actor, x = made(Actor, *hidden, **EXACT), drawn(7, 3, **EXACT)
    expected = plain(zip(actor.weight, actor.bias, strict=True), nn.Tanh())(x)
    torch.testing.assert_close(actor.actions(x), expected)


@pytest.mark.parametrize("hidden", HIDDEN)
def test_the_twin_critics_are_two_separate_networks_in_values_and_gradients(hidden):
    critic, x = made(TwinCritic, *hidden, **EXACT), drawn(7, 5, **EXACT)
    twins = of_one(StackedTwins, critic)
    both = twins.both(x[None])[:, 0]
    assert both.shape == (2, 7)
    assert not torch.equal(both[0], both[1])
    both.square().sum().backward()
    for index in range(2):
        separate = plain_critic(critic, index)
        values = separate(x)[:, 0]
        torch.testing.assert_close(both[index], values)
        values.square().sum().backward()
        linears = [layer for layer in separate if isinstance(layer, nn.Linear)]
        for linear, weight, bias in zip(linears, critic.weight, critic.bias, strict=True):
            torch.testing.assert_close(weight.grad[index], linear.weight.grad.T)
            torch.testing.assert_close(bias.grad[index, 0], linear.bias.grad)
    torch.testing.assert_close(twins.first(x[None])[0], both[0])


def test_the_first_and_the_lower_critic_send_gradients_to_their_input_only():
    critic = made(TwinCritic, 6, 5, **EXACT)
    x, twins = drawn(1, 9, 5, **EXACT).requires_grad_(), of_one(StackedTwins, critic)
    for found, whole in ((twins.first, lambda both: both[0]), (twins.lowest, lambda both: both.amin(0))):
        torch.testing.assert_close(found(x), whole(twins.both(x)))
        (gradient,) = torch.autograd.grad(found(x).sum(), x)
        torch.testing.assert_close(gradient, torch.autograd.grad(whole(twins.both(x)).sum(), x)[0])
        found(x).sum().backward()
    assert_untouched(critic)


@pytest.mark.parametrize("hidden", HIDDEN)
def test_the_action_enters_the_late_critic_at_its_second_layer(hidden):
    critic = made(LateActionCritic, *hidden, **EXACT)
    s, a = (drawn(7, size, **EXACT).requires_grad_() for size in (3, 2))
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
    critic = made(LateActionCritic, 6, 5)
    s, a = (drawn(7, size).requires_grad_() for size in (3, 2))
    late, inputs = of_one(StackedLate, critic), (s[None], a[None])
    assert torch.equal(late.fixed_value(*inputs), late.value(*inputs))
    late.fixed_value(*inputs).sum().backward()
    assert s.grad.any()
    assert a.grad.any()
    assert_untouched(critic)


def test_a_strided_view_of_packed_rows_is_an_input_like_any_other():
    twins, rows = of_one(StackedTwins, made(TwinCritic, 6, 5)), drawn(1, 7, 11)
    torch.testing.assert_close(twins.both(rows[..., :5]), twins.both(rows[..., :5].contiguous()))


def assert_uniform(values: Tensor, bound: float) -> None:
    assert 0.95 * bound < values.abs().max() <= bound
    assert values.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.06)


def test_the_second_layer_of_the_late_critic_is_drawn_as_one_layer_of_both_inputs():
    critic = made(LateActionCritic, 400, 300, m=17, n=6)
    for values in (critic.weight[1], critic.action_weight, critic.bias[1]):
        assert_uniform(values, 1 / math.sqrt(406))


def test_xavier_bounds_depend_on_both_sides_of_a_layer_and_leave_biases_zero():
    actor = made(Actor, 256, m=17, n=6, bounds=xavier_bounds)
    for weight, bias, ends in zip(actor.weight, actor.bias, (17 + 256, 256 + 6), strict=True):
        assert_uniform(weight, math.sqrt(6 / ends))
        assert not bias.any()


def test_initial_values_are_spread_like_those_of_a_torch_linear_layer_and_each_drawn_anew():
    actor, critic = (made(kind, 256, 256, m=17, n=6) for kind in (Actor, TwinCritic))
    for network, first in ((actor, 17), (critic, 23)):
        for weight, bias, inputs in zip(network.weight, network.bias, (first, 256, 256), strict=True):
            assert_uniform(weight, 1 / math.sqrt(inputs))
            assert bias.abs().max() <= 1 / math.sqrt(inputs)
    values = torch.cat([p.flatten() for p in made(TwinCritic, 6, 5).parameters()])
    assert len(values.unique()) == len(values)


def test_initial_values_depend_on_the_generator_and_on_no_global_state():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = made(Actor, 8)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again, other = made(Actor, 8), made(Actor, 8, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.weight[0], other.weight[0])


def test_a_frozen_copy_is_equal_shares_no_memory_and_takes_no_gradient():
    for network in (made(Actor, 8), made(TwinCritic, 8), made(LateActionCritic, 8)):
        frozen = network.frozen_copy()
        for ours, theirs in zip(network.parameters(), frozen.parameters(), strict=True):
            assert torch.equal(ours, theirs)
            assert ours.data_ptr() != theirs.data_ptr()
            assert not theirs.requires_grad
    frozen, x = made(Actor, 8).frozen_copy(), torch.ones(1, 3)
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
