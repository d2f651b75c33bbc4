"""The matrix products of the passes: in float32, or of matrices that are rounded to bfloat16 for it.

A bfloat16 has the range of a float32 and 8 bits of its precision. A CPU that multiplies them sums in
float32, so a product costs two roundings going in and one coming out, each by at most 2⁻⁹ of the number;
whatever else a pass computes, and all that it keeps, is float32 either way.

torch's own switches (`torch.backends.mkldnn.matmul.fp32_precision`, `torch.set_float32_matmul_precision`)
hold for the whole process, and gained nothing on a CPU with AVX512_BF16: oneDNN multiplies in float32 there
all the same.
"""

from collections.abc import Mapping
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
