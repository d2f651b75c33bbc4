"""Stacks of layers with their passes written out, against autograd in float64."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows

from dase_grpc.learning.agents.passes import Buffers, Dense, Linear

SIZES = [(5, 3), (5, 7, 3), (5, 7, 6, 3), (5, 7, 6, 4, 1)]


def leaves(sizes, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(i, o, generator=draw, dtype=torch.float64, requires_grad=True),
            torch.randn(o, generator=draw, dtype=torch.float64, requires_grad=True),
        )
        for i, o in pairwise(sizes)
    ]


def stack(sizes, parameters):
    layers = [Linear(w.detach(), b.detach(), torch.empty_like(w), torch.empty_like(b)) for w, b in parameters]
    return Dense(layers, Buffers(sizes[1:-1], parameters[0][0].detach()))


def by_autograd(parameters, x, *, beside=None):
    linears = []
    for index, (weight, bias) in enumerate(parameters):
        linears.append(x @ weight + (beside if index == 1 and beside is not None else bias))
        linears[-1].retain_grad()
        x = F.relu(linears[-1])
    return linears


def rows(count, width=5, seed=1):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("sizes", SIZES)
def test_values_and_all_gradients_are_those_of_autograd_for_any_number_of_rows(sizes):
    parameters = leaves(sizes)
    dense = stack(sizes, parameters)
    for count in (4, 9, 2, 9, 1):
        x, upstream = rows(count), rows(count, sizes[-1], seed=2)
        linears = by_autograd(parameters, x)
        for parameter in (p for pair in parameters for p in pair):
            parameter.grad = None
        linears[-1].backward(upstream)
        torch.testing.assert_close(dense.forward(x), linears[-1].detach())
        torch.testing.assert_close(dense.gradient_at(0, upstream), linears[0].grad)
        for watch, linear in enumerate(linears):
            dense.forward(x)
            torch.testing.assert_close(dense.backward(upstream, watch=watch), linear.grad)
        for layer, (weight, bias) in zip(dense.layers, parameters, strict=True):
            torch.testing.assert_close(layer.weight_gradient, weight.grad)
            torch.testing.assert_close(layer.bias_gradient, bias.grad)


@pytest.mark.parametrize("sizes", SIZES[1:])
def test_what_comes_in_beside_takes_the_place_of_the_second_bias(sizes):
    parameters = leaves(sizes)
    dense, x, beside = stack(sizes, parameters), rows(8), rows(8, sizes[2], seed=3)
    expected = by_autograd(parameters, x, beside=beside)[-1].detach()
    torch.testing.assert_close(dense.forward(x, beside=beside), expected)
    assert not torch.allclose(dense.forward(x), expected)


def test_a_narrowed_pass_has_the_gradients_of_its_rows_alone():
    sizes = (5, 7, 6, 3)
    parameters, x, upstream = leaves(sizes), rows(9), rows(4, 3, seed=2)
    whole, part, chosen = stack(sizes, parameters), stack(sizes, parameters), torch.tensor([0, 3, 4, 8])
    whole.forward(x)
    whole.narrow(chosen, x[chosen])
    whole.backward(upstream)
    part.forward(x[chosen])
    part.backward(upstream)
    for one, other in zip(whole.layers, part.layers, strict=True):
        torch.testing.assert_close(one.weight_gradient, other.weight_gradient)
        torch.testing.assert_close(one.bias_gradient, other.bias_gradient)


def test_gradients_can_go_into_transposed_views():
    sizes = (5, 7, 3)
    parameters, x, upstream = leaves(sizes), rows(6), rows(6, 3, seed=2)
    plain = stack(sizes, parameters)
    turned = Dense(
        [
            Linear(w.detach().T.contiguous().T, b.detach(), torch.empty_like(w.T).T, torch.empty_like(b))
            for w, b in parameters
        ],
        Buffers(sizes[1:-1], x),
    )
    for dense in (plain, turned):
        dense.forward(x)
        dense.backward(upstream)
    for one, other in zip(plain.layers, turned.layers, strict=True):
        torch.testing.assert_close(one.weight_gradient, other.weight_gradient)


def test_what_a_pass_gives_is_not_overwritten_by_the_next():
    dense = stack((5, 7, 3), leaves((5, 7, 3)))
    first = dense.forward(rows(4))
    kept = first.clone()
    dense.forward(rows(4, seed=8))
    assert torch.equal(first, kept)
