"""Exported policies, all between an observation and an action in the environment's units, in one file.

The normaliser and the scaling of actions compute in float64, as training and evaluation do.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from dase_grpc.learning.agents.model_files import ACTION, EXTRA, OBSERVATION, deprecated, export_library
from dase_grpc.learning.agents.policy import CLIP, MIN_DEVIATION, ActorPolicy
from dase_grpc.schema import Array

OPSET: Final = 18

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Recipe:
    """A policy in the environment's units as arrays.

    Attributes:
        layers: weights (out, in) and biases (out,), float32; ReLU between, tanh behind the last.
        seen: mean and deviation, (m,) each, by which observations are normalised; None where they are not.
        low, high: the bounds of the action, (n,).
        shape, dtype: those of an action of the environment.
    """

    layers: tuple[tuple[Array, Array], ...]
    seen: tuple[Doubles, Doubles] | None
    low: Doubles
    high: Doubles
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, policy: ActorPolicy, *, low: npt.NDArray[Any], high: npt.NDArray[Any]) -> Self:
        """The recipe of a trained policy; low and high are the action space's, of its shape and dtype."""
        pairs = zip(policy.actor.weight, policy.actor.bias, strict=True)
        layers = tuple((_array(weight), _array(bias)) for weight, bias in pairs)
        seen = None
        if policy.normaliser is not None:
            found = dict(policy.normaliser.named_tensors())
            mean, variance = (_array(found[f"normaliser.{name}"]) for name in ("mean", "variance"))
            seen = mean.astype(np.float64), np.maximum(np.sqrt(variance), MIN_DEVIATION)
        flat_low, flat_high = (np.asarray(bound, np.float64).ravel() for bound in (low, high))
        return cls(layers, seen, flat_low, flat_high, low.shape, low.dtype)

    @property
    def size(self) -> int:
        """m, the components of an observation."""
        return int(self.layers[0][0].shape[1])

    def rounding(self, rows: Array) -> Doubles:
        """How far float32 may be from an action in [-1, 1], (B, n): its unit of the sums of absolute values.

        Two orders of the same sum differ by that, a sixtieth of it in policies that were looked at.
        """
        mean, deviation = self.seen or (0.0, 1.0)
        sums = np.abs((rows - np.float64(mean)) / deviation)
        if self.seen is not None:
            sums = np.minimum(sums, CLIP)
        for weight, bias in self.layers:
            sums = sums @ np.abs(weight.T) + np.abs(bias)
        return np.asarray(sums * np.finfo(np.float32).eps)


def write_torchscript(recipe: Recipe, path: Path, metadata: Mapping[str, Any]) -> None:
    """Writes a module whose forward maps (B, m) float32 observations to (B, *shape) actions."""
    module = _Module(recipe).eval()
    with deprecated():
        traced = torch.jit.trace(module, torch.zeros(2, recipe.size))  # type: ignore[no-untyped-call]  # torch's
        # written by torch, a disk that is full would abort the process
        path.write_bytes(traced.save_to_buffer(_extra_files={EXTRA: json.dumps(metadata)}))


