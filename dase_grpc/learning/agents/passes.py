"""The networks of networks.py with both passes written out: the same parameters, no autograd, for a CPU.

Every layer writes into buffers that the next pass uses again, and the gradients go straight to where the
optimiser reads them. What these give is what the reference twins in stack.py give, up to the order of float
sums; with bfloat16 products large layers are rounded. One thread at a time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, Self

import torch
from torch import Tensor

from dase_grpc.config.algorithms import ProductsKind
from dase_grpc.learning.agents.networks import Actor, LateActionCritic, TwinCritic

WORTH_ROUNDING: Final = 96
"""A layer's inputs and its outputs have to be as many: among fewer, rounding takes what the product gains.

Measured with batches of 256 on an AMD EPYC (Zen 4), in the best rounds: a layer of 64 x 64 takes 1.5 times as
long, one of 128 x 128 0.86 times, one of 256 x 256 0.6 times.
"""


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


def _rounded(a: Tensor, b: Tensor, /, *, out: Tensor) -> Tensor:
    return out.copy_(torch.mm(a.bfloat16(), b.bfloat16()))


def _rounded_added(added: Tensor, a: Tensor, b: Tensor, /, *, out: Tensor) -> Tensor:
    return _rounded(a, b, out=out).add_(added)


EXACT: Final = Products(torch.mm, torch.addmm)
ROUNDED: Final = Products(_rounded, _rounded_added)
PRODUCTS: Final[Mapping[ProductsKind, Products]] = {"float32": EXACT, "bfloat16": ROUNDED}

_THROUGH_RELU: Final = torch.ops.aten.threshold_backward.grad_input


class Buffers:
    """Room for what the hidden layers give, for any number of rows; their gradients take its place.

    Stacks of the same sizes may share it: it holds the activations of whichever was forward last, so
    a stack's backward pass has to come before another's forward pass. There is as little of it as will do,
    so that more stays in a core's cache.

    Attributes:
        activations: what each hidden layer gives, (B, width) each.
        incoming: a place for the gradient that comes to each hidden layer, (B, width) each; all overlap.
    """

    def __init__(self, widths: Sequence[int], like: Tensor) -> None:
        self._widths = tuple(widths)
        self._like = like
        self._room: list[Tensor] = []
        self._passing = like.new_empty(0)
        self._rows = -1
        self.activations: list[Tensor] = []
        self.incoming: list[Tensor] = []

    @classmethod
    def of(cls, network: Actor | TwinCritic | LateActionCritic) -> Self:
        """Room for such a network, or for one of twins."""
        first, *_ = network.weight
        return cls([bias.shape[-1] for bias in network.bias][:-1], first.detach())

    def fit(self, rows: int) -> None:
        """Views for that many rows; larger room only if there never were as many."""
        if rows == self._rows:
            return
        if not self._room or self._room[0].shape[0] < rows:
            self._room = [self._like.new_empty(rows, width) for width in self._widths]
            self._passing = self._like.new_empty(rows * max(self._widths, default=0))
        self.activations = [room[:rows] for room in self._room]
        self.incoming = [self._passing[: rows * width].view(rows, width) for width in self._widths]
        self._rows = rows


@dataclass(frozen=True)
class Linear:
    """One layer: x @ weight + bias, with weight (in, out) and bias (out,), and where their gradients go.

    Views of any strides; without gradients where nothing learns. `values` multiplies on the way forward,
    but in the last layer of a stack, and `gradients` on the way back, where the weight is `back`, (out, in).
    """

    weight: Tensor
    bias: Tensor
    weight_gradient: Tensor | None = None
    bias_gradient: Tensor | None = None
    values: Products = EXACT
    gradients: Products = EXACT
    back: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "back", self.weight.T)


class Dense:
    """y = relu(... relu(x W_1 + b_1) ...) W_L + b_L, of L layers, in `buffers`."""

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

        Each forward pass has one backward, this or `gradient_at`. Returns the gradient of what layer `watch`
        gives, before its ReLU: a buffer, as in `gradient_at`.
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
        """From the gradient of what layer `index` gives to that of its input, in the place of the input."""
        below, layer = self._inputs[index], self.layers[index]
        incoming = layer.gradients.plain(gradient, layer.back, out=self.buffers.incoming[index - 1])
        result: Tensor = _THROUGH_RELU(incoming, below, 0, grad_input=below)
        return result


View = Callable[[Tensor], Tensor]
"""From a parameter, or its gradient, to a layer's (in, out) weight or (out,) bias."""


def _dense(
    network: Actor | TwinCritic | LateActionCritic,
    buffers: Buffers,
    *,
    values: Products,
    gradients: Products,
    weight: View = Tensor.detach,
    bias: View = Tensor.detach,
) -> Dense:
    """A stack of the network's layers; small ones, and what the last one gives, are exact in any case."""

    def part(parameter: Tensor, view: View) -> tuple[Tensor, Tensor | None]:
        return view(parameter.detach()), None if parameter.grad is None else view(parameter.grad)

    layers = []
    for parameters in zip(network.weight, network.bias, strict=True):
        (w, w_gradient), (b, b_gradient) = part(parameters[0], weight), part(parameters[1], bias)
        products = (values, gradients) if min(w.shape) >= WORTH_ROUNDING else (EXACT, EXACT)
        layers.append(Linear(w, b, w_gradient, b_gradient, *products))
    return Dense(layers, buffers)


