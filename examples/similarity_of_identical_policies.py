"""Prints how much identical policies weigh each other, by the number of action dimensions n.

Both agents follow the same policy; the stored actions differ from it only by exploration noise of
standard deviation 0.1, so the deviations are N(0, 0.01 I) and the reference is N(0, 0.1 I). The last
column leaves the actions in the environment's units, bounded by ±0.4 as in Humanoid: the noise shrinks
with the bound, the reference does not. No sampling error: the true moments go in.

    python examples/similarity_of_identical_policies.py
"""

import math

import torch

from dase_grpc.learning.similarity.measure import REFERENCE_VARIANCE, divergence

NOISE = 0.1
HUMANOID_BOUND = 0.4


def similarity(n: int, *, kind: str, noise: float = NOISE) -> float:
    """λ for deviations N(0, noise² I) in n dimensions."""
    rho = divergence(torch.zeros(n), noise**2 * torch.eye(n), REFERENCE_VARIANCE, kind)
    return math.exp(-float(rho))


def main() -> None:
    """Prints the table."""
    print(" n   jeffreys        kl        js   jeffreys, raw actions within ±0.4")
    for n in (1, 2, 3, 6, 8, 17):
        columns = (similarity(n, kind=kind) for kind in ("jeffreys", "kl", "js"))
        raw = similarity(n, kind="jeffreys", noise=NOISE * HUMANOID_BOUND)
        print(f"{n:2d}  {'  '.join(f'{value:8.1e}' for value in columns)}   {raw:.1e}")


if __name__ == "__main__":
    main()
