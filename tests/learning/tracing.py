"""What stands for a CUDA graph on a CPU: the tensor operations of some work, traced and done again.

A trace keeps what a graph keeps, the operations and the very tensors that they read and wrote, and
forgets what a graph forgets: all Python. Work that reads a number on the host cannot be traced, and what
would wait for a GPU or draw from a generator is not let through either.
"""

import itertools
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from dase_grpc.learning.agents.graphs import RecordingFailed

UNFIT = {
    *("nonzero", "masked_select", "unique", "_unique2", "index", "index_put", "index_put_", "bincount"),
    *("_local_scalar_dense", "lift_fresh_copy", "lift_fresh", "repeat_interleave", "_linalg_eigh"),
    *("normal_", "uniform_", "random_", "bernoulli_", "randn", "rand", "randint"),
}
"""Operations that make a shape of data, bring a number from the host, or draw one."""


class Traces:
    """A `Recorder` on a CPU.

    Attributes:
        recorded: the operations of each recording, by name.
    """

    def __init__(self):
        self.works = True
        self.recorded = []

    def rehearse(self, work):
        return work()

    def record(self, work):
        found = []

        def traced_work():
            found.append(work())
            return tuple(tensors(found[0]))

        try:
            traced = make_fx(traced_work)()
        except RuntimeError as error:
            self.works = False
            raise RecordingFailed(str(error)) from error
        names = [
            node.target.__name__.partition(".")[0]
            for node in traced.graph.nodes
            if node.op == "call_function"
        ]
        assert not UNFIT & set(names), UNFIT & set(names)
        self.recorded.append(names)
        static = [tensor.detach().clone() for tensor in tensors(found[0])]
        traced_now = iter([True])  # tracing has done the work, which recording must not

        @torch.no_grad()
        def replay():
            if not next(traced_now, False):
                for place, value in zip(static, traced(), strict=True):
                    place.copy_(value)

        return replay, put(found[0], iter(static))


def tensors(results):
    """All tensors in mappings, tuples and dataclasses, in order."""
    if isinstance(results, torch.Tensor):
        return [results]
    return [tensor for part in _parts(results).values() for tensor in tensors(part)]


def put(results, given):
    """The same structure around other tensors."""
    if results is None:
        return None
    if isinstance(results, torch.Tensor):
        return next(given)
    made = {name: put(part, given) for name, part in _parts(results).items()}
    if is_dataclass(results):
        return type(results)(**made)
    return made if isinstance(results, Mapping) else tuple(made.values())


def _parts(results):
    if results is None:
        return {}
    if is_dataclass(results):
        return {field.name: getattr(results, field.name) for field in fields(results)}
    return dict(results) if isinstance(results, Mapping) else dict(enumerate(results))


@cache
def products_are_the_same():
    """Whether this processor's batched products of small matrices are those of one by one, to the bit."""
    generator = torch.Generator().manual_seed(0)
    for rows, inner, columns in itertools.product((4, 8, 16), (3, 5, 6, 9), (1, 2, 5, 6)):
        x = torch.randn(rows, inner, generator=generator)
        weight = torch.randn(inner, columns, generator=generator)
        bias = torch.randn(columns, generator=generator)
        batched = torch.baddbmm(bias[None, None], x[None], weight[None])
        if not torch.equal(batched[0], torch.addmm(bias, x, weight)):
            return False
    return True