def write_onnx(recipe: Recipe, path: Path, metadata: Mapping[str, Any]) -> None:
    """Writes a graph with the input `observation`, (B, m) float32, and the output `action`, (B, *shape).

    Raises:
        ConfigError: the library is not installed.
    """
    onnx = export_library("onnx")
    graph, helper = _Graph(onnx), onnx.helper
    value = graph.scaled(graph.acted(graph.normalised(OBSERVATION, recipe), recipe), recipe)
    graph.node("Reshape", [value, graph.constant("shape", np.array([-1, *recipe.shape]))], output=ACTION)
    kind = helper.np_dtype_to_tensor_dtype(recipe.dtype)
    made = helper.make_graph(
        graph.nodes,
        "policy",
        [helper.make_tensor_value_info(OBSERVATION, onnx.TensorProto.FLOAT, ["batch", recipe.size])],
        [helper.make_tensor_value_info(ACTION, kind, ["batch", *recipe.shape])],
        graph.constants,
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", OPSET)], producer_name="dase-grpc")
    helper.set_model_props(model, {key: json.dumps(value) for key, value in metadata.items()})
    onnx.checker.check_model(model)
    onnx.save(model, str(path))


class _Module(nn.Module):
    """A recipe as torch computes it."""

    mean: Tensor
    deviation: Tensor
    low: Tensor
    high: Tensor

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self._count = len(recipe.layers)
        for index, (weight, bias) in enumerate(recipe.layers):
            self.register_buffer(f"weight_{index}", torch.from_numpy(weight))
            self.register_buffer(f"bias_{index}", torch.from_numpy(bias))
        self._normalises = recipe.seen is not None
        mean, deviation = recipe.seen or (np.zeros(recipe.size), np.ones(recipe.size))
        for name, values in (
            ("mean", mean),
            ("deviation", deviation),
            ("low", recipe.low),
            ("high", recipe.high),
        ):
            self.register_buffer(name, torch.from_numpy(values))
        self._shape, self._dtype = recipe.shape, torch.from_numpy(np.empty(0, recipe.dtype)).dtype

    def forward(self, observation: Tensor) -> Tensor:
        hidden = observation
        if self._normalises:
            z = (observation.double() - self.mean) / self.deviation
            hidden = z.clamp(-CLIP, CLIP).float()
        for index in range(self._count):
            hidden = nn.functional.linear(
                hidden, getattr(self, f"weight_{index}"), getattr(self, f"bias_{index}")
            )
            hidden = torch.relu(hidden) if index + 1 < self._count else torch.tanh(hidden)
        a = hidden.double()
        values = (1.0 - a) * (self.low / 2) + (1.0 + a) * (self.high / 2)
        values = torch.minimum(torch.maximum(values, self.low), self.high)
        if not self._dtype.is_floating_point:
            values = values.round()
        return values.to(self._dtype).reshape(-1, *self._shape)


class _Graph:
    """Nodes and constants of an ONNX graph, as they are added."""

    def __init__(self, onnx: Any) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self._onnx = onnx

    def constant(self, name: str, values: npt.NDArray[Any]) -> str:
        """A constant by its name."""
        self.constants.append(self._onnx.numpy_helper.from_array(np.ascontiguousarray(values), name))
        return name

    def node(self, kind: str, inputs: list[str], *, output: str | None = None, **attributes: Any) -> str:
        """An operation; the name of what it gives."""
        name = output or f"{kind.lower()}_{len(self.nodes)}"
        self.nodes.append(self._onnx.helper.make_node(kind, inputs, [name], **attributes))
        return name

    def normalised(self, observation: str, recipe: Recipe) -> str:
        """What the network sees of an observation."""
        if recipe.seen is None:
            return observation
        mean, deviation = recipe.seen
        wide = self.node("Cast", [observation], to=self._onnx.TensorProto.DOUBLE)
        centred = self.node("Sub", [wide, self.constant("mean", mean)])
        z = self.node("Div", [centred, self.constant("deviation", deviation)])
        bounds = [self.constant(name, np.array(value)) for name, value in (("least", -CLIP), ("most", CLIP))]
        return self.node("Cast", [self.node("Clip", [z, *bounds])], to=self._onnx.TensorProto.FLOAT)

    def acted(self, hidden: str, recipe: Recipe) -> str:
        """The action in [-1, 1]."""
        last = len(recipe.layers) - 1
        for index, (weight, bias) in enumerate(recipe.layers):
            given = [self.constant(f"weight_{index}", weight), self.constant(f"bias_{index}", bias)]
            hidden = self.node("Gemm", [hidden, *given], transB=1)
            hidden = self.node("Tanh" if index == last else "Relu", [hidden])
        return hidden

    def scaled(self, action: str, recipe: Recipe) -> str:
        """The action in the environment's units and dtype."""
        low, high = self.constant("low", recipe.low), self.constant("high", recipe.high)
        one, a = (
            self.constant("one", np.array(1.0)),
            self.node("Cast", [action], to=self._onnx.TensorProto.DOUBLE),
        )
        below = self.node("Mul", [self.node("Sub", [one, a]), self.constant("half_low", recipe.low / 2)])
        above = self.node("Mul", [self.node("Add", [one, a]), self.constant("half_high", recipe.high / 2)])
        values = self.node("Min", [self.node("Max", [self.node("Add", [below, above]), low]), high])
        if np.issubdtype(recipe.dtype, np.integer):
            values = self.node("Round", [values])
        return self.node("Cast", [values], to=int(self._onnx.helper.np_dtype_to_tensor_dtype(recipe.dtype)))


def _array(tensor: Tensor) -> npt.NDArray[Any]:
    values: npt.NDArray[Any] = tensor.detach().cpu().numpy()
    return values
