"""Linear layers with ReLU between them, both passes written out, in float32 or with bfloat16 products.

No autograd and no large allocation: every layer writes into buffers that the next pass uses again, and
the gradients go straight to where the optimiser reads them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from dase_grpc.config.algorithms import ProductsKind

WORTH_ROUNDING: Final = 96
"""A layer's inputs and its outputs have to be as many: among fewer, rounding takes what the product gains.

Measured with batches of 256 on an AMD EPYC (Zen 4), in the best rounds: a layer of 64 x 64 takes 1.5 times as
long, one of 128 x 128 0.86 times, one of 256 x 256 0.6 times.
"""


class Buffers:
    """Room for what the hidden layers give and for the gradients there, for any number of rows.

    Stacks of the same sizes may share it: it holds the activations of whichever was forward last, so
    a stack's backward pass has to come before another's forward pass.
    """

    def __init__(self, widths: Sequence[int], like: Tensor) -> None:
        self._widths = tuple(widths)
        self._like = like
        self._room: list[Tensor] = []
        self._rows = -1
        self.activations: list[Tensor] = []
        self.gradients: list[Tensor] = []

    def fit(self, rows: int) -> None:
        """Views for that many rows; larger room only if there never were as many."""
        if rows == self._rows:
            return
        if not self._room or self._room[0].shape[0] < rows:
            self._room = [self._like.new_empty(rows, width) for width in self._widths * 2]
        views = [room[:rows] for room in self._room]
        self.activations, self.gradients = views[: len(self._widths)], views[len(self._widths) :]
        self._rows = rows


class Product(Protocol):
    """Two matrices multiplied."""

    def __call__(self, a: Tensor, b: Tensor, /, *, out: Tensor) -> Tensor:
        """Writes a b into `out` and returns it; (r, k) and (k, c) -> (r, c), views of any strides."""
        ...


class AddedProduct(Protocol):
    """Two matrices multiplied, and something added."""

    def __call__(self, added: Tensor, a: Tensor, b: Tensor, /, *, out: Tensor) -> Tensor:
        """Writes added + a b into `out` and returns it; `added` is (c,) or (r, c)."""
        ...


@dataclass(frozen=True)
class Products:
    """How a layer multiplies."""

    plain: Product
    added: AddedProduct


EXACT: Final = Products(torch.mm, torch.addmm)


@dataclass(frozen=True)
class Linear:
    """One layer: x @ weight + bias, with weight (in, out) and bias (out,), and where their gradients go.

    Views of any strides; without gradients where nothing learns. `values` multiplies on the way forward,
    but in the last layer of a stack, and `gradients` on the way back.
    """

    weight: Tensor
    bias: Tensor
    weight_gradient: Tensor | None = None
    bias_gradient: Tensor | None = None
    values: Products = EXACT
    gradients: Products = EXACT


class Dense:
    """y = relu(... relu(x W_1 + b_1) ...) W_L + b_L; one thread at a time.

    Attributes:
        layers: W_1 and b_1 to W_L and b_L, as they were given.
        buffers: what it works in.
    """

    def __init__(self, layers: Sequence[Linear], buffers: Buffers) -> None:
        self.layers = tuple(layers)
        *self._inner, self._last = layers
        self.buffers = buffers
        self._inputs: list[Tensor] = []

    def forward(self, x: Tensor, *, beside: Tensor | None = None) -> Tensor:
        """(B, in) -> (B, out), a new tensor; x is kept and has to stay as it is until after `backward`.

        What is given as beside, (B, width), the second layer adds in place of its bias.
        """
        self.buffers.fit(x.shape[0])
        self._inputs = [x, *self.buffers.activations]
        for index, (layer, hidden) in enumerate(zip(self._inner, self.buffers.activations, strict=True)):
            added = beside if index == 1 and beside is not None else layer.bias
            x = layer.values.added(added, x, layer.weight, out=hidden).relu_()
        added = beside if len(self._inner) == 1 and beside is not None else self._last.bias
        return torch.addmm(added, x, self._last.weight)

    def backward(self, gradient: Tensor, *, watch: int = 0) -> Tensor:
        """Writes the parameters' gradients, for the (B, out) gradient of the last `forward`'s result.

        Returns the gradient of what layer `watch` gives, before its ReLU: a buffer, as in `gradient_at`.
        """
        watched = gradient
        for index in reversed(range(len(self.layers))):
            layer = self.layers[index]
            if index == watch:
                watched = gradient
            assert layer.weight_gradient is not None
            assert layer.bias_gradient is not None
            layer.gradients.plain(self._inputs[index].T, gradient, out=layer.weight_gradient)
            torch.sum(gradient, 0, out=layer.bias_gradient)
            if index:
                gradient = self._through(index, gradient)
        return watched

    def gradient_at(self, index: int, gradient: Tensor) -> Tensor:
        """The gradient of what layer `index` gives, before its ReLU; that of the result is given, (B, out).

        A buffer, which the next pass overwrites; nothing else is computed.
        """
        for above in range(len(self.layers) - 1, index, -1):
            gradient = self._through(above, gradient)
        return gradient

    def narrow(self, rows: Tensor, x: Tensor) -> None:
        """Lets `backward` go on from some rows of the last `forward` alone; x is their part of its input."""
        self._inputs = [x, *(kept.index_select(0, rows) for kept in self.buffers.activations)]
        self.buffers.fit(x.shape[0])

    def _through(self, index: int, gradient: Tensor) -> Tensor:
        """From the gradient of what layer `index` gives to that of what the layer below gives."""
        below, layer = self.buffers.gradients[index - 1], self.layers[index]
        layer.gradients.plain(gradient, layer.weight.T, out=below)
        result: Tensor = torch.ops.aten.threshold_backward.grad_input(
            below, self._inputs[index], 0, grad_input=below
        )
        return result


def _rounded(a: Tensor, b: Tensor, /, *, out: Tensor) -> Tensor:
    return out.copy_(torch.mm(a.bfloat16(), b.bfloat16()))


def _rounded_added(added: Tensor, a: Tensor, b: Tensor, /, *, out: Tensor) -> Tensor:
    return _rounded(a, b, out=out).add_(added)


ROUNDED: Final = Products(_rounded, _rounded_added)
PRODUCTS: Final[Mapping[ProductsKind, Products]] = {"float32": EXACT, "bfloat16": ROUNDED}
