"""The networks of networks.py with their passes written out: the same parameters, no autograd.

What these give, and the gradients that they write, are those of the reference twins in batched.py up to
the order of float sums. One thread at a time.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dase_grpc.learning.agents.dense import EXACT, WORTH_ROUNDING, Buffers, Dense, Linear, Products
from dase_grpc.learning.agents.networks import Actor, LateActionCritic, TwinCritic

Pick = Callable[[Tensor], Tensor]


class ActorPass:
    """π(s); the last pass is kept for the backward one.

    Args:
        values: what multiplies on the way to the actions.
        gradients: what multiplies on the way back.
    """

    def __init__(self, actor: Actor, *, values: Products = EXACT, gradients: Products = EXACT) -> None:
        self._dense = _dense(
            actor.weight, actor.bias, None, pick_weight=torch.t, values=values, gradients=gradients
        )
        self._actions: Tensor | None = None

    def actions(self, observation: Tensor) -> Tensor:
        """Actions in [-1, 1]; (B, m) -> (B, n), a new tensor; observation is kept."""
        self._actions = torch.tanh(self._dense.forward(observation))
        return self._actions

    def again(self, actions: Tensor | None, observation: Tensor, rows: Tensor | None) -> Tensor:
        """The actions for `observation`: those of the last pass if it gave `actions`, else by a new pass.

        Args:
            actions: what the last pass gave, while neither the actor nor the observations have changed.
            observation: (B, m), what `actions` answers to; if rows are given, those of it.
            rows: which rows of `actions` are wanted; None for all.
        """
        if actions is None or actions is not self._actions:
            return self.actions(observation)
        if rows is not None:
            self._dense.narrow(rows, observation)
            self._actions = actions[rows]
        return self._actions

    def forget(self) -> None:
        """The actor is about to change: what it gave is not to be used again."""
        self._actions = None

    def backward(self, gradient: Tensor) -> None:
        """Writes the parameters' gradients, for the (B, n) gradient of the last pass's actions."""
        assert self._actions is not None
        self._dense.backward(gradient * (1 - self._actions.square()))


class CriticPass:
    """One critic of a pair, Q(s, a)."""

    def __init__(self, critic: TwinCritic, which: int, buffers: Buffers, products: Products) -> None:
        self._dense = _dense(
            critic.weight,
            critic.bias,
            buffers,
            pick_weight=lambda weight: weight[which],
            pick_bias=lambda bias: bias[which, 0],
            values=products,
            gradients=products,
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

    Args:
        buffers: of the first and of the second. One that serves both holds what the second gave: then
            `learn` is possible, and what is for one of them alone.
    """

    def __init__(
        self, critic: TwinCritic, buffers: tuple[Buffers, Buffers], *, products: Products = EXACT
    ) -> None:
        self.first, self.second = (CriticPass(critic, i, buffers[i], products) for i in range(2))

    def both(self, state_action: Tensor) -> Tensor:
        """Both values; (B, m + n) -> (2, B)."""
        return torch.stack((self.first.value(state_action), self.second.value(state_action)))

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

    def __init__(
        self, critic: LateActionCritic, buffers: Buffers | None = None, *, products: Products = EXACT
    ) -> None:
        self._dense = _dense(critic.weight, critic.bias, buffers, values=products, gradients=products)
        self.buffers = self._dense.buffers
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


def critic_buffers(critic: TwinCritic) -> Buffers:
    """Room for one critic of a pair."""
    return Buffers([weight.shape[2] for weight in critic.weight][:-1], critic.weight[0].detach())


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _dense(
    weights: nn.ParameterList,
    biases: nn.ParameterList,
    buffers: Buffers | None,
    *,
    pick_weight: Pick = _same,
    pick_bias: Pick = _same,
    values: Products,
    gradients: Products,
) -> Dense:
    """A stack of the parameters' parts; their gradients too, where they have any.

    Small layers, and what the last one gives, are exact whatever multiplies.
    """

    def part(parameter: Tensor, pick: Pick) -> tuple[Tensor, Tensor | None]:
        gradient = parameter.grad
        return pick(parameter.detach()), None if gradient is None else pick(gradient)

    layers = []
    for weight, bias in zip(weights, biases, strict=True):
        (w, w_gradient), (b, b_gradient) = part(weight, pick_weight), part(bias, pick_bias)
        large = min(w.shape) >= WORTH_ROUNDING
        products = (values, gradients) if large else (EXACT, EXACT)
        layers.append(Linear(w, b, w_gradient, b_gradient, *products))
    room = buffers or Buffers([layer.weight.shape[1] for layer in layers[:-1]], layers[0].weight)
    return Dense(layers, room)