class ActorPass:
    """π(s); the last pass is kept for the backward one. values and gradients multiply there and back."""

    def __init__(
        self, actor: Actor, buffers: Buffers, *, values: Products = EXACT, gradients: Products = EXACT
    ) -> None:
        self._dense = _dense(actor, buffers, values=values, gradients=gradients, weight=torch.t)
        self._actions: Tensor | None = None

    def actions(self, observation: Tensor) -> Tensor:
        """Actions in [-1, 1]; (B, m) -> (B, n), a new tensor; observation is kept."""
        self._actions = torch.tanh(self._dense.forward(observation))
        return self._actions

    def again(self, actions: Tensor | None, observation: Tensor, rows: Tensor | None) -> Tensor:
        """The actions for (B, m) observations: those of the last pass if it gave `actions`, else new ones.

        Where rows are given, the observations are those of the last pass at these rows. Neither actor nor
        observations may have changed since.
        """
        if actions is None or actions is not self._actions:
            return self.actions(observation)
        if rows is not None:
            self._dense.narrow(rows, observation)
            self._actions = actions.index_select(0, rows)
        return self._actions

    def forget(self) -> None:
        """The actor is about to change: what it gave is not to be used again."""
        self._actions = None

    def backward(self, gradient: Tensor) -> None:
        """Writes the parameters' gradients, for the (B, n) gradient of the last pass's actions."""
        assert self._actions is not None
        self._dense.backward(gradient * (1 - self._actions * self._actions))


class CriticPass:
    """One critic of a pair, Q(s, a)."""

    def __init__(self, critic: TwinCritic, which: int, buffers: Buffers, products: Products) -> None:
        self._dense = _dense(
            critic,
            buffers,
            values=products,
            gradients=products,
            weight=lambda weight: weight[which],
            bias=lambda bias: bias[which, 0],
        )

    def value(self, state_action: Tensor) -> Tensor:
        """Q; (B, m + n) -> (B,), a new tensor; state_action is kept."""
        return self._dense.forward(state_action)[:, 0]

    def backward(self, gradient: Tensor) -> None:
        """Writes the parameters' gradients, for the (B,) gradient of the last pass's values."""
        self._dense.backward(gradient[:, None])

    def action_gradient(self, gradient: Tensor, size: int) -> Tensor:
        """The (B, n) gradient of the actions, for the (B,) one of the last pass's values; n is `size`."""
        return self._dense.gradient_at(0, gradient[:, None]) @ self._dense.layers[0].weight[-size:].T


class TwinPass:
    """Q1 and Q2 of (s, a), one after the other: as fast as both in batched products, and smaller.

    Buffers are one for each, or one for both, which holds what the second gave: then `learn` is possible,
    and what is for one of them alone.
    """

    def __init__(self, critic: TwinCritic, *buffers: Buffers, products: Products = EXACT) -> None:
        self.first = CriticPass(critic, 0, buffers[0], products)
        self.second = CriticPass(critic, 1, buffers[-1], products)

    def both(self, state_action: Tensor) -> Tensor:
        """Both values; (B, m + n) -> (2, B)."""
        return torch.stack((self.first.value(state_action), self.second.value(state_action)))

    def lowest(self, state_action: Tensor) -> Tensor:
        """The lower of both values; (B, m + n) -> (B,)."""
        return torch.minimum(self.first.value(state_action), self.second.value(state_action))

    def lowest_action_gradient(self, both: Tensor, gradient: Tensor, size: int) -> Tensor:
        """The (B, n) gradient of the actions, for the (B,) one of the lower value; half from each if equal.

        both is what `both` gave last, which has to have buffers of its own for each; n is `size`.
        """
        lower = (both[1] - both[0]).sign_()  # 1 where the first is lower, −1 where the second is
        from_first = self.first.action_gradient(gradient * (1 + lower) / 2, size)
        return from_first + self.second.action_gradient(gradient * (1 - lower) / 2, size)

    def learn(self, state_action: Tensor, gradient: Callable[[Tensor], Tensor]) -> Tensor:
        """`both`; writes the parameters' gradients, for what `gradient` gives for one's (B,) values."""
        values = []
        for critic in (self.first, self.second):
            values.append(critic.value(state_action))
            critic.backward(gradient(values[-1]))
        return torch.stack(values)


class LatePass:
    """The critic whose action enters at the second layer, Q(s, a)."""

    def __init__(self, critic: LateActionCritic, buffers: Buffers, *, products: Products = EXACT) -> None:
        self._dense = _dense(critic, buffers, values=products, gradients=products)
        self._entry = critic.action_weight.detach()
        self._entry_gradient = critic.action_weight.grad
        self._action: Tensor | None = None

    def value(self, observation: Tensor, action: Tensor) -> Tensor:
        """Q; (B, m) and (B, n) -> (B,), a new tensor; both inputs are kept."""
        self._action = action
        beside = torch.addmm(self._dense.layers[1].bias, action, self._entry)
        return self._dense.forward(observation, beside=beside)[:, 0]

    def backward(self, gradient: Tensor) -> None:
        """Writes the parameters' gradients, for the (B,) gradient of the last pass's values."""
        assert self._action is not None
        assert self._entry_gradient is not None
        entering = self._dense.backward(gradient[:, None], watch=1)
        torch.mm(self._action.T, entering, out=self._entry_gradient)

    def action_gradient(self, gradient: Tensor) -> Tensor:
        """The (B, n) gradient of the actions, for the (B,) one of the last pass's values."""
        return self._dense.gradient_at(1, gradient[:, None]) @ self._entry.T
