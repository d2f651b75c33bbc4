"""A measure of one's own: others' transitions count by similarity, and less the older they are.

From this folder (its modules can be named there), about a minute on two cores:

    dase train --env Pendulum-v1 --steps 5000 --set agent.start_steps=1000 --set dps.measure=my_measure:fresh
"""

import torch
from torch import Tensor

from dase_grpc.learning.similarity.measures import Context, similarity

HALF_LIFE = 1_000
"""Updates of the collector's policy after which a transition counts half."""


def fresh(context: Context) -> Tensor:
    """One weight ≥ 0 for each external row: λ · 2^(−age / HALF_LIFE)."""
    age = (context.version - context.external.policy_version).clamp(min=0)
    return similarity(context) * torch.exp2(-age / HALF_LIFE)
