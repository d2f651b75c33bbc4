"""Counts the floating-point operations of one update, from the sizes of the layers.

Matrix products alone, 2 · rows · in · out for a layer's forward pass, as many for its weights' gradient and
for its inputs'. No gradient is counted that nobody needs: a first layer's input has none, and in the actor's
loss the critic's parameters have none, and of its input the action alone. Tested against torch's own count
of what the update calls.
"""

from collections.abc import Sequence
from itertools import pairwise

from dase_grpc.config.algorithms import AgentConfig
from dase_grpc.schema import TransitionSchema

Layers = Sequence[tuple[int, int]]


def forward(layers: Layers, rows: int) -> int:
    """A pass through the stack; also its parameters' gradients."""
    return sum(2 * rows * inputs * outputs for inputs, outputs in layers)


def learn(layers: Layers, rows: int) -> int:
    """A pass forward and back to all parameters."""
    return 2 * forward(layers, rows) + forward(layers[1:], rows)


def update_flops(config: AgentConfig, schema: TransitionSchema, rows: int) -> float:
    """One update of a batch of that many rows; the delayed actor of TD3 counts by its share."""
    m, n = schema.observation_size, schema.action_size
    actor = list(pairwise((m, *config.hidden, n)))
    if config.algorithm == "ddpg":
        first, *others = pairwise((m, *config.hidden, 1))
        entry = (n, others[0][1])
        critic, above, both = [first, *others], others, 1
        late = forward([entry], rows)
        target = forward(actor, rows) + forward(critic, rows) + late
        critic_step = learn(critic, rows) + 2 * late
        back = forward(above[1:], rows) + late
        actor_loss = forward(critic, rows) + late + back
        return target + critic_step + actor_loss + learn(actor, rows)
    critic = list(pairwise((m + n, *config.hidden, 1)))
    both = 2 if config.algorithm == "sac" else 1
    target = forward(actor, rows) + 2 * forward(critic, rows)
    action = 2 * rows * n * critic[0][1]
    through_critic = forward(critic, rows) + forward(critic[1:], rows) + action
    actor_step = both * through_critic + learn(actor, rows)
    delay = config.policy_delay if config.algorithm == "td3" else 1
    return target + 2 * learn(critic, rows) + actor_step / delay
