"""Which rows of a batch are worth computing: those whose weight can change a sum in float32."""

from typing import Final

import torch
from torch import Tensor

NEGLIGIBLE: Final = 2.0**-40
"""A row counts if its weight is more than this share of the batch's largest, an internal row's 1.

Float32 keeps a sum to 2⁻²⁴ of its terms at best, so rows of such weights change the sums of a loss and of
its gradients by less than rounding does, unless what they add up to without their weights is 65 000 times
what the others do. Where no other row reaches a parameter at all, Adam, which divides by the gradient's own
size + 1e-8, would move it by 1e-4 of the learning rate for a gradient of 1. Weights of 0 never count.
"""


def that_count(weight: Tensor) -> Tensor | None:
    """The (k,) int64 indices of the rows that count, in order; None if all do, or all weights are 0.

    weight is (B,), on the CPU: on another device this would wait for it, and k would be a shape that
    depends on data.
    """
    values = weight.numpy()
    (rows,) = (values > NEGLIGIBLE * values.max()).nonzero()
    return torch.from_numpy(rows) if 0 < len(rows) < len(values) else None
